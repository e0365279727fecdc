"""What is done before and after the calls of a module that is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def around_calls(
    module: torch.nn.Module,
    end: Callable[[Any], Any],
    begin: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """While this is open a module's calls begin and end with something.

    They are all that `module(...)` does: hooks, and behind them a `__call__` of its own class. A
    module with a loss has one, and gives the loss of what the hooks gave. Calls within a call are
    parts of it, as where the step of a Lightning module calls the module itself.

    Args:
        module: the module.
        end: is given what a call gives; what it returns is given in its place, unless it is None.
        begin: comes first.
    """
    owner = type(module)
    own = vars(owner).get("__call__")
    within = False

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal within
        # (Looked up now: a tracer puts its own in the place of torch.nn.Module's.)
        run = super(owner, self).__call__ if own is None else own.__get__(self, owner)
        if self is not module or within:
            return run(*args, **kwargs)
        within = True
        try:
            begin()
            out = run(*args, **kwargs)
            other = end(out)
            return out if other is None else other
        finally:
            within = False

    owner.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del owner.__call__
        else:
            owner.__call__ = own  # type: ignore[method-assign]
