"""fp16's dynamic loss scale, and the count of skipped steps: how they begin and how they go on."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fzero.plan import Plan
from fzero.summary import Printed, summary


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class LossScale(Printed):
    """Loss scale and its counters (scalars).

    Args:
        scale: float32; losses are multiplied by it before the backward pass. Always 1 when the
            plan skips non-finite steps in fp32 or bf16.
        good_steps: int32; clean steps since the scale last changed.
        hysteresis: int32; overflows still forgiven before the scale falls.
        skipped: int32; steps skipped so far.
    """

    scale: jax.Array
    good_steps: jax.Array
    hysteresis: jax.Array
    skipped: jax.Array

    def _summary(self) -> str:
        return summary("LossScale", vars(self))


def initial_loss_scale(plan: Plan) -> LossScale | None:
    """The loss scale a new state starts with; `None` when the plan never skips a step."""
    if not plan.skips:
        return None
    start = plan.loss_scale.initial if plan.precision == "fp16" else 1.0
    # Each an array of its own: a step gives them away.
    none, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
    return LossScale(jnp.float32(start), none, jnp.int32(plan.loss_scale.hysteresis), skipped)


def next_loss_scale(plan: Plan, old: LossScale, finite: jax.Array) -> LossScale:
    """The loss scale after a step whose gradients were finite or not."""
    how, skipped = plan.loss_scale, old.skipped + jnp.where(finite, 0, 1)
    if plan.precision != "fp16":
        return LossScale(old.scale, old.good_steps, old.hysteresis, skipped)
    grow = finite & (old.good_steps + 1 >= how.growth_steps)
    fall = ~finite & (old.hysteresis <= 1)
    scale = jnp.where(grow, old.scale * 2, old.scale)
    scale = jnp.where(fall, jnp.maximum(scale / 2, how.minimum), scale)
    good = jnp.where(finite & ~grow, old.good_steps + 1, 0)
    # Patience is restored when the scale grows, not by every clean step: then overflows that
    # alternate with clean steps still bring the scale down.
    patience = jnp.where(finite, old.hysteresis, jnp.maximum(old.hysteresis - 1, 1))
    patience = jnp.where(grow, how.hysteresis, patience)
    return LossScale(scale, good.astype(jnp.int32), patience.astype(jnp.int32), skipped)
