"""Functions with PyTorch's derivatives, where JAX's are others at zeros, poles and bounds.

Away from such points both are the same: a quotient's is `-x / (y y)` in JAX, `-(x / y) / y` in
PyTorch. Of 1e-25 the first has no square in float32, and gives NaN.
"""

# mypy: allow-untyped-calls
# (parts of jax.numpy have no types)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from torch_bridge.dtypes import is_complex


@jax.custom_jvp
def sloped(x: jax.Array, slope: Any) -> jax.Array:
    """Zeros, with a slope of x that is given: what is added where a value has another gradient."""
    return jnp.zeros_like(x)


sloped.defjvps(lambda dx, out, x, slope: dx * slope, None)


def with_tangents(fn: Callable[..., Any], *rules: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A function of float arrays of one dtype, with tangents of its own.

    Args:
        fn: elementwise, of one or more arrays.
        rules: for each array, of its tangent, the result and all arrays: its part of the tangent.

    Returns:
        The same function; shapes are broadcast.

    Example:
        >>> import jax
        >>> absolute = with_tangents(abs, lambda dx, out, x: dx * (x > 0))
        >>> jax.grad(absolute)(-1.0)
        Array(0., dtype=float32, weak_type=True)
    """

    @jax.custom_jvp
    def valued(*args: Any) -> Any:
        return fn(*args)

    def tangent(args: Any, tangents: Any) -> Any:
        out = valued(*args)
        terms = [
            rule(dx, out, *args)
            for rule, dx in zip(rules, tangents, strict=True)
            if not isinstance(dx, SymbolicZero)
        ]
        return out, functools.reduce(jnp.add, terms, jnp.zeros_like(out) if not terms else 0)

    valued.defjvp(tangent, symbolic_zeros=True)

    @functools.wraps(fn)
    def computed(*args: Any) -> jax.Array:
        found: jax.Array = valued(*jnp.broadcast_arrays(*args))
        return found

    return computed


def _sinc(x: Any) -> Any:
    """As PyTorch has it: NaN at infinity, where `jnp.sinc` is 0 since jax 0.12."""
    turned = np.asarray(np.pi, x.dtype) * x
    return jnp.where(turned == 0, 1, jnp.sin(turned) / jnp.where(turned == 0, 1, turned))


def _slope_of_sinc(dx: Any, _: Any, x: Any) -> Any:
    turned = np.asarray(np.pi, x.dtype) * x
    square = turned * x
    small = square == 0
    slope = (turned * jnp.cos(turned) - jnp.sin(turned)) / jnp.where(small, 1, square)
    return dx * jnp.where(small, 0, slope)


def _over_square(a: Any, b: Any) -> Any:
    """The reciprocal of `a a + b b`, 0 at the origin."""
    square = a * a + b * b
    return jnp.where(square == 0, 0, 1 / jnp.where(square == 0, 1, square))


def _less_power(dx: Any, _: Any, a: Any, b: Any) -> Any:
    return dx * b * power(a, jnp.where(b == 0, 1, b) - 1)


def _logarithm(dx: Any, out: Any, a: Any, b: Any) -> Any:
    return dx * out * jnp.log(jnp.where((a == 0) & (b >= 0), 1, a))


def log_of_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """log(exp(a) + exp(b)), of complex numbers with the phase of the larger one, as in torch."""
    if not is_complex(a):
        return jnp.logaddexp(a, b)
    small, large = (jnp.where(a.real < b.real, *pair) for pair in ((a, b), (b, a)))
    return large + jnp.log1p(jnp.exp(small - large))


def _none(dx: Any, out: Any, *_: Any) -> Any:
    return jnp.zeros_like(out)


divide = with_tangents(jnp.divide, lambda dx, _, x, y: dx / y, lambda dy, out, _, y: -out / y * dy)
power = with_tangents(jnp.power, _less_power, _logarithm)
arctan2 = with_tangents(
    jnp.arctan2,
    lambda da, _, a, b: da * b * _over_square(a, b),
    lambda db, _, a, b: -db * a * _over_square(a, b),
)
hypot = with_tangents(
    jnp.hypot, lambda da, out, a, b: da * (a / out), lambda db, out, a, b: db * (b / out)
)
copysign = with_tangents(
    jnp.copysign,
    lambda da, out, a, _: da * jnp.where(a == 0, 0, out / jnp.where(a == 0, 1, a)),
    _none,
)
nextafter = with_tangents(jnp.nextafter, lambda da, _, a, b: jnp.where(a == b, 0, da), _none)
sinc = with_tangents(_sinc, _slope_of_sinc)
logaddexp = with_tangents(
    log_of_sum,
    lambda da, _, a, b: da / (1 + jnp.exp(b - a)),
    lambda db, _, a, b: db / (1 + jnp.exp(a - b)),
)
logaddexp2 = with_tangents(
    jnp.logaddexp2,
    lambda da, _, a, b: da / (1 + jnp.exp2(b - a)),
    lambda db, _, a, b: db / (1 + jnp.exp2(a - b)),
)
xlogy = with_tangents(
    lambda x, y: jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log(y)),
    lambda dx, _, x, y: dx * jnp.log(jnp.where((x == 0) & (y <= 0), 1, y)),
    lambda dy, _, x, y: dy * x / y,
)
xlog1py = with_tangents(
    lambda x, y: jnp.where((x == 0) & ~jnp.isnan(y), 0, x * jnp.log1p(y)),
    lambda dx, _, x, y: dx * jnp.log1p(jnp.where((x == 0) & (y <= -1), 0, y)),
    lambda dy, _, x, y: dy * x / (y + 1),
)
logit = with_tangents(
    lambda x: jnp.log(x / (1 - x)),
    lambda dx, _, x: dx * jnp.where((x < 0) | (x > 1), jnp.nan, 1 / (x * (1 - x))),
)
ndtri = with_tangents(
    jsp.ndtri,
    lambda dx, out, _: dx * np.asarray(np.sqrt(2 * np.pi), out.dtype) * jnp.exp(out * out / 2),
)


at_least = with_tangents(
    jnp.maximum,
    lambda dx, _, x, low: jnp.where(x >= low, dx, 0),
    lambda dlow, _, x, low: jnp.where(x < low, dlow, 0),
)

at_most = with_tangents(
    jnp.minimum,
    lambda dx, _, x, high: jnp.where(x <= high, dx, 0),
    lambda dhigh, _, x, high: jnp.where(x > high, dhigh, 0),
)


# Bounds that cross have the upper one, and the lower one no gradient.
between = with_tangents(
    lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high),
    lambda dx, _, x, low, high: jnp.where((x >= low) & (x <= high), dx, 0),
    lambda dlow, _, x, low, high: jnp.where((x < low) & (low < high), dlow, 0),
    lambda dhigh, _, x, low, high: jnp.where((x > high) | (high < low), dhigh, 0),
)


# Of the quotient that the value is the remainder of: JAX's slope rounds it before its floor.
modulo = with_tangents(
    jnp.remainder, lambda dx, out, x, y: dx, lambda dy, out, x, y: -dy * jnp.floor_divide(x, y)
)


def exact_quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x / y`, rounded once.

    Of a divisor that is spread, or a number, XLA takes the reciprocal: 3 / 3 is less than 1 then.
    Not of one that seems to be another for each `x`, which takes no memory.
    """
    return x / jnp.where(x >= 0, y, jax.lax.optimization_barrier(y))


def whole_quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """`x / y` without its fraction."""
    return jnp.trunc(exact_quotient(x, y))


remains = with_tangents(
    jnp.fmod, lambda dx, out, x, y: dx, lambda dy, out, x, y: -dy * whole_quotient(x, y)
)
