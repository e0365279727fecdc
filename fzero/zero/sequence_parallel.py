"""Values between layers that a `tensor` axis divides: each device has its own positions.

What a layer adds up over `tensor` is whole on all of its devices, and what follows up to the next
product (norms, dropout, the residual stream, and what is kept for the backward pass) would be the
same on each. Divided over positions it is done and kept once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fzero.axes import CONTEXT, EXPERT, TENSOR, free_axes, rows_axis
from fzero.errors import UnusedDevicesWarning, warn
from fzero.plan import Plan
from fzero.sharding.split import flat_splits
from fzero.tree import PyTree


# So many values have to have as many elements as a layer's leaves that lie along `tensor`: XLA then
# gathers these where it would have added values up (docs/axes.md has what was measured).
TIMES = 3


@dataclass(frozen=True)
class Handover:
    """How values go from layer to layer.

    Args:
        wanted: `Plan.sequence_parallel`.
        elements: of one layer, those of leaves that lie along `tensor`.
    """

    wanted: bool | None
    elements: int

    @staticmethod
    def of(plan: Plan, splits: PyTree) -> Handover:
        """What a plan says of a stack whose leaves lie so."""
        divided = [split for split in flat_splits(splits) if TENSOR in split.axes]
        elements = sum(math.prod(split.shape[int(split.stacked) :]) for split in divided)
        return Handover(plan.sequence_parallel, elements)

    def given(self, values: list[Any]) -> list[Any]:
        """What a layer gives, floating-point arrays: positions shared out."""
        return [_between(value, True) if self._shares(value) else value for value in values]

    def taken(self, values: list[Any]) -> list[Any]:
        """The same as the next layer computes with it: whole positions."""
        return [_between(value, False) if self._shares(value) else value for value in values]

    def _shares(self, value: Any) -> bool:
        """Whether positions of a value, its dim 1 of 3, are shared out where this is traced."""
        sizes = free_axes()
        ways = sizes.get(TENSOR, 1)
        if ways == 1 or self.wanted is False or value.ndim != 3:
            return False
        others = sizes.get(CONTEXT, 1)
        if value.shape[1] % (ways * others):
            if self.wanted:
                self._say(value, f"{value.shape[1]} positions", ways * others, "length")
            return False
        if sizes.get(EXPERT, 1) > 1:
            # XLA's partitioner ends the process where positions are divided and rows are not.
            if not rows_axis(value.shape[0]):
                if self.wanted:
                    self._say(value, f"{value.shape[0]} rows", sizes[EXPERT], "number of rows")
                return False
            others *= sizes[EXPERT]
        least = self.elements or math.inf
        return self.wanted is True or TIMES * value.size // others >= least

    def _say(self, value: Any, what: str, ways: int, choose: str) -> None:
        warn(
            f"plan: sequence_parallel=True, but {what} of what a layer gives"
            f" {list(value.shape)} cannot be shared out by {ways} devices: each computes all"
            f" positions. Choose a {choose} that divides, or leave sequence_parallel out",
            UnusedDevicesWarning,
        )


def _between(value: jax.Array, split: bool) -> jax.Array:
    """A value, and its gradient, with positions divided over `tensor`, or whole there."""
    own = tuple(axis for axis in (CONTEXT, *(TENSOR,) * split) if axis in free_axes())
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(value, PartitionSpec(free, own or None, None))
