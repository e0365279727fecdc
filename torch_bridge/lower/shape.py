"""Views: everything that rearranges, cuts or joins. JAX has no strides, so a view is a reshape."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import ConversionError
from torch_bridge.dtypes import cast, result_dtype
from torch_bridge.lower.features_last import Last, in_order, takes_last
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import broadcast


@register_operator(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.view_copy.default",
)
def view(x: jax.Array, size: Sequence[int]) -> jax.Array:
    shape = list(size)
    if -1 in shape and 0 in x.shape:
        # numpy cannot infer -1 next to a zero; torch allows it when the rest has no zero.
        known = int(np.prod([n for n in shape if n != -1]))
        shape[shape.index(-1)] = 0 if known == 0 else x.size // known
    return jnp.reshape(x, shape)


@register_operator("aten.view.dtype")
def view_dtype(x: jax.Array, dtype: Any) -> jax.Array:
    from torch_bridge.dtypes import jax_dtype

    return x.view(jax_dtype(dtype))


@register_operator("aten.permute.default")
def permute(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, dims)


@register_operator("aten.transpose.int")
def transpose(x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    return jnp.swapaxes(x, dim0, dim1) if x.ndim else x


@register_operator("aten.t.default")
def t(x: jax.Array) -> jax.Array:
    return jnp.transpose(x)


@register_operator("aten.unsqueeze.default")
def unsqueeze(x: jax.Array, dim: int) -> jax.Array:
    return jnp.expand_dims(x, dim)


@register_operator("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def squeeze(x: jax.Array, dim: int | Sequence[int] | None = None) -> jax.Array:
    if dim is None:
        return jnp.squeeze(x)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return jnp.squeeze(x, axis=tuple(d for d in dims if x.ndim and x.shape[d] == 1))


@register_operator("aten.expand.default", "aten.expand_copy.default")
def expand(x: jax.Array, size: Sequence[int], implicit: bool = False) -> jax.Array:
    lead = len(size) - x.ndim
    shape = [x.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    return jnp.broadcast_to(broadcast(x, tuple(shape)), shape)


@register_operator("aten.cat.default")
@takes_last
def cat(tensors: Sequence[Any], dim: int = 0) -> jax.Array | Last:
    held = [x.held for x in tensors if isinstance(x, Last)]
    if len(held) == len(tensors) and dim % held[0].ndim == 1:
        return Last(cat(held, -1))
    tensors = in_order(tensors)
    dtype = result_dtype(*tensors)
    # torch skips legacy empty tensors of shape (0,) whatever the other shapes are.
    kept = [x for x in tensors if x.shape != (0,)] or list(tensors)
    return jnp.concatenate([cast(x, dtype) for x in kept], axis=dim)


@register_operator("aten.stack.default")
def stack(tensors: Sequence[Any], dim: int = 0) -> jax.Array:
    dtype = result_dtype(*tensors)
    return jnp.stack([cast(x, dtype) for x in tensors], axis=dim)


def _sections(x: jax.Array, sizes: Sequence[int], dim: int) -> list[jax.Array]:
    bounds = np.cumsum([0, *sizes])
    return [
        jax.lax.slice_in_dim(x, int(bounds[i]), int(bounds[i + 1]), axis=dim % x.ndim)
        for i in range(len(sizes))
    ]


@register_operator("aten.split.Tensor")
def split(x: jax.Array, split_size: int, dim: int = 0) -> list[jax.Array]:
    length = x.shape[dim]
    if length == 0:
        return [x]
    sizes = [min(split_size, length - start) for start in range(0, length, split_size)]
    return _sections(x, sizes, dim)


@register_operator("aten.split_with_sizes.default", "aten.split.sizes")
def split_with_sizes(x: jax.Array, sizes: Sequence[int], dim: int = 0) -> list[jax.Array]:
    return _sections(x, sizes, dim)


@register_operator("aten.chunk.default")
def chunk(x: jax.Array, chunks: int, dim: int = 0) -> list[jax.Array]:
    if not x.shape[dim]:
        return _sections(x, [0] * chunks, dim)
    return split(x, -(-x.shape[dim] // chunks), dim)


@register_operator("aten.unbind.int")
def unbind(x: jax.Array, dim: int = 0) -> list[jax.Array]:
    return [jax.lax.index_in_dim(x, i, dim % x.ndim, keepdims=False) for i in range(x.shape[dim])]


def slice_bounds(length: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Python's rule for the bounds of a slice, as non-negative numbers with start <= end."""
    low, high, _ = slice(start, end).indices(length)
    return low, max(low, high)


@register_operator("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    x: jax.Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> jax.Array:
    low, high = slice_bounds(x.shape[dim], start, end)
    if (low, high, step) == (0, x.shape[dim], 1):
        return jnp.asarray(x)
    return jax.lax.slice_in_dim(x, low, high, step, axis=dim % x.ndim)


@register_operator("aten.select.int", "aten.select_copy.int")
def select(x: jax.Array, dim: int, index: int) -> jax.Array:
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


@register_operator("aten.narrow.default")
def narrow(x: jax.Array, dim: int, start: int, length: int) -> jax.Array:
    return slice_(x, dim, start, start + length)


@register_operator("aten.flip.default")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, tuple(dims)) if x.ndim else x


@register_operator("aten.roll.default")
def roll(x: jax.Array, shifts: Any, dims: Any = ()) -> jax.Array:
    amounts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    axes = (dims,) if isinstance(dims, int) else tuple(dims)
    return jnp.roll(x, amounts, axes) if axes else jnp.roll(x, amounts[0])


@register_operator("aten.repeat.default")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(repeats))


@register_operator("aten.repeat_interleave.self_int")
def repeat_interleave(
    x: jax.Array, repeats: int, dim: int | None = None, output_size: int | None = None
) -> jax.Array:
    return jnp.repeat(x, repeats, axis=dim)


@register_operator("aten.repeat_interleave.Tensor")
def repeated_indices(repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    """The number of each element, as often as it is repeated; out of range if they do not fit."""
    if output_size is None:
        raise ConversionError(
            "repeat_interleave: how long its result is depends on data. Say it:"
            " repeat_interleave(x, repeats, output_size=n)"
        )
    indices = jnp.arange(len(repeats), dtype=repeats.dtype)
    found = jnp.repeat(indices, repeats, total_repeat_length=output_size)
    return jnp.where(jnp.sum(repeats) == output_size, found, len(repeats))


@register_operator("aten.tril.default")
def tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.tril(x, diagonal)


@register_operator("aten.triu.default")
def triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    return jnp.triu(x, diagonal)


@register_operator("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(x: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> jax.Array:
    return jnp.diagonal(x, offset, dim1, dim2)


_PAD_MODES = {"reflect": "reflect", "circular": "wrap"}


@register_operator("aten.constant_pad_nd.default")
def constant_pad_nd(x: jax.Array, pad: Sequence[int], value: Any = 0) -> jax.Array:
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):  # torch lists the last dimension first
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return jax.lax.pad(x, cast(value, x.dtype), widths)  # negative widths cut, as in torch


@register_operator("aten.pad.default")
def pad(x: jax.Array, pad: Sequence[int], mode: str = "constant", value: Any = None) -> jax.Array:
    if mode == "constant":
        return constant_pad_nd(x, pad, 0 if value is None else value)
    widths = [(0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1])
    if mode == "replicate":
        for axis, (low, high) in enumerate(widths):
            indices = np.arange(x.shape[axis] + low + high) - low  # negative widths cut
            x = jnp.take(x, np.clip(indices, 0, x.shape[axis] - 1), axis=axis)
        return x
    kept = tuple(
        slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True)
    )
    grown = [(max(a, 0), max(b, 0)) for a, b in widths]
    return jnp.pad(x[kept], grown, mode=_PAD_MODES[mode])


@register_operator("aten.pixel_shuffle.default")
def pixel_shuffle(x: jax.Array, upscale_factor: int) -> jax.Array:
    r = upscale_factor
    *lead, c, h, w = x.shape
    n = len(lead)
    blocks = jnp.reshape(x, (*lead, c // (r * r), r, r, h, w))
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return jnp.reshape(jnp.transpose(blocks, order), (*lead, c // (r * r), h * r, w * r))
