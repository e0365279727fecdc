"""Reductions into elements given by an index, and the less common ways to write."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import canonical, cast, is_bool, is_float, promote
from torch_bridge.lower.index import added, along, into_vectors, is_outside, marked, written
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.tangents import sloped, whole_quotient


@register_operator("aten.scatter_reduce.two")
@into_vectors
def scatter_reduce(
    x: jax.Array, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> jax.Array:
    valid, new = written(x, dim, index, src[tuple(slice(n) for n in index.shape)], True)
    places = along(x, dim, valid)
    found = reduce_into(x, places, new, reduce, include_self)
    return marked(found, places, is_outside(x, dim, index))


@register_operator("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(x: jax.Array, dim: int, index: Any, src: Any, *, reduce: str) -> jax.Array:
    src = src if hasattr(src, "shape") else jnp.full(index.shape, src, x.dtype)
    return scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def reduce_into(
    x: jax.Array, where: tuple[Any, ...], src: jax.Array, reduce: str, include_self: bool
) -> jax.Array:
    """Values reduced into the elements at an index: sum, mean, prod, amax or amin."""
    if reduce in ("amax", "amin") or (reduce == "prod" and is_bool(x)):
        return _extreme(x, where, src, reduce == "amax", include_self)
    if reduce == "prod":
        return _product(x, where, src, include_self)
    total = added(_first(x, where, 0, include_self), where, src)
    if reduce == "sum":
        return total
    if reduce != "mean":
        raise NotImplementedError(f"reduce={reduce!r}: expected sum, prod, mean, amax, amin")
    counts = jnp.full(x.shape, 1 if include_self else 0, np.int32).at[where].add(1)
    counts = jnp.maximum(counts, 1).astype(x.dtype)
    return total / counts if is_float(x) else jnp.floor_divide(total, counts)


def _first(x: jax.Array, where: tuple[Any, ...], neutral: Any, include_self: bool) -> jax.Array:
    """What a reduction starts from: elements that are written to may not count themselves."""
    return x if include_self else jnp.asarray(x).at[where].set(jnp.asarray(neutral, x.dtype))


def _extreme(
    x: jax.Array, where: tuple[Any, ...], src: jax.Array, largest: bool, include_self: bool
) -> jax.Array:
    """The largest or smallest value; its gradient is shared evenly by all that are equal to it."""
    neutral: Any = not largest
    if is_float(x):
        neutral = -np.inf if largest else np.inf
    elif not is_bool(x):
        neutral = np.iinfo(x.dtype).min if largest else np.iinfo(x.dtype).max
    start = _first(jax.lax.stop_gradient(x), where, neutral, include_self)
    written = start.at[where]
    given = jax.lax.stop_gradient(src)
    best = written.max(given) if largest else written.min(given)
    if not is_float(x):
        return best
    # JAX has no gradient for scatter-max. Value zero, gradient one: each equal term minus itself.
    # torch counts a value that is equal, but takes no part, among those that share.
    own = jax.lax.stop_gradient(x) == best
    equal = given == best[where]
    number = own.astype(x.dtype).at[where].add(equal.astype(x.dtype))
    zeros = sloped(x, (own & _counted(x, where, include_self)).astype(x.dtype))
    zeros = zeros.at[where].add(sloped(src, equal.astype(x.dtype)))
    return best + zeros / jnp.maximum(number, jnp.ones((), x.dtype))


def _counted(x: jax.Array, where: tuple[Any, ...], include_self: bool) -> jax.Array:
    """Which elements take part in a reduction into them."""
    counted = jnp.ones(x.shape, bool)
    return counted if include_self else counted.at[where].set(False)


def _product(x: jax.Array, where: tuple[Any, ...], src: jax.Array, include_self: bool) -> jax.Array:
    """The product; its gradient for a factor is the product of the others, zeros included."""
    start = _first(jax.lax.stop_gradient(x), where, 1, include_self)
    given = jax.lax.stop_gradient(src)
    if not is_float(x):
        return start.at[where].multiply(given)
    # JAX has no gradient for repeated factors. As in `_extreme`: value zero, gradient as it is.
    one, zero = jnp.ones((), x.dtype), jnp.zeros((), x.dtype)
    alive = start != 0, given != 0
    num_zeros = (~alive[0]).astype(np.int32).at[where].add((~alive[1]).astype(np.int32))
    rest = jnp.where(alive[0], start, one).at[where].multiply(jnp.where(alive[1], given, one))

    def others(factor: Any, lives: Any, zeros: Any, product: Any) -> Any:
        divided = jnp.where(zeros == 0, product / jnp.where(lives, factor, one), zero)
        return jnp.where(lives, divided, jnp.where(zeros == 1, product, zero))

    own = others(start, alive[0], num_zeros, rest)
    terms = sloped(x, jnp.where(_counted(x, where, include_self), own, zero))
    terms = terms.at[where].add(sloped(src, others(given, alive[1], num_zeros[where], rest[where])))
    return start.at[where].multiply(given) + terms


@register_operator("aten.index_copy.default")
def index_copy(x: jax.Array, dim: int, index: Any, source: Any) -> jax.Array:
    if not x.ndim:
        return jnp.reshape(cast(source, x.dtype), ())
    valid, new = written(x, dim, jnp.ravel(index), source)
    return jnp.asarray(x).at[(slice(None),) * (dim % x.ndim) + (valid,)].set(new)


@register_operator("aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor")
def index_fill(x: jax.Array, dim: int, index: Any, value: Any) -> jax.Array:
    if not x.ndim:
        return index_fill(x[None], 0, index, value)[0]
    index = jnp.where(index < 0, index + x.shape[dim], index)  # which torch takes here
    return index_copy(x, dim, index, value)


@register_operator("aten.masked_scatter.default")
def masked_scatter(x: jax.Array, mask: Any, source: Any) -> jax.Array:
    """The i-th True of the mask takes the i-th value of the source."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    wanted = jnp.ravel(jnp.broadcast_to(mask, shape))
    order = jnp.maximum(jnp.cumsum(wanted, dtype=np.int32) - 1, 0)
    taken = jnp.take(jnp.ravel(cast(source, x.dtype)), order)
    return jnp.where(mask, jnp.reshape(taken, shape), x)


@register_operator("aten.diagonal_scatter.default")
def diagonal_scatter(
    x: jax.Array, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, cols = moved.shape[-2:]
    length = max(min(rows, cols - offset) if offset >= 0 else min(rows + offset, cols), 0)
    steps = np.arange(length)
    where = (..., steps + max(-offset, 0), steps + max(offset, 0))
    return jnp.moveaxis(moved.at[where].set(cast(src, x.dtype)), (-2, -1), (dim1, dim2))


@register_operator("aten.histc.default")
def histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    values = jax.lax.stop_gradient(jnp.ravel(x))
    kind = values.dtype
    low, high = jnp.asarray(min, kind), jnp.asarray(max, kind)
    if min == max and values.size:  # torch takes the range from the data then
        low, high = jnp.min(values), jnp.max(values)
    same = low == high  # and then one to both sides of it
    low, high = jnp.where(same, low - 1, low), jnp.where(same, high + 1, high)
    if not is_float(values):  # whole numbers: count in float32, whatever the values are
        values, low, high = (cast(v, np.float32) for v in (values, low, high))
    inside = (values >= low) & (values <= high)
    # In this order, as torch: the other one moves values at the edges of bins.
    index = whole_quotient((values - low) * jnp.asarray(bins, values.dtype), high - low)
    index = jnp.clip(index, 0, bins - 1).astype(np.int32)
    counts = jnp.zeros((bins,), np.int32).at[index].add(inside.astype(np.int32))
    return counts.astype(kind)


@register_operator("aten.bincount.default")
def bincount(x: jax.Array, weights: Any = None, minlength: int = 0) -> jax.Array:
    raise NotImplementedError("bincount has a size that depends on the data; use torch.histc")


@register_operator("aten.searchsorted.Tensor")
def searchsorted(
    sorted_sequence: jax.Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> jax.Array:
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    right = right or side == "right"
    if sorted_sequence.ndim == 1:
        return bucketize(x, sorted_sequence, out_int32=out_int32, right=right)

    def one(edges: jax.Array, values: jax.Array) -> jax.Array:
        return bucketize(values, edges, out_int32=out_int32, right=right)

    for _ in sorted_sequence.shape[:-1]:
        one = jax.vmap(one)
    return one(sorted_sequence, x)


@register_operator("aten.searchsorted.Scalar")
def searchsorted_number(sorted_sequence: jax.Array, x: Any, **kwargs: Any) -> jax.Array:
    return searchsorted(sorted_sequence, jnp.asarray(x, sorted_sequence.dtype), **kwargs)


@register_operator("aten.bucketize.Scalar")
def bucketize_number(x: Any, boundaries: jax.Array, **kwargs: Any) -> jax.Array:
    return bucketize(jnp.asarray(x, boundaries.dtype), boundaries, **kwargs)


@register_operator("aten.bucketize.Tensor")
def bucketize(
    x: jax.Array, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    edges, values = promote(boundaries, x)
    found = jnp.searchsorted(edges, values, side="right" if right else "left")
    return found.astype(np.int32 if out_int32 else canonical("int64"))
