"""The state: one immutable pytree for training, evaluation, offload, checkpoints and export."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax

from fzero.loss_scaling import LossScale
from fzero.sharding.homes import StackRows
from fzero.sharding.split import OwnShapes
from fzero.state import compute_copy, filling, row_order
from fzero.summary import Printed, summary
from fzero.tree import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Pending(Printed):
    """Gradients accumulated by `accumulate_step` and not yet applied.

    Args:
        sums: gradients (at least float32) of the summed loss total, one per parameter, sharded.
        total: sum of the losses so far.
        count: sum of their counts.
        calls: int32, batches accumulated.
    """

    sums: PyTree
    total: jax.Array
    count: jax.Array
    calls: jax.Array

    def _summary(self) -> str:
        return summary("Pending", vars(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState(Printed):
    """Everything that training changes, as one value.

    Args:
        step: int32 scalar, optimizer steps taken.
        params: the parameters; the fp32 master under mixed precision.
        compute: a cast copy of `params` that the forward pass reads, or `None` when it reads
            `params` (fp32) or casts them as it gathers (stage 3). It follows `params`: what else is
            put there no step reads, but casts it anew.
        opt_state: the optax state.
        buffers: whatever else the model changes (running statistics); replicated.
        rng: key from which every layer's key is folded; never changes.
        loss_scale: fp16's loss scale and the count of skipped steps, or `None`.
        grads: an accumulation in progress, or `None`.
        ema: moving averages of the trained parameters in float32 (`Plan(ema=0.999)`), or `None`.
        rows: of a pipeline's state, `(name, rows)` of each stack whose layers are not kept in
            order: the layer in each row, as the plan's schedule and partition have it. No leaf: a
            state of another order has another structure, and its arrays are refused here.
        padded: `(path, shape)` of each parameter that is kept with zeros at its end, as no dim of
            it divides: its own shape, by which a state of 27 rows is none of a model with 28. No
            leaf, like `rows`.

    `fz.describe` names the leaves with zeros at their ends (`opt_state` and `ema` have some, too),
    `fz.logical` gives parameters in their own shapes.
    """

    step: jax.Array
    params: PyTree
    compute: PyTree
    opt_state: PyTree
    buffers: PyTree
    rng: jax.Array
    loss_scale: LossScale | None
    grads: Pending | None = None
    ema: PyTree = None
    rows: StackRows = field(default=(), metadata={"static": True})
    padded: OwnShapes = field(default=(), metadata={"static": True})

    def __post_init__(self) -> None:
        row_order.require_alike(self, fields_of(self))

    def _summary(self) -> str:
        return summary("TrainState", fields_of(self))

    def replace(self, **changes: Any) -> TrainState:
        """The same state with some fields changed.

        Steps take a number for `step`, and a seed or a key that lies anywhere for `rng`.
        New `params` are cast into a new `compute` where the state has one, unless it is given too.
        Everything else stays: moments and averages go on from what they were. For averages that
        begin again at new parameters, `fz.replan(state.replace(params=..., ema=None), model, tx,
        plan.replace(ema=None), plan)`.

        Raises:
            StateError: zeros that fill up `params` have moved among their values (`x[::-1]`), or
                arrays are of a state whose layers are kept in another order; or `compute` alone was
                edited, which no step reads.
        """
        if "params" in changes:
            filling.require_unmoved(self.params, changes["params"], self.rows, self.padded)
        new = dataclasses.replace(self, **changes)
        if "params" not in changes and "compute" in changes:
            compute_copy.require_copy(self.params, self.compute, new.compute)
        if "params" not in changes or "compute" in changes or self.compute is None:
            return new
        return dataclasses.replace(new, compute=compute_copy.refreshed(new.params, new.compute))


def fields_of(state: TrainState) -> dict[str, Any]:
    """What a state holds in arrays, by name."""
    return {name: value for name, value in vars(state).items() if name not in ("rows", "padded")}
