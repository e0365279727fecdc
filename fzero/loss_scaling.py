"""How fp16's loss scale moves, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fzero.errors import PlanError, known_fields


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
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 < value < 2.0**127 and math.frexp(value)[0] == 0.5):
                raise PlanError(f"plan: loss_scale: {name}={value!r}: expected a power of two")
            object.__setattr__(self, name, float(value))
        for name in ("growth_steps", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(
                    f"plan: loss_scale: {name}={value!r}: expected a whole number of at least 1"
                )
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
