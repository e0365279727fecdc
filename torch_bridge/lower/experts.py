"""Mixtures of experts: rows sorted by expert, times the matrix of their expert."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import promote
from torch_bridge.lower.registry import register_operator


@register_operator("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(
    x: jax.Array, weight: Any, offs: Any, bias: Any = None, out_dtype: Any = None
) -> jax.Array:
    """Shapes: x `(S, I)` sorted by expert, weight `(E, I, O)`, offs `(E,)` where each ends."""
    if x.ndim != 2 or weight.ndim != 3 or bias is not None or out_dtype is not None:
        raise NotImplementedError(
            f"a grouped product of shapes {x.shape} and {weight.shape}, with bias or out_dtype"
        )
    a, w = promote(x, weight)
    ends = offs.astype(np.int32)
    sizes = jnp.diff(ends, prepend=jnp.zeros((1,), np.int32))
    # Rows behind the last expert's end belong to none and are 0.
    held = jnp.arange(a.shape[0], dtype=np.int32)[:, None] < ends[-1]
    return jnp.where(held, jax.lax.ragged_dot(a, w, sizes), jnp.zeros((), a.dtype))
