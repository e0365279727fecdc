"""Matrix products. Weights stay in torch's (out, in) layout: dot_general contracts either side."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange.attention import divided_sequences
from torch_bridge.dtypes import cast, is_bool, is_complex, is_float, promote
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once, product_dtype, with_bias


@register_operator("aten.linear.default")
def linear(x: jax.Array, weight: Any, bias: Any = None) -> jax.Array:
    a, w = promote(x, weight)
    # Rows of tokens: a weight's gradient then contracts over one dim. Over several, XLA's CPU
    # backend copies a transposed gradient first. (A sequence that is divided over devices cannot be
    # joined with other dims: it would be gathered.)
    join = a.ndim > 2 and a.size and not divided_sequences()
    rows = jnp.reshape(a, (-1, a.shape[-1])) if join else a
    out = jax.lax.dot_general(
        rows, w, (((rows.ndim - 1,), (w.ndim - 1,)), ((), ())),
        preferred_element_type=product_dtype(a, bias),
    )  # fmt: skip
    out = jnp.reshape(out, (*a.shape[:-1], *w.shape[:-1]))
    return with_bias(out, bias, a.dtype)


@register_operator(
    "aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.dot.default",
    "aten.matmul.default",
)  # fmt: skip
def matmul(x: jax.Array, y: Any) -> jax.Array:
    return jnp.matmul(*promote(x, y))


@register_operator("aten.addmm.default", "aten.addmv.default", "aten.baddbmm.default")
def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    a, b = promote(x, y)
    product = jnp.matmul(a, b, preferred_element_type=product_dtype(a, bias))
    return _added(bias, product, beta, alpha, a.dtype)


def _added(bias: Any, product: jax.Array, beta: Any, alpha: Any, dtype: Any) -> jax.Array:
    """`beta * bias + alpha * product`; factors of whole numbers are whole, as in torch."""
    whole = not (is_float(product) or is_complex(product))
    beta, alpha = (int(f) if whole and not isinstance(f, complex) else f for f in (beta, alpha))
    out = product if alpha == 1 else product * alpha
    if beta == 0:  # torch ignores the bias altogether then, NaN included
        return out.astype(dtype)
    return (out + cast(bias, product.dtype) * (1 if beta == 1 else beta)).astype(dtype)


@register_operator("aten.addbmm.default")
def addbmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    a, b = promote(x, y)
    product = jnp.einsum("bij,bjk->ik", a, b, preferred_element_type=product_dtype(a, bias))
    return _added(bias, product, beta, alpha, a.dtype)


@register_operator("aten.addr.default")
@once
def addr(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> jax.Array:
    c, a, b = promote(bias, x, y)
    if is_bool(a):
        return (c & bool(beta)) | (a[:, None] & b & bool(alpha))
    return _added(c, a[:, None] * b, beta, alpha, a.dtype)


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
