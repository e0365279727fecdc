"""Code of a user's own that a forward leads to: methods, and what they name of their modules."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.export.watch.counts import is_foreign, names_of


LRU = functools._lru_cache_wrapper


def users_classes(module: torch.nn.Module) -> list[type]:
    """Classes of a module's modules, and those that they are made of, but for libraries'."""
    kinds = {kind: None for m in module.modules() for kind in type(m).__mro__}
    return [kind for kind in kinds if not is_foreign(kind)]


def users_functions(module: torch.nn.Module) -> list[types.FunctionType]:
    """Functions that a forward can call, as far as names lead to them."""
    stack = [value for kind in users_classes(module) for value in vars(kind).values()]
    found: dict[int, types.FunctionType] = {}
    while stack:
        value = stack.pop()
        # No other object is asked for anything: what its attributes do is the user's.
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        value = value.__wrapped__ if isinstance(value, LRU) else value
        if not isinstance(value, types.FunctionType) or is_foreign(value) or id(value) in found:
            continue
        found[id(value)] = value
        stack.extend(named for _, _, named in named_in(value))
    return list(found.values())


def named_in(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What a function names of its module, and of a user's modules there: (where, name, value)."""
    names = set(names_of(function.__code__))
    own = function.__globals__
    spaces = [own]
    for word in names & own.keys():
        if isinstance(own[word], types.ModuleType) and not is_foreign(own[word]):
            spaces.append(vars(own[word]))
    for space in spaces:
        for word in sorted(names & space.keys()):
            yield space, word, space[word]
