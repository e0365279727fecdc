"""Llamas of 8 and 70 billion parameters, Mixtral 8x22B; to ask `fzero preflight` about, never made.

    fzero preflight --model benchmarks/large_models.py:llama_8b --topology h200:8 \\
        --batch 8 --seq 4096
    fzero preflight --model benchmarks/large_models.py:llama_70b --topology h200:8x8 \\
        --data 8 --replica 8 --batch 64 --seq 4096 --html llama_70b.html
    fzero preflight --model benchmarks/large_models.py:llama_70b_qlora --topology h100:8 \\
        --batch 8 --seq 32768
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import fzero as fz
from fzero.weight_records import quantized_shape


@dataclass(frozen=True)
class LlamaSize:
    """Shapes of a Llama; the defaults are those of the 8B one. `exchange` is that of
    `fz.attention`; with `experts` each token takes two of so many gated products of a layer."""

    vocab: int = 128256
    d: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    seq: int = 4096
    exchange: str = "auto"
    experts: int = 0


LLAMA_8B = LlamaSize()
LLAMA_70B = LlamaSize(d=8192, layers=80, heads=64, hidden=28672)
MIXTRAL_8X22B = LlamaSize(32768, 6144, 56, 48, hidden=16384, experts=8)


def llama_8b() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The model, and the shapes of a batch of so many rows and tokens."""
    return llama(LLAMA_8B), batch_shapes


def llama_70b() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The model, and the shapes of a batch of so many rows and tokens."""
    return llama(LLAMA_70B), batch_shapes


def mixtral_8x22b() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The model, and the shapes of a batch of so many rows and tokens."""
    return llama(MIXTRAL_8X22B), batch_shapes


def llama_70b_lora() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """As `llama_70b`, frozen in bf16, with adapters of rank 16 in every layer's products."""
    return adapted(LLAMA_70B), batch_shapes


def llama_70b_qlora() -> tuple[fz.Model, Callable[[int, int], Any]]:
    """The same with the layers' products frozen in NF4."""
    return adapted(LLAMA_70B, quantised=True), batch_shapes


def batch_shapes(rows: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch's shapes: the tokens read, and one more to predict."""
    return {"ids": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}


def llama(size: LlamaSize = LLAMA_8B) -> fz.Sequential:
    """A Llama: RMS norms, rotary positions, grouped queries, SwiGLU, a head of its own."""
    head_dim = size.d // size.heads

    kv = size.kv_heads * head_dim
    attending = {"q": (size.d, size.d), "k": (size.d, kv), "v": (size.d, kv), "o": (size.d, size.d)}
    gated = {
        "gate": (size.d, size.hidden), "up": (size.d, size.hidden), "down": (size.hidden, size.d)
    }  # fmt: skip
    own = (size.experts,) if size.experts else ()
    shapes = attending | {name: (*own, *shape) for name, shape in gated.items()}
    if size.experts:
        shapes |= {"router": (size.d, size.experts)}

    def init_block(rng: jax.Array) -> Any:
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
        seen = fz.attention(_rotate(q), _rotate(k), v, causal=True, exchange=size.exchange)
        x = x + times(seen.reshape(b, t, -1), "o")
        h = _rms(x, p["norm_2"])
        if size.experts:
            return x + _mixture(p, h)
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

    heads, groups = fz.Parts("tensor", size.heads), fz.Parts("tensor", size.kv_heads)
    divided = {"q": (None, heads), "k": (None, groups), "v": (None, groups), "o": (heads, None)}
    gates = {"gate": (None, "tensor"), "up": (None, "tensor"), "down": ("tensor", None)}
    divided |= dict.fromkeys(gates, ("expert",)) if size.experts else gates
    return fz.Sequential(
        [
            fz.Layer("embed", init_embed, embed, shard={"tokens": ("tensor",)}),
            fz.Stack("blocks", size.layers, init_block, block, shard=divided),
            fz.Layer("head", init_head, head, shard={"out": (None, "tensor")}),
        ],
        loss,
    )


class _Adapted:
    """What `x @ weight` is with an adapter."""

    def __init__(self, weight: jax.Array, down: jax.Array, up: jax.Array) -> None:
        self.weight, self.down, self.up = weight, down, up

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        weight = self.weight
        if weight.dtype == jnp.uint8:
            weight = fz.dequantize(weight, (self.down.shape[0], self.up.shape[1]), x.dtype)
        return x @ weight + (x @ self.down) @ self.up * 2


def adapted(size: LlamaSize, rank: int = 16, quantised: bool = False) -> fz.Sequential:
    """A Llama whose own weights are frozen, with low-rank adapters; the loss without logits.

    Args:
        size: its shapes.
        rank: of the adapters.
        quantised: whether the weights of its layers are kept in NF4, not in bf16.
    """
    embed, blocks, _ = llama(size).layers[:3]

    def frozen(weight: jax.Array) -> jax.Array:
        if quantised and weight.ndim > 1:
            return jnp.zeros(quantized_shape(weight.shape), jnp.uint8)
        return weight.astype(jnp.bfloat16)

    def init_block(rng: jax.Array) -> Any:
        own = blocks.init(rng)
        found = {name: frozen(weight) for name, weight in own.items()}
        for name, weight in own.items():
            if weight.ndim > 1:
                n, m = weight.shape
                found[f"{name}_lora_down"] = jax.random.normal(rng, (n, rank)) / n**0.5
                found[f"{name}_lora_up"] = jnp.zeros((rank, m))
        return found

    def block(p: Any, x: jax.Array, ctx: fz.Context) -> Any:
        own = {
            name: _Adapted(leaf, p[f"{name}_lora_down"], p[f"{name}_lora_up"])
            if f"{name}_lora_up" in p
            else leaf
            for name, leaf in p.items()
        }
        return blocks.apply(own, x, ctx)

    def init_embed(rng: jax.Array) -> Any:
        return {"tokens": jnp.zeros((size.vocab, size.d), jnp.bfloat16)}

    def init_head(rng: jax.Array) -> Any:
        return {
            "norm": jnp.ones(size.d, jnp.bfloat16),
            "out": jnp.zeros((size.vocab, size.d), jnp.bfloat16),
        }

    def head(p: Any, x: jax.Array, ctx: fz.Context) -> Any:
        labels = ctx.batch["ids"][:, 1:]
        return fz.linear_cross_entropy(_rms(x, p["norm"]), p["out"], labels)

    layers = [
        fz.Layer("embed", init_embed, embed.apply),
        fz.Stack("blocks", size.layers, init_block, block),
        fz.Layer("head", init_head, head),
    ]
    return fz.Sequential(layers, frozen=lambda name: "_lora_" not in name)


def num_params(size: LlamaSize = LLAMA_8B) -> int:
    """Ψ of a Llama with a head of its own."""
    kv = size.kv_heads * size.d // size.heads
    gated = 3 * size.d * size.hidden
    block = 2 * size.d * size.d + 2 * size.d * kv + gated + 2 * size.d
    return 2 * size.vocab * size.d + size.layers * block + size.d


def _rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def _mixture(p: Any, x: jax.Array) -> jax.Array:
    """Of each token, its two experts' gated products."""

    def gated(own: Any, p: Any, rows: jax.Array) -> jax.Array:
        return own.dot(jax.nn.silu(own.dot(rows, p["gate"])) * own.dot(rows, p["up"]), p["down"])

    best, chosen = jax.lax.top_k((x @ p["router"]).astype(jnp.float32), 2)
    weights = {name: p[name] for name in ("gate", "up", "down")}
    return fz.experts(gated, weights, x, chosen, jax.nn.softmax(best).astype(x.dtype))[0]


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, positions, heads, head_dim]."""
    half = x.shape[-1] // 2
    speed = 500000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * speed
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
