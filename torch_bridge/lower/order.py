"""Order: sort and topk, the median, the k-th and the most frequent value."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import canonical, is_float
from torch_bridge.lower.reduce import number_and_index, value_at
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.special_functions import is_nan


@register_operator("aten.sort.default")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    return sort_stable(x, stable=True, dim=dim, descending=descending)


@register_operator("aten.sort.stable")
def sort_stable(
    x: jax.Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), canonical("int64"))
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order.astype(canonical("int64"))


@register_operator("aten.argsort.default")
def argsort(x: jax.Array, dim: int = -1, descending: bool = False) -> jax.Array:
    return sort(x, dim, descending)[1]


@register_operator("aten.topk.default")
def topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    if not x.ndim:
        return x, jnp.zeros((), canonical("int64"))
    moved = jnp.moveaxis(x, dim, -1)
    if largest:
        values, order = jax.lax.top_k(moved, k)
    else:
        order = jnp.argsort(moved, axis=-1, stable=True)[..., :k]
        values = jnp.take_along_axis(moved, order, axis=-1)
    order = order.astype(canonical("int64"))
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(order, -1, dim)


def _picked(x: jax.Array, dim: int, rank: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """The value of a rank (0 is the smallest) along a dim, and where it stands."""
    if not x.ndim:
        return number_and_index(x)
    order = jnp.argsort(x, axis=dim, stable=True)  # NaN last, as in torch
    index = jnp.take_along_axis(order, jnp.broadcast_to(rank, _one(x, dim)), axis=dim)
    return value_at(x, index, dim, keepdim)


def _one(x: jax.Array, dim: int) -> tuple[int, ...]:
    """The shape of `x` with one element along `dim`."""
    axis = dim % x.ndim
    return (*x.shape[:axis], 1, *x.shape[axis + 1 :])


def _median_rank(x: jax.Array, dim: int) -> Any:
    """The lower of the two middle ranks, or the last one (a NaN) where there is a NaN."""
    if not x.ndim:
        return 0
    length = x.shape[dim]
    ill = jnp.any(is_nan(x), axis=dim, keepdims=True)
    return jnp.where(ill, length - 1, (length - 1) // 2)


@register_operator("aten.kthvalue.default")
def kthvalue(
    x: jax.Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _picked(x, dim, k - 1, keepdim)


@register_operator("aten.median.dim")
def median_dim(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _picked(x, dim, _median_rank(x, dim), keepdim)


@register_operator("aten.median.default")
def median(x: jax.Array) -> jax.Array:
    flat = jnp.ravel(x)
    return _of_equals(flat, _picked(flat, 0, _median_rank(flat, 0), False)[0])


@jax.custom_jvp
def _of_equals(x: jax.Array, value: jax.Array) -> jax.Array:
    """One of some values; all that are equal to it share its gradient. NaN where there are none."""
    return value if x.size or not is_float(x) else jnp.full_like(value, jnp.nan)


@_of_equals.defjvp
def _shared(primals: Any, tangents: Any) -> Any:
    (x, value), dx = primals, tangents[0]
    equal = (x == value) | (is_nan(x) & is_nan(value))
    count = jnp.maximum(jnp.sum(equal.astype(x.dtype)), 1)
    return _of_equals(x, value), jnp.sum(jnp.where(equal, dx, 0)) / count


@register_operator("aten.nanmedian.dim")
def nanmedian_dim(
    x: jax.Array, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    if not x.ndim:
        return number_and_index(x)
    number = jnp.sum(~is_nan(x), axis=dim, keepdims=True)
    return _picked(x, dim, jnp.maximum(number - 1, 0) // 2, keepdim)


@register_operator("aten.nanmedian.default")
def nanmedian(x: jax.Array) -> jax.Array:
    flat = jnp.ravel(x)
    return _of_equals(flat, nanmedian_dim(flat, 0)[0])


def _running(x: jax.Array, dim: int, better: Any) -> tuple[jax.Array, jax.Array]:
    if not x.ndim:
        return number_and_index(x)
    axis = dim % x.ndim
    positions = jax.lax.broadcasted_iota(canonical("int64"), x.shape, axis)

    def later(a: Any, b: Any) -> Any:
        wins = better(b[0], a[0]) | jnp.isnan(b[0])
        return jnp.where(wins, b[0], a[0]), jnp.where(wins, b[1], a[1])

    fixed = jax.lax.stop_gradient(x)
    _, index = jax.lax.associative_scan(later, (fixed, positions), axis=axis)
    return jnp.take_along_axis(x, index, axis=axis), index  # read by index: torch's gradient


@register_operator("aten.cummax.default")
def cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, jnp.greater_equal)  # of equal values the last, as in torch


@register_operator("aten.cummin.default")
def cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, jnp.less_equal)


@register_operator("aten.aminmax.default")
def aminmax(
    x: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    axis = dim if x.ndim else None
    return jnp.min(x, axis=axis, keepdims=keepdim), jnp.max(x, axis=axis, keepdims=keepdim)
