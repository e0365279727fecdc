"""Buffers that a forward assigns anew (`self.mean = self.mean * 0.9 + ...`), of any submodule.

torch.export sees such an assignment to the outermost module alone, and keeps the old values of
all others without a word. While a module is exported, assignments are Python's, as they are
without torch.export: what read the buffer before has its old value. At the end of the forward,
what a buffer is then is written into the one that there was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fzero.errors import ConversionError
from torch_bridge.export.calls import around_calls
from torch_bridge.export.stand_ins.replacement import StandIn


_assign = torch.nn.Module.__setattr__
_register = torch.nn.Module.register_buffer


def _assigned(self: Any, name: str, value: Any) -> None:
    """An assignment to a buffer that there is, of which torch.export is not told."""
    if _is_buffer(self, name) and isinstance(value, torch.Tensor):
        self._buffers[name] = value
    else:
        _assign(self, name, value)


def _registered(self: Any, name: str, tensor: Any, persistent: bool = True) -> None:
    if _is_buffer(self, name) and isinstance(tensor, torch.Tensor):
        self._buffers[name] = tensor
    else:
        _register(self, name, tensor, persistent)


ASSIGNMENTS: tuple[StandIn, ...] = (
    (torch.nn.Module, "__setattr__", _assigned),
    (torch.nn.Module, "register_buffer", _registered),
)


def _is_buffer(module: Any, name: str) -> bool:
    return isinstance(module.__dict__.get("_buffers", {}).get(name), torch.Tensor)


class _Held(NamedTuple):
    """A parameter or buffer as a forward found it, and the dict of a module that has it by name."""

    path: str
    own: dict[str, Any]
    name: str
    tensor: torch.Tensor
    version: int


@contextlib.contextmanager
def assignments_written(module: torch.nn.Module) -> Iterator[None]:
    """While a module is exported: buffers are written at the end of each call.

    Raises:
        ConversionError: of the forward, where it assigns a parameter, a tensor of another shape or
            kind, or one of two buffers that are one tensor.
    """
    begun: list[list[_Held]] = []

    def begin() -> None:
        begun.append(
            [
                _Held(f"{path}.{name}" if path else name, own, name, tensor, tensor._version)
                for path, m in module.named_modules()
                for own in (m._parameters, m._buffers)
                for name, tensor in own.items()
                if tensor is not None
            ]
        )

    def end(_: Any) -> None:
        held = begun.pop()
        moved = [one for one in held if one.own.get(one.name) is not one.tensor]
        for one in moved:
            _require_kept(one, [h.path for h in held if h.tensor is one.tensor and h is not one])
            _require_own_memory(one, held, {m.path for m in moved})
        with torch.no_grad():
            # All of them before the first is written: two buffers may have changed places.
            values = [one.own[one.name].clone() for one in moved]
            for one, value in zip(moved, values, strict=True):
                one.tensor.copy_(value)
                one.own[one.name] = one.tensor

    with around_calls(module, end, begin):
        yield


def _require_kept(held: _Held, others: list[str]) -> None:
    """Raises `ConversionError` unless a state can keep the new value where it keeps the old one."""
    path, old, new = held.path, held.tensor, held.own.get(held.name)
    if isinstance(old, torch.nn.Parameter):
        raise ConversionError(
            f"the forward assigns the parameter `{path}` anew: what a state trains, its optimizer"
            " changes. Keep what the forward computes in a buffer (register_buffer, then"
            " self.name.copy_(value)), and read it where the parameter was read."
        )
    if not isinstance(new, torch.Tensor):
        raise ConversionError(
            f"the forward takes the buffer `{path}` away, which a state keeps from step to step."
            " Write into it (self.name.copy_(value))."
        )
    if others:
        raise ConversionError(
            f"the forward assigns the buffer `{path}` anew, which is one tensor with {others[0]}:"
            " from then on they would be two. Give each its own (clone()) before tb.convert, or"
            " write into both (self.name.copy_(value))."
        )
    if new.shape != old.shape:
        raise ConversionError(
            f"the forward assigns a tensor of shape {tuple(new.shape)} to the buffer `{path}`,"
            f" which is {tuple(old.shape)}: from step to step a state keeps one shape. Register it"
            " with the shape that it comes to have, or keep what grows outside of the module."
        )
    if _kind(new) != _kind(old):
        raise ConversionError(
            f"the forward assigns {new.dtype} to the buffer `{path}`, which is {old.dtype}: from"
            f" step to step a state keeps one dtype. Register it as {new.dtype}, or write into it"
            " (self.name.copy_(value)), which casts."
        )


def _require_own_memory(moved: _Held, held: list[_Held], whole: Collection[str]) -> None:
    """Raises `ConversionError` if a buffer becomes memory that somebody writes to in place.

    Args:
        moved: the buffer.
        held: all parameters and buffers.
        whole: paths of those that were assigned anew as well.
    """
    memory = _memory(moved.own[moved.name])
    for one in held:
        written = isinstance(one.tensor, torch.nn.Parameter) or one.tensor._version != one.version
        if one.path not in whole and written and memory == _memory(one.tensor):
            raise ConversionError(
                f"the forward assigns to the buffer `{moved.path}` the memory of `{one.path}`, with"
                " which it would change: keep what it is now, with .clone()"
            )


def _memory(tensor: torch.Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())


def _kind(tensor: torch.Tensor) -> tuple[bool, ...]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype is torch.bool
