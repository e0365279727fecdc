"""Distances of all pairs of rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lower.arithmetic import absolute
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once
from torch_bridge.lower.tangents import sloped


# With more rows PyTorch takes a product of matrices, if it may choose. That leaves noise of small
# distances, so here not before the differences of all pairs would be many.
_FEW_ROWS, _FEW_NUMBERS = 25, 2**24


@register_operator("aten.cdist.default")
@once
def cdist(x: jax.Array, y: Any, p: float = 2, compute_mode: int | None = None) -> jax.Array:
    """Distances of all pairs of rows. Shapes: x `(..., P, M)`, y `(..., R, M)`."""
    chosen = compute_mode == 1 or max(x.shape[-2], y.shape[-2]) > _FEW_ROWS
    if p == 2 and compute_mode != 2 and chosen:
        return _euclidean(x, y)
    return _each_pair(x, y, p, compute_mode)


@register_operator("aten._euclidean_dist.default")
@once
def _euclidean(x: jax.Array, y: Any) -> jax.Array:
    ahead = jnp.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if math.prod((*ahead, *x.shape[-2:], y.shape[-2])) <= _FEW_NUMBERS:
        return distances(jnp.expand_dims(x, -2) - jnp.expand_dims(y, -3), 2)
    x, y = (jnp.broadcast_to(one, (*ahead, *one.shape[-2:])) for one in (x, y))
    return _by_products(x, y)


@register_operator("aten._cdist_forward.default")
@once
def _each_pair(x: jax.Array, y: Any, p: float, compute_mode: int | None) -> jax.Array:
    return distances(jnp.expand_dims(x, -2) - jnp.expand_dims(y, -3), p)


@register_operator("aten._pdist_forward.default")
def pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    """Distances of all pairs of rows, each once."""
    first, second = np.triu_indices(x.shape[0], 1)
    return distances(x[first] - x[second], p)


@jax.custom_jvp
def _by_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Without an array of all pairs' differences, with all digits that a product has."""
    squares = jnp.sum(x * x, -1)[..., :, None] + jnp.sum(y * y, -1)[..., None, :]
    return jnp.sqrt(jnp.maximum(squares - 2 * _products(x, y), 0))


@_by_products.defjvp
def _slopes(primals: Any, tangents: Any) -> Any:
    """PyTorch's: where two rows are one there is none."""
    (x, y), (dx, dy) = primals, tangents
    found = _by_products(x, y)
    own = jnp.sum(x * dx, -1)[..., :, None] + jnp.sum(y * dy, -1)[..., None, :]
    moved = own - _products(dx, y) - _products(x, dy)
    none = found == 0
    return found, jnp.where(none, 0, moved / jnp.where(none, 1, found))


def _products(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, jnp.matrix_transpose(y), precision=jax.lax.Precision.HIGHEST)


def distances(gaps: jax.Array, p: float) -> jax.Array:
    """Norms of rows. Of the largest all have the whole gradient, where a norm's share it; a NaN is
    no difference that could be counted."""
    if p == 0:
        counts = jnp.where(jnp.isnan(gaps), gaps, (gaps != 0).astype(gaps.dtype))
        return jnp.sum(jax.lax.stop_gradient(counts), axis=-1)
    if p != float("inf") or not gaps.shape[-1]:
        return vector_norm(gaps, p, -1)
    size = absolute(gaps)
    best = jnp.max(jax.lax.stop_gradient(size), axis=-1, keepdims=True)
    return jnp.sum(sloped(size, (size == best).astype(size.dtype)), axis=-1) + best[..., 0]
