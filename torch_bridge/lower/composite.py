# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
"""Operators that decomposition would only respell. With these, most graphs need no decomposing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import is_bool, jax_dtype
from torch_bridge.lower.arithmetic import cast_torch
from torch_bridge.lower.registry import find_lowering, register_operator


@register_operator("aten.to.dtype")
def to_dtype(x: Any, dtype: Any, *_: Any, **__: Any) -> jax.Array:
    return cast_torch(x, jax_dtype(dtype))


@register_operator("aten.to.dtype_layout")
def to_dtype_layout(x: Any, *, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.asarray(x) if dtype is None else cast_torch(x, jax_dtype(dtype))


@register_operator("aten.to.device")
def to_device(x: Any, device: Any, dtype: Any, *_: Any, **__: Any) -> jax.Array:
    return cast_torch(x, jax_dtype(dtype))


@register_operator("aten.to.other", "aten.type_as.default")
def to_other(x: Any, other: Any, *_: Any, **__: Any) -> jax.Array:
    return cast_torch(x, other.dtype)


@register_operator("aten.diff.default")
def diff(
    x: jax.Array, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> jax.Array:
    given = [one for one in (prepend, x, append) if one is not None]
    joined = jnp.concatenate(given, axis=dim) if len(given) > 1 else x
    for _ in range(n):
        after = jax.lax.slice_in_dim(joined, 1, None, axis=dim % x.ndim)
        before = jax.lax.slice_in_dim(joined, 0, -1, axis=dim % x.ndim)
        joined = after != before if is_bool(joined) else after - before
    return joined


@register_operator("aten.flatten.using_ints")
def flatten(x: jax.Array, start_dim: int = 0, end_dim: int = -1) -> jax.Array:
    if x.ndim == 0:
        return jnp.reshape(x, (1,))
    first, last = start_dim % x.ndim, end_dim % x.ndim
    size = 1
    for n in x.shape[first : last + 1]:
        size *= n
    return jnp.reshape(x, (*x.shape[:first], size, *x.shape[last + 1 :]))


@register_operator("aten.unflatten.int")
def unflatten(x: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    axis = dim % x.ndim
    known = 1
    for n in sizes:
        known *= n if n != -1 else 1
    inner = [x.shape[axis] // known if n == -1 else n for n in sizes]
    return jnp.reshape(x, (*x.shape[:axis], *inner, *x.shape[axis + 1 :]))


@register_operator("aten.expand_as.default", "aten.view_as.default")
def expand_as(x: jax.Array, other: jax.Array) -> jax.Array:
    same = x.size == other.size
    return jnp.reshape(x, other.shape) if same else jnp.broadcast_to(x, other.shape)


@register_operator("aten.mT.default")
def matrix_transpose(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


@register_operator("aten.movedim.intlist")
def movedim(x: jax.Array, source: Sequence[int], destination: Sequence[int]) -> jax.Array:
    return jnp.moveaxis(x, source, destination)


for _operator in ("and", "or", "xor"):
    _same = find_lowering(f"aten.bitwise_{_operator}.Tensor")
    assert _same is not None
    register_operator(f"aten.__{_operator}__.Tensor", f"aten.__{_operator}__.Scalar")(_same.fn)
