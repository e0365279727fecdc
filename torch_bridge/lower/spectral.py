"""Complex numbers and Fourier transforms."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import cast, is_complex, promote, promote_float
from torch_bridge.lower.arithmetic import sign
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.tangents import arctan2, with_tangents


_NONE, _ROOT, _FULL = 0, 1, 2  # at::native::fft_norm_mode


def _scaled(x: jax.Array, num_points: int, normalization: int) -> jax.Array:
    if normalization == _NONE:
        return x
    factor = 1.0 / (math.sqrt(num_points) if normalization == _ROOT else num_points)
    return x * jnp.asarray(factor, x.dtype)


def _points(x: jax.Array, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _complex_of(x: jax.Array) -> jax.Array:
    if is_complex(x):
        return x
    return cast(x, np.complex128 if x.dtype == np.float64 else np.complex64)


@register_operator("aten._fft_r2c.default")
def fft_r2c(x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    if not onesided:
        return fft_c2c(_complex_of(x), dim, normalization, True)
    # The last of `dim` is the one that is halved, as in numpy.
    return _scaled(jnp.fft.rfftn(x, axes=tuple(dim)), _points(x, dim), normalization)


@register_operator("aten._fft_c2r.default")
def fft_c2r(x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> jax.Array:
    sizes = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    out = jnp.fft.irfftn(x, s=sizes, axes=tuple(dim), norm="forward")
    return _scaled(out, math.prod(sizes), normalization)


@register_operator("aten._fft_c2c.default")
def fft_c2c(x: jax.Array, dim: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    axes = tuple(dim)
    if forward:
        out = jnp.fft.fftn(_complex_of(x), axes=axes)
    else:
        out = jnp.fft.ifftn(_complex_of(x), axes=axes, norm="forward")
    return _scaled(out, _points(x, dim), normalization)


@register_operator("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(x: jax.Array) -> jax.Array:
    return jax.lax.complex(x[..., 0], x[..., 1])


@register_operator("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.real(x), jnp.imag(x)], axis=-1)


@register_operator("aten.complex.default")
def complex_(real: jax.Array, imag: Any) -> jax.Array:
    return jax.lax.complex(*jnp.broadcast_arrays(real, imag))


@register_operator("aten.polar.default")
def polar(size: jax.Array, angle: Any) -> jax.Array:
    return _polar(*promote(size, angle))


# torch's slope of the size is the direction of the result, which 0 has none of.
_polar = with_tangents(
    lambda r, phi: jax.lax.complex(r * jnp.cos(phi), r * jnp.sin(phi)),
    lambda dr, out, *_: dr.astype(out.dtype) * sign(out),
    lambda dphi, out, *_: dphi.astype(out.dtype) * (1j * out),
)


@register_operator("aten.real.default")
def real(x: jax.Array) -> jax.Array:
    return jnp.real(x)


@register_operator("aten.imag.default")
def imag(x: jax.Array) -> jax.Array:
    return jnp.imag(x)


@register_operator("aten.angle.default")
def angle(x: jax.Array) -> jax.Array:
    if is_complex(x):
        return arctan2(jnp.imag(x), jnp.real(x))
    # Also of -0 it is 0, and it has no slope.
    (size,) = map(jax.lax.stop_gradient, promote_float(x))
    return jnp.where(jnp.isnan(size), size, jnp.where(size < 0, cast(np.pi, size.dtype), 0))


@register_operator(
    "aten._conj.default",
    "aten.conj.default",
    "aten._conj_physical.default",
    "aten.conj_physical.default",
)
def conj(x: jax.Array) -> jax.Array:
    return jnp.conj(x) if is_complex(x) else x


@register_operator("aten.resolve_conj.default", "aten.resolve_neg.default")
def resolved(x: jax.Array) -> jax.Array:
    return x


@jax.custom_vjp
def torch_gradient(x: jax.Array) -> jax.Array:
    """`x` itself, whose gradient comes out in torch's convention.

    For a real loss `jax.grad` gives the conjugate of what `tensor.grad` holds for a complex
    tensor; a descent step needs torch's.
    """
    return x


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _backward(_: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jnp.conj(grad),)


torch_gradient.defvjp(_forward, _backward)
