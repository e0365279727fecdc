"""Llamas of 8 and 70 billion parameters, to ask `fzero preflight` about; none is ever allocated.

    fzero preflight --model benchmarks/large_models.py:llama_8b --topology h200:8 \\
        --batch 8 --seq 4096
    fzero preflight --model benchmarks/large_models.py:llama_70b --topology h200:8x8 \\
        --data 8 --replica 8 --batch 64 --seq 4096 --html llama_70b.html
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import fzero as fz


@dataclass(frozen=True)
class LlamaSize:
    """Shapes of a Llama; the defaults are those of the 8B one."""

    vocab: int = 128256
    d: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    seq: int = 4096


LLAMA_8B = LlamaSize()
LLAMA_70B = LlamaSize(d=8192, layers=80, heads=64, hidden=28672)


def llama_8b() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The model, and the shapes of a batch of so many rows and tokens."""
    return llama(LLAMA_8B), batch_shapes


def llama_70b() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The model, and the shapes of a batch of so many rows and tokens."""
    return llama(LLAMA_70B), batch_shapes


def batch_shapes(rows: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch's shapes: the tokens read, and one more to predict."""
    return {"ids": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}


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
        def times(x: jax.Array, name: str) -> jax.Array:
            return checkpoint_name(x @ p[name], name)  # policies of `remat` may name it

        b, t, _ = x.shape
        h = _rms(x, p["norm_1"])
        q, k, v = (times(h, name).reshape(b, t, -1, head_dim) for name in "qkv")
        x = x + times(fz.attention(_rotate(q), _rotate(k), v, causal=True).reshape(b, t, -1), "o")
        h = _rms(x, p["norm_2"])
        return x + times(jax.nn.silu(times(h, "gate")) * times(h, "up"), "down")

    def init_embed(rng: jax.Array) -> Any:
        return {"tokens": 0.02 * jax.random.normal(rng, (size.vocab, size.d))}

    def init_head(rng: jax.Array) -> Any:
        out = 0.02 * jax.random.normal(rng, (size.d, size.vocab))
        return {"norm": jnp.ones(size.d), "out": out}

    def loss(logits: jax.Array, batch: Any) -> fz.Mean:
        return fz.cross_entropy(logits, batch["ids"][:, 1:])

    def embed(p: Any, batch: Any, ctx: fz.Context) -> Any:
        return p["tokens"][batch["ids"][:, :-1]]

    def head(p: Any, x: jax.Array, ctx: fz.Context) -> Any:
        return _rms(x, p["norm"]) @ p["out"]

    heads, kv = fz.Parts("tensor", size.heads), fz.Parts("tensor", size.kv_heads)
    divided = {
        "q": (None, heads), "k": (None, kv), "v": (None, kv), "o": (heads, None),
        "gate": (None, "tensor"), "up": (None, "tensor"), "down": ("tensor", None),
    }  # fmt: skip
    return fz.Sequential(
        [
            fz.Layer("embed", init_embed, embed, shard={"tokens": ("tensor",)}),
            fz.Stack("blocks", size.layers, init_block, block, shard=divided),
            fz.Layer("head", init_head, head, shard={"out": (None, "tensor")}),
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
