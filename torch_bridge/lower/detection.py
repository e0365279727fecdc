"""torchvision's operators of detectors, by their names: torchvision need not be there."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.errors import ConversionError
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once


@register_operator("torchvision.roi_align.default")
@once
def roi_align(
    x: jax.Array, rois: Any, spatial_scale: float, height: int, width: int, ratio: int,
    aligned: bool,
) -> jax.Array:  # fmt: skip
    """Means of interpolated samples in each bin of each box; boxes get no gradient, as in torch.

    Shapes: x `(N, C, H, W)`, rois `(K, 5)` of a row and two corners; `(K, C, height, width)`.
    """
    if ratio <= 0:
        raise ConversionError(
            "torchvision.roi_align: sampling_ratio <= 0 takes as many samples as a box is large,"
            " a number that depends on the data; say sampling_ratio=2, as torchvision's detectors"
        )
    rois = jax.lax.stop_gradient(rois)
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    start, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = jnp.maximum(size, 1.0)

    def samples(axis: int, bins: int) -> jax.Array:
        steps = (jnp.arange(bins * ratio, dtype=size.dtype) + 0.5) / (bins * ratio)
        return start[:, axis, None] + size[:, axis, None] * steps

    ys, xs = samples(1, height)[:, :, None], samples(0, width)[:, None, :]
    limits = x.shape[-2:]
    # Up to a pixel outside, a sample is that of the border; beyond, it is 0.
    inside = (ys >= -1) & (ys <= limits[0]) & (xs >= -1) & (xs <= limits[1])
    ys, xs = (jnp.clip(at, 0, n - 1) for at, n in zip((ys, xs), limits, strict=True))
    image = jnp.moveaxis(x, 1, -1)
    row = rois[:, 0].astype(jnp.int32)[:, None, None]
    found: Any = 0.0
    for y, wy in _neighbours(ys):
        for z, wz in _neighbours(xs):
            near = image.at[row, y, z].get(mode="clip")
            found = found + near * jnp.where(inside, wy * wz, 0.0)[..., None]
    bins = jnp.reshape(found, (rois.shape[0], height, ratio, width, ratio, x.shape[1]))
    return jnp.moveaxis(jnp.mean(bins, axis=(2, 4)), -1, 1)


def _neighbours(at: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """The whole numbers on both sides, and how much of each is taken."""
    low = jax.lax.stop_gradient(jnp.floor(at))
    rest = at - low
    index = low.astype(jnp.int32)
    return [(index, 1 - rest), (index + 1, rest)]


@register_operator("torchvision.deform_conv2d.default")
@once
def deform_conv2d(
    x: jax.Array, weight: Any, offset: Any, mask: Any, bias: Any, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int,
    use_mask: bool,
) -> jax.Array:  # fmt: skip
    """A convolution whose taps are moved by `offset` and weighed by `mask`.

    Shapes: x `(N, C, H, W)`, weight `(O, C / groups, kh, kw)`, offset `(N, 2 G kh kw, H', W')` with
    y before x, mask `(N, G kh kw, H', W')`, bias `(O,)`; G is `offset_groups`.
    """
    n, c, *_ = x.shape
    out, _, kh, kw = weight.shape
    high, wide = offset.shape[-2:]
    moved = jnp.reshape(offset, (n, offset_groups, kh, kw, 2, high, wide))

    def points(axis: int, size: int, taps: int, stride: int, pad: int, dilation: int) -> jax.Array:
        start = jnp.arange(size, dtype=x.dtype) * stride - pad
        tap = jnp.arange(taps, dtype=x.dtype) * dilation
        shape = [(taps, 1, size, 1), (1, taps, 1, size)][axis]
        grid = jnp.reshape(tap[:, None] + start, shape)
        return jnp.reshape(grid + moved[:, :, :, :, axis], (n, offset_groups, -1))

    ys = points(0, high, kh, stride_h, pad_h, dilation_h)
    xs = points(1, wide, kw, stride_w, pad_w, dilation_w)
    grouped = jnp.reshape(x, (n, offset_groups, c // offset_groups, *x.shape[2:]))
    taps = jax.vmap(jax.vmap(_interpolated))(grouped, ys, xs)
    if use_mask:
        taps = taps * jnp.reshape(mask, (n, offset_groups, 1, -1))
    columns = jnp.reshape(taps, (n, groups, c // groups, kh * kw, high * wide))
    kernel = jnp.reshape(weight, (groups, out // groups, c // groups, kh * kw))
    found = jnp.einsum("ngckl,gock->ngol", columns, kernel)
    return jnp.reshape(found, (n, out, high, wide)) + jnp.reshape(bias, (-1, 1, 1))


def _interpolated(image: jax.Array, ys: jax.Array, xs: jax.Array) -> jax.Array:
    """Samples of an image with zeros around it. Shapes: image `(C, H, W)`, points `(L,)`."""
    high, wide = image.shape[1:]
    inside = (ys > -1) & (ys < high) & (xs > -1) & (xs < wide)
    found: Any = 0.0
    for y, wy in _neighbours(ys):
        for z, wz in _neighbours(xs):
            there = inside & (y >= 0) & (y < high) & (z >= 0) & (z < wide)
            near = image.at[:, y, z].get(mode="clip")
            found = found + jnp.where(there, near * (wy * wz), 0.0)
    return found
