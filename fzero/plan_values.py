"""What each field of a plan may be, on its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fzero.axes import FURTHER
from fzero.errors import PlanError, is_number, known_fields
from fzero.float8.recipe import Float8
from fzero.schedule.actions import Schedule


PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
TIERS = ("device", "host", "disk")
PARKED = ("opt_state", "ema", "master", "params")

# What may be said, for each field that takes one of a few words or numbers.
CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "reduce": ("microbatch", "step"),
    "reduce_dtype": (None, "fp32"),
    "gather": ("eager", "lazy"),
    "gather_dtype": (None, "int8"),
    "update_on": ("device", "host"),
    "prefetch": (None, True, False),
    "sequence_parallel": (None, True, False),
    "skip_nonfinite": (True, False),
    "deterministic": (True, False),
}
# The least whole number that may be said.
LEAST = {
    **dict.fromkeys(("pipe", "replica", *FURTHER, "microbatches", "data"), 1),
    "min_shard_bytes": 0,
    "stream_bytes": 1,
}


@dataclass(frozen=True)
class LossScaling:
    """How fp16's dynamic loss scale moves.

    The defaults are the usual constants (Megatron, DeepSpeed and torch.amp agree on them): start
    high and fall quickly, double after 1000 clean steps, and forgive one overflow before halving,
    because a single overflow says little. A device adds up the rows of a microbatch in float16, so
    whether a step overflows depends on how its batch is divided.

    Args:
        initial: the scale that a new state starts with; a power of two, as all others then are, so
            that scaling changes no bit.
        growth_steps: clean steps after which it doubles.
        hysteresis: overflows, counted since it last grew, of which the last one halves it.
        minimum: it never falls below this power of two.

    Raises:
        PlanError: a value is out of range.

    Example:
        >>> LossScaling(initial=2**12, growth_steps=200).minimum
        1.0

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    initial: float = 2.0**16
    growth_steps: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name in ("initial", "minimum"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value < 2.0**127 and math.frexp(value)[0] == 0.5):
                raise PlanError(f"plan: loss_scale: {name}={value!r}: expected a power of two")
            object.__setattr__(self, name, float(value))
        for name in ("growth_steps", "hysteresis"):
            expect_int(f"loss_scale: {name}", getattr(self, name), 1)
        if self.minimum > self.initial:
            raise PlanError(
                f"plan: loss_scale: minimum={self.minimum} is above initial={self.initial}; lower"
                " the one or raise the other"
            )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LossScaling:
        """From the dict of its values.

        Raises:
            PlanError: a key is unknown.
        """
        return cls(**known_fields(cls, "plan: loss_scale", values))


def check_values(plan: Any) -> None:
    """Refuses a plan with a field that is out of range.

    Raises:
        PlanError: it says which, what was expected and what came.
    """
    if plan.reduce_dtype == "int8":
        raise PlanError(
            "plan: reduce_dtype='int8' is no more (fzero 0.1 had it): use gather_dtype='int8'"
            " with zero=3 to send fewer bytes, or reduce='step' to reduce once a step"
        )
    for name, choices in CHOICES.items():
        expect_choice(name, getattr(plan, name), choices)
    for name, least in LEAST.items():
        value = getattr(plan, name)
        if (name, value) != ("data", None):
            expect_int(name, value, least)
    if not isinstance(plan.loss_scale, LossScaling):
        raise PlanError(
            f"plan: loss_scale={plan.loss_scale!r}: expected a fz.LossScaling, such as"
            " fz.LossScaling(initial=2**12)"
        )
    if not isinstance(plan.float8, Float8):
        raise PlanError(
            f"plan: float8={plan.float8!r}: expected a fz.Float8, such as"
            ' fz.Float8(recipe="rowwise")'
        )
    held = np.finfo(np.float32)  # what a step computes with: infinity by infinity is no number
    low, high = float(held.tiny), float(held.max)
    clip, decay = plan.clip_norm, plan.ema
    if clip is not None and not (is_number(clip) and low <= clip <= high):
        raise PlanError(
            f"plan: clip_norm={clip!r}: expected a positive number that float32 holds, or"
            " None for no clipping (metrics have the norm in any case)"
        )
    if decay is not None and not (is_number(decay) and 0 < decay < 1):
        raise PlanError(
            f"plan: ema={decay!r}: expected a decay between 0 and 1, such as 0.999, or None for"
            " no averages"
        )
    if plan.secondary not in (None, "host"):
        if not isinstance(plan.secondary, int):
            raise PlanError(
                f"plan: secondary={plan.secondary!r}: expected a number of devices, 'host' or None"
            )
        expect_int("secondary", plan.secondary, 2)
    if not isinstance(plan.partition, str):
        for size in plan.partition:
            expect_int("partition", size, 1)
    if plan.schedule is not None and not isinstance(plan.schedule, str | Schedule):
        raise PlanError(
            f"plan: schedule={plan.schedule!r}: expected a name or a fzero.pipeline.Schedule"
        )


def as_tiers(given: Any) -> tuple[tuple[str, str, float], ...]:
    """What `Plan.tiers` may be given as, in one form that can be compared and hashed."""
    if isinstance(given, list | tuple) and all(
        isinstance(one, list | tuple) and len(one) == 3 for one in given
    ):
        given = {name: (tier, share) for name, tier, share in given}
    if not isinstance(given, Mapping):
        raise PlanError(
            f"plan: tiers={given!r}: expected a tier for each class, as {{'opt_state': 'host'}}"
        )
    found = []
    for name, value in given.items():
        expect_choice("tiers", name, PARKED)
        share: Any = 1.0
        if isinstance(value, list | tuple) and len(value) == 2:
            value, share = value
        elif is_number(value):
            value, share = "host", value
        if value not in TIERS or not is_number(share) or not 0 <= share <= 1:
            raise PlanError(
                f"plan: tiers[{name!r}]={given[name]!r}: expected one of {list(TIERS)}, a share"
                " from 0 to 1 (of the bytes, on the host), or a pair of both"
            )
        if value != "device" and share > 0:
            found.append((name, value, float(share)))
    return tuple(sorted(found))


def expect_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is none of the choices, or of another type (`True` for 1).

    Raises:
        PlanError: it says what was expected.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        named = [choice for choice in choices if choice is not None]
        switch = all(isinstance(choice, bool) for choice in named)
        expected = "True or False" if switch else f"one of {named}"
        raise PlanError(f"plan: {name}={value!r}: expected {expected}")


def expect_int(name: str, value: Any, least: int) -> None:
    """Refuses what is not a whole number of at least `least`.

    Raises:
        PlanError: it says what was expected.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"plan: {name}={value!r}: expected a whole number of at least {least}")


def given_devices(devices: object) -> list[Any]:
    """A choice of devices as a list.

    Raises:
        PlanError: it is no sequence of jax's devices, is empty, or has one of them twice.
    """
    found = list(devices) if isinstance(devices, Iterable) else [devices]
    odd = next((d for d in found if not hasattr(d, "platform")), None)
    if not isinstance(devices, Iterable) or odd is not None or not found:
        raise PlanError(
            f"plan: devices={devices!r:.60}: expected a sequence of devices, such as"
            " jax.devices()[:4]; how many a plan takes of them, its axes say"
        )
    device, times = Counter(found).most_common(1)[0]
    if times > 1:
        raise PlanError(f"plan: devices: expected each device once, got {device} {times} times")
    return found
