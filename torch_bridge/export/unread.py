"""What torch.export does for those who debug it, which takes a quarter of its time, left undone.

All of it is PyTorch's own business, found by name: where a version does not have it so, it is done
as before.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.export import exported_program
from torch.fx import proxy

from torch_bridge.export.stand_ins.replacement import replaced


@contextlib.contextmanager
def nothing_unread() -> Iterator[None]:
    """While a module is exported or decomposed: no Python code of graphs that nobody runs, no
    records for a log that nobody keeps, no frames outside of a forward."""
    known = [(owner, name, fn) for owner, name, fn in _STAND_INS if name in vars(owner)]
    with _lazy_code(), _no_records(), _short_stacks(), replaced(known):
        yield


def _lazy_code() -> contextlib.AbstractContextManager[Any]:
    """Code of a graph is written when it is called, not whenever a pass has changed it."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = _use_lazy_graph_module(True)
    return found


@contextlib.contextmanager
def _no_records() -> Iterator[None]:
    """Records, with a stack each, are made for whoever handles that log.

    A handler that PyTorch puts there takes itself away at the first of them, which never comes
    while logs are disabled.
    """
    log = logging.getLogger("torch.__trace")
    before, log.handlers = log.handlers, []
    try:
        yield
    finally:
        log.handlers = before


@contextlib.contextmanager
def _short_stacks() -> Iterator[None]:
    """The stack of a node, of which PyTorch keeps what begins with a forward."""
    whole: Any = vars(proxy).get("CapturedTraceback")
    if whole is None:
        yield
        return
    exporting = threading.get_ident()

    class FromForward:
        """Stands for PyTorch's class where nodes are made, in this thread."""

        @staticmethod
        def extract(**options: Any) -> Any:
            here = threading.get_ident() == exporting and not options
            return FromForward() if here else whole.extract(**options)

        def summary(self) -> traceback.StackSummary:
            """Of the caller, the outermost frame first; lines of source are read when shown."""
            frames, frame = [], sys._getframe(1)
            while frame is not None:
                frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
                frame = frame.f_back  # type: ignore[assignment]
            frames.reverse()
            names = [name for _, _, name in frames]
            first = names.index("forward") if "forward" in names else len(frames)
            return traceback.StackSummary.from_list(
                [traceback.FrameSummary(*one, lookup_line=False) for one in frames[first:]]
            )

    vars(proxy)["CapturedTraceback"] = FromForward
    try:
        yield
    finally:
        vars(proxy)["CapturedTraceback"] = whole


def _composite_operators() -> set[Any]:
    """Operators that are made of others, which a decomposition asks for anew each time."""
    known = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return _of_so_many(len(known))


_collect = vars(exported_program).get("_collect_all_valid_cia_ops")


@lru_cache(maxsize=1)
def _of_so_many(count: int) -> set[Any]:
    assert _collect is not None
    found: set[Any] = _collect()
    return found


_STAND_INS = ((exported_program, "_collect_all_valid_cia_ops", _composite_operators),)
