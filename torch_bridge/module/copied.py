"""A copy of a module without its weights, which is traced for later sizes and dtypes.

The module itself may change after its conversion, and holds memory. Python's `deepcopy` keeps
functions as they are: a hook or an attribute that is a closure (`lambda x: x * self.scale`) would
go on to read the module that it was made in, its mode and its numbers. Such functions are made
anew, around the copy.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch


# Much memory and no part of a forward; what belongs to a class, or to all.
_LEFT = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.optim.Optimizer)
_PLAIN = (torch.Tensor, type, types.ModuleType, str, bytes, int, float, complex, *_LEFT)


def without_weights(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """A copy of a module whose parameters and buffers have memory that nothing has touched.

    Such memory costs nothing until somebody writes to it; export looks at shapes and strides only.

    Args:
        module: any module.
        dtype: what its floating-point parameters and buffers have in the copy, as after
            `module.to(dtype)`; None: their own.

    Raises:
        ValueError: its weights are on another device than the CPU.
        Exception: what its attributes raise when they are copied.

    Example:
        >>> copied = without_weights(torch.nn.Linear(3, 2))
        >>> copied.weight.shape
        torch.Size([2, 3])
    """
    memo: dict[int, Any] = {}
    for m in module.modules():
        attributes = list(vars(m).values())
        # An old weight_norm keeps what it computed as an attribute, which cannot be copied.
        computed = [t for t in attributes if isinstance(t, torch.Tensor) and not t.is_leaf]
        for tensor in (*m._parameters.values(), *m._buffers.values(), *computed):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = untouched_like(tensor, dtype)
        for value in attributes:
            if isinstance(value, _LEFT):  # an optimizer would keep the weights alive
                memo[id(value)] = None if isinstance(value, torch.optim.Optimizer) else value
    return _copied(module, memo)


def untouched_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor or parameter of the same form, in memory that nothing has touched.

    Args:
        tensor: on the CPU, or meta.
        dtype: that of the result if the tensor has a floating-point one; None: its own.

    Raises:
        ValueError: it is on another device.
    """
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"its weights are on {tensor.device}; convert it on the CPU")
    dtype = dtype if dtype and tensor.is_floating_point() else tensor.dtype
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
    """A deep copy, and with it those functions that hold a part of the module."""
    modules = list(module.modules())
    # A module with a loss around it has the attributes of the module, which functions hold.
    twins = [
        value
        for value in _reached(modules)
        if isinstance(value, torch.nn.Module) and value.__dict__ is module.__dict__
    ]
    parts = {id(m) for m in (*modules, *twins)}
    functions = [
        value
        for value in _reached(modules)
        if isinstance(value, types.FunctionType)
        and any(id(held) in parts for held in _reached(_held(value)))
    ]
    cells: dict[int, types.CellType] = {}
    for fn in functions:  # empty yet: what they hold is what the copy will have
        closure = [cells.setdefault(id(cell), types.CellType()) for cell in fn.__closure__ or ()]
        memo[id(fn)] = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, None, tuple(closure)
        )
    memo.update((id(twin), object.__new__(type(twin))) for twin in twins if twin is not module)
    made = copy.deepcopy(module, memo)
    for twin in twins:
        object.__setattr__(memo[id(twin)], "__dict__", vars(made))

    def own(value: Any) -> Any:
        inside = any(id(held) in parts for held in _reached([value]))
        return copy.deepcopy(value, memo) if inside else value

    for fn in functions:
        new = memo[id(fn)]
        new.__defaults__ = fn.__defaults__ and tuple(map(own, fn.__defaults__))
        new.__kwdefaults__ = fn.__kwdefaults__ and {k: own(v) for k, v in fn.__kwdefaults__.items()}
        new.__dict__.update({name: own(value) for name, value in vars(fn).items()})
        for cell in fn.__closure__ or ():
            with suppress(ValueError):  # one that is empty yet
                cells[id(cell)].cell_contents = own(cell.cell_contents)
    return made


def _reached(values: Iterable[Any]) -> Iterator[Any]:
    """Some values and whatever they hold, each once."""
    seen: dict[int, Any] = {}  # which keeps them: no other takes the place of one
    todo = list(values)
    while todo:
        value = todo.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            yield value
            todo.extend(_held(value))


def _held(value: Any) -> Iterable[Any]:
    """What a value holds: a container's elements, a function's closure, an object's attributes."""
    if isinstance(value, types.FunctionType):
        held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                held.append(cell.cell_contents)
        return [*held, *vars(value).values()]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if value is None or isinstance(value, _PLAIN):
        return ()
    return list(getattr(value, "__dict__", {}).values())
