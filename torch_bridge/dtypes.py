"""Dtypes: the map between torch, numpy and JAX, and torch's own promotion rules.

JAX promotes differently from torch (a zero-dimensional float32 array widens a bfloat16 one, in
torch it does not) and may be set to refuse implicit promotion altogether. So every lowering casts
explicitly, by torch's rule, and never leaves it to `jax.numpy`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from fzero.errors import ConversionError


_PAIRS: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.float32, np.float32),
    (torch.bfloat16, ml_dtypes.bfloat16),
    (torch.float16, np.float16),
    (torch.float64, np.float64),
    (torch.int64, np.int64),
    (torch.int32, np.int32),
    (torch.int16, np.int16),
    (torch.int8, np.int8),
    (torch.uint8, np.uint8),
    (torch.uint16, np.uint16),
    (torch.uint32, np.uint32),
    (torch.uint64, np.uint64),
    (torch.bool, np.bool_),
    (torch.complex64, np.complex64),
    (torch.complex128, np.complex128),
    (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz),
    (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz),
    (torch.float8_e8m0fnu, ml_dtypes.float8_e8m0fnu),
)
_TO_NUMPY = {pair[0]: np.dtype(pair[1]) for pair in _PAIRS}
_TO_TORCH = {np.dtype(pair[1]): pair[0] for pair in _PAIRS}
_NARROW = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype with the same bits as a torch dtype.

    Example:
        >>> numpy_dtype(torch.bfloat16).name
        'bfloat16'
    """
    if dtype not in _TO_NUMPY:
        raise ConversionError(
            f"no JAX dtype has the bits of {dtype}: give complex32 as .cfloat(), quantised"
            " tensors as .dequantize()"
        )
    found: np.dtype[Any] = _TO_NUMPY[dtype]
    return found


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype with the same bits as a numpy or JAX dtype."""
    return _TO_TORCH[np.dtype(dtype)]


def x64_enabled() -> bool:
    """Whether JAX may hold 64-bit values in this process."""
    return bool(jax.config.read("jax_enable_x64"))


def canonical(dtype: Any) -> np.dtype[Any]:
    """The dtype that JAX holds instead of `dtype`: 64-bit ones narrow when x64 is off."""
    exact: np.dtype[Any] = np.dtype(dtype)
    return exact if x64_enabled() else _NARROW.get(exact, exact)


def jax_dtype(dtype: torch.dtype | None) -> np.dtype[Any]:
    """The dtype that a tensor of torch's `dtype` has in JAX; None stands for torch's float32."""
    return canonical(numpy_dtype(torch.float32 if dtype is None else dtype))


def is_array(x: Any) -> bool:
    """Whether a value is an array of JAX or NumPy."""
    return isinstance(x, jax.Array | np.ndarray)


def is_float(x: Any) -> bool:
    """Whether an array or dtype is floating point (bfloat16 included, complex not)."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.floating))


def is_complex(x: Any) -> bool:
    """Whether an array or dtype is complex."""
    return bool(jnp.issubdtype(getattr(x, "dtype", x), jnp.complexfloating))


def is_bool(x: Any) -> bool:
    """Whether an array or dtype is boolean."""
    return bool(np.dtype(getattr(x, "dtype", x)) == np.bool_)


def _promote(a: np.dtype[Any] | None, b: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """torch's promotion of two dtypes (jnp's own is refused in strict mode)."""
    if a is None or b is None or a == b:
        return b if a is None else a
    low, high = sorted((a, b), key=_category)
    if _category(low) < _category(high) < 3:
        return high
    if _category(high) == 3:
        wide = 16 in (low.itemsize, high.itemsize) or low == np.float64
        return np.dtype(np.complex128 if wide else np.complex64)
    if _category(high) == 2 and low.itemsize == high.itemsize:
        return np.dtype(np.float32)  # float16 with bfloat16
    if _category(high) == 2:
        return max(low, high, key=lambda d: d.itemsize)
    return np.promote_types(low, high)


def _category(dtype: np.dtype[Any]) -> int:
    """bool, integer, float, complex: 0 to 3."""
    if is_complex(dtype):
        return 3
    return 2 if is_float(dtype) else int(not is_bool(dtype))


def _combine(higher: np.dtype[Any] | None, lower: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """One step of torch's result type: `lower` counts only if its category is above `higher`'s."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if is_complex(higher) or (is_float(higher) and not is_complex(lower)):
        return higher
    if is_float(higher):  # float tensor with a complex scalar
        return _promote(higher, np.dtype(np.complex64))
    if is_bool(higher) or is_float(lower) or is_complex(lower):
        return _promote(higher, lower)
    return higher


def result_dtype(*operands: Any) -> np.dtype[Any]:
    """The dtype torch gives an elementwise operation on arrays and Python numbers.

    Tensors with dimensions come first, zero-dimensional ones second, Python numbers last; a later
    group counts only when it is of a higher category (bool < integer < float < complex).

    Args:
        *operands: arrays and Python numbers.

    Returns:
        The numpy dtype of the result, narrowed when x64 is off.

    Example:
        >>> result_dtype(jnp.ones(3, jnp.bfloat16), jnp.ones((), jnp.float32)).name
        'bfloat16'
    """
    dims = zeros = wrapped = None
    for x in operands:
        if isinstance(x, bool):
            wrapped = _promote(wrapped, np.dtype(np.bool_))
        elif isinstance(x, int):
            wrapped = _promote(wrapped, canonical(np.int64))
        elif isinstance(x, float):
            wrapped = _promote(wrapped, np.dtype(np.float32))
        elif isinstance(x, complex):
            wrapped = _promote(wrapped, np.dtype(np.complex64))
        elif x.ndim:
            dims = _promote(dims, np.dtype(x.dtype))
        else:
            zeros = _promote(zeros, np.dtype(x.dtype))
    result = _combine(_combine(dims, zeros), wrapped)
    if result is None:
        raise TypeError("result_dtype needs at least one operand")
    return canonical(result)


def cast(x: Any, dtype: Any) -> jax.Array:
    """`x` (array or Python number) as a JAX array of `dtype`, without a copy where it is one."""
    return jnp.asarray(as_held(x, np.dtype(dtype)) if isinstance(x, int) else x, dtype=dtype)


def as_held(value: int, dtype: np.dtype[Any]) -> int:
    """A number of Python as a tensor of `dtype` holds it: -100 is 156 among bytes, as in torch.

    Raises:
        ConversionError: it does not fit into an integer dtype. (torch raises where it fills, and
            wraps where it computes and compares.)
    """
    if dtype.kind not in "iu" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        return value
    if dtype.kind == "u" and -np.iinfo(dtype).max <= value < 0:
        return value + np.iinfo(dtype).max + 1
    raise ConversionError(
        f"the number {value} does not fit into {dtype}: write it with a tensor of a wider dtype,"
        " as x.long()"
    )


def as_counted(x: Any, dtype: torch.dtype | None) -> jax.Array:
    """What torch's `prod` or `cumsum` takes of `x`: in `dtype`, or bool and integers in 64 bits."""
    if dtype is not None:
        return cast(x, jax_dtype(dtype))
    return jnp.asarray(x) if is_float(x) or is_complex(x) else cast(x, canonical("int64"))


def promote(*operands: Any) -> tuple[jax.Array, ...]:
    """All operands cast to torch's common dtype."""
    dtype = result_dtype(*operands)
    return tuple(cast(x, dtype) for x in operands)


def promote_float(*operands: Any) -> tuple[jax.Array, ...]:
    """Like `promote`, but integers and booleans become float32, as for division and `exp`."""
    dtype = result_dtype(*operands)
    if not (is_float(dtype) or is_complex(dtype)):
        dtype = np.dtype(np.float32)
    return tuple(cast(x, dtype) for x in operands)


def accumulation_dtype(x: Any) -> np.dtype[Any]:
    """The dtype torch computes statistics in: float32 for half precision, else that of `x`."""
    dtype = np.dtype(x.dtype)
    return np.dtype(np.float32) if is_float(dtype) and dtype.itemsize < 4 else dtype
