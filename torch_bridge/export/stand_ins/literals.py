"""Tensors that a forward makes of Python's numbers on the `meta` device: made with their values.

A module without values computes there, where PyTorch forgets the numbers at once. They are made on
the CPU, and then said to be on `meta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from torch_bridge.export.stand_ins.arrays import in_own_memory
from torch_bridge.export.stand_ins.numbers_as_places import write_at_numbers
from torch_bridge.export.stand_ins.replacement import StandIn


def _with_values(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a tensor of what is not one, where its argument `device` says."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.get("device")
        device = _default_device() if given is None else torch.device(given)
        if device.type != "meta" or any(map(_is_tensor, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": "cpu"}).to(device)

    return made


def _default_device() -> torch.device:
    """As PyTorch's own says it, which makes a tensor to know it: that would be in the graph."""
    modes = reversed(_get_current_function_mode_stack())
    found = (mode.device for mode in modes if isinstance(mode, DeviceContext))
    return next(found, torch.device("cpu"))


def _new_tensor(
    x: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any
) -> torch.Tensor:
    device = x.device if device is None else torch.device(device)
    if device.type != "meta" or _is_tensor(data):
        return in_own_memory(x.new_tensor)(data, dtype=dtype, device=device, **kwargs)
    return _tensor(data, dtype=dtype or x.dtype, device=device, **kwargs)


def _new(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A list gives values, and all else that `Tensor.new` takes gives none."""
    values = len(args) == 1 and isinstance(args[0], list | tuple)
    if not _on_meta(x) or kwargs or not values or isinstance(args[0], torch.Size):
        return x.new(*args, **kwargs)
    return _tensor(args[0], dtype=x.dtype, device=x.device)


def read(x: torch.Tensor, index: Any) -> torch.Tensor:
    """`x[index]`, in which PyTorch makes tensors of lists."""
    return x[_with_tensors(x, index)]


def _write(x: torch.Tensor, index: Any, value: Any) -> None:
    if not write_at_numbers(x, index, value):
        x[_with_tensors(x, index)] = value


def _with_tensors(x: torch.Tensor, index: Any) -> Any:
    """An index with tensors, where `x` is, for its lists."""
    if not _on_meta(x):
        return index
    if isinstance(index, tuple):
        return tuple(_as_index(one, x.device) for one in index)
    if not isinstance(index, list):
        return index
    if all(isinstance(one, int) for one in index):
        return _as_index(index, x.device)
    # What a list of lists means is PyTorch's to say: another thing from version to version.
    return [_as_index(one, x.device) for one in index]


def _as_index(one: Any, device: torch.device) -> Any:
    if not isinstance(one, list | tuple | range):
        return one
    found = torch.tensor(one, device="cpu")
    return found.to(device, None if found.dtype is torch.bool else torch.int64)


def _on_meta(x: torch.Tensor) -> bool:
    return x.device.type == "meta"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_tensor = _with_values(in_own_memory(torch.tensor))
LITERALS: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    torch.as_tensor: _with_values(in_own_memory(torch.as_tensor)),
    torch.asarray: _with_values(in_own_memory(torch.asarray)),
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.new: _new,
    torch.Tensor.__setitem__: _write,
}
# Where numbers are sizes that are free, torch.export puts this in the place of `torch.tensor`.
OF_SIZES: StandIn = (torch._refs, "tensor", _with_values(torch._refs.tensor))
