"""Tensors made from nothing: arange, full, zeros, and their `_like` forms."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_bridge.dtypes import as_held, canonical, jax_dtype
from torch_bridge.lower.registry import register_operator


def _number_dtype(values: Sequence[Any], dtype: Any) -> np.dtype[Any]:
    if dtype is not None:
        return jax_dtype(dtype)
    if all(isinstance(v, bool) for v in values):
        return np.dtype(np.bool_)
    if any(isinstance(v, complex) for v in values):
        return np.dtype(np.complex64)
    return canonical("int64") if all(isinstance(v, int) for v in values) else np.dtype("float32")


_EXTREMES = {-(2**63): -(2**31), 2**63 - 1: 2**31 - 1}


def _fit(value: Any, dtype: np.dtype[Any]) -> Any:
    """A constant as `dtype` holds it; int64's extremes, which are sentinels, as int32's."""
    if not isinstance(value, int):
        return value
    if dtype == np.int32 and value in _EXTREMES:  # of an int64 that JAX holds so
        return _EXTREMES[value]
    return as_held(value, dtype)


@register_operator("aten.arange.start_step")
def arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_: Any) -> jax.Array:
    kind = _number_dtype((start, end, step), dtype)
    if kind.kind in "iu" and any(isinstance(x, float) for x in (start, end, step)):
        # Which of them is cut to a whole number, and when, is torch's own.
        return jnp.asarray(torch.arange(start, end, step, dtype=dtype).numpy().astype(kind))
    if kind.kind not in "iu" and not all(float(x).is_integer() for x in (start, step)):
        return _rounded(torch.arange, (start, end, step), dtype, kind)
    return jnp.arange(start, end, step, dtype=kind)


@register_operator("aten.arange.default")
def arange_end(end: Any, **kwargs: Any) -> jax.Array:
    return arange(0, end, **kwargs)


@register_operator("aten.arange.start")
def arange_start(start: Any, end: Any, **kwargs: Any) -> jax.Array:
    return arange(start, end, **kwargs)


@register_operator("aten.linspace.default")
def linspace(start: Any, end: Any, steps: int, dtype: Any = None, **_: Any) -> jax.Array:
    kind = jax_dtype(dtype)
    if kind.kind in "iu":  # how its float32 steps are cut to whole numbers is torch's own
        return jnp.asarray(torch.linspace(start, end, steps, dtype=dtype).numpy().astype(kind))
    return _rounded(torch.linspace, (start, end, steps), dtype, kind)


@register_operator("aten.fft_fftfreq.default")
def fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> jax.Array:
    return _frequencies(torch.fft.fftfreq, n, d, dtype)


@register_operator("aten.fft_rfftfreq.default")
def rfftfreq(n: int, d: float = 1.0, *, dtype: Any = None, **_: Any) -> jax.Array:
    return _frequencies(torch.fft.rfftfreq, n, d, dtype)


def _frequencies(of: Callable[..., torch.Tensor], n: int, d: float, dtype: Any) -> jax.Array:
    kind = jax_dtype(dtype)
    return _rounded(of, (n, d), torch.float64 if kind == np.float64 else torch.float32, kind)


def _rounded(
    of: Callable[..., torch.Tensor], numbers: Sequence[Any], dtype: Any, kind: np.dtype[Any]
) -> jax.Array:
    """Of known numbers, computed as torch rounds them: edges of bins are met to the last bit."""
    made = of(*numbers, dtype=dtype or torch.float32)
    wide = made if made.is_complex() else made.double()  # NumPy has no bfloat16 of its own
    return jnp.asarray(wide.numpy().astype(kind))


@register_operator("aten.full.default")
def full(size: Sequence[int], fill_value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    kind = _number_dtype((fill_value,), dtype)
    return jnp.full(tuple(size), _fit(fill_value, kind), kind)


@register_operator("aten.full_like.default")
def full_like(x: jax.Array, fill_value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    kind = np.dtype(x.dtype) if dtype is None else jax_dtype(dtype)
    return jnp.full(x.shape, _fit(fill_value, kind), kind)


@register_operator("aten.scalar_tensor.default")
def scalar_tensor(value: Any, dtype: Any = None, **_: Any) -> jax.Array:
    kind = jax_dtype(dtype)  # torch's default is float32 here, whatever the number is
    return jnp.asarray(_fit(value, kind), kind)


@register_operator("aten.zeros.default", "aten.empty.memory_format", "aten.empty_permuted.default")
def zeros(size: Sequence[int], *_rest: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.zeros(tuple(size), jax_dtype(dtype))


@register_operator("aten.ones.default")
def ones(size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.ones(tuple(size), jax_dtype(dtype))


@register_operator("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    return full_like(x, 0, dtype)


@register_operator("aten.ones_like.default")
def ones_like(x: jax.Array, dtype: Any = None, **_: Any) -> jax.Array:
    return full_like(x, 1, dtype)


@register_operator("aten.new_zeros.default", "aten.new_empty.default")
def new_zeros(x: jax.Array, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.zeros(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@register_operator("aten.new_empty_strided.default")
def new_empty_strided(
    x: jax.Array, size: Sequence[int], stride: Any, dtype: Any = None, **_: Any
) -> jax.Array:
    return new_zeros(x, size, dtype)


@register_operator("aten.empty_strided.default")
def empty_strided(size: Sequence[int], stride: Any, dtype: Any = None, **_: Any) -> jax.Array:
    return zeros(size, dtype=dtype)


@register_operator("aten.new_ones.default")
def new_ones(x: jax.Array, size: Sequence[int], dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.ones(tuple(size), x.dtype if dtype is None else jax_dtype(dtype))


@register_operator("aten.new_full.default")
def new_full(
    x: jax.Array, size: Sequence[int], value: Any, dtype: Any = None, **_: Any
) -> jax.Array:
    kind = np.dtype(x.dtype) if dtype is None else jax_dtype(dtype)
    return jnp.full(tuple(size), _fit(value, kind), kind)


@register_operator("aten.fill.Scalar", "aten.fill.Tensor")
def fill(x: jax.Array, value: Any) -> jax.Array:
    return jnp.full(x.shape, _fit(value, np.dtype(x.dtype)), x.dtype)


@register_operator("aten.tril_indices.default")
def tril_indices(row: int, col: int, offset: int = 0, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.asarray(np.tril_indices(row, offset, col), _number_dtype((0,), dtype))


@register_operator("aten.triu_indices.default")
def triu_indices(row: int, col: int, offset: int = 0, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.asarray(np.triu_indices(row, offset, col), _number_dtype((0,), dtype))


@register_operator("aten.eye.default", "aten.eye.m")
def eye(n: int, m: int | None = None, dtype: Any = None, **_: Any) -> jax.Array:
    return jnp.eye(n, m, dtype=jax_dtype(dtype))
