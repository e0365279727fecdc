"""Reductions: sums, means, extremes and where they are, over some dims or all."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import (
    accumulation_dtype,
    as_counted,
    canonical,
    cast,
    is_complex,
    is_float,
    jax_dtype,
)
from torch_bridge.lower.arithmetic import absolute
from torch_bridge.lower.features_last import Last, takes_last
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import once
from torch_bridge.lower.tangents import sloped


Dims = Any


def axes_of(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    """The dims torch means: none or an empty list is all of them; scalars have none."""
    if x.ndim == 0:
        return ()
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(x.ndim))
    return tuple(d % x.ndim for d in ([dim] if isinstance(dim, int) else dim))


@register_operator("aten.sum.default", "aten.sum.dim_IntList")
def sum_(x: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    if dtype is not None:
        out = jax_dtype(dtype)
    else:
        out = x.dtype if is_float(x) or is_complex(x) else canonical("int64")
    wide = cast(x, out)
    wide = cast(wide, accumulation_dtype(wide))
    return jnp.sum(wide, axis=axes_of(x, dim), keepdims=keepdim).astype(out)


@register_operator("aten.mean.default", "aten.mean.dim")
@takes_last
def mean(x: jax.Array | Last, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if isinstance(x, Last):
        if sorted(axes_of(x.held, dim)) == list(range(2, x.held.ndim)):
            averaged = mean(x.held, list(range(1, x.held.ndim - 1)), keepdim, dtype)
            return Last(averaged) if keepdim else averaged
        x = x.in_order()
    out = x.dtype if dtype is None else jax_dtype(dtype)
    wide = cast(x, accumulation_dtype(cast(x, out)))
    return jnp.mean(wide, axis=axes_of(x, dim), keepdims=keepdim).astype(out)


@register_operator("aten.prod.default", "aten.prod.dim_int")
def prod(x: jax.Array, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> jax.Array:
    return jnp.prod(as_counted(x, dtype), axis=axes_of(x, dim), keepdims=keepdim)


def argmax(x: jax.Array, axis: int | None = None, keepdims: bool = False) -> jax.Array:
    """Where the first of the largest values is, NaN before all, in int32."""
    return _place(x, axis, keepdims, jax.lax.argmax, jnp.max)


def argmin(x: jax.Array, axis: int | None = None, keepdims: bool = False) -> jax.Array:
    """Where the first of the smallest values is, NaN before all, in int32."""
    return _place(x, axis, keepdims, jax.lax.argmin, jnp.min)


def _place(x: jax.Array, axis: int | None, keepdims: bool, where: Any, end: Any) -> jax.Array:
    if axis is None:
        found = _place(jnp.ravel(x), 0, False, where, end)
        return jnp.reshape(found, (1,) * x.ndim) if keepdims else found
    axis %= x.ndim
    if x.dtype.itemsize < 8:
        found = where(x, axis, np.int32)
    else:  # JAX works `where` out later, when `jax.enable_x64` may have ended
        hit = (x == end(x, axis=axis, keepdims=True)) | (x != x)
        number = jax.lax.broadcasted_iota(np.int32, x.shape, axis)
        found = jnp.min(jnp.where(hit, number, np.int32(x.shape[axis])), axis=axis)
    return jnp.expand_dims(found, axis) if keepdims else found


def _register_extremes(name: str, end: Any, where: Any) -> None:
    """The operators of the largest values, or of the smallest."""

    @register_operator(f"aten.{name}.default", f"aten.a{name}.default")
    def values(x: jax.Array, dim: Dims = (), keepdim: bool = False) -> Any:
        return end(x, axis=axes_of(x, dim), keepdims=keepdim)

    @register_operator(f"aten.{name}.dim")
    def with_index(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
        if x.ndim == 0:
            return number_and_index(x)
        return value_at(x, where(x, axis=dim, keepdims=True), dim, keepdim)

    @register_operator(f"aten.arg{name}.default")
    def index(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        if not x.ndim:
            return jnp.zeros((), canonical("int64"))
        return where(x, axis=dim, keepdims=keepdim).astype(canonical("int64"))


_register_extremes("max", jnp.max, argmax)
_register_extremes("min", jnp.min, argmin)


def value_at(
    x: jax.Array, index: jax.Array, dim: int, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    """One value along a dim and its index, which has one element there."""
    # Values are read through the index, so that the gradient goes to one place, as in torch.
    value = jnp.take_along_axis(x, index, axis=dim)
    index = index.astype(canonical("int64"))
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


def number_and_index(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A 0-d array, which has one value, and its index."""
    return x, jnp.zeros((), canonical("int64"))


@register_operator("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return _truth(jnp.any(x.astype(bool), axis=_truth_axes(x, dim), keepdims=keepdim), x)


@register_operator("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return _truth(jnp.all(x.astype(bool), axis=_truth_axes(x, dim), keepdims=keepdim), x)


def _truth_axes(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    """Of no dims, `any` and `all` reduce none, where sums and their like reduce all."""
    return () if isinstance(dim, Sequence) and not dim else axes_of(x, dim)


def _truth(found: jax.Array, x: jax.Array) -> jax.Array:
    """Of bytes torch gives bytes: they were its truth values before it had others."""
    return found.astype(x.dtype) if x.dtype == jnp.uint8 else found


@register_operator("aten.var.correction", "aten.var.dim")
def var(x: jax.Array, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> jax.Array:
    axes = axes_of(x, dim)
    wide = cast(x, accumulation_dtype(x))
    ddof = 1 if correction is None else correction
    left = math.prod(x.shape[axis] for axis in axes) - ddof
    found = jnp.var(wide, axis=axes, ddof=ddof if left > 0 else 0, keepdims=keepdim)
    if left <= 0:  # torch divides by 0, but its slope by the number that is left
        found = found * jnp.inf
    if is_complex(x):
        return found
    if left <= 0:
        fixed = jax.lax.stop_gradient(wide)
        gaps = (fixed - jnp.mean(fixed, axis=axes, keepdims=True)) * (2 / left if left else jnp.inf)
        found = jax.lax.stop_gradient(found)
        found = found + jnp.sum(sloped(wide, gaps), axis=axes, keepdims=keepdim)
    return found.astype(x.dtype)


@register_operator("aten.std.correction", "aten.std.dim")
@once
def std(x: jax.Array, dim: Dims = None, correction: Any = 1, keepdim: bool = False) -> jax.Array:
    return safe_sqrt(var(x, dim, correction, keepdim))


def safe_sqrt(x: jax.Array) -> jax.Array:
    """The square root with torch's gradient at 0 for norms and deviations: 0, not infinite."""
    zero = x == 0
    return jnp.where(zero, x, jnp.sqrt(jnp.where(zero, jnp.ones((), x.dtype), x)))


@register_operator("aten.var.default")
def var_all(x: jax.Array, unbiased: bool = True) -> jax.Array:
    return var(x, None, int(unbiased))


@register_operator("aten.std.default")
def std_all(x: jax.Array, unbiased: bool = True) -> jax.Array:
    return std(x, None, int(unbiased))


@register_operator("aten.std_mean.correction")
def std_mean(
    x: jax.Array, dim: Dims = None, correction: Any = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return std(x, dim, correction, keepdim), mean(x, dim, keepdim)


@register_operator("aten.var_mean.correction")
def var_mean(
    x: jax.Array, dim: Dims = None, correction: Any = 1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return var(x, dim, correction, keepdim), mean(x, dim, keepdim)


@register_operator("aten.logsumexp.default")
@once
def logsumexp(x: jax.Array, dim: Dims, keepdim: bool = False) -> jax.Array:
    return jax.nn.logsumexp(x, axis=axes_of(x, dim), keepdims=keepdim)


@register_operator("aten.linalg_vector_norm.default")
def vector_norm(
    x: jax.Array, ord: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> jax.Array:
    return _vector_norm(x if dtype is None else cast(x, jax_dtype(dtype)), ord, dim, keepdim)


@once
def _vector_norm(x: jax.Array, ord: Any, dim: Dims, keepdim: bool) -> jax.Array:
    axes = axes_of(x, dim)
    size = jnp.abs(x) if is_complex(x) else absolute(x)
    if ord == 2:
        return safe_sqrt(jnp.sum(jnp.square(size), axis=axes, keepdims=keepdim))
    if ord == float("inf"):
        return jnp.max(size, axis=axes, keepdims=keepdim)
    if ord == float("-inf"):
        return jnp.min(size, axis=axes, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((x != 0).astype(size.dtype), axis=axes, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, axis=axes, keepdims=keepdim)
    norm = _norm_of_sizes(size, ord, axes)
    return norm if keepdim else jnp.squeeze(norm, axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _norm_of_sizes(size: jax.Array, ord: float, axes: tuple[int, ...]) -> jax.Array:
    """Of another order than those that have a name, with dims of one element for `axes`."""
    return _power(jnp.sum(_power(size, ord), axis=axes, keepdims=True), 1.0 / ord)


@_norm_of_sizes.defjvp
def _norm_slopes(ord: float, axes: tuple[int, ...], primals: Any, tangents: Any) -> Any:
    """PyTorch's: 0 where all are 0, and NaN beside infinity, for elements that are 0, too."""
    (size,), (dsize,) = primals, tangents
    norm = _norm_of_sizes(size, ord, axes)
    zero = size == 0
    own = jnp.where(zero, 0, jnp.where(zero, 1, size) ** (ord - 1))
    none = norm == 0
    of_all = jnp.where(none, 0, jnp.where(none, 1, norm) ** (1 - ord))
    return norm, jnp.sum(dsize * (own * of_all), axis=axes, keepdims=True)


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """`x ** exponent` for x >= 0."""
    zero = x == 0
    one = jnp.ones((), x.dtype)
    at_zero = jnp.asarray(jnp.inf if exponent < 0 else 0.0, x.dtype)
    return jnp.where(zero, at_zero, jnp.where(zero, one, x) ** exponent)


@register_operator("aten.renorm.default")
def renorm(x: jax.Array, p: float, dim: int, maxnorm: float) -> jax.Array:
    """Rows along a dim, none longer than a bound. PyTorch leaves one whose norm is NaN alone."""
    others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
    above = vector_norm(cast(x, accumulation_dtype(x)), p, others, True) > maxnorm
    long = jnp.where(above, x, 1)  # elsewhere nothing has a slope, of NaN either
    norm = vector_norm(cast(long, accumulation_dtype(x)), p, others, True)
    factor = maxnorm / (norm + 1e-7)
    return jnp.where(above, long * factor.astype(x.dtype), x)
