"""What a trace leaves outside of modules, and is taken out again.

A forward may keep what it computed in an object, a list, a closure or a global. While it is traced
these are tensors without values, with which PyTorch could not go on afterwards. What it counts in
arrays would have been counted by calls that nobody made.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from torch_bridge.export.watch.counts import Memory, holders, is_foreign


# Values that exist in a trace alone.
OF_A_TRACE = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool)
# The bytes of an array up to which a copy is kept while a forward is traced.
_MOST = 2**26


@contextlib.contextmanager
def no_leftovers(module: torch.nn.Module, harmless: set[str]) -> Iterator[None]:
    """While a forward is traced; then what held another value, or none, does so again.

    An array above 64 MiB keeps what was written to it: a copy might not fit.

    Args:
        module: the module whose forward it is.
        harmless: attributes of modules that are not looked into.
    """
    found, arrays = holders(module, harmless)
    kept = [(holder, _contents(holder)) for holder in found]
    values = [(one, _copy(one)) for one in arrays.values() if _is_kept(one)]
    try:
        yield
    finally:
        for holder, before in kept:
            _put_back(holder, before)
        for one, copy in values:
            _write_back(one, copy)


def _is_kept(one: Memory) -> bool:
    """Whether an array can have been written to, and is copied for that."""
    if isinstance(one, np.ndarray):
        return one.flags.writeable and one.nbytes <= _MOST
    return memoryview(one).nbytes <= _MOST


def _copy(one: Memory) -> Memory:
    return one.copy() if isinstance(one, np.ndarray) else one[:]


def _write_back(one: Any, before: Any) -> None:
    """Give an array its values again, if it has others: a file may lie behind it."""
    if not isinstance(one, np.ndarray):
        if one != before:
            one[:] = before
    elif one.dtype == object or one.tobytes() != before.tobytes():
        one[...] = before


def _contents(holder: Any) -> Any:
    if isinstance(holder, type):
        return dict(vars(holder))
    if isinstance(holder, types.CellType):
        return _named(holder)
    # Of the plain kind: a class of a user's may copy itself otherwise, or not at all.
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _named(holder: Any) -> dict[str, Any]:
    """What a dict, a class or a cell holds, by name."""
    if isinstance(holder, types.CellType):
        try:
            return {"cell_contents": holder.cell_contents}
        except ValueError:  # nothing is in it
            return {}
    return holder if isinstance(holder, dict) else dict(vars(holder))


def _put_back(holder: Any, before: Any) -> None:
    if isinstance(holder, list | deque | set):
        if any(map(_is_of_a_trace, list(holder))):
            holder.clear()
            (holder.update if isinstance(holder, set) else holder.extend)(before)
        return
    for name, value in list(_named(holder).items()):
        if value is before.get(name) or not _is_of_a_trace(value):
            continue
        if isinstance(holder, dict):
            if name in before:
                holder[name] = before[name]
            else:
                del holder[name]
        elif name in before:
            setattr(holder, name, before[name])
        else:
            delattr(holder, name)


def _is_of_a_trace(value: Any) -> bool:
    """Whether a value, or an object's attribute, holds something that a trace computed."""
    if value is None or isinstance(value, bool | int | float | str):
        return False
    if hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor):
        if isinstance(value, types.ModuleType | torch.nn.Module) or is_foreign(type(value)):
            return False
        value = list(vars(value).values())
    return any(isinstance(leaf, OF_A_TRACE) for leaf in tree_leaves(value))
