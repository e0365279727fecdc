"""Matrix products. Weights stay in torch's (out, in) layout: dot_general contracts either side."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..dtypes import cast, promote, result_dtype
from .registry import register_operator


@register_operator("aten.linear.default")
def linear(x: jax.Array, weight: Any, bias: Any = None) -> jax.Array:
    a, w = promote(x, weight)
    # Rows of tokens: a weight's gradient then contracts over one dim. Over several, XLA's CPU
    # backend copies a transposed gradient first.
    rows = jnp.reshape(a, (-1, a.shape[-1])) if a.ndim > 2 and a.size else a
    out = jax.lax.dot_general(rows, w, (((rows.ndim - 1,), (w.ndim - 1,)), ((), ())))
    out = jnp.reshape(out, (*a.shape[:-1], *w.shape[:-1]))
    return out if bias is None else out + cast(bias, out.dtype)


@register_operator("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default")
def matmul_plain(x: jax.Array, y: Any) -> jax.Array:
    return jnp.matmul(*promote(x, y))


@register_operator("aten.matmul.default")
def matmul(x: jax.Array, y: Any) -> jax.Array:
    return jnp.matmul(*promote(x, y))


@register_operator("aten.addmm.default", "aten.addmv.default", "aten.baddbmm.default")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    dtype = result_dtype(x, y)
    out = jnp.matmul(cast(x, dtype), cast(y, dtype))
    if alpha != 1:
        out = out * alpha
    if beta == 0:  # torch ignores the bias altogether then, NaN included
        return out
    return out + cast(bias, dtype) * (1 if beta == 1 else beta)


@register_operator("aten.outer.default")
def outer(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return a[:, None] * b[None, :]


@register_operator("aten.bilinear.default")
def bilinear(x: jax.Array, y: Any, weight: Any, bias: Any = None) -> jax.Array:
    a, b, w = promote(x, y, weight)
    out = jnp.einsum("...i,oij,...j->...o", a, w, b)
    return out if bias is None else out + cast(bias, out.dtype)


@register_operator("aten.einsum.default")
def einsum(equation: str, operands: Any, path: Any = None) -> jax.Array:
    return jnp.einsum(equation, *promote(*operands))
