"""Ctrl-C and SIGTERM ask a run to stop after the step it is in: what is written is whole."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from fzero.hosts.agree import exchange
from fzero.hosts.join import watch


# What shells report for a process that SIGINT ended.
EXIT_INTERRUPTED = 130
# A scheduler that takes its machines back asks with SIGTERM; a run that saved has not failed.
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class StopOnInterrupt:
    """Within it the first signal sets `asked`; a second one interrupts at once, as usual.

    Attributes:
        asked: what asked, as `NAMES` has it; empty until then.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnInterrupt:
        for number in NAMES:
            # None: something else than Python had set it.
            self._previous[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def agree(self) -> None:
        """Over several processes: what one was asked, all were. Each calls this once a step."""
        if watch() is not None:
            self.asked = next(filter(None, exchange("stop", self.asked)), "")

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = NAMES[signal.Signals(number)]
        self._restore()
