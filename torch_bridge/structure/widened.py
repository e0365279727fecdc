"""Blocks that are equal in float32, and of which the first alone is given 16 bits in those.

A residual that is kept in float32 (Mamba) begins as an embedding of 16 bits: the first block casts
it, the others have it. Cast before the first block it is the same, and all blocks are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from fzero.errors import ConversionError
from torch_bridge.export.graph.float64 import operator_name
from torch_bridge.export.mode import Mode, build_mode
from torch_bridge.export.origins import module_path
from torch_bridge.module.names import Layout
from torch_bridge.structure.blocks import roll_same
from torch_bridge.structure.loops import LoopedGraph
from torch_bridge.structure.stacked_names import BlockStack


_NARROW = (torch.bfloat16, torch.float16)
_CASTS = ("to", "_to_copy")


def roll_widened(
    program: torch.export.ExportedProgram,
    mode: Mode,
    layout: Layout,
    min_layers: int,
    stacks: Sequence[BlockStack],
) -> tuple[Mode, LoopedGraph]:
    """As `roll_same`, of a graph in which first blocks may be given what later ones are.

    Args:
        program: an exported program, which may be changed.
        mode: what was made of it.
        layout: the module's leaves.
        min_layers: the fewest layers that were rolled.
        stacks: what was rolled.

    Returns:
        What is made of the program now, and that with loops.

    Raises:
        ConversionError: as of `roll_same`.
    """
    with contextlib.suppress(ConversionError):
        return mode, roll_same(program, mode, layout, min_layers, stacks)
    if _widen_first_inputs(program, stacks):
        mode = build_mode(program, layout, mode.call)
    return mode, roll_same(program, mode, layout, min_layers, stacks)


def _widen_first_inputs(
    program: torch.export.ExportedProgram, stacks: Sequence[BlockStack]
) -> bool:
    """Cast what first blocks read in the place of what later ones are handed; whether any does."""
    changed = False
    for stack in stacks:
        first, second = (_nodes(program, stack, layer) for layer in (0, 1))
        inside = set(first)
        found: dict[torch.fx.Node, list[tuple[torch.fx.Node, torch.fx.Node]]] = {}
        for one, other in zip(first, second, strict=False):
            for given, handed in zip(one.all_input_nodes, other.all_input_nodes, strict=False):
                value = _before_casts(given)
                carried = value not in inside and handed in inside
                if carried and _dtype(value) in _NARROW and _dtype(handed) is torch.float32:
                    found.setdefault(value, []).append((one, given))
        for value, readers in found.items():
            # What computes with it in 16 bits would not, any more.
            if all(operator_name(node) in _CASTS for node, _ in readers):
                _cast_for(program.graph, value, readers)
                changed = True
    program.graph_module.recompile()
    return changed


def _nodes(
    program: torch.export.ExportedProgram, stack: BlockStack, layer: int
) -> list[torch.fx.Node]:
    """The nodes of a layer that give tensors."""
    paths = {stack.block(layer, offset) for offset in range(stack.period)}
    return [
        node for node in program.graph.nodes
        if node.op == "call_function"
        and _dtype(node) is not None
        and any(f"{module_path(node)}.".startswith(f"{path}.") for path in paths)
    ]  # fmt: skip


def _dtype(node: torch.fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _before_casts(node: torch.fx.Node) -> torch.fx.Node:
    """What a value is, behind casts that change nothing: PyTorch gives the same tensor there."""
    while operator_name(node) in _CASTS and _dtype(node) is _dtype(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    return node


def _cast_for(
    graph: torch.fx.Graph,
    value: torch.fx.Node,
    readers: Sequence[tuple[torch.fx.Node, torch.fx.Node]],
) -> None:
    """Give readers a value in float32, in place of what they are given."""
    with graph.inserting_before(readers[0][0]):
        cast = graph.call_function(torch.ops.aten.to.dtype, (value, torch.float32))
    cast.meta.update(value.meta)
    cast.meta["val"] = value.meta["val"].to(torch.float32)
    for node, given in readers:
        node.replace_input_with(given, cast)
