"""Of which array each copy is that stands in for one while a forward is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeAlias

import numpy as np


# By where each copy begins: the copy, which stays there meanwhile, and what it is a copy of.
Copies: TypeAlias = dict[int, tuple[Any, Any]]
_made: ContextVar[Copies | None] = ContextVar("_made", default=None)


@contextlib.contextmanager
def noted_copies() -> Iterator[Copies]:
    """The copies made meanwhile: what a graph writes to one, PyTorch writes to an array."""
    copies: Copies = {}
    before = _made.set(copies)
    try:
        yield copies
    finally:
        _made.reset(before)


def noted(copy: Any, original: Any) -> Any:
    """The copy, an array or a `bytearray`, of which it is noted what it is a copy of."""
    if (copies := _made.get()) is not None:
        array = copy if isinstance(copy, np.ndarray) else np.frombuffer(copy, np.uint8)
        copies[array.__array_interface__["data"][0]] = (copy, original)
    return copy
