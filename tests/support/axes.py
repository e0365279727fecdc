"""A chain with something to divide over every further axis: attention, a wide layer, experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fzero as fz
from support import tiny


LENGTH, HEADS, HIDDEN, EXPERTS = 8, 2, 32, 4
SHARD = {
    "up": (None, "tensor"),
    "down": ("tensor", None),
    "experts/w": ("expert",),
}


def block_init(key: jax.Array) -> dict[str, Any]:
    """Weights of one layer."""
    qkv, up, down, router, experts = jax.random.split(key, 5)
    return {
        "qkv": 0.3 * jax.random.normal(qkv, (tiny.D, 3, HEADS, tiny.D // HEADS)),
        "up": 0.3 * jax.random.normal(up, (tiny.D, HIDDEN)),
        "down": 0.3 * jax.random.normal(down, (HIDDEN, tiny.D)),
        "router": jax.random.normal(router, (tiny.D, EXPERTS)),
        "experts": {"w": 0.3 * jax.random.normal(experts, (EXPERTS, tiny.D, tiny.D))},
    }


def block(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
    """A residual layer that says nothing of devices."""
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchf->btchf", x, p["qkv"]), 2, 0)
    x = x + fz.attention(q, k, v, causal=True).reshape(x.shape)
    x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 1)
    mixed, _ = fz.experts(
        lambda own, p, rows: own.dot(rows, p["w"]), p["experts"], x, chosen, gates
    )
    return x + mixed


def chain() -> fz.Sequential:
    """`tiny.chain` with these layers."""
    return fz.Sequential(
        [
            fz.Layer("embed", tiny.embed_init, tiny.embed),
            fz.Stack("blocks", 2, block_init, block, shard=SHARD),
            fz.Layer("head", tiny.head_init, tiny.head, reads={"table": "embed/table"}),
        ],
        loss=tiny.token_loss,
    )


def tokens(rows: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch whose sequences divide."""
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(0, tiny.VOCAB, (2, rows, LENGTH), dtype=np.int32)
    return {"ids": ids, "labels": labels, "mask": np.ones((rows, LENGTH), bool)}
