"""Activations that stay whole through export."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.dtypes import accumulation_dtype, cast, jax_dtype
from torch_bridge.lower.features_last import elementwise
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import broadcast, once
from torch_bridge.lower.tangents import with_tangents


@register_operator("aten.relu.default")
@elementwise
def relu(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x)


@register_operator("aten.gelu.default")
@elementwise
def gelu(x: jax.Array, approximate: str = "none") -> jax.Array:
    wide = cast(x, accumulation_dtype(x))  # torch computes half precision in float32
    return jax.nn.gelu(wide, approximate=approximate == "tanh").astype(x.dtype)


@register_operator("aten.silu.default")
@elementwise
def silu(x: jax.Array) -> jax.Array:
    wide = cast(x, accumulation_dtype(x))
    return jax.nn.silu(wide).astype(x.dtype)


@register_operator("aten.mish.default")
@elementwise
@once
def mish(x: jax.Array) -> jax.Array:
    return jax.nn.mish(x)


@register_operator("aten.softplus.default")
@elementwise
@once
def softplus(x: jax.Array, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    scaled = x * beta
    # The inner `where` keeps the unused branch finite, so that its gradient is 0 and not NaN.
    low = jnp.where(scaled > threshold, jnp.zeros((), x.dtype), scaled)
    return jnp.where(scaled > threshold, x, jnp.log1p(jnp.exp(low)) / beta)


@register_operator("aten.hardswish.default")
@elementwise
@once
def hardswish(x: jax.Array) -> jax.Array:
    inside = jnp.clip(x, -3, 3)  # finite, so that the unused slope is not NaN
    return _between(x, -3, 3, x * 0, inside * ((inside + 3.0) / 6.0), x)


@register_operator("aten.hardsigmoid.default")
@elementwise
@once
def hardsigmoid(x: jax.Array) -> jax.Array:
    return _between(x, -3, 3, jnp.zeros_like(x), (x + 3.0) / 6.0, jnp.ones_like(x))


@register_operator("aten.hardtanh.default")
@elementwise
def hardtanh(x: jax.Array, min_val: Any = -1, max_val: Any = 1) -> jax.Array:
    low, high = cast(min_val, x.dtype), cast(max_val, x.dtype)
    return _between(x, low, high, jnp.full_like(x, low), x, jnp.full_like(x, high))


def _between(x: Any, low: Any, high: Any, below: Any, inside: Any, above: Any) -> jax.Array:
    """Three pieces; at the bounds, torch has the outer ones' gradients."""
    return jnp.where(x <= low, below, jnp.where(x >= high, above, inside))


@register_operator("aten.leaky_relu.default")
@elementwise
@once
def leaky_relu(x: jax.Array, negative_slope: Any = 0.01) -> jax.Array:
    return jnp.where(x > 0, x, x * negative_slope)


@register_operator("aten.elu.default")
@elementwise
@once
def elu(x: jax.Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> jax.Array:
    low = jnp.where(x > 0, jnp.zeros((), x.dtype), x)
    return jnp.where(x > 0, x * scale, jnp.expm1(low * input_scale) * (alpha * scale))


@register_operator("aten.celu.default")
@elementwise
def celu(x: jax.Array, alpha: Any = 1) -> jax.Array:
    return elu(x, alpha, 1, 1 / alpha)


@register_operator("aten.prelu.default", "aten._prelu_kernel.default")
def prelu(x: jax.Array, weight: Any) -> jax.Array:
    slope = jnp.reshape(weight, ()) if weight.size == 1 else weight  # x may have no dims
    if weight.size > 1 and weight.ndim == 1 and x.ndim > 1:
        slope = jnp.reshape(weight, (1, -1, *(1,) * (x.ndim - 2)))
    return _prelu(x, broadcast(slope.astype(x.dtype), x.shape))


# An infinite slope or input is NaN in no gradient that it has no part in.
_prelu = with_tangents(
    lambda x, slope: jnp.where(x > 0, x, x * slope),
    lambda dx, _, x, slope: dx * jnp.where(x > 0, 1, slope),
    lambda dslope, _, x, slope: dslope * jnp.where(x > 0, 0, x),
)


@register_operator("aten.log_sigmoid_forward.default")
@once
def log_sigmoid_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.log_sigmoid(x), jnp.zeros((0,), x.dtype)


@register_operator("aten.log_sigmoid.default")
@once
def log_sigmoid(x: jax.Array) -> jax.Array:
    return jax.nn.log_sigmoid(x)


@register_operator("aten.glu.default")
@once
def glu(x: jax.Array, dim: int = -1) -> jax.Array:
    a, b = jnp.split(x, 2, axis=dim)
    return a * jax.nn.sigmoid(b)


def _softmax_input(x: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    """`x` in the dtype that a softmax computes in, and the dtype that it gives."""
    # `_softmax` has a bool (half_to_float) as its third argument; False there means the same dtype.
    out = jax_dtype(dtype) if dtype is not None and not isinstance(dtype, bool) else x.dtype
    return cast(x, accumulation_dtype(cast(x, out))), out


@register_operator("aten.softmax.int", "aten._softmax.default")
def softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    wide, out = _softmax_input(x, dtype)
    return jax.nn.softmax(wide, axis=dim if x.ndim else None).astype(out)


@register_operator("aten._safe_softmax.default")
def safe_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    dead = jnp.all(x == -jnp.inf, axis=dim if x.ndim else None, keepdims=True)
    return jnp.where(dead, 0.0, softmax(jnp.where(dead, 0.0, x), dim, dtype))


@register_operator("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    wide, out = _softmax_input(x, dtype)
    return jax.nn.log_softmax(wide, axis=dim if x.ndim else None).astype(out)
