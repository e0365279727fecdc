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

    They are its hooks, and behind them a `__call__` of its own class: a module with a loss has one,
    and what it gives is the loss of what the hooks gave.

    Args:
        module: the module.
        end: is given what a call gives; what it returns is given in its place, unless it is None.
        begin: comes first.
    """
    owner = type(module)
    own = owner.__call__
    if own is torch.nn.Module.__call__:
        handles = [
            module.register_forward_pre_hook(lambda *_: begin(), prepend=True),
            module.register_forward_hook(lambda *given: end(given[-1])),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not module:
            return own(self, *args, **kwargs)
        begin()
        out = own(self, *args, **kwargs)
        other = end(out)
        return out if other is None else other

    inherited = "__call__" not in vars(owner)
    owner.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        if inherited:
            del owner.__call__
        else:
            owner.__call__ = own  # type: ignore[method-assign]
