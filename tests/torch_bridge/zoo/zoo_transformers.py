"""transformers' architectures of the zoo, from tiny random configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from zoo_entries import Call, Entry
from zoo_torch import floats, ids


VOCABULARY = 37
# Names differ between architectures; each takes what it knows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.0,
}


def model(name: str, **options: Any) -> Callable[[], nn.Module]:
    """`transformers.<name>` from its own config class with the options."""

    def make() -> nn.Module:
        kind = getattr(hf, name)
        config = kind.config_class(**{**NO_DROPOUT, **options})
        return kind(config)

    return make


def tokens(batch: int) -> Call:
    return Call((ids(batch, 7, high=VOCABULARY - 3, seed=4) + 3,))


def padded(batch: int) -> Call:
    found = ids(batch, 7, high=VOCABULARY - 3, seed=4) + 3
    mask = torch.ones_like(found)
    mask[0, 5:] = 0
    found[0, 5:] = 0
    return Call((), {"input_ids": found, "attention_mask": mask})


def translation(batch: int) -> Call:
    source = padded(batch).kwargs
    target = ids(batch, 5, high=VOCABULARY - 3, seed=9) + 3
    return Call((), {**source, "decoder_input_ids": target})


def pixels(size: int) -> Callable[[int], Call]:
    return lambda batch: Call((floats(batch, 3, size, size, seed=2),))


def clip_call(batch: int) -> Call:
    return Call((), {**padded(batch).kwargs, "pixel_values": floats(batch, 3, 8, 8, seed=2)})


def whisper_call(batch: int) -> Call:
    target = ids(batch, 5, high=VOCABULARY - 3, seed=9) + 3
    return Call((floats(batch, 8, 20, seed=2),), {"decoder_input_ids": target})


VISION: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}
TEXT_OF_CLIP = {**SMALL, "projection_dim": 16, "num_hidden_layers": 1}
VISION_OF_CLIP = {**TEXT_OF_CLIP, **VISION}
BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip

# What is rolled: three equal layers and more. The other entries have fewer.
ROLLED = {
    "gpt2": ("transformer.h",),
    "llama": ("model.layers",),
    "gemma2": ("model.layers",),  # three layers of two blocks: a local and a global one
    "bert": ("bert.encoder.layer",),
    "t5": ("encoder.block[1:4]", "decoder.block[1:4]"),  # the first block makes the position bias
    "vit": ("vit.layers",),
}

ENTRIES: dict[str, Entry] = {
    "gpt2": Entry(
        model("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2,
              n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
              eos_token_id=2), padded),
    "llama": Entry(model("LlamaForCausalLM", **{**GROUPED, "num_hidden_layers": 3}), padded),
    "qwen2": Entry(model("Qwen2ForCausalLM", **GROUPED), tokens),
    "qwen3": Entry(model("Qwen3ForCausalLM", **GROUPED, head_dim=8), padded),
    "mistral": Entry(model("MistralForCausalLM", **GROUPED, sliding_window=3), tokens),
    "gemma2": Entry(
        model("Gemma2ForCausalLM", **{**GROUPED, "num_hidden_layers": 6}, head_dim=8,
              sliding_window=3), tokens),
    "phi": Entry(model("PhiForCausalLM", **SMALL, resid_pdrop=0.0, embd_pdrop=0.0), tokens),
    "gpt_neox": Entry(model("GPTNeoXForCausalLM", **SMALL), tokens),
    "opt": Entry(
        model("OPTForCausalLM", **SMALL, ffn_dim=24, word_embed_proj_dim=12), padded),
    "bloom": Entry(
        model("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=4,
              bos_token_id=1, eos_token_id=2, pad_token_id=0), padded),
    "mixtral": Entry(
        model("MixtralForCausalLM", **GROUPED, num_local_experts=4, num_experts_per_tok=2,
              output_router_logits=True), tokens),
    "bert": Entry(model("BertForMaskedLM", **{**SMALL, "num_hidden_layers": 3}), padded),
    "roberta": Entry(model("RobertaForSequenceClassification", **SMALL), padded),
    "distilbert": Entry(
        model("DistilBertForQuestionAnswering", vocab_size=VOCABULARY, dim=16, n_layers=1,
              n_heads=4, hidden_dim=24, max_position_embeddings=32, qa_dropout=0.0), padded),
    "albert": Entry(model("AlbertForTokenClassification", **{**SMALL, "num_hidden_layers": 2},
                          embedding_size=8, classifier_dropout_prob=0.0), padded),
    "electra": Entry(model("ElectraForPreTraining", **SMALL, embedding_size=8), padded),
    "deberta_v2": Entry(
        model("DebertaV2ForMaskedLM", **SMALL, relative_attention=True, position_buckets=8,
              pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
              max_relative_positions=-1, position_biased_input=False), padded),
    "t5": Entry(
        model("T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=24,
              num_layers=4, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
              feed_forward_proj="gated-gelu"), translation),
    "bart": Entry(model("BartForConditionalGeneration", **BART), translation),
    "vit": Entry(
        model("ViTForImageClassification", **{**SMALL, "num_hidden_layers": 3}, **VISION),
        pixels(8)),
    "deit": Entry(
        model("DeiTForImageClassificationWithTeacher", **SMALL, **VISION), pixels(8)),
    "swin": Entry(
        model("SwinForImageClassification", image_size=16, patch_size=2, embed_dim=8,
              depths=[2], num_heads=[2], window_size=4, drop_path_rate=0.0), pixels(16)),
    "convnext": Entry(
        model("ConvNextForImageClassification", hidden_sizes=[8, 12], depths=[1, 1], num_stages=2,
              patch_size=2), pixels(16)),
    "resnet": Entry(
        model("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 12],
              depths=[1, 1], layer_type="basic"), pixels(32)),
    "clip": Entry(
        model("CLIPModel", text_config=TEXT_OF_CLIP, vision_config=VISION_OF_CLIP,
              projection_dim=16), clip_call),
    "whisper": Entry(
        model("WhisperForConditionalGeneration", **{**BART, "num_mel_bins": 8,
              "max_source_positions": 10, "max_target_positions": 16}), whisper_call),
    "wav2vec2": Entry(
        model("Wav2Vec2ForCTC", **SMALL, conv_dim=[8, 8], conv_kernel=[5, 3], conv_stride=[3, 2],
              num_feat_extract_layers=2, num_conv_pos_embeddings=4,
              num_conv_pos_embedding_groups=2, layerdrop=0.0, feat_proj_dropout=0.0,
              final_dropout=0.0, apply_spec_augment=False),
        lambda n: Call((floats(n, 60, seed=2),))),
    "mamba": Entry(
        model("MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, state_size=4,
              num_hidden_layers=1, time_step_rank=4),
        lambda n: Call((ids(n, 5, high=VOCABULARY),))),
    "segformer": Entry(
        model("SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1],
              sr_ratios=[2, 1], hidden_sizes=[8, 12], num_attention_heads=[1, 2],
              patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=8,
              drop_path_rate=0.0, classifier_dropout_prob=0.0), pixels(16)),
}  # fmt: skip
