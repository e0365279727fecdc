"""Resizing: nearest, linear, cubic, each separable: a few pixels and their weights per dim.

Coordinates are computed on the host exactly as torch computes them (in float32, also for half
precision), so that no output pixel reads another input pixel than in torch.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, cast, is_float
from torch_bridge.lower.registry import register_operator


Array = np.ndarray[Any, Any]


def _sizes(
    x: jax.Array, output_size: Sequence[int] | None, factors: Sequence[float] | None, dims: int
) -> list[tuple[int, int, float | None]]:
    """(input length, output length, factor if one counts) of each spatial dim."""
    found = []
    for i in range(dims):
        length = x.shape[x.ndim - dims + i]
        factor = None if factors is None else factors[i]
        if output_size is not None:
            out = int(output_size[i])
        else:
            assert factor is not None
            out = math.floor(length * factor)
        found.append((length, out, factor))
    return found


def _step(length: int, out: int, factor: float | None, kind: Any) -> Any:
    """Input pixels per output pixel, in the precision that torch computes coordinates in."""
    if factor is not None and factor > 0:
        return kind.type(1.0 / factor)
    return kind.type(length) / kind.type(out)


def _nearest_index(length: int, out: int, factor: float | None, exact: bool) -> Array:
    indices = np.arange(out)
    if out == length:
        return indices
    if out == 2 * length and not exact:
        return indices // 2
    step = _step(length, out, factor, np.dtype(np.float32))
    offset = np.float32(0.5) if exact else np.float32(0.0)
    picked = np.floor((indices.astype(np.float32) + offset) * step).astype(np.int64)
    return np.minimum(picked, length - 1)


def _nearest(
    x: jax.Array, dims: int, output_size: Any, factors: Any, exact: bool = False
) -> jax.Array:
    for i, (length, out, factor) in enumerate(_sizes(x, output_size, factors, dims)):
        axis = x.ndim - dims + i
        index = _nearest_index(length, out, factor, exact)
        if out == length and np.array_equal(index, np.arange(length)):
            continue
        times = out // length
        if out == times * length and np.array_equal(index, np.arange(out) // times):
            x = jnp.repeat(x, times, axis=axis)  # its gradient is a sum, not a scatter
        else:
            x = jnp.take(x, index, axis=axis)
    return x


class _Taps(NamedTuple):
    """Which input pixels make each output pixel (-1: none), and their weights: `(taps, out)`."""

    rows: Array
    weights: Array

    def matrix(self, length: int) -> Array:
        """The same as one product, `(length, out)`."""
        made = np.zeros((length, self.rows.shape[1]), self.weights.dtype)
        taps, columns = np.nonzero(self.rows >= 0)
        np.add.at(made, (self.rows[taps, columns], columns), self.weights[taps, columns])
        return made


Weights = Callable[[int, int, "float | None", bool, Any], _Taps]


def _source(
    length: int, out: int, factor: float | None, align: bool, kind: Any, clip: bool
) -> Array:
    indices = np.arange(out).astype(kind)
    if align:
        step = kind.type(length - 1) / kind.type(out - 1) if out > 1 else kind.type(0)
        return indices * step
    half = kind.type(0.5)
    found = _step(length, out, factor, kind) * (indices + half) - half
    return np.maximum(found, kind.type(0)) if clip else found


def _linear(length: int, out: int, factor: float | None, align: bool, kind: Any) -> _Taps:
    source = _source(length, out, factor, align, kind, clip=True)
    low = np.minimum(np.floor(source).astype(np.int64), length - 1)
    high = np.minimum(low + 1, length - 1)
    share = np.clip(source - low.astype(kind), kind.type(0), kind.type(1))
    return _Taps(np.stack([low, high]), np.stack([kind.type(1) - share, share]))


def _cubic_weight(distance: Array, a: float) -> Array:
    """Keys' cubic kernel."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def _cubic(length: int, out: int, factor: float | None, align: bool, kind: Any) -> _Taps:
    source = _source(length, out, factor, align, kind, clip=False)
    base = np.floor(source)
    share = (source - base).astype(np.float64)
    taps = np.arange(-1, 3)[:, None]
    rows = np.clip(base.astype(np.int64) + taps, 0, length - 1)
    return _Taps(rows, _cubic_weight(share - taps, -0.75).astype(kind))


def _smooth(support: int, kernel: Callable[[Array], Array]) -> Weights:
    """Antialiased resizing: where pixels are lost, the kernel is as wide as an output pixel."""

    def taps_of(length: int, out: int, factor: float | None, align: bool, kind: Any) -> _Taps:
        if align:
            step = (length - 1) / (out - 1) if out > 1 else 0.0
        else:
            step = float(_step(length, out, factor, kind))
        reach = support * 0.5 * max(step, 1.0)
        narrow = 1.0 / step if step >= 1.0 else 1.0
        most = math.ceil(2 * reach) + 1
        rows, taken = np.full((most, out), -1), np.zeros((most, out), np.float64)
        for column in range(out):
            centre = step * (column + 0.5)
            first = max(int(centre - reach + 0.5), 0)
            last = min(int(centre + reach + 0.5), length)
            weights = kernel((np.arange(first, last) - centre + 0.5) * narrow)
            rows[: last - first, column] = np.arange(first, last)
            taken[: last - first, column] = weights / weights.sum()
        return _Taps(rows, taken.astype(kind))

    return taps_of


def _resize(
    x: jax.Array, dims: int, output_size: Any, align: bool, factors: Any, weights: Weights
) -> jax.Array:
    if not is_float(x):
        raise NotImplementedError(
            f"resizing {x.dtype}: how PyTorch rounds depends on the processor; resize x.float()"
        )
    wide = cast(x, accumulation_dtype(x))
    for i, (length, out, factor) in enumerate(_sizes(x, output_size, factors, dims)):
        taps = weights(length, out, factor, align, wide.dtype)
        matrix = taps.matrix(length)
        if length == out and np.array_equal(matrix, np.eye(length, dtype=matrix.dtype)):
            continue
        axis = x.ndim - dims + i
        wide = jnp.moveaxis(_made(jnp.moveaxis(wide, axis, -1), taps, matrix), -1, axis)
    return wide.astype(x.dtype)


def _made(x: jax.Array, taps: _Taps, matrix: Array) -> jax.Array:
    """Pixels of the last dim. A product would spread one infinite or missing pixel over all; as the
    tangent it is faster to transpose than the taps.
    """

    @jax.custom_jvp
    def resized(x: jax.Array) -> jax.Array:
        total: Any = None
        for rows, weights in zip(*taps, strict=True):
            taken = jnp.take(x, np.maximum(rows, 0), axis=-1) * weights
            taken = taken if (rows >= 0).all() else jnp.where(rows >= 0, taken, 0)
            total = taken if total is None else total + taken
        return total

    @resized.defjvp
    def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        # Exact products: the default of GPUs would round the weights to ten bits.
        slope = jnp.matmul(tangents[0], jnp.asarray(matrix), precision=jax.lax.Precision.HIGHEST)
        return resized(*primals), slope

    return resized(x)


def _one_list(values: Sequence[Any], dims: int) -> list[Any] | None:
    """The factors of the overloads that take one argument per dim; None where none is given."""
    given = list(values[:dims]) + [None] * (dims - len(values))
    return None if all(v is None for v in given) else given


def _register_nearest(name: str, dims: int, exact: bool) -> None:
    @register_operator(f"aten.{name}.vec")
    def by_list(x: jax.Array, output_size: Any = None, scale_factors: Any = None) -> jax.Array:
        return _nearest(x, dims, output_size, scale_factors, exact)

    @register_operator(f"aten.{name}.default")
    def by_dim(x: jax.Array, output_size: Any, *scales: Any) -> jax.Array:
        return _nearest(x, dims, output_size, _one_list(scales, dims), exact)


def _register(name: str, dims: int, weights: Weights) -> None:
    @register_operator(f"aten.{name}.vec")
    def by_list(
        x: jax.Array, output_size: Any, align_corners: bool, scale_factors: Any = None
    ) -> jax.Array:
        return _resize(x, dims, output_size, align_corners, scale_factors, weights)

    @register_operator(f"aten.{name}.default")
    def by_dim(x: jax.Array, output_size: Any, align_corners: bool, *scales: Any) -> jax.Array:
        return _resize(x, dims, output_size, align_corners, _one_list(scales, dims), weights)


def _triangle(distance: Array) -> Array:
    return np.maximum(1.0 - np.abs(distance), 0.0)


def _sharp_cubic(distance: Array) -> Array:
    return _cubic_weight(distance, -0.5)  # torch's antialiased cubic is Pillow's


for _dims in (1, 2, 3):
    _register_nearest(f"upsample_nearest{_dims}d", _dims, exact=False)
    _register_nearest(f"_upsample_nearest_exact{_dims}d", _dims, exact=True)
_register("upsample_linear1d", 1, _linear)
_register("upsample_bilinear2d", 2, _linear)
_register("upsample_trilinear3d", 3, _linear)
_register("upsample_bicubic2d", 2, _cubic)
_register("_upsample_bilinear2d_aa", 2, _smooth(2, _triangle))
_register("_upsample_bicubic2d_aa", 2, _smooth(4, _sharp_cubic))
