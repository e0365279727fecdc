"""Architectures for `make models`: each from a tiny config, with random weights.

A name is `library/architecture`. transformers' are made from their own config classes: sizes are
known by the names that configs give them, what is left keeps its default. timm's, torchvision's and
torchaudio's are small variants of their own, on small images.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


Call = Callable[[int], Mapping[str, Any]]
Built = tuple[torch.nn.Module, Call]
Builder = Callable[[], Built]
VOCABULARY, LENGTH, IMAGE = 40, 7, 32

# The size of a config's field, by the first pattern that is its whole name.
_NUMBERS: tuple[tuple[str, int], ...] = (
    (r"rotary_dim", 4),
    (r"(\w+_)?vocab_size|n_vocab", VOCABULARY),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"(\w+_)?(num_attention_heads|attention_heads|num_heads|n_heads?|heads)", 4),
    (
        r"head_dim|d_kv|attention_head_dim|attention_head_size|qk_rope_head_dim|qk_nope_head_dim|v_head_dim",
        4,
    ),
    (r"kv_lora_rank|q_lora_rank", 8),
    (r"n_group|topk_group|first_k_dense_replace|n_shared_experts|num_shared_experts", 1),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|num_selected_experts|moe_k", 2),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"(\w+_)?(num_hidden_layers|num_layers|n_layers?|layers|num_blocks|depth)", 1),
    (r"(\w+_)?(ffn_dim|intermediate_size|d_ff|n_inner|mlp_dim)", 24),
    (
        r"(\w+_)?(hidden_size|d_model|n_embd|hidden_dim|embed_dim|embedding_size|embedding_dim"
        r"|projection_dim|proj_dim|n_embed|dim)",
        16,
    ),
    (r"max_position_embeddings|n_positions|max_seq_len|max_target_positions", 64),
    (r"image_size|img_size", IMAGE),
    (r"patch_size", 8),
    (r"num_mel_bins|feature_size", 8),
    (r"max_source_positions", 12),
    (r"state_size|mamba_d_state", 4),
    (r"sliding_window", 4),
    (r"num_feat_extract_layers|num_conv_pos_embedding_groups", 2),
    (r"num_conv_pos_embeddings", 4),
)
_LISTS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (r"depths|num_layers_per_stage|layers_per_stage", (1,)),
    (r"(\w+_)?(num_heads|num_attention_heads)", (2,)),
    (r"conv_kernel", (5, 3)),
    (r"conv_stride", (3, 2)),
    (r"conv_dim", (8, 8)),
    (r"(\w+_)?hidden_sizes|embed_dims?", (8, 16, 16, 16, 16, 16)),
)
# Fields that make a forward random, give memory to it, or mask what it is trained with.
_OFF = re.compile(r"\w*drop\w*|use_cache|apply_spec_augment|\w*jitter\w*")


def shrunk(config: type, **options: Any) -> Any:
    """A config class with small sizes; configs within it likewise."""
    parameters = inspect.signature(config.__init__).parameters
    default, given = config(), {}
    for name in parameters:
        old = getattr(default, name, None)
        number = next((n for p, n in _NUMBERS if re.fullmatch(p, name)), None)
        row = next((n for p, n in _LISTS if re.fullmatch(p, name)), None)
        if _OFF.fullmatch(name) and isinstance(old, bool | int | float):
            given[name] = type(old)(0)
        elif _OFF.fullmatch(name) and isinstance(old, list | tuple):
            given[name] = [0.0] * len(old)  # one for each stage
        elif isinstance(old, int) and not isinstance(old, bool) and number and old:
            given[name] = number
        elif isinstance(old, list | tuple) and old and row:
            size = len(row) if name.startswith("conv_") else len(old)
            given[name] = [row[min(i, len(row) - 1)] for i in range(size)]
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            given[name] = shrunk(type(inner))
    if {"pad_token_id", "eos_token_id"} <= set(parameters):
        given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return config(**{**given, **options})


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same for every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(batch: int, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Tokens above the special ones."""
    make = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=make)


def _padded(batch: int) -> torch.Tensor:
    mask = torch.ones(batch, LENGTH, dtype=torch.int64)
    mask[0, LENGTH - 2 :] = 0
    return mask


def transformers_inputs(model: Any) -> Call:
    """What a model of transformers takes, by the names of its arguments."""
    names = inspect.signature(model.forward).parameters
    main, config = model.main_input_name, model.config
    text = main == "input_ids"
    image, channels = IMAGE, 3
    for part in (config, getattr(config, "vision_config", None)):
        size = getattr(part, "image_size", None)
        image = size if isinstance(size, int) else image
        channels = getattr(part, "num_channels", None) or channels
    both = hasattr(config, "text_config") and hasattr(config, "vision_config")

    def call(batch: int) -> Mapping[str, Any]:
        given: dict[str, Any] = {}
        if text or (both and "input_ids" in names):
            given["input_ids"] = tokens(batch)
            if "attention_mask" in names:
                given["attention_mask"] = _padded(batch)
            if "bbox" in names:
                given["bbox"] = torch.arange(4).expand(batch, LENGTH, 4).contiguous()
        if "pixel_values" in names and (not text or both):
            given["pixel_values"] = floats(batch, channels, image, image)
        if "noise" in names:  # which patches are masked; else drawn, in eval mode too
            given["noise"] = floats(batch, (image // config.patch_size) ** 2)
        if main == "input_values":
            given[main] = floats(batch, 120)
        if main == "input_features":
            given[main] = floats(batch, 8, 24)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            given["decoder_input_ids"] = tokens(batch, 5, seed=1)
        return given

    return call


# The class of an architecture is the first that one of these tables of transformers names.
_TABLES = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "OBJECT_DETECTION",
)
# What the names of the fields do not tell. One layer is enough for most; these have several kinds.
_OPTIONS: dict[str, dict[str, Any]] = {
    **{
        kind: {"num_hidden_layers": 2}
        for kind in (
            "gemma2", "cohere2", "llama4", "exaone4", "olmo3", "gpt_oss", "gemma3_text", "smollm3",
            "modernbert", "albert", "minimax", "granitemoehybrid", "bamba", "falcon_h1", "doge",
        )
    },
    **{kind: {"num_hidden_layers": 4} for kind in ("qwen3_next", "recurrent_gemma", "olmo_hybrid")},
    "convnext": {"patch_size": 2},
    "convnextv2": {"patch_size": 2},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "swin": {"window_size": 4, "patch_size": 2, "depths": [2], "num_heads": [2], "image_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 4, "n_groups": 1},
    "rwkv": {"num_hidden_layers": 2},
    "switch_transformers": {"router_jitter_noise": 0.0},
    "data2vec-audio": {"mask_time_prob": 0.0},
    "dinov3_vit": {"pos_embed_rescale": None},  # else drawn for each call in train mode
}  # fmt: skip
# The ones that are tried, the best known first; without those that take images beside text.
_KINDS = """
llama qwen3 gpt2 bert t5 vit mistral gemma mixtral gpt_neox deepseek_v3 qwen2_moe phi3 roberta
bart whisper wav2vec2 clip resnet convnext swin mamba olmo2 falcon bloom opt phi gpt_oss
deberta-v2 distilbert electra xlnet longt5 pegasus mbart m2m_100 beit deit dinov2 segformer
hubert wavlm siglip gemma2 gemma3_text qwen2 qwen3_moe qwen3_next llama4 deepseek_v2 cohere
cohere2 granite granitemoe glm glm4 stablelm starcoder2 gptj gpt_bigcode mpt olmo olmo3 olmoe
persimmon phimoe jamba bamba mamba2 falcon_mamba recurrent_gemma rwkv xlstm lfm2 nanochat
modernbert albert camembert canine convbert deberta ernie eurobert flaubert fnet funnel ibert
layoutlm longformer luke markuplm megatron-bert mobilebert mpnet mra nystromformer rembert
roberta-prelayernorm roformer splinter squeezebert tapas xlm xlm-roberta xlm-roberta-xl yoso
big_bird bigbird_pegasus biogpt blenderbot blenderbot-small ctrl cpmant fsmt helium jetmoe led
marian mt5 mvp nllb-moe openai-gpt pegasus_x plbart prophetnet switch_transformers t5gemma umt5
xglm convnextv2 cvt data2vec-vision dinov3_vit dinov3_convnext focalnet glpn ijepa imagegpt
mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet swiftformer vit_mae vit_msn vitdet yolos
altclip chinese_clip clipseg groupvit owlvit metaclip_2 data2vec-audio sew sew-d unispeech
seamless_m4t fastspeech2_conformer aimv2 apertus arcee bitnet cwm diffllama exaone4 exaone_moe
falcon_h1 flex_olmo glm4_moe gpt_neox_japanese granitemoehybrid hrm_text jais2 minimax
minimax_m2 ministral3 olmo_hybrid qwen3_5 seed_oss smollm3 vaultgemma doge dpr ernie4_5
ernie4_5_moe kimi_linear modernbert-decoder moshi nomic_bert roc_bert trocr
""".split()  # noqa: SIM905


def _classes() -> dict[str, str]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tables = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in _TABLES] + [
        modeling_auto.MODEL_MAPPING_NAMES
    ]
    found: dict[str, str] = {}
    for kind in CONFIG_MAPPING:
        name = next((table[kind] for table in tables if kind in table), None)
        name = name[0] if isinstance(name, list | tuple) else name
        if name is not None:
            found[kind] = name
    return found


def transformers() -> Iterator[tuple[str, Builder]]:
    """transformers' architectures."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    classes = _classes()
    for kind in _KINDS:
        name = classes[kind]

        def build(name: str = name, kind: str = kind) -> Built:
            made = getattr(hf, name)
            if kind == "groupvit":  # it draws noise in train mode, which no field turns off
                code = sys.modules[made.__module__]
                code.gumbel_softmax = lambda x, hard, dim: code.hard_softmax(x, dim)  # type: ignore[attr-defined]
            model = made(shrunk(made.config_class, **_OPTIONS.get(kind, {})))
            return model, transformers_inputs(model)

        yield f"transformers/{kind}", build


def _image(size: int, name: str = "x") -> Call:
    return lambda batch: {name: floats(batch, 3, size, size)}


def timm() -> Iterator[tuple[str, Builder]]:
    """timm's architectures: its own models for tests, and the smallest of others."""
    import timm as library
    from timm.models import byobnet

    fixed = ("test_coatnet", "test_maxvit", "test_vit3", "test_vit_relpos")
    small = {name: 160 if name in fixed else 64 for name in library.list_models("test_*")}
    small |= {
        "edgenext_xx_small": 64, "lcnet_035": 64, "mobilenetv3_small_050": 64,
        "mobilenetv4_conv_small_035": 64, "tinynet_e": 64, "resnet10t": 64,
        "hardcorenas_a": 64, "semnasnet_050": 64, "fbnetc_100": 64,
    }  # fmt: skip
    options: dict[str, tuple[int, dict[str, Any]]] = {n: (s, {}) for n, s in small.items()}
    tiny = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    options |= {
        "vit_tiny_patch16_224": (32, tiny),
        "deit_tiny_distilled_patch16_224": (32, tiny),
        "beit_base_patch16_224": (32, tiny),
        "eva02_tiny_patch14_224": (32, tiny),
        "cait_xxs24_224": (32, {**tiny, "depth": 1}),
        "xcit_nano_12_p16_224": (32, {**tiny, "patch_size": 16}),
        "swin_tiny_patch4_window7_224": (
            32,
            {
                "img_size": 32,
                "window_size": 4,
                "embed_dim": 8,
                "depths": (2, 1),
                "num_heads": (2, 2),
            },
        ),
        # The first block of each stage, with all its branches: all are 1,289 modules.
        "mobileone_s0": (
            64,
            {"blocks": [stage[:2] for stage in byobnet.model_cfgs["mobileone_s0"].blocks]},
        ),
        "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}),
    }
    for name, (size, given) in options.items():

        def build(name: str = name, size: int = size, given: Any = given) -> Built:
            off = {"drop_path_rate": 0.0, "drop_rate": 0.0}
            return library.create_model(name, num_classes=5, **off, **given), _image(size)

        yield f"timm/{name}", build


def torchvision() -> Iterator[tuple[str, Builder]]:
    """torchvision's architectures, small by their own arguments."""
    import torchvision.models as models
    from torchvision.models import convnext, densenet, resnet, segmentation, swin_transformer

    classes = {"num_classes": 5}
    calm = {"dropout": 0.0, **classes}
    block = convnext.CNBlockConfig
    found: dict[str, tuple[Callable[[], torch.nn.Module], Call]] = {
        "mobilenet_v2": (
            lambda: models.mobilenet_v2(
                width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]], **calm),
            _image(64)),
        "mobilenet_v3_small": (
            lambda: models.mobilenet_v3_small(width_mult=0.5, **calm), _image(64)),
        "shufflenet_v2": (lambda: models.shufflenet_v2_x0_5(**classes), _image(64)),
        "squeezenet": (lambda: models.squeezenet1_1(**calm), _image(64)),
        "mnasnet": (lambda: models.mnasnet0_5(**calm), _image(64)),
        "densenet": (
            lambda: densenet.DenseNet(4, (2, 2), 8, num_classes=5, drop_rate=0), _image(64)),
        "resnet": (lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], **classes), _image(64)),
        "resnext": (
            lambda: resnet.ResNet(
                resnet.Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=4, **classes),
            _image(64)),
        "vit": (
            lambda: models.VisionTransformer(
                image_size=32, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=24,
                **classes), _image(32)),
        "swin": (
            lambda: swin_transformer.SwinTransformer(
                [2, 2], 8, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, **classes),
            _image(32)),
        "swin_v2": (
            lambda: swin_transformer.SwinTransformer(
                [2, 2], 8, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, **classes,
                block=swin_transformer.SwinTransformerBlockV2,
                downsample_layer=swin_transformer.PatchMergingV2), _image(32)),
        "convnext": (
            lambda: convnext.ConvNeXt([block(8, 16, 1), block(16, None, 1)],
                                      stochastic_depth_prob=0.0, **classes), _image(32)),
        "efficientnet": (lambda: _efficientnet(models), _image(64)),
        "regnet": (lambda: _regnet(models), _image(64)),
        "maxvit": (
            lambda: models.MaxVit(
                (32, 32), 8, 4, [8], [1], 4, stochastic_depth_prob=0.0, **classes), _image(32)),
        "lraspp": (
            lambda: segmentation.lraspp_mobilenet_v3_large(
                weights=None, weights_backbone=None, **classes), _image(64, "input")),
    }  # fmt: skip
    for name, (make, call) in found.items():
        yield f"torchvision/{name}", lambda make=make, call=call: (make(), call)


def _efficientnet(models: Any) -> torch.nn.Module:
    setting = models.efficientnet.MBConvConfig
    made: torch.nn.Module = models.EfficientNet(
        [setting(1, 3, 1, 8, 8, 1), setting(2, 5, 2, 8, 16, 1)], 0.0,
        stochastic_depth_prob=0.0, num_classes=5, last_channel=16)  # fmt: skip
    return made


def _regnet(models: Any) -> torch.nn.Module:
    params = models.regnet.BlockParams.from_init_params(2, 8, 8.0, 2.0, 4, se_ratio=0.25)
    made: torch.nn.Module = models.RegNet(params, num_classes=5, stem_width=8)
    return made


def torchaudio() -> Iterator[tuple[str, Builder]]:
    """torchaudio's architectures."""
    from torchaudio import models

    def lengths(batch: int) -> torch.Tensor:
        return torch.full((batch,), 16)

    found: dict[str, tuple[Callable[[], torch.nn.Module], Call]] = {
        "conformer": (
            lambda: models.Conformer(16, 2, 24, 1, 3),
            lambda batch: {"input": floats(batch, 16, 16), "lengths": lengths(batch)}),
        "conv_tasnet": (
            lambda: models.ConvTasNet(2, 4, 8, 3, 8, 8, 2, 1),
            lambda b: {"input": floats(b, 1, 64)}),
        "deepspeech": (
            lambda: models.DeepSpeech(8, 16, 5, 0.0), lambda b: {"x": floats(b, 1, 10, 8)}),
        "wav2vec2": (
            lambda: models.wav2vec2_model(
                "group_norm", [(8, 5, 3), (8, 3, 2)], False, 16, 0.0, 4, 2, 1, 4, 0.0, 24, 0.0, 0.0,
                False, 0.0, 5), lambda b: {"waveforms": floats(b, 120)}),
        "emformer": (
            lambda: models.Emformer(16, 2, 24, 1, 4),
            lambda b: {"input": floats(b, 16, 16), "lengths": lengths(b)}),
        "hdemucs": (
            lambda: models.HDemucs(["a", "b"], channels=8, nfft=64, depth=2),
            lambda b: {"input": floats(b, 2, 256)}),
    }  # fmt: skip
    for name, (make, call) in found.items():
        yield f"torchaudio/{name}", lambda make=make, call=call: (make(), call)


def peft() -> Iterator[tuple[str, Builder]]:
    """PEFT's kinds of adapters, on a small Llama."""
    import peft as library
    import transformers as hf

    on = {"target_modules": ["q_proj", "v_proj"]}
    kinds: dict[str, Callable[[], Any]] = {
        "lora": lambda: library.LoraConfig(r=2, **on),
        "dora": lambda: library.LoraConfig(r=2, use_dora=True, **on),
        "rslora": lambda: library.LoraConfig(r=2, use_rslora=True, **on),
        "loha": lambda: library.LoHaConfig(r=2, **on),
        "lokr": lambda: library.LoKrConfig(r=2, **on),
        "ia3": lambda: library.IA3Config(feedforward_modules=[], **on),
        "vera": lambda: library.VeraConfig(r=2, **on),
        "oft": lambda: library.OFTConfig(r=0, oft_block_size=4, **on),
        "boft": lambda: library.BOFTConfig(boft_block_size=4, **on),
        "adalora": lambda: library.AdaLoraConfig(init_r=2, target_r=2, total_step=10, **on),
        "prompt_tuning": lambda: library.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2),
        "prefix_tuning": lambda: library.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=2),
        "fourierft": lambda: library.FourierFTConfig(n_frequency=8, **on),
        "hra": lambda: library.HRAConfig(r=2, **on),
        "ln_tuning": lambda: library.LNTuningConfig(target_modules=["input_layernorm"]),
    }
    for name, config in kinds.items():

        def build(config: Any = config) -> Built:
            model = hf.LlamaForCausalLM(shrunk(hf.LlamaConfig))
            call: Call = lambda batch: {"input_ids": tokens(batch)}  # noqa: E731
            return library.get_peft_model(model, config()), call

        yield f"peft/{name}", build


def diffusers() -> Iterator[tuple[str, Builder]]:
    """diffusers' denoisers and autoencoders."""
    import diffusers as library

    two = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
    cross = {"cross_attention_dim": 16, "attention_head_dim": 4}
    plain = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
             "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}  # fmt: skip
    crossed = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
               "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip

    def noisy(channels: int, *, words: bool = False) -> Call:
        def call(batch: int) -> Mapping[str, Any]:
            time = torch.arange(1, batch + 1)
            given = {"sample": floats(batch, channels, 16, 16), "timestep": time}
            return {**given, "encoder_hidden_states": floats(batch, 5, 16)} if words else given

        return call

    def hidden(batch: int, channels: int = 4, size: int = 8) -> dict[str, Any]:
        return {"hidden_states": floats(batch, channels, size, size),
                "timestep": torch.arange(1, batch + 1)}  # fmt: skip

    def sample(batch: int) -> dict[str, Any]:
        return {"sample": floats(batch, 3, 16, 16)}

    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    coder = {"down_block_types": ("DownEncoderBlock2D",) * 2,
             "up_block_types": ("UpDecoderBlock2D",) * 2, **two}  # fmt: skip

    def flux(batch: int) -> dict[str, Any]:
        return {"hidden_states": floats(batch, 16, 4),
                "encoder_hidden_states": floats(batch, 5, 16),
                "pooled_projections": floats(batch, 16), "timestep": torch.ones(batch),
                "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}  # fmt: skip

    found: dict[str, tuple[Callable[[], torch.nn.Module], Call]] = {
        "UNet2DModel": (
            lambda: library.UNet2DModel(sample_size=16, **two, **plain, attention_head_dim=4),
            noisy(3)),
        "UNet2DConditionModel": (
            lambda: library.UNet2DConditionModel(sample_size=16, **two, **cross, **crossed),
            noisy(4, words=True)),
        "AutoencoderKL": (lambda: library.AutoencoderKL(**coder, sample_size=16), sample),
        "VQModel": (
            lambda: library.VQModel(**coder, num_vq_embeddings=8, sample_size=16), sample),
        "AutoencoderTiny": (
            lambda: library.AutoencoderTiny(
                encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
                num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)), sample),
        "DiTTransformer2DModel": (
            lambda: library.DiTTransformer2DModel(
                **heads, in_channels=4, sample_size=8, num_embeds_ada_norm=5, dropout=0.0),
            lambda b: {**hidden(b), "class_labels": torch.arange(b)}),
        "SD3Transformer2DModel": (
            lambda: library.SD3Transformer2DModel(
                sample_size=8, in_channels=4, **heads, joint_attention_dim=16,
                caption_projection_dim=16, pooled_projection_dim=16, out_channels=4),
            lambda b: {**hidden(b), "encoder_hidden_states": floats(b, 5, 16),
                       "pooled_projections": floats(b, 16)}),
        "FluxTransformer2DModel": (
            lambda: library.FluxTransformer2DModel(
                in_channels=4, **heads, num_single_layers=1, joint_attention_dim=16,
                pooled_projection_dim=16, axes_dims_rope=(2, 2, 4)), flux),
        "PixArtTransformer2DModel": (
            lambda: library.PixArtTransformer2DModel(
                **heads, in_channels=4, sample_size=8, cross_attention_dim=16, caption_channels=16,
                use_additional_conditions=False),
            lambda b: {**hidden(b), "encoder_hidden_states": floats(b, 5, 16)}),
        "PriorTransformer": (
            lambda: library.PriorTransformer(**heads, embedding_dim=16, num_embeddings=5),
            lambda b: {"hidden_states": floats(b, 16), "timestep": torch.arange(1, b + 1),
                       "proj_embedding": floats(b, 16),
                       "encoder_hidden_states": floats(b, 5, 16)}),
        "ControlNetModel": (
            lambda: library.ControlNetModel(
                **two, **cross, down_block_types=crossed["down_block_types"],
                conditioning_embedding_out_channels=(8, 8)),
            lambda b: {**noisy(4, words=True)(b), "controlnet_cond": floats(b, 3, 32, 32)}),
    }  # fmt: skip
    for name, (make, call) in found.items():
        yield f"diffusers/{name}", lambda make=make, call=call: (make(), call)


def entries() -> list[tuple[str, Builder]]:
    """All architectures of the libraries that are installed."""
    _names_of_torchvision()
    found: list[tuple[str, Builder]] = []
    for library in (transformers, peft, torchvision, timm, diffusers, torchaudio):
        try:
            found += library()
        except (ImportError, OSError) as error:
            print(f"left out: {library.__name__}: {error}", file=sys.stderr)
    # A run may be cut short: it then has as large a part of each library, the best known first.
    size = Counter(name.split("/")[0] for name, _ in found)
    seen: Counter[str] = Counter()
    place: dict[str, float] = {}
    for name, _ in found:
        library_name = name.split("/")[0]
        place[name] = seen[library_name] / size[library_name]
        seen[library_name] += 1
    return sorted(found, key=lambda entry: place[entry[0]])


def _names_of_torchvision() -> None:
    """torchvision for CUDA beside a PyTorch for CPUs cannot load its kernels, and then not start.

    Its models take none of them: the names that it asks for are enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    place = Path(importlib.util.find_spec("torchvision").origin).parent  # type: ignore
    try:
        torch.ops.load_library(place / "_C.so")
    except OSError:
        _KEPT.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _KEPT[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_KEPT: list[Any] = []
