"""Who writes which file of a checkpoint; by itself, a process writes all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fzero.errors import CheckpointError


class ToldError(CheckpointError):
    """Another process failed, and said so: every process knows."""


class Turns:
    """The writers of one checkpoint: here this process alone (`multiprocess_write` has several).

    Every writer makes the same calls in the same order. A format with several files divides them
    into turns in their order, so that a stack's layers are mostly in one turn.

    Attributes:
        leads: whether this process does what one alone has to do.
        own_folders: whether every process writes into a folder of its own.
        count: how many write.
    """

    leads = True
    own_folders = False
    count = 1

    @contextlib.contextmanager
    def turn(self, index: int = 0, of: int = 1) -> Iterator[bool]:
        """Whether this process may write; where another one may, it has when this is left.

        Args:
            index: which one, from 0.
            of: how many there are.
        """
        yield True

    def told(self, value: Any) -> list[Any]:
        """What every process gives, once all have come here: plain values."""
        return [value]

    def folder(self, make: Callable[[], Path]) -> Path:
        """A new folder for all that write; what makes one is called once."""
        return make()
