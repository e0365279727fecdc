"""What this process is at: the step and the action that others name when it is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import jax


class _Now:
    """Read by the watch's thread, written by the one that works."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.action = "starting"
        self.lock = threading.Lock()


_NOW = _Now()


def now() -> tuple[int | None, str]:
    """The step (from 1, `None` before the first) and the action."""
    with _NOW.lock:
        return _NOW.step, _NOW.action


@contextlib.contextmanager
def doing(action: str, step: int | None = None) -> Iterator[None]:
    """Says what this process is at; within another action until that goes on.

    Args:
        action: such as `"save"`.
        step: the optimizer step, from 1; the last one that was said by default.
    """
    with _NOW.lock:
        before = _NOW.action
        _NOW.action = action
        _NOW.step = _NOW.step if step is None else step
    yield  # what fails stays named
    with _NOW.lock:
        within = before != "starting" and not before.startswith("after ")
        _NOW.action = before if within else f"after {action}"


def text(step: int | None, action: str) -> str:
    """Both as a sentence has them."""
    return action if step is None else f"step {step}, {action}"


class Steps:
    """The numbers of the steps that a function takes, without waiting for a device."""

    def __init__(self) -> None:
        self._taken = 0

    def number(self, taken: jax.Array) -> int:
        """The step that is about to be taken, from 1.

        Args:
            taken: steps taken so far, as the state has it.
        """
        ready = taken.is_ready()  # type: ignore[attr-defined]
        self._taken = int(taken) if ready else self._taken + 1
        return self._taken + 1
