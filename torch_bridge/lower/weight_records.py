"""Weights in blocks of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from fzero.weight_records import dequantize
from torch_bridge.dtypes import jax_dtype
from torch_bridge.lower.registry import register_operator


@register_operator("fzero.dequantize.default")
def widened(records: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    return dequantize(records, tuple(shape), jax_dtype(dtype))
