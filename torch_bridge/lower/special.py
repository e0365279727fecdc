"""Special functions and the less common elementwise arithmetic."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from torch_bridge.dtypes import cast, is_float, promote, promote_float
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator


_name: str
_fn: Any


for _name, _fn in {
    "i0": jsp.i0,
    "special_i0": jsp.i0,
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_entr": jsp.entr,
    "special_log_ndtr": jsp.log_ndtr,
    "special_ndtr": jsp.ndtr,
    "special_ndtri": jsp.ndtri,
    "deg2rad": jnp.deg2rad,
    "rad2deg": jnp.rad2deg,
}.items():
    register_operator(f"aten.{_name}.default")(lambda x, fn=_fn: fn(*promote_float(x)))

for _name, _fn in {
    "special_xlog1py": jsp.xlog1py,
    "special_zeta": jsp.zeta,
    "igamma": jsp.gammainc,
    "igammac": jsp.gammaincc,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
}.items():
    register_operator(f"aten.{_name}.default")(lambda x, y, fn=_fn: fn(*promote_float(x, y)))


@register_operator("aten.polygamma.default")
def polygamma(n: int, x: jax.Array) -> jax.Array:
    (wide,) = promote_float(x)
    return jax.lax.digamma(wide) if n == 0 else jsp.polygamma(np.int32(n), wide)


@register_operator("aten.mvlgamma.default")
def mvlgamma(x: jax.Array, p: int) -> jax.Array:
    (wide,) = promote_float(x)
    terms = sum((jax.lax.lgamma(wide - 0.5 * k) for k in range(p)), jnp.zeros_like(wide))
    return terms + float(p * (p - 1) / 4 * np.log(np.pi))


@register_operator("aten.copysign.Tensor", "aten.copysign.Scalar")
def copysign(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote_float(x, y)
    flips = jnp.signbit(a) != jnp.signbit(b)
    # Written so that its slope is the sign that it takes, and 0 at 0, as torch's is.
    slope = jnp.where(a == 0, 0.0, jnp.where(flips, -1.0, 1.0)).astype(a.dtype)
    value = jax.lax.stop_gradient(jnp.copysign(a, b))
    return value + (a - jax.lax.stop_gradient(a)) * slope


@register_operator("aten.fmax.default")
def fmax(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return jnp.where(_is_nan(b) | (a >= b), a, b)


@register_operator("aten.fmin.default")
def fmin(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return jnp.where(_is_nan(b) | (a <= b), a, b)


def _is_nan(x: jax.Array) -> jax.Array:
    return jnp.isnan(x) if is_float(x) else jnp.zeros(x.shape, bool)


@register_operator("aten.frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mantissa, exponent = jnp.frexp(jax.lax.stop_gradient(x))
    scale = jnp.exp2(-exponent.astype(x.dtype))
    return mantissa + (x - jax.lax.stop_gradient(x)) * scale, exponent.astype(np.int32)


@register_operator("aten.ldexp.Tensor")
def ldexp(x: jax.Array, exponent: Any) -> jax.Array:
    a, b = promote_float(x, exponent)
    return a * jnp.exp2(b)


@register_operator("aten.nextafter.default")
def nextafter(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    fixed = jax.lax.stop_gradient(a)
    return jnp.nextafter(fixed, jax.lax.stop_gradient(b)) + (a - fixed)


@register_operator("aten.heaviside.default")
def heaviside(x: jax.Array, values: Any) -> jax.Array:
    return jnp.where(x == 0, cast(values, x.dtype), (x > 0).astype(x.dtype))


@register_operator("aten.gcd.default")
def gcd(x: jax.Array, y: Any) -> jax.Array:
    return jnp.gcd(*promote(x, y))


@register_operator("aten.lcm.default")
def lcm(x: jax.Array, y: Any) -> jax.Array:
    return jnp.abs(jnp.lcm(*promote(x, y)))


@register_operator("aten.round.decimals")
def round_decimals(x: jax.Array, *, decimals: int) -> jax.Array:
    if not is_float(x):
        return x
    scale = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    rounded = jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale
    return rounded + (x - jax.lax.stop_gradient(x)) * 0


for _shift, _fn in {"left": jnp.left_shift, "right": jnp.right_shift}.items():
    _short = f"__{_shift[0]}shift__"
    register_operator(
        f"aten.bitwise_{_shift}_shift.Tensor",
        f"aten.bitwise_{_shift}_shift.Tensor_Scalar",
        f"aten.bitwise_{_shift}_shift.Scalar_Tensor",
        f"aten.{_short}.Tensor",
        f"aten.{_short}.Scalar",
    )(lambda x, y, fn=_fn: _shifted(fn, x, y))


def _shifted(fn: Any, x: Any, y: Any) -> jax.Array:
    """torch shifts floating-point numbers, too: by powers of two."""
    a, b = promote(x, y)
    if is_float(a):
        return a * jnp.exp2(b if fn is jnp.left_shift else -b)
    return fn(a, b)


@register_operator("aten.logcumsumexp.default")
def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    return jax.lax.associative_scan(jnp.logaddexp, x, axis=dim % x.ndim) if x.ndim else x


@register_operator("aten.dist.default")
def dist(x: jax.Array, y: Any, p: Any = 2) -> jax.Array:
    a, b = promote(x, y)
    return vector_norm(a - b, p)


@register_operator("aten.signbit.default")
def signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if is_float(x) else x < 0
