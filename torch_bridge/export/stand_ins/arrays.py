"""Tensors that a forward makes of arrays: with the values that an array has then.

They share its memory, and export reads its constants when the forward has ended. What the forward
writes to the array after that, or its next call does, would be in them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np
import torch

from torch_bridge.export.stand_ins.replacement import StandIn


# By where each copy begins: the copy, which stays there meanwhile, and what it is a copy of.
Copies: TypeAlias = dict[int, tuple[Any, Any]]
_made: ContextVar[Copies | None] = ContextVar("_made", default=None)


@contextlib.contextmanager
def noted_copies() -> Iterator[Copies]:
    """Meanwhile, the copies that stand in for arrays: what a graph writes to one is not theirs."""
    copies: Copies = {}
    before = _made.set(copies)
    try:
        yield copies
    finally:
        _made.reset(before)


def in_own_memory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor of an array: it is given a copy."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*map(_copied, args), **{k: _copied(v) for k, v in kwargs.items()})

    return made


def _copied(value: Any) -> Any:
    return _noted(value.copy(order="K"), value) if isinstance(value, np.ndarray) else value


def _noted(copy: Any, original: Any) -> Any:
    if (copies := _made.get()) is not None:
        bytes_of = copy if isinstance(copy, np.ndarray) else np.frombuffer(copy, np.uint8)
        copies[bytes_of.__array_interface__["data"][0]] = (copy, original)
    return copy


_from_buffer = torch.frombuffer


def _of_bytes(buffer: Any, **kwargs: Any) -> torch.Tensor:
    return _from_buffer(_noted(bytearray(buffer), buffer), **kwargs)


# No mode hears of these two.
OF_ARRAYS: tuple[StandIn, ...] = (
    (torch, "from_numpy", in_own_memory(torch.from_numpy)),
    (torch, "frombuffer", _of_bytes),
)
