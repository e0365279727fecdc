"""Losses that export keeps whole or in half."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.losses import picked as pick_label
from torch_bridge.dtypes import cast, is_float, promote
from torch_bridge.lower.activation import log_softmax
from torch_bridge.lower.registry import register_operator


_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def _reduce(x: jax.Array, reduction: int) -> jax.Array:
    if reduction == _MEAN:
        return jnp.mean(x)
    return jnp.sum(x) if reduction == _SUM else x


@register_operator("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(
    x: jax.Array, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """Shapes: x `(N, C, *rest)` or `(C,)`, target `(N, *rest)` or `()`."""
    axis = 1 if x.ndim > 1 else 0
    kept = target != ignore_index
    safe = jnp.where(kept, target, 0)
    picked = -pick_label(x, safe, axis)
    scale = kept.astype(x.dtype)
    if weight is not None:
        scale = scale * jnp.take(weight.astype(x.dtype), safe)
    losses = jnp.where(kept, picked * scale, jnp.zeros((), x.dtype))
    total = jnp.sum(scale)
    if reduction == _NONE:
        return losses, jnp.zeros((), x.dtype)
    return (jnp.sum(losses) / total if reduction == _MEAN else jnp.sum(losses)), total


@register_operator("aten.nll_loss.default", "aten.nll_loss_nd.default")
def nll_loss(
    x: jax.Array, target: Any, weight: Any = None, reduction: int = _MEAN, ignore_index: int = -100
) -> jax.Array:
    return nll_loss_forward(x, target, weight, reduction, ignore_index)[0]


@register_operator("aten.multi_margin_loss.default")
def multi_margin_loss(
    x: jax.Array, target: jax.Array, p: float = 1, margin: float = 1, weight: Any = None,
    reduction: int = _MEAN,
) -> jax.Array:  # fmt: skip
    """Shapes: x `(N, C)` or `(C,)`, target `(N,)` or `()`. At its kink the slope is 0."""
    rows, labels = jnp.atleast_2d(x), jnp.ravel(target)
    own = pick_label(rows, labels, 1)[:, None]
    margins = margin - own + rows
    counts = (margins > 0) & (jnp.arange(rows.shape[1]) != labels[:, None])
    margins = jnp.where(counts, margins, 0)
    terms = margins if p == 1 else margins * margins
    if weight is not None:
        terms = terms * jnp.take(cast(weight, x.dtype), labels)[:, None]
    losses = jnp.sum(terms, 1) / rows.shape[1]
    losses = jnp.where((labels < 0) | (labels >= rows.shape[1]), jnp.nan, losses)
    return _reduce(jnp.reshape(losses, target.shape), reduction)


@register_operator("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss_forward(
    x: jax.Array, target: jax.Array, reduction: int
) -> tuple[jax.Array, jax.Array]:
    """Shapes: x, target `(N, C)`, `(C,)` or `()`; a row's labels end at its first negative one."""
    shape, x, target = target.shape, jnp.atleast_1d(x), jnp.atleast_1d(target)
    classes = x.shape[-1]
    listed = jnp.cumprod(target >= 0, -1).astype(bool)
    labels = jnp.where(listed, target, 0)
    is_target = jnp.any((labels[..., None] == jnp.arange(classes)) & listed[..., None], -2)
    own = jnp.take_along_axis(x, labels, -1)
    margins = 1 - own[..., :, None] + x[..., None, :]
    counts = listed[..., :, None] & ~is_target[..., None, :] & (margins > 0)
    losses = jnp.sum(jnp.where(counts, margins, 0), (-2, -1)) / classes
    losses = jnp.where(jnp.any((target < -1) | (target >= classes), -1), jnp.nan, losses)
    return _reduce(losses, reduction), jnp.reshape(is_target, shape).astype(x.dtype)


@register_operator("aten.multilabel_margin_loss.default")
def multilabel_margin_loss(x: jax.Array, target: jax.Array, reduction: int = _MEAN) -> jax.Array:
    return multilabel_margin_loss_forward(x, target, reduction)[0]


@register_operator("aten.mse_loss.default")
def mse_loss(x: jax.Array, target: Any, reduction: int = _MEAN) -> jax.Array:
    a, b = promote(x, target)
    return _reduce(jnp.square(a - b), reduction)


@register_operator("aten.binary_cross_entropy.default")
def binary_cross_entropy(
    x: jax.Array, target: Any, weight: Any = None, reduction: int = _MEAN
) -> jax.Array:
    losses = _cross_entropy(*promote(x, target))
    return _reduce(losses if weight is None else losses * weight, reduction)


@jax.custom_jvp
def _cross_entropy(x: jax.Array, target: jax.Array) -> jax.Array:
    """Of one probability each; torch clamps both logarithms at -100."""
    low = jnp.asarray(-100.0, x.dtype)
    return -(target * jnp.maximum(jnp.log(x), low) + (1 - target) * jnp.maximum(jnp.log1p(-x), low))


@_cross_entropy.defjvp
def _cross_entropy_jvp(values: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, target), (dx, dtarget) = values, tangents
    # torch's own: the quotient is bounded, not the logarithms.
    slope = (x - target) / jnp.maximum((1 - x) * x, jnp.asarray(1e-12, x.dtype))
    return _cross_entropy(x, target), slope * dx + (jnp.log1p(-x) - jnp.log(x)) * dtarget


@register_operator("aten.huber_loss.default")
def huber_loss(x: jax.Array, target: Any, reduction: int = _MEAN, delta: float = 1.0) -> jax.Array:
    a, b = promote(x, target)
    gap = jnp.abs(a - b)
    near = jnp.minimum(gap, delta)  # an infinite gap has no square, whose gradient is NaN
    losses = jnp.where(gap < delta, 0.5 * jnp.square(near), delta * (gap - 0.5 * delta))
    return _reduce(losses, reduction)


@register_operator("aten.smooth_l1_loss.default")
def smooth_l1_loss(
    x: jax.Array, target: Any, reduction: int = _MEAN, beta: float = 1.0
) -> jax.Array:
    a, b = promote(x, target)
    gap = jnp.abs(a - b)
    if beta == 0:
        return _reduce(gap, reduction)
    near = jnp.minimum(gap, beta)
    losses = jnp.where(gap < beta, 0.5 * near * near / beta, gap - 0.5 * beta)
    return _reduce(losses, reduction)


@register_operator("aten.cross_entropy_loss.default")
def cross_entropy_loss(
    x: jax.Array,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Shapes: x `(N, C, *rest)` or `(C,)`; target of classes `(N, *rest)`, or like x."""
    axis = 1 if x.ndim > 1 else 0
    classes = x.shape[axis]
    logs = log_softmax(x, axis)
    scale: Any = 1
    if weight is not None:
        scale = jnp.reshape(cast(weight, x.dtype), (-1, *(1,) * (x.ndim - axis - 1)))
    if is_float(target):
        shares = cast(target, x.dtype) * (1 - label_smoothing) + label_smoothing / max(classes, 1)
        losses = -jnp.sum(logs * shares * scale, axis=axis)
        number: Any = jnp.asarray(x.size // max(classes, 1), x.dtype)  # of none a mean is NaN
        return jnp.sum(losses) / number if reduction == _MEAN else _reduce(losses, reduction)
    found, total = nll_loss_forward(logs, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return found
    kept = target != ignore_index
    smooth = jnp.where(kept, -jnp.sum(logs * scale, axis=axis), jnp.zeros((), x.dtype))
    if reduction == _MEAN:
        number = total if weight is not None else jnp.sum(kept.astype(x.dtype))
        smooth = jnp.sum(smooth) / number
    else:
        smooth = _reduce(smooth, reduction)
    return (1 - label_smoothing) * found + label_smoothing / classes * smooth
