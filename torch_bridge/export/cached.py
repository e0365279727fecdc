"""Functions whose results Python keeps (`functools.lru_cache`), computed anew while it is traced.

What they give in a trace are no numbers: the next trace, and the module itself, would die of them.
What they keep already would be a constant of a graph that should compute it for other sizes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fzero.errors import ConversionError
from torch_bridge.export.counts import is_foreign, names_of


_LRU = functools._lru_cache_wrapper
_DRAWS = (
    "bernoulli", "cauchy_", "dropout", "exponential_", "geometric_", "log_normal_", "multinomial",
    "normal", "poisson", "rand", "uniform_",
)  # fmt: skip


class _Drawless(TorchFunctionMode):
    """Random numbers that a function keeps are not drawn anew, as they would be here."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").startswith(_DRAWS):
            raise ConversionError(
                f"`{self.name}` draws random numbers ({func.__name__}) and Python keeps them: a"
                " converted forward would draw new ones in each call. Draw them in __init__, and"
                " keep them in a buffer (register_buffer)."
            )
        return func(*args, **(kwargs or {}))


def _anew(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What a cache would call, each time; numbers are kept, or a recursion would never end."""
    tracing = threading.get_ident()

    def drawless(*args: Any, **kwargs: Any) -> Any:
        with _Drawless(function.__qualname__):
            return function(*args, **kwargs)

    kept = functools.lru_cache(maxsize=None)(drawless)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing:  # another thread may train meanwhile
            return own(*args, **kwargs)
        made = kept(*args, **kwargs)
        if any(isinstance(x, torch.Tensor) for x in tree_leaves(made)):
            kept.cache_clear()
        return made

    return run


@contextlib.contextmanager
def computed_anew(module: torch.nn.Module) -> Iterator[None]:
    """While a module is traced, its code calls such functions as if nothing was kept.

    Args:
        module: the module; found are those that classes of its modules have, and globals that
            their functions name, also through other functions of the user's own.
    """
    undo: list[Callable[[], None]] = []
    seen: set[int] = set()
    try:
        for kind in {kind for m in module.modules() for kind in type(m).__mro__}:
            if not is_foreign(kind):
                _of_class(kind, undo, seen)
        yield
    finally:
        for back in reversed(undo):
            back()


def _of_class(kind: type, undo: list[Callable[[], None]], seen: set[int]) -> None:
    for name, value in list(vars(kind).items()):
        put = functools.partial(setattr, kind, name)
        if isinstance(value, _LRU):
            _replace(undo, put, value, _anew(value, value.__wrapped__))
            _of_function(value.__wrapped__, undo, seen)
        elif isinstance(value, functools.cached_property):
            _replace(undo, put, value, property(_anew(value.__get__, value.func)))
        elif isinstance(value, types.FunctionType):
            _of_function(value, undo, seen)


def _of_function(function: Any, undo: list[Callable[[], None]], seen: set[int]) -> None:
    if not isinstance(function, types.FunctionType) or id(function) in seen or is_foreign(function):
        return
    seen.add(id(function))
    names = set(names_of(function.__code__))
    spaces = [function.__globals__]
    for word in names & function.__globals__.keys():
        value = function.__globals__[word]
        if isinstance(value, types.ModuleType) and not is_foreign(value):
            spaces.append(vars(value))
    for space in spaces:
        for word in names & space.keys():
            value = space[word]
            if isinstance(value, _LRU) and not is_foreign(value):
                put = functools.partial(space.__setitem__, word)
                _replace(undo, put, value, _anew(value, value.__wrapped__))
                value = value.__wrapped__
            _of_function(value, undo, seen)


def _replace(
    undo: list[Callable[[], None]], put: Callable[[Any], None], own: Any, new: Any
) -> None:
    put(new)
    undo.append(functools.partial(put, own))
