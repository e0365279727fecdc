"""Names of mesh axes, outermost first.

Stages of a pipeline and replicas of a sharding group may sit on different hosts; the devices of one
group (`data`) are neighbours. What divides a layer itself sends most: its devices are the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax


PIPE, REPLICA, DATA = "pipe", "replica", "data"
# Over which a batch's rows are spread, and gradients summed.
AXES = (REPLICA, DATA)
# Over which XLA divides the work of a layer.
EXPERT, CONTEXT, TENSOR = "expert", "context", "tensor"
FURTHER = (EXPERT, CONTEXT, TENSOR)
# Those of them that share out tokens: rows, and their positions.
TOKENS = (EXPERT, CONTEXT)
# Over which ZeRO shares leaves out, outermost first.
ZERO = (DATA, *FURTHER)


@dataclass(frozen=True)
class Parts:
    """An entry of `shard` for a dim that is made of parts, such as heads.

    Where an axis does not divide their number the dim stays whole, on every device; an axis that is
    named alone has to divide the dim.

    Args:
        axis: the mesh axis that the dim lies along.
        num: how many parts there are.

    Example:
        >>> shard = {"wq": (None, Parts("tensor", 8)), "wk": (None, Parts("tensor", 2))}
    """

    axis: str
    num: int

    def under(self, sizes: Mapping[str, int]) -> str | None:
        """The axis, if it divides the parts in a mesh of these sizes."""
        return None if self.num % sizes.get(self.axis, 1) else self.axis


def free_axes() -> dict[str, int]:
    """Sizes of the mesh axes that XLA divides over where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    return {name: sizes[name] for name in FURTHER if name in mesh.auto_axes}


def rows_axis(rows: int) -> str | None:
    """The further axis that rows of a batch are spread over where this is traced, if it divides
    them: layers that do not live on its devices are computed there, each for its own rows."""
    size = free_axes().get(EXPERT, 1)
    return EXPERT if size > 1 and rows and not rows % size else None


def token_axes(rows: int) -> tuple[str | None, str | None]:
    """The further axes that a batch's rows and positions are spread over where this is traced."""
    return rows_axis(rows), CONTEXT if free_axes().get(CONTEXT, 1) > 1 else None


def zero_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the axes that ZeRO shares leaves out over, in a mesh of these sizes."""
    return {name: sizes[name] for name in ZERO if name in sizes}


def shared_over(sizes: Mapping[str, int], along: Sequence[str | None] = ()) -> dict[str, int]:
    """Of ZeRO's axes those whose devices would all hold the same of a leaf, and share it out.

    What `tensor` leaves whole of a layer is small, and travels with the rest; experts are not.

    Args:
        sizes: `zero_sizes` of the mesh.
        along: the further axes that the leaf lies along.
    """
    idle = {*along} if EXPERT in along else {*along, TENSOR}
    return {name: size for name, size in sizes.items() if name not in idle}


def manual_axes(mesh: Any) -> set[str]:
    """The mesh axes over which a step's collectives are its own; XLA divides over the others."""
    return set(mesh.axis_names) - set(FURTHER)
