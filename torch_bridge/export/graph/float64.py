"""Float64 in a graph: where it is only handed on, and where a gradient goes through it."""

from __future__ import annotations

import torch
from torch.export.graph_signature import OutputKind


WIDE_FLOATS = (torch.float64, torch.complex128)
# What gives the numbers that it was given.
_MOVES = frozenset((
    "view", "reshape", "_unsafe_view", "expand", "slice", "select", "permute", "transpose",
    "t", "squeeze", "unsqueeze", "clone", "contiguous", "alias", "detach", "flatten",
    "unflatten", "flip", "roll", "repeat", "index", "index_select", "gather", "cat", "stack",
    "narrow", "to", "_to_copy", "lift_fresh_copy",
))  # fmt: skip
# What passes no gradient on.
_FLAT = frozenset((
    "detach", "floor", "ceil", "round", "trunc", "sign", "zeros_like", "ones_like",
    "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_empty",
    "new_full",
))  # fmt: skip


def only_moved(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Inputs of float64, and views of them, that nothing computes with in float64."""
    nodes = [node for node in program.graph.nodes if is_float64(node)]
    moved = {
        node for node in nodes
        if node.op == "placeholder"
        or (operator_name(node) in _MOVES and any(map(is_float64, node.all_input_nodes)))
    }  # fmt: skip
    while True:
        beside = {
            node for node in moved
            for other in (*node.users, *node.all_input_nodes)
            if is_float64(other) and other not in moved
        }  # fmt: skip
        if not beside:
            return moved
        moved -= beside


def with_gradient(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Nodes from which a path without `detach`, of floats only, leads to what is returned."""
    signature = program.graph_signature.output_specs
    returned = {s.arg.name for s in signature if s.kind is OutputKind.USER_OUTPUT}
    found: set[torch.fx.Node] = set()
    for node in reversed(program.graph.nodes):
        floats = any(x.is_floating_point() or x.is_complex() for x in _tensors(node))
        if not floats or operator_name(node) in _FLAT:
            continue
        if node.name in returned or any(user in found for user in node.users):
            found.add(node)
    return found


def operator_name(node: torch.fx.Node) -> str:
    """`add` of `aten.add.Tensor`."""
    return str(node.target).removeprefix("aten.").partition(".")[0]


def is_float64(node: torch.fx.Node) -> bool:
    """Whether a node gives float64 (or complex numbers of it)."""
    return any(x.dtype in WIDE_FLOATS for x in _tensors(node))


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [x for x in values if isinstance(x, torch.Tensor)]
