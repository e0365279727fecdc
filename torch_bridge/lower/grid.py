"""Reading an image at positions that are given: `grid_sample` in two and three dims."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lower.registry import register_operator


_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
# A place of which no corner is within an image.
_OUTSIDE = -2
# The cubic kernel's free parameter, as in torch and OpenCV.
_A = -0.75


@register_operator(
    "aten.grid_sampler.default", "aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default"
)
def grid_sampler(
    x: jax.Array, grid: jax.Array, mode: int, padding: int, align_corners: bool
) -> jax.Array:
    """Shapes: x `(N, C, *spatial)`, grid `(N, *out, dims)` with the last dim of x first."""
    sizes = x.shape[2:]
    positions = [
        _unnormalized(grid[..., len(sizes) - 1 - i], n, align_corners) for i, n in enumerate(sizes)
    ]
    if len(sizes) == 3 and padding == _ZEROS:  # of images PyTorch has NaN there
        positions = [jnp.where(jnp.isfinite(p), p, _OUTSIDE) for p in positions]
    if mode == _BICUBIC:
        return _cubic(x, positions, padding, align_corners)
    inside = [_padded(p, n, padding, align_corners) for p, n in zip(positions, sizes, strict=True)]
    if mode == _NEAREST:
        return _read(x, [jnp.round(jax.lax.stop_gradient(p)) for p in inside])
    lows = [jnp.floor(jax.lax.stop_gradient(p)) for p in inside]
    total: Any = 0
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight: Any = 1
        for up, position, low in zip(corner, inside, lows, strict=True):
            weight = weight * (position - low if up else low + 1 - position)
        values = _read(x, [low + up for up, low in zip(corner, lows, strict=True)])
        total = total + values * weight[:, None]
    return total


def _unnormalized(position: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """From [-1, 1] to positions in the image."""
    if align_corners:
        return (position + 1) / 2 * (size - 1)
    return ((position + 1) * size - 1) / 2


def _padded(position: jax.Array, size: int, padding: int, align_corners: bool) -> jax.Array:
    """Where a position outside the image is read; its gradient there is torch's."""
    if padding == _ZEROS:
        return position
    if padding == _REFLECTION:
        low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        if low == high:
            position = position * 0
        else:
            start, span = low / 2, (high - low) / 2
            away = jnp.where(position < start, start - position, position - start)
            flips = jnp.floor(jax.lax.stop_gradient(away) / span)
            rest = away - flips * span
            position = jnp.where(flips % 2 == 0, rest, span - rest) + start
    # At the border itself torch's gradient is 0.
    inner = (position > 0) & (position < size - 1)
    return jnp.where(inner, position, jnp.clip(jax.lax.stop_gradient(position), 0, size - 1))


def _read(x: jax.Array, positions: list[jax.Array]) -> jax.Array:
    """Values `(N, C, *out)` at whole positions; 0 outside the image."""
    sizes = x.shape[2:]
    inside = jnp.ones(positions[0].shape, bool)
    index = []
    for position, size in zip(positions, sizes, strict=True):
        inside = inside & (position >= 0) & (position <= size - 1)
        bounded = jnp.clip(jnp.nan_to_num(position), 0, size - 1)
        index.append(bounded.astype(np.int32))
    values = jax.vmap(lambda image, *at: image[(slice(None), *at)])(x, *index)
    return jnp.where(inside[:, None], values, jnp.zeros((), x.dtype))


def _cubic(
    x: jax.Array, positions: list[jax.Array], padding: int, align_corners: bool
) -> jax.Array:
    lows = [jnp.floor(jax.lax.stop_gradient(p)) for p in positions]
    taps = [_cubic_weights(p - low) for p, low in zip(positions, lows, strict=True)]
    total: Any = 0
    for offsets in itertools.product(range(4), repeat=len(positions)):
        weight: Any = 1
        at = []
        for axis, tap in enumerate(offsets):
            weight = weight * taps[axis][tap]
            position = _padded(lows[axis] + (tap - 1), x.shape[2 + axis], padding, align_corners)
            at.append(jnp.round(position))
        total = total + _read(x, at) * weight[:, None]
    return total


def _cubic_weights(t: jax.Array) -> list[jax.Array]:
    def near(s: jax.Array) -> jax.Array:
        return ((_A + 2) * s - (_A + 3)) * s * s + 1

    def far(s: jax.Array) -> jax.Array:
        return ((_A * s - 5 * _A) * s + 8 * _A) * s - 4 * _A

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]
