"""Frozen weights in 4 or 8 bits: records of 64 elements and a scale, widened where they are used.

A record is a row of bytes: the elements, then the four bytes of their scale, so that whatever
divides, gathers or writes records keeps the two together. With double quantisation a record has 256
such blocks: their elements, a byte for each one's scale, and what these bytes mean.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fzero.errors import StateError
from fzero.precision import round_to
from fzero.sharding.lazy_array import Index, LazyArray


# Elements of a record, as QLoRA has them.
BLOCK = 64
_SCALE_BYTES = 4
# Quantiles of a normal distribution, with an exact 0, over the largest: appendix E of the paper.
_NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip
_HALFWAY = (_NF4[1:] + _NF4[:-1]) / 2
# Blocks of a record, which "nf4-double" keeps the scales of in a byte each, as QLoRA has them.
_BLOCKS = {"nf4": 1, "int8": 1, "nf4-double": 256}
_ELEMENT_BYTES = {"nf4": BLOCK // 2, "int8": BLOCK, "nf4-double": 256 * BLOCK // 2}
# The bytes of a record tell what is in it.
_WIDTHS = {
    "nf4": _ELEMENT_BYTES["nf4"] + _SCALE_BYTES,
    "int8": _ELEMENT_BYTES["int8"] + _SCALE_BYTES,
    "nf4-double": _ELEMENT_BYTES["nf4-double"] + _BLOCKS["nf4-double"] + 2 * _SCALE_BYTES,
}
# The byte of a scale that is not finite; those of others are less.
_NAN = 255
# What `checkpoint_name` calls widened weights, which no policy of fzero keeps.
WIDENED = "fzero.widened"


def quantized_shape(shape: tuple[int, ...], to: str = "nf4") -> tuple[int, int]:
    """The shape of `quantize`'s records of an array.

    Raises:
        StateError: another word than "nf4", "nf4-double" or "int8".

    Example:
        >>> quantized_shape((4096, 4096)), quantized_shape((3, 5), "int8")
        ((262144, 36), (1, 68))
        >>> quantized_shape((4096, 4096), "nf4-double")
        (1024, 8456)
    """
    if to not in _WIDTHS:
        raise StateError(f"quantize: to={to!r}: expected one of {sorted(_WIDTHS)}")
    return -(-math.prod(shape) // _elements(to)), _WIDTHS[to]


def _elements(to: str) -> int:
    """How many elements a record stands for."""
    return BLOCK * _BLOCKS[to]


def quantize(array: Any, to: str = "nf4") -> np.ndarray[Any, Any]:
    """A weight in blocks of 64 elements (row after row; the last one filled up with zeros).

    With "nf4" an element is the nearest of 16 levels times its block's largest magnitude: 4.5 bits
    an element. With "nf4-double" that magnitude is kept in 8 bits, as one of 255 between the least
    and the largest of 256 blocks, the closer together the smaller they are: 4.13 bits an element,
    where their number is a multiple of 16,384, to which they are filled up. With "int8" an element
    is a whole number of 127ths of the magnitude: 8.5 bits. A block in which something is not finite
    is NaN. For parameters that a model freezes: such records are kept, divided, gathered and saved
    like any array, and `dequantize` widens them where they are used.

    Args:
        array: floats of any shape.
        to: "nf4", "nf4-double" or "int8".

    Returns:
        uint8 on the host, `quantized_shape(array.shape, to)`: a row for each block, or for 256.

    Raises:
        StateError: `array` has no floats or is traced, or another word than those.

    Example:
        >>> import numpy as np
        >>> records = quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64))
        >>> records.shape, float(dequantize(records, (2, 64), "float32")[1, 63])
        ((2, 36), 1.0)

    Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E; elements and scales
        of "nf4" are those of bitsandbytes' `quantize_4bit`. Its second quantisation has other
        levels (floats of 8 bits around the mean of the whole weight).
    """
    num, _ = quantized_shape(np.shape(array), to)
    if isinstance(array, jax.core.Tracer):  # within `init`, say, which fz.init traces
        raise StateError(
            "quantize: got a traced array: it works on the host. Quantise outside, and give the"
            " records as initial values: Model(init=(params, buffers)), model.with_init(pair)"
        )
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, np.floating):
        raise StateError(f"quantize: expected floats, got {array.dtype}")
    flat = np.zeros(num * _elements(to), np.float32)
    flat[: array.size] = array.reshape(-1)
    blocks = flat.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, initial=0)
    scale = largest / np.float32(127) if to == "int8" else largest
    # Of what is below float32's normal numbers, the inverse may be infinite.
    usable = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=usable)
    whole = np.where(usable[:, None], blocks, 0) * inverse[:, None]
    if to == "int8":
        codes = np.clip(np.rint(whole), -127, 127).astype(np.int8).view("u1")
    else:
        levels = np.searchsorted(_HALFWAY, whole).astype(np.uint8)
        codes = (levels[:, ::2] << 4) | levels[:, 1::2]
    scale = np.where(np.isfinite(scale), scale, np.float32(np.nan)).astype("<f4")
    scales = _squared(scale.reshape(num, _BLOCKS[to])) if to == "nf4-double" else _bytes_of(scale)
    return np.concatenate([codes.reshape(num, _ELEMENT_BYTES[to]), scales], axis=1)


def _bytes_of(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Float32 numbers `(n,)` as `(n, 4)` bytes."""
    return np.ascontiguousarray(numbers, "<f4").view(np.uint8).reshape(-1, _SCALE_BYTES)


def _squared(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scales of records' blocks, `(n, 256)`: a byte each, then the least one and the step.

    A scale is the least one and as many steps as the square of its byte says: one large block
    among small ones does not take their scales.
    """
    finite = np.isfinite(scales)
    seen = finite & (scales > 0)  # blocks of zeros are that with any scale
    low = np.min(scales, axis=1, where=seen, initial=np.inf).astype(np.float64)
    high = np.max(scales, axis=1, where=seen, initial=0.0).astype(np.float64)
    low = np.minimum(low, high)
    largest = _NAN - 1
    step = ((high - low) / largest**2).astype(np.float32)
    # Upwards to 8 bits of mantissa: the 16 bits of a square times those are exact, so that no
    # program rounds a scale otherwise for having fused the product and the sum.
    step = ((step.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    away = np.where(seen, scales - low.astype(np.float32)[:, None], 0)
    squares = np.divide(away, step[:, None], out=np.zeros_like(away), where=step[:, None] > 0)
    codes = np.clip(np.rint(np.sqrt(squares)), 0, largest)
    codes = np.where(finite, codes, _NAN).astype(np.uint8)
    return np.concatenate([codes, _bytes_of(low.astype(np.float32)), _bytes_of(step)], axis=1)


def dequantize(records: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The weight that records stand for.

    Steps compute it anew in the backward pass instead of keeping it, unless a policy of your own
    keeps it. No gradient goes through.

    Args:
        records: as `quantize` gives them.
        shape: of the weight.
        dtype: what its values, computed in float32, are rounded to: that of what it multiplies.

    Raises:
        StateError: records of another size than `shape` has, or no float `dtype`.

    Example:
        >>> import numpy as np
        >>> records = quantize(np.array([[2.0, 0.5], [-2.0, 0.0]], np.float32), "int8")
        >>> dequantize(records, (2, 2), "float32")[:, 0]
        Array([ 2., -2.], dtype=float32)
    """
    widths = {width: to for to, width in _WIDTHS.items()}
    to = widths.get(records.shape[-1], "") if records.ndim == 2 else ""
    if not to or records.dtype != np.uint8 or records.shape != quantized_shape(shape, to):
        known = " or ".join(str(quantized_shape(shape, one)) for one in _WIDTHS)
        raise StateError(
            f"dequantize: expected {known} bytes for a weight of shape {tuple(shape)}, got"
            f" {records.shape} of {records.dtype}; these are records of another weight"
        )
    if not jnp.issubdtype(dtype, np.floating):
        raise StateError(f"dequantize: dtype={np.dtype(dtype)}: expected a float dtype")
    return _widened(jnp.asarray(records), tuple(shape), np.dtype(dtype))


def impossible(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which records `quantize` makes of no finite weight: their scales are negative or no number.

    Example:
        >>> impossible(quantize(np.array([[1.0] * 64, [np.inf] * 64]))).tolist()
        [1]
    """
    double = records.shape[1] == _WIDTHS["nf4-double"]
    ends = np.ascontiguousarray(records[:, -(2 if double else 1) * _SCALE_BYTES :]).view("<f4")
    wrong = ~(np.isfinite(ends) & (ends >= 0)).all(axis=1)
    if double:
        codes = records[:, _ELEMENT_BYTES["nf4-double"] : -2 * _SCALE_BYTES]
        wrong |= (codes == _NAN).any(axis=1)
    return np.flatnonzero(wrong)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _widened(records: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    if records.shape[1] == _WIDTHS["nf4-double"]:
        kept, scale = _unpacked(records)
    else:
        scale = jax.lax.bitcast_convert_type(records[:, -_SCALE_BYTES:], jnp.float32)
        kept = records[:, :-_SCALE_BYTES]
    if kept.shape[1] == BLOCK:
        values = jax.lax.bitcast_convert_type(kept, jnp.int8).astype(jnp.float32)
    else:
        pairs = jnp.stack([kept >> 4, kept & 15], axis=-1).reshape(-1, BLOCK)
        values = jnp.asarray(_NF4).at[pairs].get(mode="promise_in_bounds")
    whole = (values * scale[:, None]).reshape(-1)[: math.prod(shape)].reshape(shape)
    return checkpoint_name(round_to(whole, dtype), WIDENED)


def _unpacked(records: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of "nf4-double": elements `(blocks, 32)` and scales `(blocks,)`."""
    size = _ELEMENT_BYTES["nf4-double"]
    ends = records[:, -2 * _SCALE_BYTES :].reshape(-1, 2, _SCALE_BYTES)
    low, step = jnp.unstack(jax.lax.bitcast_convert_type(ends, jnp.float32)[:, None], axis=2)
    codes = records[:, size : -2 * _SCALE_BYTES].astype(jnp.float32)
    # A step that was rounded up may pass the largest number.
    scale = jnp.minimum(low + codes**2 * step, jnp.finfo(jnp.float32).max)
    scale = jnp.where(codes == _NAN, jnp.float32(jnp.nan), scale)
    return records[:, :size].reshape(-1, BLOCK // 2), scale.reshape(-1)


@_widened.defjvp
def _widened_jvp(shape: Any, dtype: Any, primals: Any, _: Any) -> tuple[jax.Array, jax.Array]:
    out = _widened(*primals, shape, dtype)
    return out, jnp.zeros_like(out)


def widens(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an operation of a program is `dequantize`."""
    body = params.get("call_jaxpr") if primitive.name == "custom_jvp_call" else None
    last = body.jaxpr.eqns[-1:] if body is not None else []
    return any(one.params.get("name") == WIDENED for one in last)


class Quantized(LazyArray):
    """The records of a value, made of the elements that are asked for, when they are.

    Args:
        value: an array or `LazyArray` of floats.
        to: see `quantize`.
    """

    def __init__(self, value: Any, to: str) -> None:
        self.value, self.to = value, to
        self.shape, self.dtype = quantized_shape(tuple(value.shape), to), np.dtype(np.uint8)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        (rows, columns), each = index, _elements(self.to)
        size = math.prod(self.value.shape[1:])
        first, stop = rows.start * each, min(rows.stop * each, math.prod(self.value.shape))
        if stop <= first:
            return np.zeros((0, columns.stop - columns.start), np.uint8)
        outer = slice(first // size, -(-stop // size))
        slices = (outer, *(slice(0, n) for n in self.value.shape[1:]))
        lazy = isinstance(self.value, LazyArray)
        given = np.asarray(self.value.read(slices) if lazy else self.value[slices]).reshape(-1)
        start = first - outer.start * size
        return quantize(given[start : start + stop - first], self.to)[:, columns]
