"""Ctrl-C asks a run to stop after the step it is in, so that what is written is whole."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


# What shells report for a process that SIGINT ended.
EXIT_INTERRUPTED = 130


class StopOnInterrupt:
    """Within it the first Ctrl-C sets `asked`; a second one interrupts at once, as usual."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def __enter__(self) -> StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._previous)
