"""Normalisation. Half-precision inputs are normalised in float32, as torch does."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange.rows import row_axes
from torch_bridge.dtypes import accumulation_dtype, cast
from torch_bridge.lower.features_last import Last, features, like, takes_last
from torch_bridge.lower.registry import register_operator


def _affine(x: jax.Array, weight: Any, bias: Any, shape: Sequence[int] | None = None) -> jax.Array:
    for factor, apply in ((weight, jnp.multiply), (bias, jnp.add)):
        if factor is not None:
            wide = cast(factor, x.dtype)
            x = apply(x, wide if shape is None else jnp.reshape(wide, shape))
    return x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance, in two passes: one pass loses digits where mean >> deviation."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


@_moments.defjvp
def _(axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    """A change of the mean leaves the variance alone: automatically its zero would be summed."""
    (x,), (dx,) = primals, tangents
    mean, var = _moments(x, axes)
    change = jnp.mean((x - mean) * dx, axis=axes, keepdims=True)
    return (mean, var), (jnp.mean(dx, axis=axes, keepdims=True), 2.0 * change)


@register_operator("torch_bridge.sum_over_devices.default")
def sum_over_devices(x: jax.Array) -> jax.Array:
    axes = row_axes()
    return jax.lax.psum(x, axes) if axes else x


@register_operator("aten.layer_norm.default")
def layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> jax.Array:
    wide = cast(x, accumulation_dtype(x))
    mean, var = _moments(wide, tuple(range(x.ndim - len(normalized_shape), x.ndim)))
    out = (wide - mean) * jax.lax.rsqrt(var + eps)
    return _affine(out, weight, bias).astype(x.dtype)


@register_operator("aten.native_layer_norm.default")
def native_layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = cast(x, accumulation_dtype(x))
    mean, var = _moments(wide, tuple(range(x.ndim - len(normalized_shape), x.ndim)))
    # torch keeps both in the dtype of the weights, without a gradient.
    kept = x.dtype if weight is None else weight.dtype
    stats = (each.astype(kept) for each in _without_gradient(mean, var, eps))
    return layer_norm(x, normalized_shape, weight, bias, eps), *stats


@register_operator("aten.rms_norm.default")
def rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> jax.Array:
    wide = cast(x, accumulation_dtype(x))
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    # torch's default is the machine epsilon of the computation, not of the input
    floor = float(jnp.finfo(wide.dtype).eps) if eps is None else eps
    out = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + floor)
    return _affine(out, weight, None).astype(x.dtype)


@register_operator("aten._fused_rms_norm.default")
def fused_rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[jax.Array, None]:
    return rms_norm(x, normalized_shape, weight, eps), None


@register_operator("aten.group_norm.default")
def group_norm(
    x: jax.Array,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> jax.Array:
    wide = cast(x, accumulation_dtype(x))
    n, c, *spatial = x.shape
    grouped = jnp.reshape(wide, (n, num_groups, math.prod(x.shape[1:]) // num_groups))
    mean, var = _moments(grouped, (2,))
    out = jnp.reshape((grouped - mean) * jax.lax.rsqrt(var + eps), x.shape)
    return _affine(out, weight, bias, (1, c, *(1,) * len(spatial))).astype(x.dtype)


@register_operator("aten.native_group_norm.default")
def native_group_norm(
    x: jax.Array, weight: Any, bias: Any, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = jnp.reshape(cast(x, accumulation_dtype(x)), (n, group, c * hxw // group))
    mean, var = _moments(rows, (2,))
    stats = (jnp.squeeze(each, 2).astype(x.dtype) for each in (mean, jax.lax.rsqrt(var + eps)))
    return group_norm(x, group, weight, bias, eps), *stats


def _batch_norm_apply(
    x: jax.Array | Last, mean: jax.Array, var: jax.Array, weight: Any, bias: Any, eps: float
) -> Any:
    array, axis = features(x)
    shape = [1] * array.ndim
    shape[axis] = -1
    wide = cast(array, accumulation_dtype(array))
    # One product and one sum per element, as torch has it: the rest is per channel.
    scale = jax.lax.rsqrt(cast(var, wide.dtype) + eps)
    if weight is not None:
        scale = scale * cast(weight, wide.dtype)
    shift = -cast(mean, wide.dtype) * scale
    if bias is not None:
        shift = shift + cast(bias, wide.dtype)
    out = wide * jnp.reshape(scale, shape) + jnp.reshape(shift, shape)
    return like(x, out.astype(array.dtype))


def _batch_moments(x: jax.Array | Last) -> tuple[jax.Array, jax.Array]:
    array, axis = features(x)
    axes = tuple(own for own in range(array.ndim) if own != axis)
    mean, var = _moments(cast(array, accumulation_dtype(array)), axes)
    return jnp.reshape(mean, (-1,)), jnp.reshape(var, (-1,))


@register_operator(
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.default"
)
@takes_last
def batch_norm_functional(
    x: jax.Array | Last,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    """BatchNorm that returns its new statistics: (out, mean, invstd, running mean, running var)."""
    if not training:
        out = _batch_norm_apply(x, running_mean, running_var, weight, bias, eps)
        return out, *_no_statistics(x), running_mean, running_var
    mean, var = _batch_moments(x)
    out = _batch_norm_apply(x, mean, var, weight, bias, eps)
    array, axis = features(x)
    count = array.size // array.shape[axis]
    # Normalised with the biased variance, but remembered unbiased.
    unbiased = var * (count / max(count - 1, 1))
    kept = array.dtype if weight is None else weight.dtype
    old_mean, old_var = cast(running_mean, mean.dtype), cast(running_var, var.dtype)
    new_mean = old_mean * (1.0 - momentum) + jax.lax.stop_gradient(mean) * momentum
    new_var = old_var * (1.0 - momentum) + jax.lax.stop_gradient(unbiased) * momentum
    return (
        out,
        *(each.astype(kept) for each in _without_gradient(mean, var, eps)),
        new_mean.astype(running_mean.dtype),
        new_var.astype(running_var.dtype),
    )


@register_operator("aten._batch_norm_with_update_functional.default")
def batch_norm_with_update(
    x: jax.Array, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float,
    eps: float,
) -> tuple[Any, ...]:  # fmt: skip
    found = batch_norm_functional(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return *found[:3], jnp.zeros((0,), jnp.uint8), *found[3:]


@register_operator("aten._native_batch_norm_legit_no_training.default")
@takes_last
def batch_norm_no_training(
    x: jax.Array | Last,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[Any, ...]:
    out = _batch_norm_apply(x, running_mean, running_var, weight, bias, eps)
    return out, *_no_statistics(x)


def _no_statistics(x: jax.Array | Last) -> tuple[jax.Array, jax.Array]:
    """What torch returns for the moments of a batch that it did not look at."""
    empty = jnp.zeros((0,), features(x)[0].dtype)
    return empty, empty


@register_operator("aten.batch_norm.default")
@takes_last
def batch_norm(
    x: jax.Array | Last,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """Of a graph in eval mode; in train mode the operator is decomposed to show what it writes."""
    assert not training
    return _batch_norm_apply(x, running_mean, running_var, weight, bias, eps)


@register_operator("aten._native_batch_norm_legit.no_stats")
@takes_last
def batch_norm_no_stats(
    x: jax.Array | Last, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    mean, var = _batch_moments(x)
    out = _batch_norm_apply(x, mean, var, weight, bias, eps)
    return out, *_without_gradient(mean, var, eps)


def _without_gradient(mean: jax.Array, var: jax.Array, eps: float) -> Any:
    """The moments of a batch as torch returns them: for its own gradient, without one."""
    return jax.lax.stop_gradient((mean, jax.lax.rsqrt(var + eps)))


@register_operator("aten._weight_norm.default")
def weight_norm(v: jax.Array, g: Any, dim: int = 0) -> jax.Array:
    """`v` rescaled so that its norm over all dims but `dim` is `g`."""
    axes = tuple(range(v.ndim)) if dim == -1 else tuple(a for a in range(v.ndim) if a != dim)
    wide = cast(v, accumulation_dtype(v))
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=axes, keepdims=True))
    return (wide * (cast(g, wide.dtype) / norm)).astype(v.dtype)
