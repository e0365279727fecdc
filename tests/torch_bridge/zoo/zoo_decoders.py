"""Decoders of transformers that generate, from tiny random configs with room for 64 new tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from zoo_transformers import GROUPED, SMALL, VOCABULARY, model


POSITIONS = 96
ROOMY = {**SMALL, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
SHARED = {**GROUPED, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
DEEP = {**SHARED, "num_hidden_layers": 3}

DECODERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": model("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2,
                  n_positions=POSITIONS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                  bos_token_id=1, eos_token_id=2),
    "llama": model("LlamaForCausalLM", **DEEP),
    "mistral": model("MistralForCausalLM", **SHARED, sliding_window=5),
    "qwen2": model("Qwen2ForCausalLM", **SHARED),
    "qwen3": model("Qwen3ForCausalLM", **SHARED, head_dim=8),
    "gemma": model("GemmaForCausalLM", **SHARED, head_dim=8),
    "gemma2": model("Gemma2ForCausalLM", **{**SHARED, "num_hidden_layers": 6}, head_dim=8,
                    sliding_window=5),
    "gemma3": model("Gemma3ForCausalLM", **{**SHARED, "num_hidden_layers": 6}, head_dim=8,
                    sliding_window=5),
    "phi": model("PhiForCausalLM", **ROOMY, resid_pdrop=0.0, embd_pdrop=0.0),
    "phi3": model("Phi3ForCausalLM", **SHARED, resid_pdrop=0.0, embd_pdrop=0.0),
    "gpt_neox": model("GPTNeoXForCausalLM", **ROOMY),
    "gptj": model("GPTJForCausalLM", vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2,
                  n_positions=POSITIONS, rotary_dim=4, resid_pdrop=0.0, embd_pdrop=0.0,
                  attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "gpt_bigcode": model("GPTBigCodeForCausalLM", vocab_size=VOCABULARY, n_embd=16, n_layer=1,
                         n_head=2, n_positions=POSITIONS, resid_pdrop=0.0, embd_pdrop=0.0,
                         attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "opt": model("OPTForCausalLM", **ROOMY, ffn_dim=24, word_embed_proj_dim=12),
    "bloom": model("BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=4,
                   bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "falcon": model("FalconForCausalLM", **ROOMY, alibi=False),
    "mixtral": model("MixtralForCausalLM", **SHARED, num_local_experts=4, num_experts_per_tok=2),
    "starcoder2": model("Starcoder2ForCausalLM", **SHARED, residual_dropout=0.0,
                        embedding_dropout=0.0),
    "stablelm": model("StableLmForCausalLM", **SHARED),
    "olmo": model("OlmoForCausalLM", **SHARED),
    "olmo2": model("Olmo2ForCausalLM", **SHARED),
    "cohere": model("CohereForCausalLM", **SHARED),
    "granite": model("GraniteForCausalLM", **SHARED),
    "smollm3": model("SmolLM3ForCausalLM", **SHARED),
}  # fmt: skip

# It takes the last rows of its own mask for the last keys, which a cache of fixed length has not.
WITHOUT_A_STATIC_CACHE = model(
    "GPTNeoForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_layers=2, num_heads=2,
    attention_types=[[["global", "local"], 1]], window_size=5, max_position_embeddings=POSITIONS,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# Prompts of several lengths: rows are padded, one of them more than a window of 5.
PROMPTS = ([5, 9, 4], [7, 3, 8, 20, 21, 11, 30, 6, 17], [30])


def lively(make: Callable[[], nn.Module]) -> nn.Module:
    """A module whose greedy tokens are not all the same: larger matrices make it chaotic."""
    torch.manual_seed(1)
    module = make().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 3 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.05 * noise)
    return module
