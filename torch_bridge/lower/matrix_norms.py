"""Norms of matrices, and condition numbers."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import cast, jax_dtype
from torch_bridge.lower.linalg import inv, svdvals
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator


@register_operator("aten.linalg_matrix_norm.default", "aten.linalg_matrix_norm.str_ord")
def matrix_norm(
    x: jax.Array, ord: Any = "fro", dim: Sequence[int] = (-2, -1), keepdim: bool = False, *,
    dtype: Any = None,
) -> jax.Array:  # fmt: skip
    x = x if dtype is None else cast(x, jax_dtype(dtype))
    rows, columns = (d % x.ndim for d in dim)
    if ord == "fro":
        return vector_norm(x, 2, [rows, columns], keepdim)
    if ord == "nuc" or abs(ord) == 2:
        values = svdvals(jnp.moveaxis(x, (rows, columns), (-2, -1)))
        if not values.shape[-1]:
            ord = "nuc"  # of nothing, which has no largest value either: 0
        reduce: Any = jnp.sum if ord == "nuc" else (jnp.max if ord > 0 else jnp.min)
        found = reduce(values, axis=-1)
    else:
        summed, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
        sums = vector_norm(x, 1, [summed], True)
        best = (jnp.max if ord > 0 else jnp.min)(sums, axis=other, keepdims=True)
        found = jnp.squeeze(best, (rows, columns))
    return jnp.expand_dims(found, sorted((rows, columns))) if keepdim else found


@register_operator("aten.linalg_norm.default", "aten.linalg_norm.ord_str")
def linalg_norm(
    x: jax.Array, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    dims = [dim] if isinstance(dim, int) else dim
    if ord is None or (dims is not None and len(dims) == 1) or (dims is None and x.ndim < 2):
        return vector_norm(x, 2 if ord is None else ord, dims, keepdim, dtype)
    return matrix_norm(x, ord, dims or (-2, -1), keepdim, dtype=dtype)


@register_operator("aten.nuclear_norm.default", "aten.nuclear_norm.dim")
def nuclear_norm(x: jax.Array, dim: Any = (-2, -1), keepdim: bool = False) -> jax.Array:
    dims = (-2, -1) if isinstance(dim, bool) else dim
    return matrix_norm(x, "nuc", dims, dim if isinstance(dim, bool) else keepdim)


@register_operator("aten.linalg_cond.default", "aten.linalg_cond.p_str")
def cond(x: jax.Array, p: Any = None) -> jax.Array:
    if p is None or p in (2, -2):
        values = svdvals(x)
        if not values.shape[-1]:
            return jnp.zeros(x.shape[:-2], values.dtype)
        largest, least = values[..., 0], values[..., -1]
        return least / largest if p == -2 else largest / least
    return matrix_norm(x, p) * matrix_norm(inv(x), p)
