"""Tensors that a forward makes of arrays: with the values that an array has then.

They share its memory, and export reads its constants when the forward has ended. What the forward
writes to the array after that, or its next call does, would be in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_bridge.export.stand_ins.replacement import StandIn
from torch_bridge.export.watch.copies import noted


def in_own_memory(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor of an array: it is given a copy."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return function(*map(_copied, args), **{k: _copied(v) for k, v in kwargs.items()})

    return made


def _copied(value: Any) -> Any:
    return noted(value.copy(order="K"), value) if isinstance(value, np.ndarray) else value


_from_buffer = torch.frombuffer


def _of_bytes(buffer: Any, **kwargs: Any) -> torch.Tensor:
    return _from_buffer(noted(bytearray(buffer), buffer), **kwargs)


# No mode hears of these two.
OF_ARRAYS: tuple[StandIn, ...] = (
    (torch, "from_numpy", in_own_memory(torch.from_numpy)),
    (torch, "frombuffer", _of_bytes),
)
