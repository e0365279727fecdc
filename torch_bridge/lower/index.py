"""Reading and writing by index.

Indices outside the tensor: torch raises, here they read NaN (whole numbers: the smallest of their
dtype), and write it, at the nearest index that there is.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, canonical, cast, is_bool
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.shape import slice_bounds
from torch_bridge.lower.tangents import sloped, with_tangents


@register_operator("aten.embedding.default")
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    places = not_negative(indices, weight.shape[0])
    rows = taken(weight, lambda table: jnp.take(table, places, axis=0))
    if scale_grad_by_freq:
        rows = by_frequency(rows, indices, weight.shape[0])
    if padding_idx < 0:
        return rows
    padded = jnp.expand_dims(indices == padding_idx, -1)
    return jnp.where(padded, jax.lax.stop_gradient(rows), rows)


@register_operator("torch_bridge.embedding_renorm.default")
def embedding_renorm(weight: Any, indices: Any, max_norm: float, norm_type: float) -> jax.Array:
    """A table of which the rows at some places are no longer than a bound.

    Its gradient is that of the table as it came: PyTorch scales the rows without one.
    """
    fixed = jax.lax.stop_gradient(weight)
    places = not_negative(jnp.ravel(indices), weight.shape[0])
    rows = jnp.take(fixed, places, axis=0)
    size = vector_norm(rows, norm_type, [1], True).astype(np.float32)
    scale = jnp.where(size > max_norm, max_norm / (size + 1e-7), 1)
    scaled = rows * scale.astype(weight.dtype)  # of 16 bits PyTorch rounds the scale, too
    return fixed.at[places].set(scaled, mode="drop") + sloped(weight, jnp.ones((), weight.dtype))


def by_frequency(rows: jax.Array, indices: Any, num: int) -> jax.Array:
    """Rows of a table whose gradients count by one over how often each is there."""
    counts = jnp.zeros((num,), np.int32).at[indices].add(1)  # 16 bits end at 256
    return _over_counts(rows, jnp.take(counts, indices)[..., None].astype(rows.dtype))


_over_counts = with_tangents(
    lambda rows, counts: rows, lambda drows, _, rows, counts: drows / counts, lambda *_: 0.0
)


def _indexers(indices: Sequence[Any]) -> tuple[Any, ...]:
    if any(i is not None and is_bool(i) for i in indices):
        raise NotImplementedError(
            "indexing with a boolean mask has a size that depends on the data; use torch.where"
        )
    return tuple(slice(None) if i is None else i for i in indices)


@register_operator("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(x: jax.Array, indices: Sequence[Any]) -> jax.Array:
    places = _indexers(indices)
    return taken(jnp.asarray(x), lambda whole: whole.at[places].get(mode="fill"))


def taken(x: jax.Array, read: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """What is read of an array, some of it perhaps often: the gradient adds up in float32.

    In 16 bits a sum of ones ends at 256 (bfloat16), as if the other places had not been read.
    """
    wide = accumulation_dtype(x)
    return read(x) if wide == x.dtype else read(x.astype(wide)).astype(x.dtype)


@register_operator("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(
    x: jax.Array, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> jax.Array:
    masks = [i for i in indices if i is not None and is_bool(i)]
    if masks and len(indices) == 1:  # which has a fixed shape after all
        new = _by_rank(x, masks[0], cast(values, x.dtype))
        mask = jnp.reshape(masks[0], (*masks[0].shape, *(1,) * (x.ndim - masks[0].ndim)))
        return jnp.where(mask, x + new if accumulate else new, x)
    inside: Any = True
    dims = [(i, n) for i, n in zip(indices, x.shape, strict=False) if i is not None]
    for one, size in dims if not masks else []:
        inside = jnp.all((one >= -size) & (one < size)) & inside
    places = _indexers(indices)
    new = jnp.where(inside, cast(values, x.dtype), lost(x))
    if accumulate:
        found = added(jnp.asarray(x), places, new, mode="clip")
        return marked(found, places, ~jnp.asarray(inside))
    return jnp.asarray(x).at[places].set(new, mode="clip")


def added(x: jax.Array, places: Any, values: Any, **options: Any) -> jax.Array:
    """Sums at an index, of 16 bits in float32; of truth values, as torch, whether any is true."""
    if is_bool(values):
        return x.at[places].max(values, **options)
    wide = accumulation_dtype(x)
    sums = x.astype(wide).at[places].add(values.astype(wide), **options)
    return sums.astype(x.dtype)


def _by_rank(x: jax.Array, mask: Any, values: jax.Array) -> jax.Array:
    """What `x[mask] = values` writes at each place: the i-th value at the i-th True of the mask.

    Where there are not as many values, which PyTorch refuses, it is no number.
    """
    rest = x.shape[mask.ndim :]
    if values.ndim <= len(rest) or values.shape[0] == 1:
        return jnp.broadcast_to(values, (1,) * mask.ndim + rest) if rest else jnp.ravel(values)[0]
    count = values.shape[0]
    values = jnp.where(jnp.sum(mask, dtype=np.int32) == count, values, lost(x))
    order = jnp.cumsum(jnp.ravel(mask), dtype=np.int32) - 1
    found = jnp.take(jnp.broadcast_to(values, (count, *rest)), order, axis=0, mode="clip")
    return jnp.reshape(found, x.shape)


@register_operator("aten.index_select.default")
def index_select(x: jax.Array, dim: int, index: Any) -> jax.Array:
    if not x.ndim:
        return x
    places = not_negative(jnp.atleast_1d(index), x.shape[dim])  # one of no dims keeps the dim
    return taken(x, lambda whole: jnp.take(whole, places, axis=dim))


def along(x: jax.Array, dim: int, index: Any) -> tuple[Any, ...]:
    """Index arrays so that `x[along(...)]` is torch's gather: other dims count along `index`."""
    counts = (jnp.arange(n, dtype=index.dtype) for n in index.shape)
    grid = list(jnp.meshgrid(*counts, indexing="ij", sparse=True))
    grid[dim % x.ndim] = index
    return tuple(grid)


@register_operator("aten.gather.default")
def gather(x: jax.Array, dim: int, index: Any, sparse_grad: bool = False) -> jax.Array:
    if not index.size:  # it may have any number of dims
        return jnp.zeros(index.shape, x.dtype)
    if not (x.ndim and index.ndim):  # numbers are vectors of one element
        found = gather(jnp.atleast_1d(x), 0, jnp.atleast_1d(index))
        return jnp.reshape(found, index.shape)
    places = along(x, dim, not_negative(index, x.shape[dim]))
    return taken(jnp.asarray(x), lambda whole: whole.at[places].get(mode="fill"))


def not_negative(index: Any, size: int) -> Any:
    """Negative indices, which torch takes in `x[i]` only, as what is outside."""
    return jnp.where(index < 0, jnp.asarray(size, index.dtype), index)


def lost(x: jax.Array) -> jax.Array:
    """What stands for a value that is not there: NaN, or the smallest whole number."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, x.dtype)
    return jnp.asarray(False if is_bool(x) else jnp.iinfo(x.dtype).min, x.dtype)


def written(
    x: jax.Array, dim: int, index: Any, values: Any, adds: bool = False
) -> tuple[Any, jax.Array]:
    """An index along a dim that is valid everywhere, and what to write.

    That is `lost` where it was not; and everywhere, unless it `adds`: another value that is
    written there may come last. Values have the index's shape, or that of `x` but along the dim.
    """
    outside = is_outside(x, dim, index)
    valid = jnp.clip(index, 0, x.shape[dim] - 1)
    values = cast(values, x.dtype)
    return valid, jnp.where(outside if adds else jnp.any(outside), lost(x), values)


def is_outside(x: jax.Array, dim: int, index: Any) -> jax.Array:
    """Where an index along a dim is of no element; of one for whole rows, for each row's values."""
    outside = (index < 0) | (index >= x.shape[dim])
    if index.ndim < x.ndim:
        outside = jnp.reshape(outside, (-1, *(1,) * (x.ndim - 1 - dim % x.ndim)))
    return outside


def marked(found: jax.Array, places: Any, outside: Any) -> jax.Array:
    """What a reduction gave, with `lost` where something lost went in.

    NaN stays NaN by itself; the smallest whole number is another once something is added.
    """
    if jnp.issubdtype(found.dtype, jnp.inexact):
        return found
    into = jnp.zeros(found.shape, bool).at[places].max(outside, mode="clip")
    return jnp.where(into, lost(found), found)


@register_operator("aten.take_along_dim.default")
def take_along_dim(x: jax.Array, indices: Any, dim: int | None = None) -> jax.Array:
    """Along a dim PyTorch takes indices modulo its size; in all of a tensor none is negative."""
    if dim is None:
        return gather(jnp.ravel(x), 0, jnp.ravel(indices))
    inside = jnp.remainder(indices, x.shape[dim])
    return taken(x, lambda whole: jnp.take_along_axis(whole, inside, axis=dim))


def into_vectors(write: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Writes into a number as into a vector of one element; an index of nothing writes nothing."""

    @functools.wraps(write)
    def run(
        x: jax.Array, dim: int, index: Any, values: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        if not index.size:
            return x
        if x.ndim and index.ndim:
            return write(x, dim, index, values, *args, **kwargs)
        given = jnp.ravel(values) if hasattr(values, "shape") else values
        found = write(jnp.ravel(x), 0, jnp.ravel(index), given, *args, **kwargs)
        return jnp.reshape(found, x.shape)

    return run


@register_operator("aten.scatter.src")
@into_vectors
def scatter(x: jax.Array, dim: int, index: Any, src: Any) -> jax.Array:
    valid, new = written(x, dim, index, src[tuple(slice(n) for n in index.shape)])
    return jnp.asarray(x).at[along(x, dim, valid)].set(new)


@register_operator("aten.scatter.value")
@into_vectors
def scatter_value(x: jax.Array, dim: int, index: Any, value: Any) -> jax.Array:
    valid, new = written(x, dim, index, value)
    return jnp.asarray(x).at[along(x, dim, valid)].set(new)


@register_operator("aten.scatter_add.default")
@into_vectors
def scatter_add(x: jax.Array, dim: int, index: Any, src: Any) -> jax.Array:
    valid, new = written(x, dim, index, src[tuple(slice(n) for n in index.shape)], True)
    places = along(x, dim, valid)
    return marked(added(jnp.asarray(x), places, new), places, is_outside(x, dim, index))


@register_operator("aten.index_add.default")
def index_add(x: jax.Array, dim: int, index: Any, source: Any, alpha: Any = 1) -> jax.Array:
    if not x.ndim:
        whole = index_add(x[None], 0, jnp.ravel(index), jnp.ravel(source), alpha)
        return whole[0]
    index = jnp.ravel(index)  # one of no dims is of one element
    valid, new = written(x, dim, index, cast(source, x.dtype) * alpha, True)
    places = (slice(None),) * (dim % x.ndim) + (valid,)
    return marked(added(jnp.asarray(x), places, new), places, is_outside(x, dim, index))


@register_operator("aten.select_scatter.default")
def select_scatter(x: jax.Array, src: Any, dim: int, index: int) -> jax.Array:
    where = (slice(None),) * (dim % x.ndim) + (index,)
    return jnp.asarray(x).at[where].set(cast(src, x.dtype))


@register_operator("aten.slice_scatter.default")
def slice_scatter(
    x: jax.Array,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    low, high = slice_bounds(x.shape[dim], start, end)
    if (low, high, step) == (0, x.shape[dim], 1):
        return jnp.broadcast_to(cast(src, x.dtype), x.shape)
    where = (slice(None),) * (dim % x.ndim) + (slice(low, high, step),)
    return jnp.asarray(x).at[where].set(cast(src, x.dtype))


@register_operator("aten.one_hot.default")
def one_hot(x: jax.Array, num_classes: int = -1) -> jax.Array:
    if num_classes < 0:
        raise NotImplementedError(
            "one_hot without num_classes has a size that depends on the data: say num_classes"
        )
    hot = jax.nn.one_hot(x, num_classes, dtype=canonical("int64"))
    return jnp.where(((x >= 0) & (x < num_classes))[..., None], hot, lost(hot))


@register_operator("aten.nonzero_static.default")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    if not x.ndim:
        return jnp.zeros((size, 0), canonical("int64"))
    # (By hand: `jnp.nonzero` of jax 0.12 is worked out after `jax.enable_x64` has ended.)
    flat = x.astype(bool).reshape(-1)
    number = jnp.cumsum(flat) - 1
    order = jnp.arange(flat.size, dtype=number.dtype)
    positions = jnp.zeros(size, number.dtype)
    positions = positions.at[jnp.where(flat, number, size)].set(order, mode="drop")
    found = jnp.stack(jnp.unravel_index(positions, x.shape), -1).astype(canonical("int64"))
    there = jnp.arange(size) < jnp.count_nonzero(flat)
    return jnp.where(there[:, None], found, fill_value)
