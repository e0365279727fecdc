"""scaled_dot_product_attention, with every form of mask torch has."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import cast, is_bool
from torch_bridge.lower.kernels import exchanged_attention, fused_attention
from torch_bridge.lower.masks import ComputedMask, EndedRows, Pattern, rows_of
from torch_bridge.lower.query_blocks import ROWS, blocks_of, by_queries, kept_scores
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import sum_dtype


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
    mask_sizes: Sequence[Any] = (),
    mask_padding: Any = None,
) -> jax.Array:
    """softmax(q k^T scale + mask) v, over the last two dims.

    Shapes: query `(..., H, L, E)`, key `(..., K, S, E)`, value `(..., K, S, V)`; with grouped
    queries H is a multiple of K. A query row whose keys are all masked gives 0, as in torch.

    A sequence that a plan divides is exchanged. In programs for GPUs it is cuDNN's kernel where
    that applies, else products and a softmax, of long sequences with dropout by blocks of queries.
    On CPUs those are faster than `jax.nn.dot_product_attention`'s, and their layout is PyTorch's.
    Of rows that were declared to end in their padding the kernel takes the lengths; one that does
    not is NaN, on every device.
    """
    # PyTorch takes one dtype only. A step in half precision may still bring others: float32 angles
    # have widened what they turn. In torch the module had cast it back.
    dtype = min((np.dtype(x.dtype) for x in (query, key_, value)), key=lambda d: d.itemsize)
    q, k, v = (cast(x, dtype) for x in (query, key_, value))
    scale = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    shape = (*q.shape[:-1], k.shape[-2])
    reads = mask_sizes if mask_padding is None else (*mask_sizes, mask_padding)
    mask = _read_mask(attn_mask, reads, is_causal, shape)
    out = None if dropout_p else _by_kernel(q, k, v, mask, scale)
    if out is None:
        groups = q.shape[-3] // k.shape[-3] if enable_gqa and q.ndim > 2 else 1
        out = _by_products(q, k, v, mask, scale, dropout_p, groups, key)
    if mask.rows is None:
        return out
    right = jnp.reshape(mask.rows.right, (-1, *(1 for _ in shape[1:])))
    return out * jnp.where(right, 1.0, jnp.nan).astype(out.dtype)  # gradients are NaN, too


class _Mask(NamedTuple):
    """What hides keys: an array, and besides it a pattern.

    With `rows` the array is all of it, and they say the same.
    """

    array: Any
    pattern: Pattern
    rows: EndedRows | None = None


def _by_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: _Mask, scale: float
) -> jax.Array | None:
    """Attention that an exchange or cuDNN computes, where one can."""
    out = None
    if mask.rows is not None:
        out = fused_attention(q, k, v, mask.rows.pattern, scale, lengths=mask.rows.lengths)
    elif mask.array is None:
        out = exchanged_attention(q, k, v, mask.pattern, scale)
    return fused_attention(q, k, v, mask.pattern, scale, mask.array) if out is None else out


def _by_products(
    q: jax.Array, k: jax.Array, v: jax.Array, given: _Mask, scale: float, dropout_p: float,
    groups: int, key: Any,
) -> jax.Array:  # fmt: skip
    """Attention as two products and a softmax."""
    if groups > 1:  # head h reads key head h // groups
        q = jnp.reshape(q, (*q.shape[:-3], k.shape[-3], groups, *q.shape[-2:]))
        k, v = jnp.expand_dims(k, -3), jnp.expand_dims(v, -3)
    blocks = blocks_of(q.shape[-2], k.shape[-2]) if dropout_p > 0.0 else 1

    def attend(q: jax.Array, mask: Any, block: Any) -> jax.Array:
        scores = _contract(q, jnp.swapaxes(k, -1, -2), np.float32) * scale
        weights, total = _weights(
            _masked(scores, mask, given.pattern, groups, 0 if block is None else block * ROWS)
        )
        if dropout_p > 0.0:
            kept = kept_scores(key, dropout_p, weights.shape, blocks, block)
            weights = jnp.where(kept, weights / ((1.0 - dropout_p) or 1.0), 0.0)
        return _sums(weights, total, v)

    out = by_queries(attend, blocks, q, given.array)
    if groups > 1:
        out = jnp.reshape(out, (*out.shape[:-4], -1, *out.shape[-2:]))
    return out


def _read_mask(mask: Any, reads: Sequence[Any], is_causal: bool, scores: Sequence[int]) -> _Mask:
    """What hides keys from scores of this shape; `reads` is what the mask is computed of."""
    if not isinstance(mask, ComputedMask):
        return _Mask(mask, Pattern(is_causal))
    found = None if is_causal else mask.pattern(reads[: len(mask.sizes)], scores)
    if found is not None and mask.padding is None:
        return _Mask(None, found)
    whole = mask.array(reads)
    rows = None if found is None else rows_of(whole, found, scores)
    return _Mask(whole, Pattern(is_causal), rows)


def _contract(x: jax.Array, y: Any, dtype: Any) -> jax.Array:
    # Half precision accumulates in float32; a float64 product must not be narrowed to float32.
    wide = np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(dtype)
    return jnp.matmul(x, y, preferred_element_type=wide)


def _masked(scores: jax.Array, mask: Any, pattern: Pattern, groups: int, first: Any) -> jax.Array:
    """Scores of what is seen; `first` is the row of the first of these queries."""
    if mask is not None:
        if groups > 1 and mask.ndim >= 3:
            heads = mask.shape[-3]
            split = (heads // groups, groups) if heads > 1 else (1, 1)
            mask = jnp.reshape(mask, (*mask.shape[:-3], *split, *mask.shape[-2:]))
        if is_bool(mask):
            scores = jnp.where(mask, scores, -jnp.inf)
        else:
            scores = scores + cast(mask, scores.dtype)
    if pattern.causal:  # aligned at the top left when L and S differ, as torch defines it
        # Compared as it is needed: a constant would be stored, of the size of the scores.
        row, column = (jax.lax.broadcasted_iota(np.int32, scores.shape[-2:], d) for d in (0, 1))
        row = row + first
        keep = column <= row
        if pattern.window is not None:
            keep = keep & (column > row - pattern.window)
        scores = jnp.where(keep, scores, -jnp.inf)
    return scores


def _weights(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last dim before it is divided, and by what; of only -inf it is 0."""
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, jnp.where(total == 0.0, 1.0, total)


def _sums(weights: jax.Array, total: jax.Array, values: jax.Array) -> jax.Array:
    """Values by their weights. As in PyTorch's kernel for CPUs, 16-bit weights are divided last.

    The largest weight is 1 then, which has no error. A product that is rounded before would
    overflow float16.
    """
    dtype = values.dtype
    wide = sum_dtype(values)
    if wide == dtype:
        return _contract((weights / total).astype(dtype), values, dtype)
    return (_wide_sums(weights, values) / total).astype(dtype)


@jax.custom_jvp
def _wide_sums(weights: jax.Array, values: jax.Array) -> jax.Array:
    """16-bit values by float32 weights, which are rounded; their gradient is not.

    It is a difference of nearly equal numbers where one weight is almost 1.
    """
    return _contract(weights.astype(values.dtype), values, weights.dtype)


@_wide_sums.defjvp
def _wide_sums_jvp(given: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (weights, values), (of_weights, of_values) = given, tangents
    slope = _contract(of_weights, values.astype(weights.dtype), weights.dtype)
    return _wide_sums(weights, values), slope + _wide_sums(weights, of_values)
