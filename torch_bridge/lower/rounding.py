"""Roundings as PyTorch's kernels have them.

Half precision is computed in float32 and rounded once: an operator that JAX writes as several
operations would round after each. A product that is `rounded` is so before it is added to
something.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.compat import traced_platform
from torch_bridge.dtypes import accumulation_dtype, cast, is_array, is_float, result_dtype
from torch_bridge.lower.features_last import Last
from torch_bridge.lower.tangents import divide


def once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of arrays compute 16-bit ones in float32, and rounds its results once.

    Args:
        fn: of arrays and Python values; what it returns has torch's common dtype of them.

    Returns:
        The same function. Numbers beside 16-bit arrays keep all their digits: `0.1` is not rounded
        before it multiplies.

    Example:
        >>> import jax.numpy as jnp
        >>> once(lambda x: x + 1 - x)(jnp.asarray(300, jnp.bfloat16))
        Array(1, dtype=bfloat16)
    """

    @functools.wraps(fn)
    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if is_array(x)]
        if not any(map(_is_narrow, given)):
            return fn(*args, **kwargs)
        narrow = result_dtype(*given)
        wide = accumulation_dtype(np.empty(0, narrow))
        out = fn(
            *(_widened(x, wide) for x in args), **{k: _widened(x, wide) for k, x in kwargs.items()}
        )
        return jax.tree.map(lambda x: x.astype(narrow) if x.dtype == wide else x, out)

    return computed


def exact_numbers(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`once`, for one operation of arrays, where an operand is a number: it keeps all its digits.

    Of two 16-bit arrays one operation is rounded once as it is, and keeps no wider values for its
    gradient.

    Args:
        fn: as for `once`.

    Returns:
        The same function.

    Example:
        >>> import jax.numpy as jnp
        >>> float(exact_numbers(lambda x, y: x * y)(jnp.asarray(1000, jnp.bfloat16), 0.1))
        100.0
    """
    wide = once(fn)

    @functools.wraps(fn)
    def computed(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or any(isinstance(v, float) or _is_wide_number(v) for v in (x, y)):
            return wide(x, y, *args, **kwargs)
        shape = np.broadcast_shapes(np.shape(x), np.shape(y))
        return fn(broadcast(x, shape), broadcast(y, shape))

    return computed


def _is_wide_number(x: Any) -> bool:
    return is_array(x) and not x.ndim and is_float(x) and not _is_narrow(x)


def _is_narrow(x: Any) -> bool:
    return is_float(x) and np.dtype(x.dtype).itemsize < 4


def _widened(x: Any, dtype: np.dtype[Any]) -> Any:
    return cast(x, dtype) if is_array(x) and _is_narrow(x) else x


def quotient(x: Any, y: Any) -> Any:
    """`x / y` of two arrays of one dtype, 16 bits rounded once.

    Where `y` was spread over a larger shape, XLA multiplies by its reciprocal instead: in 16 bits
    that rounds twice. So it is done in float32; the gradient holds the arrays as they came.
    """
    if not _is_narrow(x):
        return divide(x, y)
    return jax.checkpoint(once(divide), prevent_cse=False)(x, y)


@functools.lru_cache(maxsize=256)  # equal nodes have one function: equal blocks are found by it
def as_it_runs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which rounds what is known while it is traced as what comes later.

    XLA computes `log` of a constant by other means than that of an array: their quotient is not 1
    where both are of one number.
    """

    @functools.wraps(fn)
    def computed(*args: Any, **kwargs: Any) -> Any:
        given = [x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, jax.Array)]
        if any(isinstance(x, jax.core.Tracer) for x in given):
            return fn(*args, **kwargs)
        with jax.ensure_compile_time_eval():
            return fn(*args, **kwargs)

    return computed


@jax.custom_jvp
def rounded(x: jax.Array) -> jax.Array:
    """A float as it is, which a compiler has to round before it adds it to something.

    XLA drops barriers, casts and a `reduce_precision` that change nothing before it contracts a
    product and a sum. A choice of two values it keeps: these are equal, which it does not see.
    """
    return jnp.where(jnp.isfinite(x), x, x + x)


rounded.defjvps(lambda dx, out, x: dx)


@functools.lru_cache(maxsize=256)  # equal nodes have one function: equal blocks are found by it
def with_rounded_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose floats are `rounded`."""

    @functools.wraps(fn)
    def computed(*args: Any, **kwargs: Any) -> Any:
        return _rounded(fn(*args, **kwargs))

    return computed


def _rounded(out: Any) -> Any:
    if isinstance(out, Last):
        return Last(rounded(out.held))
    if isinstance(out, tuple):
        return tuple(map(_rounded, out))
    return rounded(out) if is_float(out) else out


def sum_dtype(x: Any) -> np.dtype[Any]:
    """The dtype of a product of arrays like `x` that is rounded after what follows it.

    On GPUs it is that of `x`: XLA adds a bias within the product's kernel if all have one dtype,
    and rounds once there, too; a float32 product would have to be written out.
    """
    return np.dtype(x.dtype) if traced_platform() == "gpu" else accumulation_dtype(x)


def product_dtype(x: Any, bias: Any) -> np.dtype[Any]:
    """The dtype of a product of arrays like `x`, to which a bias may be added (`with_bias`)."""
    return np.dtype(x.dtype) if bias is None else sum_dtype(x)


def broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """An operand in a larger shape: its gradient is added up in float32 and rounded once, as
    PyTorch's sums are. (The transpose of a broadcast of 16 bits adds in 16 bits, on CPUs.)"""
    if not isinstance(x, jax.Array) or x.shape == shape or accumulation_dtype(x) == x.dtype:
        return x
    return jnp.broadcast_to(x.astype(accumulation_dtype(x)), shape).astype(x.dtype)


def with_bias(product: jax.Array, bias: Any, dtype: Any) -> jax.Array:
    """`product + bias`, of `product_dtype`, as an array of `dtype`."""
    if bias is None:
        return product
    return (product + cast(cast(bias, dtype), product.dtype)).astype(dtype)
