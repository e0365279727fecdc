"""Which parameters a converted module's train mode computes a gradient for.

PyTorch gives the others none, and its optimizers then leave them alone, weight decay included. In
JAX their gradient is zero, and decay would move them.
"""

from __future__ import annotations

from torch_bridge.converted import Converted
from torch_bridge.export.reach import reached_from
from torch_bridge.sequential import ConvertedSequential


def reached(converted: Converted | ConvertedSequential) -> frozenset[str]:
    """Names of the module's leaves that gradients reach, frozen ones too."""
    if isinstance(converted, Converted):
        mode = converted._modes[max(converted._modes)]
        return frozenset(
            mode.params[name]
            for name in reached_from(mode.graph, mode.graph.outputs)
            if name in mode.params
        )
    leaf_at = {place.path: place.leaf.name for place in converted.places}
    found: set[str] = set()
    for layer in converted.model.layers[: len(converted.modules)]:
        reads = getattr(layer, "reads", {})
        for name in reached(converted.modules[layer.name]):
            found.add(leaf_at[reads.get(name, f"{layer.name}/{name}")])
    return frozenset(found)
