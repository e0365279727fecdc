"""Functions whose results Python keeps (`functools.lru_cache`), computed anew while it is traced.

What they give in a trace are no numbers: the next trace, and the module itself, would die of them.
What they keep already would be a constant of a graph that should compute it for other sizes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fzero.errors import ConversionError
from torch_bridge.export.watch.counts import is_foreign
from torch_bridge.export.watch.users_code import LRU, named_in, users_classes, users_functions


_OF_A_TRACE = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
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
        if any(isinstance(x, _OF_A_TRACE) for x in tree_leaves(made)):
            kept.cache_clear()
        return made

    return run


@contextlib.contextmanager
def computed_anew(module: torch.nn.Module) -> Iterator[None]:
    """While a module is traced, its code calls such functions as if nothing was kept.

    Args:
        module: the module; its classes' own are found, and those that their code names.
    """
    found: list[tuple[Callable[[Any], None], Any, Any]] = []  # how to put it, own, new
    for kind in users_classes(module):
        for name, value in vars(kind).items():
            put: Callable[[Any], None] = functools.partial(setattr, kind, name)
            if isinstance(value, LRU):
                found.append((put, value, _anew(value, value.__wrapped__)))
            elif isinstance(value, functools.cached_property):
                found.append((put, value, property(_anew(value.__get__, value.func))))
    named = {(id(space), name): (space, name, value) for function in users_functions(module)
             for space, name, value in named_in(function)
             if isinstance(value, LRU) and not is_foreign(value)}  # fmt: skip
    for space, name, value in named.values():
        put = functools.partial(space.__setitem__, name)
        found.append((put, value, _anew(value, value.__wrapped__)))
    try:
        for put, _, new in found:
            put(new)
        yield
    finally:
        for put, own, _ in found:
            put(own)
