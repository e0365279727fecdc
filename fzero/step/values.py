"""What is handed from the passes of a step to its update."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fzero.links import Mean
from fzero.tree import PyTree


# Fields of a state, or what a step computes for one, by name.
Values = dict[str, Any]
Metrics = dict[str, jax.Array]
# Step count and key, which a step never gives away, so that a consumed state knows its step.
StepAndKey = tuple[jax.Array, jax.Array]


def metrics_of(mean: Mean, own: dict[str, Mean]) -> Metrics:
    """Metrics from their sums over all devices and microbatches: the loss, and the model's own."""
    metrics = {"loss": mean.total / mean.divisor, "count": mean.count}
    return metrics | {name: value.total / value.divisor for name, value in own.items()}


class Gradients(NamedTuple):
    """What a pass over a batch gives the update.

    Attributes:
        sums: gradients of the summed loss total, as shards.
        mean: the loss over all devices and microbatches.
        own: the model's metrics, likewise.
        changed: new values of the fields that computing gradients changes: `buffers`.
    """

    sums: PyTree
    mean: Mean
    own: dict[str, Mean]
    changed: Values
