"""Learning rates as DeepSpeed and transformers move them, as functions of the update's number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from torch_bridge.configs.keys import Keys
from torch_bridge.configs.outcome import Schedule


# DeepSpeed sets the rate of update n when update n - 1 is done, from the iteration n - 1; so two
# updates run at the start's rate.


def warmup(keys: Keys, lr: float | None) -> Schedule:
    """`WarmupLR`: from `warmup_min_lr` to `warmup_max_lr`, then constant."""
    low, high = _bounds(keys, lr)
    rising, steps = _rising(keys)

    def rate(count: Any) -> Any:
        at = jnp.float32(count) - 1
        return low + (high - low) * jnp.where(at < steps, rising(at), 1.0)

    return rate


def warmup_decay(keys: Keys, lr: float | None) -> Schedule:
    """`WarmupDecayLR`: up, then down to nothing in a line."""
    total = keys.number("total_num_steps", kind=int)
    if total is None:
        raise keys.error("total_num_steps", "missing", "expected the number of updates in all")
    low, high = _bounds(keys, 1e-3)
    rising, steps = _rising(keys)

    def rate(count: Any) -> Any:
        at = jnp.float32(count) - 1
        falling = (total - at) / max(1.0, total - steps)
        share = jnp.where(at < steps, rising(at), jnp.maximum(0.0, falling))
        return low + (high - low) * share

    return rate


def warmup_cosine(keys: Keys, lr: float | None) -> Schedule:
    """`WarmupCosineLR`: up to the optimizer's rate, then down to a share of it along a cosine."""
    total = keys.number("total_num_steps", kind=int)
    if total is None or lr is None:
        missing = "total_num_steps" if total is None else "lr"
        raise keys.error(missing, "missing", "expected a number (lr: of the optimizer)")
    low = keys.number("warmup_min_ratio", 0.0)
    floor = keys.number("cos_min_ratio", 1e-4)
    rising, steps = _rising(keys)

    def rate(count: Any) -> Any:
        at = jnp.float32(count) - 1
        up = jnp.where(at < 0, 0.0, low + (1 - low) * rising(at))
        progress = jnp.minimum(1.0, (at - steps + 1) / max(1, total - steps))
        down = jnp.maximum(0.0, floor + (1 - floor) * (1 + jnp.cos(math.pi * progress)) / 2)
        return lr * jnp.where(at < steps, up, down)

    return rate


def range_test(keys: Keys, lr: float | None) -> Schedule:
    """`LRRangeTest`: ever upward, in a line or in stairs."""
    low = keys.number("lr_range_test_min_lr", 1e-3)
    size = keys.number("lr_range_test_step_size", 2000, int)
    speed = keys.number("lr_range_test_step_rate", 1.0)
    stairs = keys.take("lr_range_test_staircase", False)

    def rate(count: Any) -> Any:
        intervals = jnp.float32(count) / size
        return low * (1 + speed * (jnp.floor(intervals) if stairs else intervals))

    return rate


def one_cycle(keys: Keys, lr: float | None) -> Schedule:
    """`OneCycle`: up, down, and on down slowly. The optimizer's momentum must be left alone."""
    if keys.take("cycle_momentum", True):
        raise keys.error(
            "cycle_momentum", "true (DeepSpeed's default)",
            "the optimizers here keep their betas; write false, or make an optimizer with "
            "optax.inject_hyperparams(optax.adamw)(b1=your_schedule, ...)",
        )  # fmt: skip
    keys.without_effect(
        dict.fromkeys(
            ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"), "cycle_momentum is false"
        )
    )
    low, high = keys.number("cycle_min_lr"), keys.number("cycle_max_lr")
    if low is None or high is None:
        raise keys.error("cycle_min_lr", "missing", "expected cycle_min_lr and cycle_max_lr")
    first = keys.number("cycle_first_step_size", 2000)
    second = keys.number("cycle_second_step_size", first)
    for stairs in ("cycle_first_stair_count", "cycle_second_stair_count"):
        if keys.take(stairs, 0):
            raise keys.error(stairs, "not 0", "stairs are not taken over: write 0")
    decay, every = keys.number("decay_lr_rate", 0.0), keys.number("decay_step_size", 0.0)
    total = first + second

    def rate(count: Any) -> Any:
        count = jnp.float32(count)
        x = (count % total) / total
        peak = first / total
        up = jnp.where(x <= peak, x / peak, (1 - x) / max(1e-12, 1 - peak))
        over = count - total
        falling = 1 + decay * jnp.maximum(over, 0) / every if decay and every else 1.0
        return jnp.where(
            count == 0, low, jnp.where(over <= 0, low + (high - low) * up, low / falling)
        )

    return rate


def _bounds(keys: Keys, default: float | None) -> tuple[float, float]:
    low, high = keys.number("warmup_min_lr", 0.0), keys.number("warmup_max_lr", default)
    if high is None:
        raise keys.error("warmup_max_lr", "missing", "expected a number here or the optimizer's lr")
    return low, high


def _rising(keys: Keys) -> tuple[Schedule, int]:
    """Iteration to share of the way up, below the number of steps that it also gives."""
    steps = max(2, keys.number("warmup_num_steps", 1000, int))
    kind = keys.take("warmup_type", "log")
    if kind == "linear":
        return lambda at: jnp.maximum(at, 0) / steps, steps
    if kind != "log":
        raise keys.error("warmup_type", repr(kind), "expected 'log' or 'linear'")
    return lambda at: jnp.log(jnp.maximum(at, 0) + 1.0) / math.log(steps), steps


BUILDERS: dict[str, Callable[[Keys, float | None], Schedule]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
}
