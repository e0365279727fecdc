"""Sizes and guards: shapes are plain Python numbers in JAX, so size arithmetic is just computed."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge.lower.registry import register_operator


@register_operator("aten.sym_size.int")
def sym_size(x: Any, dim: int) -> int:
    return int(x.shape[dim])


@register_operator("aten.sym_numel.default")
def sym_numel(x: Any) -> int:
    return int(x.size)


@register_operator(
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.msg",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)
def no_check(*_: Any, **__: Any) -> None:
    """Checks of dtype or data: dtypes may differ on purpose (mixed precision)."""


@register_operator("aten._assert_scalar.default")
def assert_scalar(value: Any, message: str) -> None:
    if isinstance(value, bool | int) and not value:
        raise ValueError(f"the PyTorch module's own size check failed: {message}")


_PYTHON: frozenset[Callable[..., Any]] = frozenset(
    {
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.pow,
        operator.neg,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.and_,
        operator.or_,
        operator.not_,
        operator.lshift,
        operator.rshift,
        operator.xor,
        round,
        math.ceil,
        math.floor,
        math.trunc,
        torch.sym_int,
        torch.sym_float,
        torch.sym_max,
        torch.sym_min,
        torch.sym_not,
        torch.sym_ite,
        torch.sym_sum,
        torch.sym_sqrt,
    }
)


def python_function(target: Any) -> Callable[..., Any] | None:
    """The target itself if it computes on plain numbers or picks from a tuple, else None."""
    return target if callable(target) and target in _PYTHON else None
