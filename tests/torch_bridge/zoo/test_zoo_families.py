"""Families of models that a trap in their forwards would cost; at night.

LLaVA and Gemma 3 assert how many tokens stand for an image, and print it; MusicGen and VITS draw
numbers that nothing reads; DETR and wav2vec2 ask in train mode what eval mode does not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as hf
import zoo_checks as checks
from parity import leaves_of, numpy_of, relative_error
from torch import nn
from zoo_entries import Call, Entry, evaluate, livelier
from zoo_torch import floats, ids
from zoo_transformers import GROUPED, NO_DROPOUT, SMALL, VISION, VISION_OF_CLIP, VOCABULARY

import fzero as fz
import torch_bridge as tb


pytestmark = pytest.mark.nightly
IMAGE = VOCABULARY - 1
TEXT = {**NO_DROPOUT, **GROUPED, "num_hidden_layers": 2}


def pictured(batch: int) -> Call:
    """Tokens of which four stand for an image."""
    found = ids(batch, 9, high=VOCABULARY - 3, seed=4)
    found[:, 2:6] = IMAGE
    picture = floats(batch, 3, 8, 8, seed=2)
    asked = {"input_ids": found, "pixel_values": picture, "attention_mask": torch.ones_like(found)}
    return Call((), {**asked, "use_cache": False})


def typed(batch: int) -> Call:
    call = pictured(batch)
    return Call((), {**call.kwargs, "token_type_ids": (call.kwargs["input_ids"] == IMAGE).long()})


def llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**{**NO_DROPOUT, **VISION_OF_CLIP, "num_hidden_layers": 2})
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**TEXT),
                       image_token_id=IMAGE, vision_feature_layer=-1, image_seq_length=4)
    )  # fmt: skip


def gemma3() -> nn.Module:
    text = hf.Gemma3TextConfig(**TEXT, head_dim=8, sliding_window=8)
    vision = hf.SiglipVisionConfig(**{**NO_DROPOUT, **SMALL, **VISION})
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4,
                        image_token_id=IMAGE, boi_token_id=1, eoi_token_id=2)
    )  # fmt: skip


def musicgen() -> nn.Module:
    config = hf.MusicgenDecoderConfig(
        **NO_DROPOUT, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, ffn_dim=24, num_codebooks=2, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    return hf.MusicgenForCausalLM(config)


def sung(batch: int) -> Call:
    return Call((), {"input_ids": ids(2 * batch, 6, high=VOCABULARY), "use_cache": False,
                     "encoder_hidden_states": floats(batch, 5, 16, seed=2)})  # fmt: skip


def vits() -> nn.Module:
    config = hf.VitsConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, window_size=2,
        ffn_dim=24, flow_size=16, spectrogram_bins=9, upsample_initial_channel=16,
        upsample_rates=[2, 2], upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]], prior_encoder_num_flows=1,
        duration_predictor_num_flows=1, duration_predictor_filter_channels=16,
        prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
        wavenet_kernel_size=3, depth_separable_num_layers=1, layerdrop=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return hf.VitsModel(config)


def spoken(batch: int) -> Call:
    mask = torch.ones(batch, 7)
    mask[0, 5:] = 0
    return Call((), {"input_ids": ids(batch, 7, high=20), "padding_mask": mask[..., None],
                     "attention_mask": mask})  # fmt: skip


FAMILIES = {
    "llava": Entry(llava, pictured),
    "gemma3": Entry(gemma3, typed),
    "musicgen": Entry(musicgen, sung),
    "vits' text encoder": Entry(lambda: vits().text_encoder, spoken),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_values_gradients_and_a_step_are_torchs(name: str) -> None:
    entry = FAMILIES[name]
    result = evaluate(entry)
    checks.check_forward(result, entry)
    checks.check_gradients(result, entry)
    checks.check_round_trip(result)
    checks.check_step(result, entry)


def detr() -> nn.Module:
    backbone = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1],
                               out_features=["stage2"], layer_type="basic")  # fmt: skip
    return hf.DetrForObjectDetection(
        hf.DetrConfig(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
                      backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=1,
                      encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                      decoder_ffn_dim=24, num_queries=5, num_labels=4)
    )  # fmt: skip


def wav2vec2() -> nn.Module:
    return hf.Wav2Vec2ForCTC(
        hf.Wav2Vec2Config(**SMALL, conv_dim=[8, 8], conv_kernel=[5, 3], conv_stride=[3, 2],
                          num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                          num_conv_pos_embedding_groups=2)
    )  # fmt: skip


EVALUATED = {
    "detr": (detr, {"pixel_values": floats(2, 3, 32, 32, seed=2),
                    "pixel_mask": torch.ones(2, 32, 32, dtype=torch.long)}),
    "wav2vec2": (wav2vec2, {"input_values": floats(2, 60, seed=2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", EVALUATED)
def test_what_only_its_train_mode_asks_is_no_reason_not_to_evaluate(name: str) -> None:
    make, kwargs = EVALUATED[name]
    torch.manual_seed(3)
    module = make()
    with pytest.raises(
        fz.ConversionError, match=r"only evaluated: tb\.convert\(\.\.\., train=False"
    ):
        tb.convert(module, **kwargs)
    converted = tb.convert(livelier(module), **kwargs, train=False)
    want = leaves_of(module.eval()(**kwargs))
    got = leaves_of(converted(**kwargs))
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w.detach().numpy()) <= 2e-5
    # Gradients of its eval mode, as of a detector that is tuned with frozen norms.
    sum(w.square().sum() for w in want if w.requires_grad).backward()
    learns = [w.requires_grad for w in want]

    def loss(params: Any) -> Any:
        out = leaves_of(converted.apply(params, converted.buffers, **numpy_of(kwargs)).output)
        return sum(jnp.square(x).sum() for x, counts in zip(out, learns, strict=True) if counts)

    grads = converted.by_name(jax.jit(jax.grad(loss))(converted.params))
    slopes = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    least = checks.NEGLIGIBLE * max(float(g.abs().max()) for g in slopes.values())
    assert len(slopes) > 20
    for name, slope in slopes.items():
        scale = max(float(slope.abs().max()), least)
        np.testing.assert_allclose(grads[name], slope, rtol=0, atol=1e-4 * scale, err_msg=name)


def test_a_size_that_depends_on_data_is_refused_by_its_line() -> None:
    """The length of VITS's sound is what it predicts; its encoder, above, has none of that."""
    module = vits()
    with pytest.raises(
        fz.ConversionError, match=r"(?s)depends on tensor values.*modeling_vits\.py"
    ):
        tb.convert(module, input_ids=ids(2, 7, high=20), train=False)
