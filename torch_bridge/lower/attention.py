"""scaled_dot_product_attention, with every form of mask torch has."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import cast, is_bool, result_dtype
from .random import dropout_mask
from .registry import register_operator


def _draws(
    q: Any, k: Any, v: Any, mask: Any = None, dropout_p: float = 0.0, *_: Any, **kwargs: Any
) -> bool:
    return bool(kwargs.get("dropout_p", dropout_p) > 0.0)


@register_operator("aten.scaled_dot_product_attention.default", draws=_draws)
def attention(
    query: Any,
    key_: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: Any = None,
) -> jax.Array:
    """softmax(q k^T scale + mask) v, over the last two dims.

    Shapes: query `(..., H, L, E)`, key `(..., K, S, E)`, value `(..., K, S, V)`; with grouped
    queries H is a multiple of K. A query row whose keys are all masked gives 0, as in torch.
    """
    dtype = result_dtype(query, key_, value)
    q, k, v = (cast(x, dtype) for x in (query, key_, value))
    groups = q.shape[-3] // k.shape[-3] if enable_gqa and q.ndim > 2 else 1
    if groups > 1:  # head h reads key head h // groups
        q = jnp.reshape(q, (*q.shape[:-3], k.shape[-3], groups, *q.shape[-2:]))
        k, v = jnp.expand_dims(k, -3), jnp.expand_dims(v, -3)
    scores = _contract(q, jnp.swapaxes(k, -1, -2), np.float32)
    scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    probs = _softmax(_masked(scores, attn_mask, is_causal, groups))
    if dropout_p > 0.0:
        shape = probs.shape
        probs = jnp.where(dropout_mask(key, dropout_p, shape), probs / (1.0 - dropout_p), 0.0)
    out = _contract(probs.astype(dtype), v, dtype)
    if groups > 1:
        out = jnp.reshape(out, (*out.shape[:-4], -1, *out.shape[-2:]))
    return out


def _contract(x: jax.Array, y: Any, dtype: Any) -> jax.Array:
    # Half precision accumulates in float32; a float64 product must not be narrowed to float32.
    wide = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(dtype)
    return jnp.matmul(x, y, preferred_element_type=wide)


def _masked(scores: jax.Array, mask: Any, is_causal: bool, groups: int) -> jax.Array:
    if mask is not None:
        if groups > 1 and mask.ndim >= 3:
            heads = mask.shape[-3]
            split = (heads // groups, groups) if heads > 1 else (1, 1)
            mask = jnp.reshape(mask, (*mask.shape[:-3], *split, *mask.shape[-2:]))
        if is_bool(mask):
            scores = jnp.where(mask, scores, -jnp.inf)
        else:
            scores = scores + cast(mask, scores.dtype)
    if is_causal:  # aligned at the top left when L and S differ, as torch defines it
        rows, cols = scores.shape[-2:]
        keep = np.arange(rows)[:, None] >= np.arange(cols)[None, :]
        scores = jnp.where(keep, scores, -jnp.inf)
    return scores


def _softmax(scores: jax.Array) -> jax.Array:
    """Softmax over the last dim that gives 0 for rows of only -inf, with gradients free of NaN."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)
