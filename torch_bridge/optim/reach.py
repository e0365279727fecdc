"""Which parameters a converted module's train mode computes a gradient for.

PyTorch gives the others none, and its optimizers then leave them alone, weight decay included. In
JAX their gradient is zero, and decay would move them.
"""

from __future__ import annotations

import re

import torch

from torch_bridge.converted import Converted
from torch_bridge.export.interpret import Graph, Instruction
from torch_bridge.lower.refs import refs
from torch_bridge.sequential import ConvertedSequential


# Operators that PyTorch sends no gradient through: what they return has none.
_STOPS = re.compile(
    r"aten\.(all|any|arg(max|min|sort)|bincount|bitwise_\w+|bucketize|detach|eq|floor_divide|g[et]"
    r"|is(finite|inf|nan)|l[et]|logical_\w+|ne|new_\w+|nonzero_static|one_hot|searchsorted"
    r"|(empty|full|ones|rand|randint|randn|zeros)_like)\."
)
_CASTS = ("aten._to_copy.", "aten.to.", "prims.convert_element_type.")


def reached(converted: Converted | ConvertedSequential) -> frozenset[str]:
    """Names of the module's leaves that gradients reach, frozen ones too."""
    if isinstance(converted, Converted):
        mode = converted._modes[max(converted._modes)]
        return frozenset(mode.params[name] for name in _reached(mode.graph) if name in mode.params)
    leaf_at = {(place.layer, place.name): place.leaf.name for place in converted.places}
    found: set[str] = set()
    for layer in converted.model.layers[: len(converted.modules)]:
        reads = getattr(layer, "reads", {})
        for name in reached(converted.modules[layer.name]):
            owner, _, own = reads.get(name, f"{layer.name}/{name}").partition("/")
            found.add(leaf_at[owner, own])
    return frozenset(found)


def _reached(graph: Graph) -> set[str]:
    """All values that an output depends on with nothing between that stops gradients."""
    needed = set(refs(graph.outputs))
    for step in reversed(graph.instructions):
        if step.name in needed and not _stops(step):
            needed.update(refs(step.args))
            needed.update(refs(step.kwargs))
    return needed


def _stops(step: Instruction) -> bool:
    """Whether what an instruction returns has no gradient: comparisons, whole numbers, shapes."""
    if step.operator.startswith(_CASTS):
        kinds = [x for x in (*step.args, *step.kwargs.values()) if isinstance(x, torch.dtype)]
        return any(not (kind.is_floating_point or kind.is_complex) for kind in kinds)
    return _STOPS.match(step.operator) is not None
