"""Pooling over the last one to three dims of `(N, C, *spatial)` or `(C, *spatial)`."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, canonical, cast
from torch_bridge.lower.features_last import Last, features, like, over, takes_last
from torch_bridge.lower.index import lost
from torch_bridge.lower.reduce import argmax
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.tangents import sloped
from torch_bridge.lower.whole_dims import undivided


def _each(values: Any, dims: int) -> tuple[int, ...]:
    items = (values,) if isinstance(values, int) else tuple(values)
    return items * dims if len(items) == 1 else items


def _out_length(n: int, k: int, s: int, p: int, d: int, ceil_mode: bool) -> int:
    span = n + 2 * p - d * (k - 1) - 1
    length = (-(-span // s) if ceil_mode else span // s) + 1
    # torch: the last window has to start inside the input or its left padding.
    return length - 1 if ceil_mode and (length - 1) * s >= n + p else length


class _Windows:
    """The windows of one pooling call, as `lax.reduce_window` wants them.

    `x` is its input, or an input with its features last.
    """

    def __init__(
        self,
        x: Any,
        dims: int,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> None:
        self.kernel = _each(kernel, dims)
        self.stride = _each(stride, dims) if stride not in (None, [], ()) else self.kernel
        self.padding = _each(padding, dims)
        self.dilation = _each(dilation, dims)
        array, _ = features(x)
        self.tail = int(isinstance(x, Last))
        self.lead = array.ndim - dims - self.tail
        spatial = array.shape[self.lead : self.lead + dims]
        self.edges: list[tuple[int, int]] = []
        for n, k, s, p, d in zip(
            spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True
        ):
            length = _out_length(n, k, s, p, d, ceil_mode)
            reach = (length - 1) * s + d * (k - 1) + 1
            self.edges.append((p, max(reach - n - p, 0)))

    def reduce(self, x: jax.Array, initial: Any, fn: Any) -> jax.Array:
        before, after = (1,) * self.lead, (1,) * self.tail
        return jax.lax.reduce_window(
            x,
            np.asarray(initial, x.dtype),
            fn,
            (*before, *self.kernel, *after),
            (*before, *self.stride, *after),
            [(0, 0)] * self.lead + self.edges + [(0, 0)] * self.tail,
            window_dilation=(*before, *self.dilation, *after),
        )


def _max_pool(x: jax.Array | Last, dims: int, *args: Any, **kwargs: Any) -> Any:
    x = over(x, dims)
    windows = _Windows(x, dims, *args, **kwargs)
    if any(d > 1 for d in windows.dilation):
        # lax.reduce_window has no gradient with dilated windows.
        if isinstance(x, Last):
            return _max_pool(x.in_order(), dims, *args, **kwargs)
        return _best_slices(x, windows)[0]
    array, _ = features(x)
    return like(x, _largest_of(windows, range(windows.lead, windows.lead + dims))(array))


def _largest_of(windows: _Windows, dims: Sequence[int]) -> Any:
    """The largest value of each window; of only -inf its first element has the gradient."""

    def largest(x: jax.Array) -> jax.Array:
        # XLA's partitioner gives wrong gradients of windows that overlap over a divided dim.
        best = windows.reduce(undivided(x, dims), _lowest(x), jax.lax.max)
        return undivided(best, dims)

    if not any(low or high for low, high in windows.edges):
        return largest
    valued = jax.custom_jvp(largest)

    def tangent(given: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = given, tangents
        return valued(x), jax.jvp(largest, (_above_padding(jax.lax.stop_gradient(x)),), (dx,))[1]

    valued.defjvp(tangent)
    return valued


def _above_padding(x: jax.Array) -> jax.Array:
    """The same order, with all elements above the -inf of padding."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    lowest = jnp.asarray(jnp.finfo(x.dtype).min, x.dtype)
    above = jnp.nextafter(lowest, jnp.zeros((), x.dtype))
    return jnp.where(x == -jnp.inf, lowest, jnp.where(x == lowest, above, x))


def _with_index(x: jax.Array, dims: int, *args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    """Values and flat indices into the plane, the first of equal values as in torch."""
    plane = x.shape[-dims:]
    flat = jnp.arange(math.prod(plane), dtype=np.int32)
    index = jnp.broadcast_to(jnp.reshape(flat, plane), x.shape)
    windows = _Windows(x, dims, *args, **kwargs)
    values, index = _best_slices(x, windows, index)
    return values, index.astype(canonical("int64"))


def _lowest(x: jax.Array) -> Any:
    return -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).min


@register_operator("aten.max_unpool2d.default", "aten.max_unpool3d.default")
def max_unpool(x: jax.Array, index: jax.Array, output_size: Sequence[int], *_: Any) -> jax.Array:
    """Values back at their indices; where several meet, the last stays and all have a gradient.

    A plane with an index outside of it, for which PyTorch raises, is lost.
    """
    dims = len(output_size)
    lead = x.shape[: x.ndim - dims]
    rows = math.prod(lead)
    size = math.prod(x.shape[x.ndim - dims :])
    values, index = (jnp.reshape(given, (rows, size)) for given in (x, index))
    whole = math.prod(output_size)
    outside = jnp.any((index < 0) | (index >= whole), axis=1, keepdims=True)
    where = (jnp.arange(rows)[:, None], index)
    out = jnp.zeros((rows, whole), x.dtype)
    kept = out.at[where].set(jax.lax.stop_gradient(values))
    kept = kept + out.at[where].add(sloped(values, jnp.ones_like(values)))
    return jnp.reshape(jnp.where(outside, lost(x), kept), (*lead, *output_size))


def _window_slices(x: jax.Array, windows: _Windows, fill: Any) -> jax.Array:
    """All values of each window, stacked on a new last dim in row order."""
    widths = [(0, 0, 0)] * windows.lead + [(low, high, 0) for low, high in windows.edges]
    padded = jax.lax.pad(x, np.asarray(fill, x.dtype), widths)
    slices = []
    for offset in np.ndindex(*windows.kernel):
        start = [0] * windows.lead
        stop = list(padded.shape[: windows.lead])
        for i, o in enumerate(offset):
            first = o * windows.dilation[i]
            size = padded.shape[windows.lead + i]
            reach = windows.dilation[i] * (windows.kernel[i] - 1) + 1
            count = (size - reach) // windows.stride[i] + 1
            start.append(first)
            stop.append(first + (count - 1) * windows.stride[i] + 1)
        strides = (*(1,) * windows.lead, *windows.stride)
        slices.append(jax.lax.slice(padded, start, stop, strides))
    return jnp.stack(slices, axis=-1)


def _best_slices(x: jax.Array, windows: _Windows, *beside: jax.Array) -> tuple[jax.Array, ...]:
    """The largest value of each window, and what stands in its place in other arrays."""
    compared = _window_slices(_above_padding(jax.lax.stop_gradient(x)), windows, _lowest(x))
    best = argmax(compared, axis=-1, keepdims=True)
    given = _window_slices(x, windows, _lowest(x)), *(_window_slices(b, windows, 0) for b in beside)
    return tuple(jnp.squeeze(jnp.take_along_axis(each, best, axis=-1), -1) for each in given)


def _avg_pool(
    x: jax.Array | Last,
    dims: int,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    x = over(x, dims)
    windows = _Windows(x, dims, kernel, stride, padding, ceil_mode=ceil_mode)
    array, _ = features(x)
    wide = cast(array, accumulation_dtype(array))
    total = windows.reduce(wide, 0, jax.lax.add)
    if divisor_override is not None:
        return like(x, (total / divisor_override).astype(array.dtype))
    # Counted on the host: padding counts as input or not, the overhang of ceil_mode never does.
    counts = np.ones((), np.float64)
    for i, n in enumerate(array.shape[windows.lead : windows.lead + dims]):
        k, s, p = windows.kernel[i], windows.stride[i], windows.padding[i]
        begin = np.arange(total.shape[windows.lead + i]) * s - p
        end = np.minimum(begin + k, n + p)
        if not count_include_pad:
            begin, end = np.maximum(begin, 0), np.minimum(end, n)
        counts = np.multiply.outer(counts, end - begin)
    counts = counts.reshape(*counts.shape, *(1,) * windows.tail)
    return like(x, (total / np.asarray(counts, total.dtype)).astype(array.dtype))


def _over_dims(pool: Any, dims: int) -> Any:
    """Pooling over so many dims, which an operator's arguments do not say."""
    return lambda x, *args, **kwargs: pool(x, dims, *args, **kwargs)


for _dims in (1, 2, 3):
    register_operator(f"aten.max_pool{_dims}d.default")(takes_last(_over_dims(_max_pool, _dims)))
    register_operator(f"aten.avg_pool{_dims}d.default")(takes_last(_over_dims(_avg_pool, _dims)))
for _dims in (2, 3):  # (1 is decomposed)
    register_operator(f"aten.max_pool{_dims}d_with_indices.default")(_over_dims(_with_index, _dims))


def _adaptive_bounds(n: int, out: int) -> list[tuple[int, int]]:
    return [(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


def _adaptive_avg(x: jax.Array, sizes: Sequence[int | None], lead: int) -> jax.Array:
    """`lead` is the first of the axes that are averaged over."""
    wide = cast(x, accumulation_dtype(x))
    for i, size in enumerate(sizes):
        n = x.shape[lead + i]
        if size is None or size == n:
            continue
        wide = _window_means(wide, lead + i, size)
    return wide.astype(x.dtype)


def _window_means(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Means of so many windows along a dim, which may overlap and be of several lengths.

    Each is of its own values alone: one that is not finite stays in its windows. The dim is where
    it is, as turning an array is a copy.
    """
    n, before, after = x.shape[dim], x.shape[:dim], x.shape[dim + 1 :]
    if n % size == 0:
        return jnp.mean(jnp.reshape(x, (*before, size, n // size, *after)), axis=dim + 1)
    begin, end = np.transpose(_adaptive_bounds(n, size))
    at = begin[:, None] + np.arange(max(end - begin))
    within = np.reshape(at < end[:, None], (*at.shape, *(1 for _ in after)))
    values = jnp.where(within, jnp.take(x, np.minimum(at, n - 1), axis=dim), 0)
    lengths = np.reshape(end - begin, (size, *(1 for _ in after)))
    return jnp.sum(values, axis=dim + 1) / lengths.astype(x.dtype)


@register_operator(
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
)
@takes_last
def adaptive_avg_pool(x: jax.Array | Last, output_size: Sequence[int | None]) -> Any:
    x = over(x, len(output_size))
    if isinstance(x, Last):
        return Last(_adaptive_avg(x.held, output_size, 1))
    return _adaptive_avg(x, output_size, x.ndim - len(output_size))


@register_operator(
    "aten.adaptive_max_pool1d.default",
    "aten.adaptive_max_pool2d.default",
    "aten.adaptive_max_pool3d.default",
)
def adaptive_max_pool(
    x: jax.Array, output_size: Sequence[int | None]
) -> tuple[jax.Array, jax.Array]:
    """Values and flat indices into the plane, the first of equal values as in torch."""
    plane = x.shape[x.ndim - len(output_size) :]
    flat = jnp.arange(math.prod(plane), dtype=np.int32)
    index = jnp.broadcast_to(jnp.reshape(flat, plane), x.shape)
    # The last dim first: of equal values the one in the first row is found, as row by row.
    for i, size in reversed(list(enumerate(output_size))):
        axis = x.ndim - len(output_size) + i
        if size is None or size == x.shape[axis]:
            continue
        found = [_largest(x, index, axis, *ends) for ends in _adaptive_bounds(x.shape[axis], size)]
        x, index = (jnp.concatenate(each, axis=axis) for each in zip(*found, strict=True))
    return x, index.astype(canonical("int64"))


def _largest(
    x: jax.Array, index: jax.Array, axis: int, begin: int, end: int
) -> tuple[jax.Array, jax.Array]:
    """The largest value between two ends, and its index."""
    values, where = (jax.lax.slice_in_dim(each, begin, end, axis=axis) for each in (x, index))
    best = argmax(jax.lax.stop_gradient(values), axis=axis, keepdims=True)
    return (
        jnp.take_along_axis(values, best, axis=axis),
        jnp.take_along_axis(where, best, axis=axis),
    )


@register_operator("aten.max_pool2d_with_indices_backward.default")
def max_pool2d_backward(
    slope: jax.Array, x: jax.Array, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, index: jax.Array,
) -> jax.Array:  # fmt: skip
    """The gradient of max pooling that a forward works out itself: each where its maximum is."""
    lead = x.shape[:-2]
    rows, plane = math.prod(lead), math.prod(x.shape[-2:])
    size = math.prod(slope.shape[-2:])
    slope, index = (jnp.reshape(given, (rows, size)) for given in (slope, index))
    summed = jnp.zeros((rows, plane), slope.dtype).at[jnp.arange(rows)[:, None], index].add(slope)
    return jnp.reshape(summed, x.shape)
