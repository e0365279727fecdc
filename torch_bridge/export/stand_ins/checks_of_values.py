"""What a forward raises about values is left out, as a compiled program cannot raise.

`if labels.max() >= n: raise ...` and `assert mask.any()` ask a traced tensor for its value, as a
branch does. That nothing but raising hangs on the answer shows in the source of the statement.
PyTorch's own checks are left to it: those of distributions are made only where they are asked for.
"""

from __future__ import annotations

import ast
import contextvars
import functools
import itertools
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional as F

from fzero.compat import set_within
from fzero.errors import warn
from torch_bridge.export.watch.questions import PACKAGES


class LeftOutCheckWarning(UserWarning):
    """A forward checks values, and raises: a compiled program does not, and leaves it out."""


# Where a tensor was asked to no avail, while a module is traced.
_ASKED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("asked", default=None)


def asked_in_vain(places: list[str]) -> AbstractContextManager[None]:
    """While this is open, it is noted where a forward asks a tensor for a value that it has not.

    That ends a trace, unless the forward catches what it raises, or a context swallows it.
    """
    return set_within(_ASKED, places)


def truth_of(x: torch.Tensor) -> bool:
    """`bool(x)`; of a traced tensor the answer with which the statement that asks does not raise.

    Raises:
        GuardOnDataDependentSymNode, DataDependentOutputException: something else hangs on it.
    """
    try:
        return bool(torch.Tensor.__bool__(x))
    except (GuardOnDataDependentSymNode, DataDependentOutputException):
        frame = _asking()
        found, (where, said) = _answer(frame), _line_of(frame)
        if found is None or any(caught(_source(f), f.f_lineno) for f in _callers(frame)):
            _note(frame)
            raise
        warn(
            f"{where} raises where values are not as it expects them ({said}): a compiled program"
            " cannot, and leaves this check out. Check them before a call",
            LeftOutCheckWarning,
        )
        return found


def note_of_a_trace(error: Exception) -> None:
    """Notes where a forward is told what only a trace says: that a tensor has no values."""
    known = isinstance(error, _OF_TRACES)
    if known or any(said in str(error) for said in _SAID_OF_TRACES):
        _note(_asking())


_OF_TRACES = (
    GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException,
)  # fmt: skip
# Of `x.numpy()` and `np.asarray(x)`; of `f"{x:.2f}"`.
_SAID_OF_TRACES = ("tensor subclasses", "FakeTensor")


def _noting(own: Callable[..., Any]) -> Callable[..., Any]:
    """A question to a number that a tensor gave."""

    def asked(x: Any, *args: Any) -> Any:
        try:
            return own(x, *args)
        except Exception as error:
            note_of_a_trace(error)
            raise

    return asked


# What asks a number of a tensor, or of its sizes (`x.item() > 0`, `range(x.nonzero().shape[0])`).
NUMBERS = tuple(
    (kind, name, _noting(vars(kind)[name]))
    for kind, names in (
        (torch.SymBool, ("__bool__",)),
        (torch.SymInt, ("__bool__", "__int__", "__index__")),
        (torch.SymFloat, ("__bool__", "__int__", "__float__")),
    )
    for name in names
)


# What raises of values, but not of a trace's, and what a user's `except` may name for it.
_LINALG = frozenset(("LinAlgError", "RuntimeError"))
_INDEX = frozenset(("IndexError", "LookupError", "RuntimeError"))
_RAISING = {
    **dict.fromkeys((torch.cholesky, torch.Tensor.cholesky, torch.linalg.cholesky), _LINALG),
    **dict.fromkeys((torch.inverse, torch.Tensor.inverse, torch.linalg.inv), _LINALG),
    torch.linalg.solve: _LINALG,
    F.embedding: _INDEX,
}


def note_of_a_try(function: Any) -> None:
    """Notes where a forward waits, in a `try`, for what a function raises of values alone."""
    if function not in _RAISING:
        return
    frame = _asking()
    for one in (frame, *_callers(frame)):
        if not _of_torch(one) and _excepted(_source(one), one.f_lineno) & _RAISING[function]:
            return _note(one)


def _note(frame: types.FrameType) -> None:
    """Notes that a frame asks to no avail, unless it is PyTorch's own."""
    asked = _ASKED.get()
    if asked is not None and not _of_torch(frame):
        asked.append("{} ({})".format(*_line_of(frame)))


def _line_of(frame: types.FrameType) -> tuple[str, str]:
    """Where a frame is, and its line."""
    code, line = frame.f_code, frame.f_lineno
    said = f"`{linecache.getline(code.co_filename, line).strip()}`"
    return f"{code.co_filename}:{line}: {code.co_qualname}", said


def _asking() -> types.FrameType:
    """Where a tensor is asked: PyTorch's own modes, and this module, lie between, and where Python
    code of PyTorch's asks the modes, this code."""
    frame, here = sys._getframe(1), __name__.rpartition(".")[0]
    while frame.f_back is not None:
        of_python = frame.f_code.co_name == "handle_torch_function"
        named = of_python or frame.f_code.co_name == "__torch_function__"
        if not named and not frame.f_globals.get("__name__", "").startswith(here):
            break
        frame = frame.f_back
        if of_python and frame.f_back is not None:
            frame = frame.f_back
    return frame


def _answer(frame: types.FrameType) -> bool | None:
    """What a frame has to be told; None if something else hangs on it than whether it raises."""
    if _of_torch(frame):
        return None
    place: Any = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return harmless(_source(frame)).get(place)


def _of_torch(frame: types.FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").partition(".")[0] == "torch")


def _callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """The user's own functions that wait for one, up to whoever converts."""
    before = frame.f_back
    while before is not None:
        package = before.f_globals.get("__name__", "")
        if package.startswith("torch.export"):
            return
        installed = not PACKAGES.isdisjoint(Path(before.f_code.co_filename).parts)
        if not installed and not package.startswith("torch_bridge."):
            yield before
        before = before.f_back


def _source(frame: types.FrameType) -> str:
    return "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


# Lines and columns, as `code.co_positions` gives them: first and last line, first and last column.
Place = tuple[int, int, int, int]


@functools.lru_cache(maxsize=8)
def caught(source: str, line: int) -> bool:
    """Whether what a line raises may be caught, or made nothing of, in the same function."""
    return any(_on(line, body) for body in _guarded(_nodes(source)))


@functools.lru_cache(maxsize=64)
def _excepted(source: str, line: int) -> frozenset[str]:
    """The errors that are caught where a line raises them; all that are known by name, if all."""
    found: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.Try) and _on(line, node.body):
            for handler in node.handlers:
                said = "Exception" if handler.type is None else ast.unparse(handler.type)
                found.update(re.findall(r"\w+", said))
    every = _LINALG | _INDEX if found & {"Exception", "BaseException"} else ()
    return frozenset((*found, *every))


@functools.lru_cache(maxsize=8)  # a check stands in each of many layers
def harmless(source: str) -> dict[Place, bool]:
    """By the places of conditions, the truth with which a statement that only raises does not.

    Where a condition has several parts, or a `not`, Python 3.11 knows only which statement asks:
    then all parts have to want one answer.

    Args:
        source: of the whole file.

    Example:
        >>> harmless("if x.any() or not y.all(): raise ValueError(x)")
        {(1, 1, 3, 10): False, (1, 1, 18, 25): True}
    """
    found: dict[Place, bool] = {}
    nodes = _nodes(source)
    guarded = list(_guarded(nodes))
    for node in nodes:
        if isinstance(node, ast.Assert):
            parts = dict(_parts(node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node):
            parts = dict(_parts(node.test, False))
        else:
            continue
        if not any(_on(node.lineno, body) for body in guarded):
            found.update(parts)
            if len(answers := set(parts.values())) == 1:
                found[_place(node)] = answers.pop()
    return found


def _nodes(source: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return []


def _guarded(nodes: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    """Statements of which somebody may take what they raise: a `try`, or a context that is none of
    PyTorch's, as `contextlib.suppress`."""
    for node in nodes:
        caught = isinstance(node, ast.Try | ast.TryStar)
        if isinstance(node, ast.With | ast.AsyncWith):
            entered = (ast.unparse(item.context_expr) for item in node.items)
            caught = not all(one.startswith("torch.") for one in entered)
        if caught:
            yield node.body  # type: ignore[attr-defined]


def _on(line: int, body: Sequence[ast.stmt]) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or line)


def _only_raises(node: ast.If) -> bool:
    (first, *more) = node.body
    if more or node.orelse or not isinstance(first, ast.Raise) or first.exc is None:
        return False
    return "StopIteration" not in ast.unparse(first.exc)  # the end of a loop


def _parts(test: ast.expr, wanted: bool) -> Iterator[tuple[Place, bool]]:
    """Each part of a condition that may be a tensor, and what it has to be for the whole."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not wanted)
    else:
        yield _place(test), wanted


def _place(node: ast.expr | ast.stmt) -> Place:
    end_line, end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, end_line, node.col_offset, end
