"""Names of mesh axes, outermost first.

Stages of a pipeline and replicas of a sharding group may sit on different hosts; the devices of one
group (`data`) are neighbours. What divides a layer itself sends most: its devices are the nearest.
"""

from __future__ import annotations

from typing import Any


PIPE, REPLICA, DATA = "pipe", "replica", "data"
# Over which a batch's rows are spread, and gradients summed.
AXES = (REPLICA, DATA)
# Over which XLA divides the work of a layer.
CONTEXT, TENSOR = "context", "tensor"
FURTHER = (CONTEXT, TENSOR)


def manual_axes(mesh: Any) -> set[str]:
    """The mesh axes over which a step's collectives are its own; XLA divides over the others."""
    return set(mesh.axis_names) - set(FURTHER)
