"""Bessel, Airy and related functions, which JAX lacks: by quadrature, without tables of numbers.

Integrals of smooth periodic (or fast decaying) functions by the trapezoidal rule are exact to
rounding after a few dozen points; far from 0 the asymptotic series of Hankel takes over. What torch
gives here has no gradient, but for `erfcx`.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from torch_bridge.dtypes import promote_float
from torch_bridge.lower.registry import register_operator


# From here on the asymptotic series is exact to single precision.
_FAR = 12.0
# Up to here its first term is all of a series in powers of the square.
_NEAR = 1e-4
_TERMS = 10
_POINTS = 80


def _angles(x: jax.Array) -> jax.Array:
    return jnp.asarray(2 * np.pi * (np.arange(_POINTS) + 0.5) / _POINTS, x.dtype)


def _hankel(order: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Amplitudes of the cosine and the sine of `x - (order/2 + 1/4) pi`, for large x."""
    even: Any = jnp.zeros_like(x)
    odd: Any = jnp.zeros_like(x)
    factor = 1.0
    for k in range(_TERMS):
        term = factor * x**-k * (-1) ** (k // 2)
        even, odd = (even + term, odd) if k % 2 == 0 else (even, odd + term)
        factor *= (4 * order**2 - (2 * k + 1) ** 2) / (8 * (k + 1))
    scale = jnp.sqrt(2 / (np.pi * x))
    return scale * even, scale * odd


def _turned(order: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `x - (order/2 + 1/4) pi`, without rounding the angle."""
    cos, sin, root = jnp.cos(x), jnp.sin(x), math.sqrt(0.5)
    first, second = (cos + sin) * root, (sin - cos) * root
    return (first, second) if order == 0 else (second, -first)


def _first_kind(order: int, x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    near = jnp.minimum(size, _FAR)[..., None]
    angles = _angles(x)
    wave = near * jnp.sin(angles)
    samples = jnp.cos(wave) if order == 0 else jnp.sin(wave) * jnp.sin(angles)
    far = jnp.maximum(size, _FAR)
    (p, q), (cos, sin) = _hankel(order, far), _turned(order, far)
    found = jnp.where(size < _FAR, jnp.mean(samples, axis=-1), p * cos - q * sin)
    return found * jnp.sign(x) if order else found


def _second_kind(order: int, x: jax.Array) -> jax.Array:
    """By Neumann's series in functions of the first kind, all of which are one integral."""
    near = jnp.clip(x, 1e-30, _FAR)
    angles = _angles(x)
    wave = near[..., None] * jnp.sin(angles)
    weights = np.zeros(_POINTS)
    grid = np.asarray(2 * np.pi * (np.arange(_POINTS) + 0.5) / _POINTS)
    for k in range(1, 24):
        if order == 0:
            weights += (-1) ** k / k * np.cos(2 * k * grid)
        else:
            weights += (-1) ** k * (k + 0.5) / (k * (k + 1)) * np.sin((2 * k + 1) * grid)
    samples = (jnp.cos(wave) if order == 0 else jnp.sin(wave)) * jnp.asarray(weights, x.dtype)
    log = jnp.log(near / 2) + float(np.euler_gamma) - order
    series = 2 / np.pi * log * _first_kind(order, near) - 4 / np.pi * jnp.mean(samples, axis=-1)
    if order:
        series = series - 2 / (np.pi * near) * _first_kind(0, near)
    far = jnp.maximum(x, _FAR)
    (p, q), (cos, sin) = _hankel(order, far), _turned(order, far)
    found = jnp.where(x < _FAR, series, p * sin + q * cos)
    return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, found))


def _scaled_k(order: float, x: jax.Array) -> jax.Array:
    """exp(x) K(x): the integral of exp(-x (cosh t - 1)) cosh(order t), between both series."""
    step = 0.2
    steps = np.arange(160) * step
    weights = np.where(steps == 0, step / 2, step)
    middle = jnp.clip(x, _NEAR, _FAR)[..., None]
    fall = -middle * jnp.asarray(np.cosh(steps) - 1, x.dtype)
    grow = jnp.asarray(np.log(np.cosh(order * steps)) + np.log(weights), x.dtype)
    found = jnp.sum(jnp.exp(fall + grow), axis=-1)
    if order in (0, 1):
        small = jnp.maximum(x, np.finfo(x.dtype).tiny)
        first = 1 / small if order else -jnp.log(small / 2) - float(np.euler_gamma)
        found = jnp.where(x < _NEAR, first * jnp.exp(small), found)
    far, sums, factor = jnp.maximum(x, _FAR), jnp.zeros_like(x), 1.0
    for k in range(_TERMS):
        sums = sums + factor * far**-k
        factor *= (4 * order**2 - (2 * k + 1) ** 2) / (8 * (k + 1))
    found = jnp.where(x > _FAR, jnp.sqrt(np.pi / 2 / far) * sums, found)
    return jnp.where(x == 0, jnp.inf, jnp.where(x < 0, jnp.nan, found))


def _airy(x: jax.Array) -> jax.Array:
    near = jnp.clip(x, -6.0, 2.0)
    nodes, weights = np.polynomial.legendre.leggauss(40)
    t = 3 * (nodes + 1)  # exp(-t^3 / 3) is nothing behind 6
    scale = 3 * weights * np.exp(-(t**3) / 3) / np.pi
    turned = math.sqrt(0.75) * near[..., None] * jnp.asarray(t, x.dtype) + np.pi / 6
    grown = jnp.exp(-0.5 * near[..., None] * jnp.asarray(t, x.dtype))
    middle = jnp.sum(jnp.asarray(scale, x.dtype) * grown * jnp.cos(turned), axis=-1)
    right = jnp.maximum(x, 2.0)
    zeta = 2 / 3 * right**1.5
    decays = jnp.sqrt(right / 3) / np.pi * _scaled_k(1 / 3, zeta) * jnp.exp(-zeta)
    left = jnp.maximum(-x, 6.0)
    zeta = 2 / 3 * left**1.5
    even: Any = jnp.zeros_like(x)
    odd: Any = jnp.zeros_like(x)
    factor = 1.0
    for k in range(8):
        term = factor * zeta**-k * (-1) ** (k // 2)
        even, odd = (even + term, odd) if k % 2 == 0 else (even, odd + term)
        factor *= (6 * k + 1) * (6 * k + 3) * (6 * k + 5) / (216 * (k + 1) * (2 * k + 1))
    angle = zeta + np.pi / 4
    waves = (jnp.sin(angle) * even - jnp.cos(angle) * odd) / (math.sqrt(np.pi) * left**0.25)
    return jnp.where(x > 2, decays, jnp.where(x < -6, waves, middle))


@jax.custom_jvp
def _erfcx(x: jax.Array) -> jax.Array:
    """exp(x^2) erfc(x); a continued fraction where the first factor would overflow."""
    low = jnp.minimum(x, 2.0)
    high = jnp.maximum(x, 2.0)
    rest = high
    for k in range(30, 0, -1):
        rest = high + (k / 2) / rest
    return jnp.where(x < 2, jnp.exp(low * low) * jsp.erfc(low), 1 / (math.sqrt(np.pi) * rest))


_erfcx.defjvp(
    lambda x, dx: (_erfcx(x[0]), (2 * x[0] * _erfcx(x[0]) - 2 / math.sqrt(np.pi)) * dx[0])
)


def _spherical(x: jax.Array) -> jax.Array:
    zero = x == 0
    safe = jnp.where(zero, jnp.ones((), x.dtype), x)
    found = jnp.where(zero, jnp.ones((), x.dtype), jnp.sin(safe) / safe)
    return jnp.where(jnp.isinf(x), 0, found)


_name: str
_fn: Any
for _name, _fn in {
    "bessel_j0": lambda x: _first_kind(0, x),
    "bessel_j1": lambda x: _first_kind(1, x),
    "bessel_y0": lambda x: _second_kind(0, x),
    "bessel_y1": lambda x: _second_kind(1, x),
    "modified_bessel_i0": jsp.i0,
    "modified_bessel_i1": jsp.i1,
    "modified_bessel_k0": lambda x: _scaled_k(0, x) * jnp.exp(-x),
    "modified_bessel_k1": lambda x: _scaled_k(1, x) * jnp.exp(-x),
    "scaled_modified_bessel_k0": lambda x: _scaled_k(0, x),
    "scaled_modified_bessel_k1": lambda x: _scaled_k(1, x),
    "airy_ai": _airy,
    "spherical_bessel_j0": _spherical,
}.items():
    register_operator(f"aten.special_{_name}.default")(
        lambda x, fn=_fn: jax.lax.stop_gradient(fn(*promote_float(x)))
    )


@register_operator("aten.special_erfcx.default")
def erfcx(x: jax.Array) -> jax.Array:
    return _erfcx(*promote_float(x))


_HIGHEST = 10_000  # degree, for which PyTorch's own loop takes as long


def _polynomial(start: Any, step: Any, shifted: bool = False) -> Any:
    """A family of polynomials by its recurrence, whatever the degree of each element."""

    def value(x: Any, n: Any) -> jax.Array:
        (wide,) = promote_float(x if hasattr(x, "dtype") else jnp.asarray(x, jnp.float32))
        point = 2 * wide - 1 if shifted else wide
        degree = jnp.trunc(jnp.asarray(n, wide.dtype))
        degree = jnp.where(degree < 2.0**63, degree, -1)  # no 64-bit number: PyTorch's is negative
        degree = jnp.where(degree <= _HIGHEST, degree, jnp.nan)
        point, degree = jnp.broadcast_arrays(point, degree)

        def more(k: Any, pair: Any) -> Any:
            before, last = pair
            index = jnp.asarray(k, wide.dtype)
            following = step(index, point, last, before)
            go = index <= degree
            return jnp.where(go, last, before), jnp.where(go, following, last)

        one = jnp.ones_like(point)
        top = jnp.max(jnp.nan_to_num(degree), initial=0).astype(np.int32)
        _, found = jax.lax.fori_loop(2, top + 1, more, (one, start(point)))
        found = jnp.where(degree < 0, 0, jnp.where(degree == 0, one, found))
        found = jnp.where(jnp.isnan(degree), degree, found)
        return jax.lax.stop_gradient(found)

    return value


def _chebyshev(k: Any, x: Any, last: Any, before: Any) -> Any:
    return 2 * x * last - before


for _name, _fn in {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (lambda x: 2 * x, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: 2 * x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: 2 * x + 1, _chebyshev),
    "hermite_polynomial_h": (lambda x: 2 * x, lambda k, x, p, q: 2 * x * p - 2 * (k - 1) * q),
    "hermite_polynomial_he": (lambda x: x, lambda k, x, p, q: x * p - (k - 1) * q),
    "laguerre_polynomial_l": (
        lambda x: 1 - x,
        lambda k, x, p, q: ((2 * k - 1 - x) * p - (k - 1) * q) / k,
    ),
    "legendre_polynomial_p": (
        lambda x: x,
        lambda k, x, p, q: ((2 * k - 1) * x * p - (k - 1) * q) / k,
    ),
}.items():
    register_operator(*(f"aten.special_{_name}.{o}" for o in ("default", "x_scalar", "n_scalar")))(
        _polynomial(*_fn)
    )
    if "chebyshev" in _name:
        register_operator(
            *(f"aten.special_shifted_{_name}.{o}" for o in ("default", "x_scalar", "n_scalar"))
        )(_polynomial(_fn[0], _fn[1], shifted=True))
