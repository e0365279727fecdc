"""Special functions and the less common elementwise arithmetic."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from torch_bridge.dtypes import accumulation_dtype, cast, is_float, promote, promote_float
from torch_bridge.lower.arithmetic import clamp
from torch_bridge.lower.reduce import vector_norm
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once
from torch_bridge.lower.tangents import (
    copysign,
    log_of_sum,
    logaddexp,
    logaddexp2,
    logit,
    ndtri,
    nextafter,
    with_tangents,
    xlog1py,
    xlogy,
)


@jax.custom_jvp
def _i0(x: jax.Array) -> jax.Array:
    return jsp.i0(x)


# jax's own slope is a difference of large numbers.
_i0.defjvp(lambda x, dx: (_i0(x[0]), jsp.i1(x[0]) * dx[0]))


def _log_ndtr(x: jax.Array) -> jax.Array:
    """Right of -1 by log1p, as torch: ndtr itself rounds to 1."""
    left = x < -1
    high = jnp.where(left, -1, x)
    near = jnp.log1p(-jsp.erfc(high * math.sqrt(0.5)) / 2)
    return jnp.where(left, jsp.log_ndtr(jnp.where(left, x, -1)), near)


_name: str
_fn: Any
_KINDS = (
    "default", "Tensor", "Scalar", "Scalar_Self", "Scalar_Other", "self_scalar", "other_scalar",
)  # fmt: skip


for _name, _fn in {
    "i0": lambda x: _i0(x),
    "special_i0": lambda x: _i0(x),
    "special_i0e": jsp.i0e,
    "special_i1": jsp.i1,
    "special_i1e": jsp.i1e,
    "special_entr": jsp.entr,
    "special_log_ndtr": lambda x: _log_ndtr(jnp.asarray(x)),
    "special_ndtr": jsp.ndtr,
    "special_ndtri": ndtri,
    "deg2rad": jnp.deg2rad,
    "rad2deg": jnp.rad2deg,
}.items():
    register_operator(f"aten.{_name}.default")(once(lambda x, fn=_fn: fn(*promote_float(x))))

for _name, _fn in {
    "special_xlog1py": xlog1py,
    "xlogy": xlogy,
    "igamma": lambda a, x: _of_any_order(jsp.gammainc, a, x, 0),
    "igammac": lambda a, x: _of_any_order(jsp.gammaincc, a, x, 1),
    "logaddexp": logaddexp,
    "logaddexp2": logaddexp2,
    "copysign": copysign,
    "nextafter": nextafter,
}.items():
    register_operator(*(f"aten.{_name}.{kind}" for kind in _KINDS))(
        once(lambda x, y, fn=_fn: fn(*promote_float(x, y)))
    )


def _of_any_order(fn: Any, a: jax.Array, x: jax.Array, least: int) -> jax.Array:
    """With PyTorch's values of orders 0, infinity and NaN; `least` is that of x = 0."""
    found = jnp.where(jnp.isposinf(a), jnp.where(jnp.isposinf(x), jnp.nan, least), fn(a, x))
    found = jnp.where((x > 0) & ((a == 0) | jnp.isnan(a) & jnp.isposinf(x)), 1 - least, found)
    found = jnp.where(jnp.isnan(a) & (x == 0), least, found)
    return jnp.where((a < 0) | (x < 0), jnp.nan, found)


@register_operator("aten.logit.default")
@once
def logit_within(x: jax.Array, eps: float | None = None) -> jax.Array:
    (inside,) = promote_float(x)
    return logit(inside if eps is None else clamp(inside, eps, 1 - eps))


@register_operator(
    "aten.special_zeta.default", "aten.special_zeta.self_scalar", "aten.special_zeta.other_scalar"
)
@once
def zeta(x: Any, q: Any) -> jax.Array:
    return _zeta(*promote_float(x, q))


def _zeta_value(x: jax.Array, q: jax.Array) -> jax.Array:
    last = jnp.where(q < 1, jnp.inf, jnp.where(q > 1, 0.0, q))
    found = jnp.where(jnp.isposinf(x), last, jsp.zeta(x, q))
    found = jnp.where((q <= 0) & (q == jnp.floor(q)), jnp.inf, found)  # a term is 1 / 0
    return jnp.where(x < 1, jnp.nan, found)


_zeta: Callable[..., jax.Array] = with_tangents(
    _zeta_value,
    lambda dx, _, x, q: jnp.nan * dx,  # PyTorch has none
    lambda dq, _, x, q: -x * _zeta(x + 1, q) * dq,
)


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
    found = jnp.where(pole, at_pole, found)
    if n == 1:  # of infinity; the others are NaN there in torch, or their next pole
        found = jnp.where(jnp.isinf(wide), jnp.where(wide > 0, 0, jnp.nan), found)
    return found.astype(x.dtype)


@_polygamma.defjvp
def _polygamma_jvp(n: int, values: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = values, tangents
    return _polygamma(n, x), (_polygamma(n + 1, x) * dx).astype(x.dtype)


_lgamma = with_tangents(jax.lax.lgamma, lambda dx, _, x: dx * _polygamma(0, x))
register_operator("aten.lgamma.default")(once(lambda x: _lgamma(*promote_float(x))))


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
    terms = sum((_lgamma(wide - 0.5 * k) for k in range(p)), jnp.zeros_like(wide))
    return terms + float(p * (p - 1) / 4 * np.log(np.pi))


@register_operator("aten.fmax.default")
def fmax(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return jnp.where(is_nan(b) | (a >= b), a, b)


@register_operator("aten.fmin.default")
def fmin(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return jnp.where(is_nan(b) | (a <= b), a, b)


def is_nan(x: jax.Array) -> jax.Array:
    return jnp.isnan(x) if is_float(x) else jnp.zeros(x.shape, bool)


@register_operator("aten.frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    exponent = jnp.frexp(jax.lax.stop_gradient(x))[1]
    return _mantissa(x), exponent.astype(np.int32)


_mantissa = with_tangents(
    lambda x: jnp.frexp(x)[0], lambda dx, _, x: dx * jnp.exp2(-jnp.frexp(x)[1].astype(x.dtype))
)


@register_operator("aten.ldexp.Tensor")
def ldexp(x: jax.Array, exponent: Any) -> jax.Array:
    a, b = promote_float(x, exponent)
    return a * jnp.exp2(cast(b, accumulation_dtype(b))).astype(b.dtype)


@register_operator("aten.heaviside.default")
def heaviside(x: jax.Array, values: Any) -> jax.Array:
    none = jnp.zeros((), x.dtype)
    return jnp.where(x == none, cast(values, x.dtype), (x > none).astype(x.dtype))


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
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale


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
    return jax.lax.associative_scan(log_of_sum, x, axis=axis)


@_log_sums.defjvp
def _log_sums_jvp(axis: int, values: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """d out_j = sum over i <= j of softmax(x_0 .. x_j)_i dx_i; beside infinity none of the rest."""
    (x,), (dx,) = values, tangents
    positions = np.arange(x.shape[axis])
    rows = jnp.moveaxis(x, axis, -1)[..., None, :]
    before = positions[:, None] >= positions
    out = _log_sums(axis, x)
    sums = jnp.moveaxis(out, axis, -1)[..., None]
    weights = jax.nn.softmax(rows, axis=-1, where=before)
    far = jnp.where(before, jnp.exp(rows - sums), 0)
    weights = jnp.where(sums.real == jnp.inf, far, weights)
    slope = jnp.einsum("...ij,...j->...i", weights, jnp.moveaxis(dx, axis, -1))
    return out, jnp.moveaxis(slope, -1, axis).astype(x.dtype)


@register_operator("aten.dist.default")
@once
def dist(x: jax.Array, y: Any, p: Any = 2) -> jax.Array:
    a, b = promote(x, y)
    return vector_norm(a - b, p)


@register_operator("aten.signbit.default")
def signbit(x: jax.Array) -> jax.Array:
    return jnp.signbit(x) if is_float(x) else x < jnp.zeros((), x.dtype)
