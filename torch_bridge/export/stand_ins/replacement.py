"""Functions of other libraries, replaced while a module is exported."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


# Whose own function (a module or class), its name there, and what stands in for it.
StandIn = tuple[Any, str, Callable[..., Any]]


def imported(module: str, name: str) -> Any:
    """What a module of another library has by a name; `None` where that has not been imported.

    (What the module that is exported uses has been; nothing is imported for it.)
    """
    return getattr(sys.modules.get(module), name, None)


def transformers_modules() -> tuple[Any, ...]:
    """Models of transformers that are imported; thousands of other modules are passed by once."""
    return _of_transformers(len(sys.modules), next(reversed(sys.modules)))


@functools.lru_cache(maxsize=1)
def _of_transformers(_count: int, _last: str) -> tuple[Any, ...]:
    """Those there are while so many modules are imported, of which the last is this one."""
    modules = list(sys.modules.items())
    return tuple(module for name, module in modules if name.startswith("transformers.models."))


@contextlib.contextmanager
def replaced(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """Puts functions in place of others, for this thread alone: another may train meanwhile."""
    exporting = threading.get_ident()

    def either(own: Callable[..., Any], stand_in: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def function(*args: Any, **kwargs: Any) -> Any:
            here = threading.get_ident() == exporting
            return (stand_in if here else own)(*args, **kwargs)

        return function

    chosen = [(owner, name, vars(owner)[name], stand_in) for owner, name, stand_in in stand_ins]
    for owner, name, own, stand_in in chosen:
        setattr(owner, name, either(own, stand_in))
    try:
        yield
    finally:
        for owner, name, own, _ in chosen:
            setattr(owner, name, own)


@contextlib.contextmanager
def as_class(module: torch.nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give a module a subclass of its class for a while."""
    kind = type(module)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    module.__class__ = type(kind.__name__, (kind,), {**names, **attributes})
    try:
        yield
    finally:
        module.__class__ = kind
