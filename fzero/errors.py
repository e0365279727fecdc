"""Errors: each says what was expected, what came, where, and what to do."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Collection
from typing import Any


# Whose frames lie between a warning and the line of the user that it is about.
_BETWEEN = frozenset({"fzero", "torch_bridge", "jax", "torch", "contextlib", "functools"})


class FzeroError(Exception):
    """Base of every error that fzero raises on purpose."""


class PlanError(FzeroError, ValueError):
    """A plan cannot be carried out: sizes, devices or options do not fit together."""


class UnusedDevicesWarning(UserWarning):
    """A plan leaves devices idle, and nobody said which; or its `tensor` axis divides no parameter
    of the model, so that devices do the same."""


class BatchError(FzeroError, ValueError):
    """A batch does not fit the plan."""


class StateError(FzeroError, ValueError):
    """A state does not fit this model, optimizer or plan, or two of its leaves share memory."""


class StateConsumedError(FzeroError, RuntimeError):
    """A state was given to a step: its memory now belongs to the state that step returned."""


class PlacementError(FzeroError, RuntimeError):
    """A leaf is not where an operation needs it, or could not be moved.

    Attributes:
        state: after a move that failed half-way, the complete state: what was moved is where it was
            going, everything else where it was. After a step whose result a disk did not take, the
            complete new state. `None` otherwise.
    """

    state: Any = None


class HostsError(FzeroError, RuntimeError):
    """Processes cannot find each other, or do not run the same thing."""


class DivergenceError(FzeroError, RuntimeError):
    """A value that should be the same on several devices is not."""


class NonFiniteError(FzeroError, FloatingPointError):
    """A value of a state is infinite or not a number."""


class ScheduleError(FzeroError, ValueError):
    """A pipeline schedule is incomplete, out of order, unsafe or deadlocks."""


class PipelineError(FzeroError, RuntimeError):
    """An action of a pipeline failed; says which stage, kind and microbatch."""


class CheckpointError(FzeroError, RuntimeError):
    """A checkpoint cannot be read or written as asked; nothing was changed."""


class ConversionError(FzeroError, ValueError):
    """A PyTorch module cannot be converted without changing what it computes."""


class PreflightError(FzeroError, ValueError):
    """A prediction cannot be made: an unknown topology, a missing compiler, or a wrong setting."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user that led here, not at one of this package's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def some_of(words: Collection[str], most: int, lines: bool = False) -> str:
    """The first words of a message, and how many more there are.

    Args:
        words: what is to be named.
        most: how many are.
        lines: whether each has a line of its own, indented.

    Example:
        >>> some_of(["a", "b", "c"], 2), some_of(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    between, last = ("\n  ", "\n  ") if lines else (", ", " ")
    more = len(words) - most
    shown = between.join(itertools.islice(words, most))
    return shown if more <= 0 else f"{shown}{last}and {more} more"


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python: `True` and `False` are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def known_fields(cls: Any, where: str, values: dict[str, Any]) -> dict[str, Any]:
    """The values of a dataclass's fields, as they came.

    Raises:
        PlanError: a key is none of its fields.
    """
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise PlanError(f"{where}: unknown keys {unknown}; known are {sorted(known)}")
    return values
