"""Mixtures of experts: rows sorted by expert, times the matrix of their expert."""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.exchange.balance import balance_loss
from fzero.exchange.expert_products import Grouped, grouped_dot
from torch_bridge.dtypes import promote
from torch_bridge.lower.registry import register_operator


@register_operator("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(
    x: jax.Array, weight: Any, offs: Any, bias: Any = None, out_dtype: Any = None
) -> jax.Array:
    """Shapes: x `(S, I)` sorted by expert, weight `(E, I, O)`, offs `(E,)` where each ends."""
    if x.ndim != 2 or weight.ndim != 3 or bias is not None or out_dtype is not None:
        raise NotImplementedError(
            f"a grouped product of shapes {x.shape} and {weight.shape}, with bias or out_dtype:"
            " expected (rows, I) and (experts, I, O); add a bias of each row's expert, and cast,"
            " afterwards"
        )
    a, w = promote(x, weight)
    sizes = jnp.diff(offs.astype(np.int32), prepend=jnp.zeros((1,), np.int32))
    return grouped_dot(a, w, sizes)


@register_operator(
    "torch_bridge.expert_rows.default",
    "torch_bridge.expert_sum.default",
    "torch_bridge.expert_sum_within.default",
)
def alone(*given: Any) -> Any:
    """Beginning and end of experts' function; where it was found it is one step (`mixtures.py`)."""
    raise NotImplementedError(
        "experts whose function is not one of a row and its expert's weights: values of it are read"
        " elsewhere, or it reads sizes or draws random numbers. Set its dropout to 0, and return"
        " from it all that is read"
    )


@register_operator("torch_bridge.expert_dot.default")
def dot(rows: jax.Array, weight: Any, own: Grouped, into: int) -> jax.Array:
    """Rows times their expert's matrix, whose dim `into` is their features'."""
    matrices = weight if into == 1 else jnp.swapaxes(weight, 1, 2)
    return own.dot(rows.astype(weight.dtype), matrices)


@register_operator("torch_bridge.expert_each.default")
def each(values: Any, own: Grouped) -> jax.Array:
    """For each row, its expert's own value."""
    return own.each(values)


@register_operator("torch_bridge.balance_loss.default")
def balance(logits: Sequence[jax.Array], k: int, counted: Any = None) -> jax.Array:
    """The load-balancing loss over the tokens of all devices."""
    mask = None if counted is None else counted.reshape(-1) != 0
    return balance_loss(list(logits), k, mask)
