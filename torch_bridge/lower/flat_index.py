"""Places given by flat or strided indices: take, put, index_reduce, as_strided, mode."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import canonical, cast
from torch_bridge.lower.index import added, is_outside, marked, taken, written
from torch_bridge.lower.reduce import argmax, number_and_index, value_at
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.scatter import reduce_into
from torch_bridge.lower.tangents import sloped


@register_operator("aten.take.default")
def take(x: jax.Array, index: jax.Array) -> jax.Array:
    places = jnp.where(index < 0, index + x.size, index)
    return taken(jnp.ravel(x), lambda flat: jnp.take(flat, places))


@register_operator("aten.put.default")
def put(x: jax.Array, index: jax.Array, source: Any, accumulate: bool = False) -> jax.Array:
    flat, index = jnp.ravel(x), jnp.ravel(index)
    index = jnp.where(index < 0, index + x.size, index)
    valid, values = written(flat, 0, index, jnp.ravel(source), accumulate)
    if not accumulate:
        return jnp.reshape(flat.at[valid].set(values), x.shape)
    found = marked(added(flat, valid, values), valid, is_outside(flat, 0, index))
    return jnp.reshape(found, x.shape)


@register_operator("aten.index_reduce.default")
def index_reduce(
    x: jax.Array, dim: int, index: jax.Array, source: Any, reduce: str, *, include_self: bool = True
) -> jax.Array:
    if not x.ndim:
        whole = index_reduce(x[None], 0, jnp.ravel(index), jnp.ravel(source), reduce,
                             include_self=include_self)  # fmt: skip
        return whole[0]
    valid, values = written(x, dim, jnp.ravel(index), source, True)
    where = (slice(None),) * (dim % x.ndim) + (valid,)
    found = reduce_into(x, where, values, reduce, include_self)
    return marked(found, where, is_outside(x, dim, jnp.ravel(index)))


def _strided(size: Sequence[int], stride: Sequence[int], offset: int) -> Any:
    positions = np.asarray(offset)
    for n, step in zip(size, stride, strict=True):
        positions = positions[..., None] + np.arange(n) * step
    return positions.astype(np.int32)


@register_operator("aten.as_strided.default", "aten.as_strided_copy.default")
def as_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """Of a tensor whose elements lie in order; convert refuses any other (`views`)."""
    places = _strided(size, stride, storage_offset or 0)
    return taken(jnp.ravel(x), lambda flat: jnp.take(flat, places))


def _scatter_places(size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> Any:
    places = _strided(size, stride, storage_offset or 0)
    if np.unique(places).size < places.size:
        raise NotImplementedError(
            "as_strided_scatter to places that overlap: PyTorch leaves open which of the elements"
            " stays; give each place one (x.flatten().scatter(0, places, src))"
        )
    return places


@register_operator("aten.as_strided_scatter.default")
def written_by_strides(
    x: jax.Array, src: Any, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:  # fmt: skip
    """What torch.export makes of a write into `x.as_strided(...)`, with that write's gradient."""
    places = _scatter_places(size, stride, storage_offset)
    return jnp.reshape(jnp.ravel(x).at[places].set(cast(src, x.dtype)), x.shape)


@register_operator("torch_bridge.as_strided_scatter.default")
def as_strided_scatter(
    x: jax.Array, src: Any, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:  # fmt: skip
    """A forward's own, of a tensor whose elements lie in order. Its gradients are PyTorch's: the
    input's are those of the places that are replaced, and of the others none."""
    places = _scatter_places(size, stride, storage_offset)
    flat, src = jnp.ravel(x), cast(src, x.dtype)
    fixed = jax.lax.stop_gradient(flat).at[places].set(jax.lax.stop_gradient(src))
    replaced = jnp.zeros(flat.shape, x.dtype).at[places].set(1)
    slopes = sloped(flat, replaced).at[places].add(sloped(src, jnp.ones((), x.dtype)))
    return jnp.reshape(fixed + slopes, x.shape)


@register_operator("aten.mode.default")
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """The most frequent value, of several the smallest, and the last place where it stands."""
    if not x.ndim:
        return number_and_index(x)
    order = jnp.argsort(jax.lax.stop_gradient(x), axis=dim, stable=True)
    ordered = jnp.moveaxis(jnp.take_along_axis(jax.lax.stop_gradient(x), order, axis=dim), dim, -1)
    count = ordered.shape[-1]
    same = ordered[..., 1:] == ordered[..., :-1]
    position = jnp.arange(count, dtype=np.int32)
    starts = jnp.concatenate([jnp.ones((*same.shape[:-1], 1), bool), ~same], -1)
    begin = jax.lax.cummax(jnp.where(starts, position, 0), axis=ordered.ndim - 1)
    # At the end of a run its length stands; the first of the longest wins.
    last = argmax(position - begin, axis=-1, keepdims=True)
    index = jnp.take_along_axis(order, jnp.moveaxis(last, -1, dim), axis=dim)
    return value_at(x, index, dim, keepdim)


@register_operator("aten.unfold.default")
def unfold(x: jax.Array, dimension: int, size: int, step: int) -> jax.Array:
    if not x.ndim:
        return jnp.reshape(x, (1,))[:size]
    axis = dimension % x.ndim
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + np.arange(size), axis=axis)
    return jnp.moveaxis(windows, axis + 1, -1)


def fractional_starts(n: int, out: int, kernel: int, sample: jax.Array) -> jax.Array:
    """Where windows of fractional pooling start. Shapes: sample `(...)`, result `(..., out)`."""
    if out == 1:
        return jnp.full((*sample.shape, 1), n - kernel, np.int32)
    alpha = (n - kernel) / (out - 1)
    steps = jnp.arange(out - 1, dtype=sample.dtype)
    first = jnp.trunc(sample * jnp.asarray(alpha, sample.dtype))[..., None]
    starts = jnp.trunc((steps + sample[..., None]) * jnp.asarray(alpha, sample.dtype)) - first
    return jnp.concatenate(
        [starts.astype(np.int32), jnp.full((*sample.shape, 1), n - kernel, np.int32)], -1
    )


@register_operator("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default")
def fractional_max_pool(
    x: jax.Array, kernel: Sequence[int], output_size: Sequence[int], samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Values and flat indices. Shapes: x `([N,] C, *plane)`, samples `(N, C, dims)`."""
    dims = len(output_size)
    plane, lead = x.shape[-dims:], x.shape[:-dims]
    # In torch the last dim's number comes first, of three dims the first one's.
    drawn = samples if dims == 3 else jnp.flip(samples, -1)
    flat: Any = jnp.zeros((*lead, *(1,) * (2 * dims)), np.int32)
    for i in range(dims):
        sample = jnp.reshape(drawn[..., i], lead)
        starts = fractional_starts(plane[i], output_size[i], kernel[i], sample)
        reach = starts[..., None] + jnp.arange(kernel[i], dtype=np.int32)
        shape = [1] * (2 * dims)
        shape[i], shape[dims + i] = output_size[i], kernel[i]
        flat = flat + jnp.reshape(reach, (*lead, *shape)) * math.prod(plane[i + 1 :])
    flat = jnp.reshape(flat, (*lead, math.prod(output_size), math.prod(kernel)))
    values = jnp.take_along_axis(
        jnp.reshape(x, (*lead, 1, -1)), jnp.reshape(flat, (*lead, 1, -1)), axis=-1
    ).reshape(flat.shape)
    best = argmax(jax.lax.stop_gradient(values), axis=-1, keepdims=True)
    shape = [*lead, *output_size]
    picked = jnp.take_along_axis(values, best, axis=-1).reshape(shape)
    index = jnp.take_along_axis(flat, best, axis=-1).reshape(shape)
    return picked, index.astype(canonical("int64"))
