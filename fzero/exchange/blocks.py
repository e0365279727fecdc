"""Attention of some queries to some keys, as one block of attention to all keys.

A block gives the softmax over its own keys, and the log-sum-exp of each row, by which blocks are
put together. Backwards it is handed the log-sum-exp of all blocks, so that its weights are those of
the softmax over all keys.

Shapes: queries `(batch, length, groups, heads of a group, features)`, keys and values
`(batch, length of keys, groups, features)`; a row's log-sum-exp has the dims of queries but the
last. Results, and gradients, are float32 or rounded to the dtype of their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange import cudnn


# Lower than any score; its differences are finite.
LOW = -1e30


@dataclass(frozen=True)
class Plain:
    """By products and a softmax, in float32.

    Args:
        seen: which keys each query sees, to be broadcast to `(batch, groups, heads, queries,
            keys)`; `None` for all.
        scale: factor of the scores.
    """

    seen: jax.Array | None
    scale: float

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The result, and each row's log-sum-exp; a row that sees nothing gives 0, and `LOW`."""
        scores = self._scores(q, k)
        top = jnp.max(scores, -1, keepdims=True)
        weights = self._shown(jnp.exp(scores - top))
        # At least one, that of the highest score, where anything is seen.
        total = jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1.0)
        out = jnp.einsum("bghqk,bkgf->bqghf", weights / total, v.astype(jnp.float32))
        return out, _rows(top + jnp.log(total))[..., 0]

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array,
        out: jax.Array, level: jax.Array, given: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """Gradients of `q`, `k`, `v`, from the result and log-sum-exp over all keys."""
        out, given = out.astype(jnp.float32), given.astype(jnp.float32)
        weights = self._shown(jnp.exp(self._scores(q, k) - _columns(level)))
        dv = jnp.einsum("bghqk,bqghf->bkgf", weights, given)
        pulled = jnp.einsum("bqghf,bkgf->bghqk", given, v.astype(jnp.float32))
        slope = weights * (pulled - _columns(jnp.sum(given * out, -1))) * self.scale
        dq = jnp.einsum("bghqk,bkgf->bqghf", slope, k.astype(jnp.float32))
        dk = jnp.einsum("bghqk,bqghf->bkgf", slope, q.astype(jnp.float32))
        return dq, dk, dv

    def _scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """`(batch, groups, heads, queries, keys)`."""
        wide = jnp.einsum("bqghf,bkgf->bghqk", q, k, preferred_element_type=jnp.float32)
        wide = wide * self.scale
        return wide if self.seen is None else jnp.where(self.seen, wide, LOW)

    def _shown(self, weights: jax.Array) -> jax.Array:
        return weights if self.seen is None else jnp.where(self.seen, weights, 0)


@dataclass(frozen=True)
class CudnnBlocks:
    """By cuDNN's kernel.

    Args:
        causal: whether query `i` sees keys up to `i`, or all.
        scale: factor of the scores.
    """

    causal: bool
    scale: float

    def possible(self, q: Any, k: Any, v: Any) -> bool:
        """Whether the program that is traced is for a GPU that has the kernel."""
        heads = jax.ShapeDtypeStruct((*q.shape[:2], q.shape[2] * q.shape[3], q.shape[4]), q.dtype)
        return cudnn.can_fuse(heads, k, v, causal=self.causal, window=None)

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `Plain.forward`."""
        out, level = cudnn.block(joined_heads(q), k, v, causal=self.causal, scale=self.scale)
        return out.reshape(*q.shape[:-1], -1), jnp.swapaxes(level, 1, 2).reshape(q.shape[:-1])

    def backward(
        self, q: jax.Array, k: jax.Array, v: jax.Array,
        out: jax.Array, level: jax.Array, given: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """As `Plain.backward`."""
        rows = jnp.swapaxes(level.reshape(*level.shape[:2], -1), 1, 2)
        heads, out, given = map(joined_heads, (q, out, given))
        dq, dk, dv = cudnn.gradients(
            heads, k, v, out, rows, given, causal=self.causal, scale=self.scale
        )
        return dq.reshape(q.shape), dk, dv


def joined_heads(x: jax.Array) -> jax.Array:
    """The heads of all groups in one dim."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _rows(x: jax.Array) -> jax.Array:
    """`(batch, groups, heads, queries, ...)` as `(batch, queries, groups, heads, ...)`."""
    return jnp.moveaxis(x, 3, 1)


def _columns(x: jax.Array) -> jax.Array:
    """The way back, with a dim for keys."""
    return jnp.moveaxis(x, 1, 3)[..., None]
