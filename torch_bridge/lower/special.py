"""Special functions and the less common elementwise arithmetic."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, cast, is_float, promote, promote_float
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once


@jax.custom_jvp
def _i0(x: jax.Array) -> jax.Array:
    return jsp.i0(x)


# jax's own slope is a difference of large numbers.
_i0.defjvp(lambda x, dx: (_i0(x[0]), jsp.i1(x[0]) * dx[0]))


_name: str
_fn: Any


for _name, _fn in {
    "i0": lambda x: _i0(x),
    "special_i0": lambda x: _i0(x),
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
    register_operator(f"aten.{_name}.default")(once(lambda x, fn=_fn: fn(*promote_float(x))))

for _name, _fn in {
    "special_xlog1py": jsp.xlog1py,
    "igamma": jsp.gammainc,
    "igammac": jsp.gammaincc,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
}.items():
    register_operator(f"aten.{_name}.default")(once(lambda x, y, fn=_fn: fn(*promote_float(x, y))))


@register_operator(
    "aten.special_zeta.default", "aten.special_zeta.self_scalar", "aten.special_zeta.other_scalar"
)
def zeta(x: Any, q: Any) -> jax.Array:
    return jsp.zeta(*promote_float(x, q))


@register_operator("aten.polygamma.default")
def polygamma(n: int, x: jax.Array) -> jax.Array:
    return _polygamma(n, *promote_float(x))


@register_operator("aten.digamma.default")
def digamma(x: jax.Array) -> jax.Array:
    return _polygamma(0, *promote_float(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polygamma(n: int, x: jax.Array) -> jax.Array:
    """The nth derivative of digamma. Left of 0 by reflection, from the nearest pole as torch."""
    wide = cast(x, accumulation_dtype(x))
    left = wide < 0
    away = jnp.where(left, 1 - wide, wide)
    if n == 0:
        positive = jax.lax.digamma(away)
    else:
        order = jnp.asarray(n + 1, away.dtype)
        positive = float((-1) ** (n + 1) * math.factorial(n)) * jsp.zeta(order, away)
    turned = (-1) ** n * positive - _cotangents(n, wide - jnp.round(wide))
    found = jnp.where(left, turned, positive)
    pole = (wide <= 0) & (wide == jnp.round(wide))
    if n:
        at_pole: Any = jnp.inf if n % 2 else -jnp.inf
    else:
        at_pole = jnp.where(wide == 0, jnp.where(jnp.signbit(wide), jnp.inf, -jnp.inf), jnp.nan)
    return jnp.where(pole, at_pole, found).astype(x.dtype)


_polygamma.defjvp(
    lambda n, x, dx: (_polygamma(n, x[0]), (_polygamma(n + 1, x[0]) * dx[0]).astype(x[0].dtype))
)


def _cotangents(n: int, x: jax.Array) -> jax.Array:
    """The nth derivative of pi cot(pi x), a polynomial in the cotangent."""
    factors = np.polynomial.Polynomial([0.0, np.pi])
    for _ in range(n):
        factors = factors.deriv() * np.polynomial.Polynomial([-np.pi, 0.0, -np.pi])
    # From the nearer of pole and zero: both are exact there.
    pi, near = np.asarray(np.pi, x.dtype), jnp.abs(x) < 0.25
    to_zero = jnp.tan(pi * jnp.where(near, 0.0, 0.5 - jnp.abs(x))) * jnp.sign(x)
    cotangent = jnp.where(near, 1 / jnp.tan(pi * jnp.where(near, x, 0.25)), to_zero)
    return jnp.polyval(jnp.asarray(factors.coef[::-1], x.dtype), cotangent)


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
@once
def logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    return _log_sums(dim % x.ndim, x) if x.ndim else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_sums(axis: int, x: jax.Array) -> jax.Array:
    return jax.lax.associative_scan(jnp.logaddexp, x, axis=axis)


@_log_sums.defjvp
def _log_sums_jvp(axis: int, values: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """d out_j = sum over i <= j of softmax(x_0 .. x_j)_i dx_i."""
    (x,), (dx,) = values, tangents
    places = np.arange(x.shape[axis])
    rows = jnp.moveaxis(x, axis, -1)[..., None, :]
    weights = jax.nn.softmax(rows, axis=-1, where=places[:, None] >= places)
    slope = jnp.einsum("...ij,...j->...i", weights, jnp.moveaxis(dx, axis, -1))
    return _log_sums(axis, x), jnp.moveaxis(slope, -1, axis).astype(x.dtype)


@register_operator("aten.dist.default")
@once
def dist(x: jax.Array, y: Any, p: Any = 2) -> jax.Array:
    a, b = promote(x, y)
    return vector_norm(a - b, p)


@register_operator("aten.signbit.default")
def signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if is_float(x) else x < 0
