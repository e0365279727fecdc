"""Frozen weights in 4 or 8 bits: records of 64 elements and a scale, widened where they are used.

A record is a row of bytes: the elements, then the four bytes of their scale, so that whatever
divides, gathers or writes records keeps the two together.
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
from fzero.sharding.lazy import Index, LazyArray


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
# The bytes of a record tell what is in it.
_WIDTHS = {"nf4": BLOCK // 2 + _SCALE_BYTES, "int8": BLOCK + _SCALE_BYTES}
# What `checkpoint_name` calls widened weights, which no policy of fzero keeps.
WIDENED = "fzero.widened"


def quantized_shape(shape: tuple[int, ...], to: str = "nf4") -> tuple[int, int]:
    """The shape of `quantize`'s records of an array.

    Raises:
        StateError: another word than "nf4" or "int8".

    Example:
        >>> quantized_shape((4096, 4096)), quantized_shape((3, 5), "int8")
        ((262144, 36), (1, 68))
    """
    if to not in _WIDTHS:
        raise StateError(f"quantize: to={to!r}: expected one of {sorted(_WIDTHS)}")
    return -(-math.prod(shape) // BLOCK), _WIDTHS[to]


def quantize(array: Any, to: str = "nf4") -> np.ndarray[Any, Any]:
    """A weight in blocks of 64 elements (row after row; the last one filled up with zeros).

    With "nf4" an element is the nearest of 16 levels times its block's largest magnitude: 4.5 bits
    an element. With "int8" it is a whole number of 127ths of that: 8.5 bits. A block in which
    something is not finite is NaN. For parameters that a model freezes: such records are kept,
    divided, gathered and saved like any array, and `dequantize` widens them where they are used.

    Args:
        array: floats of any shape.
        to: "nf4" or "int8".

    Returns:
        uint8 on the host, `quantized_shape(array.shape, to)`: a row for each block.

    Raises:
        StateError: `array` has no floats, or another word than those.

    Example:
        >>> import numpy as np
        >>> records = quantize(np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64))
        >>> records.shape, float(dequantize(records, (2, 64), "float32")[1, 63])
        ((2, 36), 1.0)

    Source: Dettmers et al., QLoRA, arXiv:2305.14314, section 3 and appendix E (without double
        quantisation); the elements and scales are those of bitsandbytes' `quantize_4bit`.
    """
    num, width = quantized_shape(np.shape(array), to)
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, np.floating):
        raise StateError(f"quantize: expected floats, got {array.dtype}")
    flat = np.zeros(num * BLOCK, np.float32)
    flat[: array.size] = array.reshape(-1)
    blocks = flat.reshape(num, BLOCK)
    largest = np.abs(blocks).max(axis=1, initial=0)
    scale = largest if to == "nf4" else largest / np.float32(127)
    # Of what is below float32's normal numbers, the inverse may be infinite.
    usable = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=usable)
    whole = np.where(usable[:, None], blocks, 0) * inverse[:, None]
    records = np.empty((num, width), np.uint8)
    if to == "nf4":
        levels = np.searchsorted(_HALFWAY, whole).astype(np.uint8)
        records[:, :-_SCALE_BYTES] = (levels[:, ::2] << 4) | levels[:, 1::2]
    else:
        records[:, :-_SCALE_BYTES] = np.clip(np.rint(whole), -127, 127).astype(np.int8).view("u1")
    scale = np.where(np.isfinite(scale), scale, np.float32(np.nan)).astype("<f4")
    records[:, -_SCALE_BYTES:] = scale.view(np.uint8).reshape(num, _SCALE_BYTES)
    return records


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
    want = -(-math.prod(shape) // BLOCK)
    if records.ndim != 2 or records.shape[0] != want or records.shape[1] not in widths:
        raise StateError(
            f"dequantize: expected ({want}, {' or '.join(map(str, widths))}) bytes for a weight of"
            f" shape {tuple(shape)}, got {records.shape}; these are records of another weight"
        )
    if not jnp.issubdtype(dtype, np.floating):
        raise StateError(f"dequantize: dtype={np.dtype(dtype)}: expected a float dtype")
    return _widened(jnp.asarray(records), tuple(shape), np.dtype(dtype))


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _widened(records: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    scale = jax.lax.bitcast_convert_type(records[:, -_SCALE_BYTES:], jnp.float32)
    kept = records[:, :-_SCALE_BYTES]
    if kept.shape[1] == BLOCK:
        values = jax.lax.bitcast_convert_type(kept, jnp.int8).astype(jnp.float32)
    else:
        pairs = jnp.stack([kept >> 4, kept & 15], axis=-1).reshape(-1, BLOCK)
        values = jnp.asarray(_NF4).at[pairs].get(mode="promise_in_bounds")
    whole = (values * scale[:, None]).reshape(-1)[: math.prod(shape)].reshape(shape)
    return checkpoint_name(round_to(whole, dtype), WIDENED)


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
        rows, columns = index
        size = math.prod(self.value.shape[1:])
        first, stop = rows.start * BLOCK, min(rows.stop * BLOCK, math.prod(self.value.shape))
        if stop <= first:
            return np.zeros((0, columns.stop - columns.start), np.uint8)
        outer = slice(first // size, -(-stop // size))
        piece = (outer, *(slice(0, n) for n in self.value.shape[1:]))
        lazy = isinstance(self.value, LazyArray)
        given = np.asarray(self.value.read(piece) if lazy else self.value[piece]).reshape(-1)
        start = first - outer.start * size
        return quantize(given[start : start + stop - first], self.to)[:, columns]
