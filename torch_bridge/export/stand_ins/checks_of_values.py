"""What a forward raises about values is left out, as a compiled program cannot raise.

`if labels.max() >= n: raise ...` and `assert mask.any()` ask a traced tensor for its value, as a
branch does. That nothing but raising hangs on the answer shows in the source of the statement.
PyTorch's own checks are left to it: those of distributions are made only where they are asked for.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fzero.errors import warn
from torch_bridge.export.watch.questions import PACKAGES


class LeftOutCheckWarning(UserWarning):
    """A forward checks values, and raises: a compiled program does not, and leaves it out."""


def truth_of(x: torch.Tensor) -> bool:
    """`bool(x)`; of a traced tensor the answer with which the statement that asks does not raise.

    Raises:
        GuardOnDataDependentSymNode, DataDependentOutputException: something else hangs on it.
    """
    try:
        return bool(torch.Tensor.__bool__(x))
    except (GuardOnDataDependentSymNode, DataDependentOutputException):
        frame = _asking()
        code, line = frame.f_code, frame.f_lineno
        own = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        found = None if own else harmless(_source(frame), line)
        if found is None or any(caught(_source(f), f.f_lineno) for f in _callers(frame)):
            raise
        warn(
            f"{code.co_filename}:{line}: {code.co_qualname} raises where values are not as it"
            f" expects them (`{linecache.getline(code.co_filename, line).strip()}`): a compiled"
            " program cannot, and leaves this check out. Check them before a call",
            LeftOutCheckWarning,
        )
        return found


def _asking() -> types.FrameType:
    """Where a tensor is asked: PyTorch's own modes, and this module, lie between."""
    frame = sys._getframe(1)
    between = ("__torch_function__", truth_of.__name__)
    while frame.f_back is not None and frame.f_code.co_name in between:
        frame = frame.f_back
    return frame


def _callers(frame: types.FrameType) -> Iterator[types.FrameType]:
    """The user's own functions that wait for one, up to whoever converts."""
    before = frame.f_back
    while before is not None:
        package = before.f_globals.get("__name__", "")
        if package.startswith(("torch.export", "torch_bridge.")):
            return
        if PACKAGES.isdisjoint(Path(before.f_code.co_filename).parts):
            yield before
        before = before.f_back


def _source(frame: types.FrameType) -> str:
    return "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


@functools.lru_cache(maxsize=8)
def caught(source: str, line: int) -> bool:
    """Whether what a line raises may be caught in the same function."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.Try | ast.TryStar) and node.handlers
        and _on(line, node.body[0], node.body[-1]) for node in nodes
    )  # fmt: skip


@functools.lru_cache(maxsize=8)  # a check stands in each of many layers
def harmless(source: str, line: int) -> bool | None:
    """With which truth of the tensors that it asks the statement at a line does not raise.

    Args:
        source: of the whole file.
        line: one of those that the statement's condition is on.

    Returns:
        None if something else hangs on them: another branch, or who catches what is raised.

    Example:
        >>> harmless("if n and not x.all(): raise ValueError(n)", 1) is None  # n may be one as well
        True
        >>> harmless("if n is None or not x.all(): raise ValueError(n)", 1)
        True
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None
    asking = [
        node
        for node in nodes
        if isinstance(node, ast.If | ast.Assert | ast.While | ast.IfExp)
        and _on(line, node.test, node.test)
    ]
    if len(asking) != 1 or caught(source, line):
        return None
    node = asking[0]
    if isinstance(node, ast.If):
        only_raises = len(node.body) == 1 and isinstance(node.body[0], ast.Raise)
        answers = set(_answers(node.test, False)) if only_raises and not node.orelse else set()
    else:
        answers = set(_answers(node.test, True)) if isinstance(node, ast.Assert) else set()
    return answers.pop() if len(answers) == 1 else None


def _on(line: int, first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> bool:
    return first.lineno <= line <= (last.end_lineno or last.lineno)


def _answers(test: ast.expr, wanted: bool) -> Iterator[bool | None]:
    """What each part of a condition that may be a tensor has to be, for the whole to be so."""
    if isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _answers(part, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _answers(test.operand, not wanted)
    elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
        return  # never a tensor
    elif any(isinstance(n, ast.IfExp | ast.BoolOp | ast.Not | ast.Lambda) for n in ast.walk(test)):
        yield None  # asked on the way
    else:
        yield wanted
