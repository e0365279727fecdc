"""GPT-2 1.5B and a Llama-like 8B as `fz.Sequential`s: shapes to plan and compile, never to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fzero as fz
from tests.support import gpt as gpt_module
from tests.support.gpt import Size


GPT2_XL = Size(vocab=50257, d=1600, layers=48, heads=25, seq=1024)


@dataclass(frozen=True)
class LlamaSize:
    """Shapes of a Llama; the defaults are those of the 8B one, at half its sequence length."""

    vocab: int = 128256
    d: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    seq: int = 4096


LLAMA_8B = LlamaSize()


def gpt2(size: Size = GPT2_XL) -> fz.Model:
    """A GPT-2 of any size."""
    return gpt_module.gpt(size)


def abstract_batch(size: Size | LlamaSize, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch's shapes."""
    return {"ids": jax.ShapeDtypeStruct((rows, size.seq + 1), jnp.int32)}


def llama(size: LlamaSize = LLAMA_8B) -> fz.Sequential:
    """A Llama: RMS norms, rotary positions, grouped queries, SwiGLU, a head of its own."""
    head_dim = size.d // size.heads

    def init_block(rng: jax.Array) -> Any:
        kv = size.kv_heads * head_dim
        shapes = {
            "q": (size.d, size.d), "k": (size.d, kv), "v": (size.d, kv), "o": (size.d, size.d),
            "gate": (size.d, size.hidden), "up": (size.d, size.hidden),
            "down": (size.hidden, size.d),
        }  # fmt: skip
        keys = jax.random.split(rng, len(shapes))
        weights = {
            name: 0.02 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return weights | {"norm_1": jnp.ones(size.d), "norm_2": jnp.ones(size.d)}

    def block(p: Any, x: jax.Array, ctx: fz.Context) -> Any:
        b, t, _ = x.shape
        h = _rms(x, p["norm_1"])
        q, k, v = ((h @ p[name]).reshape(b, t, -1, head_dim) for name in "qkv")
        q, k = _rotate(q), _rotate(k)
        groups = size.heads // size.kv_heads
        q = q.reshape(b, t, size.kv_heads, groups, head_dim)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k).astype(jnp.float32) / np.sqrt(head_dim)
        causal = jnp.tril(jnp.ones((t, t), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(v.dtype)
        x = x + jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(b, t, -1) @ p["o"]
        h = _rms(x, p["norm_2"])
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def init_embed(rng: jax.Array) -> Any:
        return {"tokens": 0.02 * jax.random.normal(rng, (size.vocab, size.d))}

    def init_head(rng: jax.Array) -> Any:
        out = 0.02 * jax.random.normal(rng, (size.d, size.vocab))
        return {"norm": jnp.ones(size.d), "out": out}

    def loss(logits: jax.Array, batch: Any) -> fz.Mean:
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        target = batch["ids"][:, 1:, None]
        return fz.Mean(-jnp.take_along_axis(logp, target, -1).sum(), jnp.float32(target.size))

    return fz.Sequential(
        [
            fz.Layer("embed", init_embed, lambda p, batch, ctx: p["tokens"][batch["ids"][:, :-1]]),
            fz.Stack("blocks", size.layers, init_block, block),
            fz.Layer("head", init_head, lambda p, x, ctx: _rms(x, p["norm"]) @ p["out"]),
        ],
        loss,
    )


def num_params(size: LlamaSize = LLAMA_8B) -> int:
    """Ψ of a Llama with a head of its own."""
    kv = size.kv_heads * size.d // size.heads
    block = 2 * size.d * size.d + 2 * size.d * kv + 3 * size.d * size.hidden + 2 * size.d
    return 2 * size.vocab * size.d + size.layers * block + size.d


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, positions, heads, head_dim]."""
    half = x.shape[-1] // 2
    speed = 500000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
