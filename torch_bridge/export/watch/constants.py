"""Tensors that a forward reads, but not as parameters or buffers: export makes constants of them.

Of a tensor of the user's own that is what was meant. Of a weight that is read through a plain list
or a detached copy, and of one computed from weights, it is not: no gradient would come back, and
trained or loaded values would not be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export.graph_signature import InputKind

from fzero.errors import ConversionError
from torch_bridge.export.graph.memory import memory_of, writes
from torch_bridge.export.origins import module_path, source_line
from torch_bridge.export.watch.copies import Copies
from torch_bridge.export.watch.counts import Memory


# A copy that `keep_values` made says where its original lies: weights are known by that.
_COPY_OF = "_torch_bridge_copy_of"


def refuse_nameless(
    program: torch.export.ExportedProgram, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Refuse constants of a graph that are, or are made of, weights of its module.

    Args:
        program: an exported program.
        tensors: the module's parameters and buffers.

    Raises:
        ConversionError: says which tensor is read, where, and what to do.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors:
        if (memory := _memory(tensor)) is not None:
            names.setdefault(memory, name)
    for target, value, reader in _read_constants(program):
        shared = names.get(_memory(value) or 0)
        if shared is None and not value.requires_grad:
            continue
        what = f"`{shared}`, but not by this name" if shared else f"`{target}`"
        raise ConversionError(
            f"{module_path(reader)} reads {what}, which export makes a constant: no gradient would"
            f" reach it, nor any later value.\n  at: {source_line(reader)}\n  Read weights as"
            " attributes of their module (not from a list, a dict or a detached copy), keep what"
            " is learnt as a torch.nn.Parameter, and compute with it in forward."
        )


def refuse_without_values(program: torch.export.ExportedProgram) -> None:
    """Refuse constants on the `meta` device.

    Args:
        program: an exported program.

    Raises:
        ConversionError: says which tensor is read, where, and what to do.
    """
    for name, value, reader in _read_constants(program):
        if value.device.type == "meta":
            raise ConversionError(
                f"{module_path(reader)} reads the tensor `{name}`, which is neither parameter nor"
                " buffer and has no value on the `meta` device. Make it a buffer (register_buffer),"
                " which a checkpoint or tb.convert(..., buffers=...) gives; make what is computed"
                " of Python numbers in forward, with torch.tensor; or convert on the CPU"
                f"\n  at: {source_line(reader)}"
            )


def keep_values(
    program: torch.export.ExportedProgram, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy constants whose memory is not PyTorch's alone: a later call may write to an array's.

    Args:
        program: an exported program.
        tensors: the module's parameters and buffers, which are known by their memory.
    """
    own = {_memory(tensor) for _, tensor in tensors}
    for name, value in program.constants.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            continue
        # PyTorch lets nobody resize what others look at.
        memory = _memory(value)
        if memory and memory not in own and not value.untyped_storage().resizable():
            copied = value.detach().clone().requires_grad_(value.requires_grad)
            setattr(copied, _COPY_OF, memory)
            program.constants[name] = copied


def refuse_shared(
    arrays: Mapping[str, Memory], tensors: Iterable[tuple[str, torch.Tensor]], mode: str
) -> None:
    """Refuse parameters and buffers in whose memory a forward writes by an array.

    Args:
        arrays: what it wrote to, by name.
        tensors: the module's parameters and buffers.
        mode: "train" or "eval".

    Raises:
        ConversionError: names both.
    """
    places = {name: _place(one) for name, one in arrays.items()}
    for name, tensor in tensors:
        if not (begin := _memory(tensor)):
            continue
        end = begin + tensor.untyped_storage().nbytes()
        for array, (first, last) in places.items():
            if first < end and begin < last:
                raise ConversionError(
                    f"the {mode} forward writes to {array}, whose memory `{name}` shares: of that"
                    f" export sees nothing. Write to the tensor itself (self.{name}.copy_(...)),"
                    " which is returned after every call."
                )


def refuse_written_copies(
    program: torch.export.ExportedProgram, copies: Copies, held: Mapping[str, Memory]
) -> None:
    """Refuse writes through a tensor into an array that a forward leads to.

    Args:
        program: as traced, where such a tensor is a constant with the memory of a copy.
        copies: what each copy is one of, by where it begins.
        held: the arrays that a later call may read, by name. What is written to others ends with
            the call, as it does in the graph.

    Raises:
        ConversionError: says which array, and where.
    """
    kept = {name: _place(one) for name, one in held.items()} if copies else {}
    specs = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes if kept else ():
        written = memory_of(node)[-1:] if writes(node) else []
        if written and str(written[0].target) == "aten.lift_fresh_copy.default":
            written = [written[0].args[0]]  # type: ignore[list-item]
        for base in written:
            value = program.constants.get(specs.get(base.name, ""))
            at = _memory(value) if isinstance(value, torch.Tensor) else None
            if at not in copies:
                continue
            first, last = _place(copies[at][1])
            for name, (begin, end) in kept.items():
                if first < end and begin < last:
                    raise ConversionError(
                        f"{module_path(node)} writes through a tensor into the array {name}, and a"
                        " later call would read it: of that export sees nothing. Keep it in a"
                        " buffer (register_buffer) and write to that, which is returned after every"
                        f" call.\n  at: {source_line(node)}"
                    )


def _place(one: Memory) -> tuple[int, int]:
    """Where an array's memory begins and ends."""
    array = one if isinstance(one, np.ndarray) else np.frombuffer(one, np.uint8)
    first = int(array.__array_interface__["data"][0])
    return first, first + array.nbytes


def line_that_reads_other(
    one: torch.export.ExportedProgram, other: torch.export.ExportedProgram
) -> str:
    """The line that reads a constant which two programs have differently, or nothing."""
    theirs = other.constants
    for name, value, reader in _read_constants(one):
        if name not in theirs or not same_constant(value, theirs[name]):
            return source_line(reader, unknown="")
    return ""


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants of programs are the same values."""
    if a is b or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a is b or type(a) is type(b))
    # A tensor that the first trace left in an attribute has no values.
    if type(a) is not type(b) or a.is_meta or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and _equal_else(a, b)))


def _equal_else(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a[~a.isnan()], b[~b.isnan()])


def line_that_reads_earlier(program: torch.export.ExportedProgram) -> str | None:
    """The line that reads a tensor which an earlier trace has computed; None where none does."""
    found = (n for _, value, n in _read_constants(program) if isinstance(value, FakeTensor))
    reader = next(found, None)
    return None if reader is None else source_line(reader)


def _read_constants(
    program: torch.export.ExportedProgram,
) -> Iterator[tuple[str, torch.Tensor, torch.fx.Node]]:
    """The name, the value and the first reader of each constant of a graph that is read."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and nodes[spec.arg.name].users:
            value = program.constants[str(spec.target)]
            assert isinstance(value, torch.Tensor)
            yield str(spec.target), value, next(iter(nodes[spec.arg.name].users))


def _memory(tensor: torch.Tensor) -> int | None:
    """Where a tensor's memory begins (of a copy, its original's); None if it has none."""
    if isinstance(tensor, FakeTensor | FunctionalTensor):
        return None  # what a forward registered itself
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    return getattr(tensor, _COPY_OF, None) or tensor.untyped_storage().data_ptr()
