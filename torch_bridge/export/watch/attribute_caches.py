"""What a forward keeps in attributes to save time: a mask or a table for sizes that came before.

A converted forward computes it in each call. That is the same where it follows from sizes,
constants and buffers that no forward changes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_flatten, tree_leaves

from torch_bridge.export.calls import around_calls
from torch_bridge.export.watch.constants import same_constant
from torch_bridge.export.watch.leftovers import OF_A_TRACE


# An attribute of a submodule, as (path, name).
Attribute = tuple[str, str]
# Operators that read of their first operand what it is, and not its values.
_OF_METADATA = (
    "sym_size", "sym_numel", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like",
    "full_like",
)  # fmt: skip


class _Nothing:
    """In place of an attribute that is not there; a copy of a class is itself."""


def made_while_traced(
    attributes: Sequence[Attribute], value_of: Callable[[Attribute], Any]
) -> list[Attribute]:
    """Those that hold something a trace computed: it stands for a value of every call."""
    return [
        attribute
        for attribute in attributes
        if any(isinstance(leaf, OF_A_TRACE) for leaf in tree_leaves(value_of(attribute)))
    ]


def kept_by_the_next_call(
    module: torch.nn.Module, inputs: tuple[Any, dict[str, Any]], attributes: Sequence[Attribute]
) -> bool:
    """Whether a second call leaves in attributes what the first one did: they count nothing.

    The module runs, on copies of its buffers, and keeps what it had in these attributes.
    """
    args, kwargs = inputs
    if any(leaf.is_meta for leaf in (*module.parameters(), *module.buffers())):
        return False  # it has no values
    before = {one: copy.copy(x) for one, x in _snapshot(module, attributes).items()}
    left = []
    try:
        with torch.random.fork_rng():
            for _ in range(2):
                buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
                torch.func.functional_call(module, buffers, args, kwargs)
                left.append([copy.copy(x) for x in _snapshot(module, attributes).values()])
    except Exception:  # whatever a module meets that runs as it is
        return False
    finally:
        for (path, name), value in before.items():
            held = module.get_submodule(path).__dict__
            held[name] = value
            if value is _Nothing:
                del held[name]
    (one, spec), (other, spec_2) = (tree_flatten(values) for values in left)
    return spec == spec_2 and all(map(_same, one, other))


def _snapshot(module: torch.nn.Module, attributes: Sequence[Attribute]) -> dict[Attribute, Any]:
    return {
        (path, name): module.get_submodule(path).__dict__.get(name, _Nothing)
        for path, name in attributes
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_constant(a, b)
    return bool(type(a) is type(b) and a == b)


@contextlib.contextmanager
def returned_as_well(module: torch.nn.Module, attributes: Sequence[Attribute]) -> Iterator[None]:
    """While a module is traced, its calls also return the tensors that such attributes hold."""

    def tensors(out: Any) -> Any:
        held = list(_snapshot(module, attributes).values())
        return out, [leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor)]

    with around_calls(module, tensors):
        yield


def follow_from_sizes(program: ExportedProgram) -> bool:
    """Whether what a program of `returned_as_well` returns beside its results would be the same in
    every call of the same sizes: no input's values, parameters or random numbers are in it."""
    signature = program.graph_signature
    changed = {*signature.buffers_to_mutate.values()}
    fixed = {
        spec.arg.name
        for spec in signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
        or (spec.kind is InputKind.BUFFER and spec.target not in changed)
    }
    *_, output = program.graph.nodes
    returned = output.args[0][len(output.args[0]) - _beside(program) :]
    left, seen = [node for node in returned if isinstance(node, torch.fx.Node)], set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            if node.name not in fixed:
                return False
        elif node.op == "get_attr":
            if _draws_within(program, node):
                return False
        elif _draws(node):
            return False
        else:
            what = node.args[0] if _reads_metadata(node) else None
            left += [one for one in node.all_input_nodes if one is not what]
    return True


def _beside(program: ExportedProgram) -> int:
    """How many tensors are returned beside a forward's results."""
    spec = program.call_spec.out_spec
    beside = spec.child(1) if hasattr(spec, "child") else spec.children_specs[1]  # torch 2.9
    return int(beside.num_leaves)


def _reads_metadata(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _OF_METADATA


def _draws(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _draws_within(program: ExportedProgram, node: torch.fx.Node) -> bool:
    """Whether a region of a program (of `no_grad`, say) draws random numbers."""
    region = getattr(program.graph_module, str(node.target), None)
    inside = region.graph.nodes if isinstance(region, torch.fx.GraphModule) else ()
    return any(_draws(one) for one in inside)
