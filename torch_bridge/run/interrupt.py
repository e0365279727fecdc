"""Ctrl-C and SIGTERM ask a run to stop after the step it is in: what is written is whole."""

from __future__ import annotations

import os
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
        agreed: what asked any process, as of the last `agree`: all stop after the same step.
    """

    def __init__(self) -> None:
        self.asked = self.agreed = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnInterrupt:
        for number in NAMES:
            # None: something else than Python had set it.
            self._previous[number] = signal.signal(number, self._ask) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def agree(self) -> None:
        """What one process was asked, all were: each calls this before the first step and after
        every one."""
        asked = [self.asked] if watch() is None else exchange("stop", self.asked)
        self.agreed = next(filter(None, asked), "")

    def leave_if_asked(self) -> None:
        """Before anything is written: ends the command, unless other processes wait for this one.

        Raises:
            SystemExit: with the status that shells report for the signal.
        """
        if self.asked and watch() is None:
            raise SystemExit(128 + next(n for n, name in NAMES.items() if name == self.asked))

    def restore(self) -> None:
        """From here on a signal interrupts at once."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = NAMES[signal.Signals(number)]
        # Not `print`: it may be what the signal came in between.
        os.write(2, f"{self.asked}: stopping after this step; again: at once\n".encode())
        self.restore()
