"""Elementwise arithmetic, comparison and logic, with torch's promotion."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import (
    accumulation_dtype,
    as_counted,
    cast,
    is_bool,
    is_complex,
    is_float,
    jax_dtype,
    promote,
    promote_float,
    result_dtype,
)
from torch_bridge.lower.features_last import elementwise
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import broadcast, exact_numbers, once, quotient
from torch_bridge.lower.tangents import (
    arctan2,
    at_least,
    at_most,
    between,
    exact_quotient,
    hypot,
    modulo,
    power,
    remains,
    sinc,
    whole_quotient,
)


_name: str
_fn: Any


def _scaled(y: Any, alpha: Any) -> Any:
    return y if alpha == 1 else y * alpha


@register_operator("aten.add.Tensor", "aten.add.Scalar")
@elementwise
@exact_numbers
def add(x: jax.Array, y: Any, alpha: Any = 1) -> jax.Array:
    a, b = promote(x, y)
    return jnp.add(a, _scaled(b, alpha))


@register_operator("aten.sub.Tensor", "aten.sub.Scalar")
@elementwise
@exact_numbers
def sub(x: jax.Array, y: Any, alpha: Any = 1) -> jax.Array:
    a, b = promote(x, y)
    return jnp.subtract(a, _scaled(b, alpha))


@register_operator("aten.rsub.Tensor", "aten.rsub.Scalar")
def rsub(x: jax.Array, y: Any, alpha: Any = 1) -> jax.Array:
    return sub(y, x, alpha)


@register_operator("aten.mul.Tensor", "aten.mul.Scalar")
@elementwise
@exact_numbers
def mul(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return jnp.multiply(a, b)


@register_operator(
    "aten.div.Tensor", "aten.div.Scalar", "aten.div.Tensor_mode", "aten.div.Scalar_mode"
)
@elementwise
@exact_numbers
def div(x: jax.Array, y: Any, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode is None:
        return quotient(*promote_float(x, y))
    a, b = map(jax.lax.stop_gradient, promote(x, y))
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    if is_float(a):
        return whole_quotient(a, b)
    return jax.lax.div(*jnp.broadcast_arrays(a, b))  # truncates towards zero, as torch does


@elementwise
@exact_numbers
def div_before_a_step(x: jax.Array, y: Any, rounding_mode: str | None = None) -> jax.Array:
    """`div` where the last bit decides on a whole number, as of what is floored."""
    if rounding_mode is not None:
        return div(x, y, rounding_mode=rounding_mode)
    a, b = promote_float(x, y)
    return once(exact_quotient)(a, b) if is_float(a) else quotient(a, b)


@register_operator("aten.floor_divide.default", "aten.floor_divide.Scalar")
def floor_divide(x: jax.Array, y: Any) -> jax.Array:
    return div(x, y, rounding_mode="floor")


@register_operator("aten.remainder.Tensor", "aten.remainder.Scalar", "aten.remainder.Scalar_Tensor")
def remainder(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return modulo(a, b) if is_float(a) else jnp.remainder(a, b)


@register_operator("aten.fmod.Tensor", "aten.fmod.Scalar")
def fmod(x: jax.Array, y: Any) -> jax.Array:
    a, b = promote(x, y)
    return remains(a, b) if is_float(a) else jnp.fmod(a, b)


@register_operator("aten.pow.Tensor_Scalar")
@elementwise
def pow_scalar(x: jax.Array, exponent: Any) -> jax.Array:
    # A square is one operation: rounded once as it is.
    return jnp.square(x) if exponent == 2 and is_float(x) else _pow_scalar(x, exponent)


@once
def _pow_scalar(x: jax.Array, exponent: Any) -> jax.Array:
    dtype = result_dtype(x, exponent)
    base = cast(x, dtype)
    if not (is_float(dtype) or is_complex(dtype)):
        return _whole_power(base, cast(exponent, dtype))
    if isinstance(exponent, complex):
        return jnp.power(base, cast(exponent, dtype))
    if float(exponent).is_integer() and abs(exponent) <= 16:
        # Repeated multiplication: exact gradients at 0 and no call to the slow general pow.
        return base ** int(exponent)
    if exponent == 0.5:
        return jnp.sqrt(base)
    if exponent == -0.5:
        return jax.lax.rsqrt(base)
    return jnp.power(base, cast(exponent, dtype))


@register_operator("aten.pow.Tensor_Tensor", "aten.pow.Scalar")
@once
def pow_tensor(x: jax.Array, exponent: Any) -> jax.Array:
    a, b = promote(x, exponent)
    if is_float(a):
        return power(a, b)
    return jnp.power(a, b) if is_complex(a) else _whole_power(a, b)


def _whole_power(a: jax.Array, b: jax.Array) -> jax.Array:
    """Powers of whole numbers; of negative exponents the part before the point."""
    kept = jnp.where(a == 1, 1, jnp.where(a == -1, jnp.where(b % 2 == 0, 1, -1), 0))
    return jnp.where(b < 0, kept.astype(a.dtype), jnp.power(a, jnp.maximum(b, 0)))


@register_operator("aten.addcmul.default")
@once
def addcmul(x: jax.Array, a: Any, b: Any, value: Any = 1) -> jax.Array:
    return add(x, mul(mul(a, b), value))


@register_operator("aten.addcdiv.default")
@once
def addcdiv(x: jax.Array, a: Any, b: Any, value: Any = 1) -> jax.Array:
    return add(x, mul(div(a, b), value))


@register_operator("aten.lerp.Scalar", "aten.lerp.Tensor")
@once
def lerp(x: jax.Array, end: Any, weight: Any) -> jax.Array:
    far = abs(weight) >= 0.5  # torch begins at the nearer end
    if hasattr(weight, "shape"):
        start, factor = jnp.where(far, end, x), jnp.where(far, weight - 1, weight)
    else:
        start, factor = (end, weight - 1) if far else (x, weight)
    return add(start, mul(factor, sub(end, x)))


@register_operator("aten.maximum.default", "aten.max.other")
@elementwise
def maximum(x: jax.Array, y: Any) -> jax.Array:
    return jnp.maximum(*promote(x, y))


@register_operator("aten.minimum.default", "aten.min.other")
@elementwise
def minimum(x: jax.Array, y: Any) -> jax.Array:
    return jnp.minimum(*promote(x, y))


for _name, _fn in {"atan2": arctan2, "hypot": hypot}.items():
    register_operator(f"aten.{_name}.default")(once(lambda x, y, fn=_fn: fn(*promote_float(x, y))))


@register_operator("aten.clamp.default", "aten.clamp.Tensor")
@elementwise
def clamp(x: jax.Array, min: Any = None, max: Any = None) -> jax.Array:
    dtype = result_dtype(*(v for v in (x, min, max) if v is not None))
    out = cast(x, dtype)
    if is_float(dtype) and any(hasattr(bound, "shape") for bound in (min, max)):
        # Not infinity for a bound that is none: the other one may be infinite, and would meet it.
        if min is None:
            return at_most(out, cast(max, dtype))
        if max is None:
            return at_least(out, cast(min, dtype))
        return between(out, cast(min, dtype), cast(max, dtype))
    # torch's gradient at a bound is 1 (the value is inside); jnp.maximum would split it.
    if min is not None:
        low = cast(min, dtype)
        out = jnp.where(out < low, low, out)
    if max is not None:
        high = cast(max, dtype)
        out = jnp.where(out > high, high, out)
    return out


@register_operator("aten.clamp_min.default", "aten.clamp_min.Tensor")
@elementwise
def clamp_min(x: jax.Array, min: Any) -> jax.Array:
    return clamp(x, min=min)


@register_operator("aten.clamp_max.default", "aten.clamp_max.Tensor")
@elementwise
def clamp_max(x: jax.Array, max: Any) -> jax.Array:
    return clamp(x, max=max)


def absolute(x: jax.Array) -> jax.Array:
    """|x|, whose gradient at 0 is torch's 0, not 1."""
    if not is_float(x):
        return jnp.abs(x)
    return x * jax.lax.stop_gradient(jnp.sign(x))


def sign(x: jax.Array) -> jax.Array:
    """-1, 0 or 1; torch's is 0 for NaN and -0, too. Of complex numbers `x / abs(x)`, and 0."""
    if is_complex(x):  # written out: JAX gives it no gradient
        at_zero = x == 0
        away = jnp.where(at_zero, 1, x)
        return jnp.where(at_zero, 0, away / jnp.abs(away).astype(x.dtype))
    if is_bool(x):
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _unary(name: str, fn: Any) -> None:
    register_operator(f"aten.{name}.default")(elementwise(lambda x: fn(x)))


# One operation of XLA's each, which rounds once as it is and keeps what it gives for its gradient.
_ROUNDED_ONCE = frozenset(("cos", "erf", "exp", "log", "reciprocal", "sin", "sqrt", "tanh"))


def _unary_float(name: str, fn: Any) -> None:
    own = (
        (lambda x: fn(promote_float(x)[0]))
        if name in _ROUNDED_ONCE
        else once(lambda x: fn(promote_float(x)[0]))
    )
    register_operator(f"aten.{name}.default")(elementwise(own))


for _name, _fn in {
    "abs": absolute,
    "neg": jnp.negative,
    "_neg_view": jnp.negative,
    "sign": sign,
    "sgn": sign,
    "square": jnp.square,
    "floor": lambda x: jnp.floor(x) if is_float(x) else x,
    "ceil": lambda x: jnp.ceil(x) if is_float(x) else x,
    "round": lambda x: jnp.round(x) if is_float(x) else x,
    "trunc": lambda x: jnp.trunc(x) if is_float(x) else x,
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isfinite": jnp.isfinite,
    "logical_not": lambda x: jnp.logical_not(x.astype(bool)),
    "bitwise_not": jnp.bitwise_not,
}.items():
    _unary(_name, _fn)

for _name, _fn in {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": jax.lax.rsqrt,
    "reciprocal": lambda x: 1.0 / x,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "erfinv": jax.lax.erf_inv,
    "sigmoid": jax.nn.sigmoid,
    "sinc": sinc,
}.items():
    _unary_float(_name, _fn)


def _compare(name: str, fn: Any) -> None:
    register_operator(f"aten.{name}.Tensor", f"aten.{name}.Scalar")(
        elementwise(lambda x, y: fn(*promote(x, y)))
    )


for _name, _fn in {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}.items():
    _compare(_name, _fn)


def _bitwise(name: str, fn: Any) -> None:
    register_operator(f"aten.bitwise_{name}.Tensor", f"aten.bitwise_{name}.Scalar")(
        lambda x, y: fn(*promote(x, y))
    )
    register_operator(f"aten.logical_{name}.default")(
        lambda x, y: fn(x.astype(bool), y.astype(bool))
    )


for _name, _fn in {
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}.items():
    _bitwise(_name, _fn)


@register_operator("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf")
def where(condition: Any, x: Any, y: Any) -> jax.Array:
    a, b = promote(x, y)
    shape = jnp.broadcast_shapes(jnp.shape(condition), a.shape, b.shape)
    return jnp.where(condition, broadcast(a, shape), broadcast(b, shape))


@register_operator("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(x: jax.Array, mask: Any, value: Any) -> jax.Array:
    return jnp.where(mask, cast(value, x.dtype), x)


@register_operator("aten.nan_to_num.default")
def nan_to_num(x: jax.Array, nan: Any = None, posinf: Any = None, neginf: Any = None) -> jax.Array:
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@register_operator("aten.cumsum.default")
def cumsum(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    x = as_counted(x, dtype)
    if x.ndim == 0:
        return x
    wide = cast(x, accumulation_dtype(x))
    return jnp.cumsum(wide, axis=dim).astype(x.dtype)


@register_operator("aten.cumprod.default")
def cumprod(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    x = as_counted(x, dtype)
    wide = cast(x, accumulation_dtype(x))
    return jnp.cumprod(wide, axis=dim).astype(x.dtype) if x.ndim else x


@register_operator("aten._to_copy.default", "prims.convert_element_type.default")
@elementwise
def to_copy(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.asarray(x) if dtype is None else cast_torch(x, jax_dtype(dtype))


def cast_torch(x: jax.Array, dtype: Any) -> jax.Array:
    """A dtype conversion as torch does it: anything non-zero is True."""
    if is_bool(dtype):
        return jnp.asarray(x != 0) if not is_bool(x) else jnp.asarray(x)
    x = jnp.asarray(x)
    if is_float(x) and np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize < 4:
        x = x.astype(np.int32)  # its last bits are kept; JAX would take the bounds
    return x.astype(dtype)


@register_operator(
    "aten.clone.default",
    "aten.alias.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
    "aten.positive.default",
)
@elementwise
def identity(x: jax.Array, **_: Any) -> Any:
    return x


@register_operator("aten.detach.default")
@elementwise
def detach(x: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(x)


@register_operator("aten.copy.default")
def copy(x: jax.Array, src: Any, non_blocking: bool = False) -> jax.Array:
    return jnp.broadcast_to(cast_torch(src, x.dtype), x.shape)
