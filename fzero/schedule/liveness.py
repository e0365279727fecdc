"""How many activations a schedule needs at once, and a slot for each."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from fzero.schedule.actions import Schedule
from fzero.schedule.grid import short
from fzero.schedule.instructions import intervals


@dataclass(frozen=True, repr=False)
class Slots:
    """The slots of a schedule.

    Attributes:
        assignment: the slot of each microbatch, `assignment[stage][microbatch]`. Slots of one
            stage count from 0; a stage never uses more than `per_stage` of them.
    """

    assignment: tuple[tuple[int, ...], ...]

    @property
    def per_stage(self) -> list[int]:
        """Number of live activations at the peak of each stage, which no assignment can beat."""
        return [max(row, default=-1) + 1 for row in self.assignment]

    def __repr__(self) -> str:
        return f"Slots({len(self.assignment)} stages, per_stage={short(self.per_stage)})"


def slots(schedule: Schedule, *, receive_first: bool = False) -> Slots:
    """The minimal number of live activations per stage, and an assignment that attains it.

    An activation is alive from its receive (or its `F`, where nothing is received) until the last
    action that reads it: `B`, or `W` where the backward is split, since the weight gradient needs
    what the forward saved; and until its gradient is sent, where it is. Without a backward it is
    alive until its output is sent. Lifetimes on one stage are intervals of one order, so giving
    each the lowest free slot uses as many slots as overlap at the worst moment, which is minimal.

    Args:
        schedule: a legal schedule.
        receive_first: whether a rank receives the next activation before it sends the last
            gradient. Then 1F1B needs one slot more on every stage but the first: the `+ 1` that
            DeepSpeed once had. The default sends first.

    Returns:
        The slots.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> slots(one_f_one_b(4, 8)).per_stage
        [4, 3, 2, 1]
        >>> slots(one_f_one_b(4, 8), receive_first=True).per_stage
        [4, 4, 3, 2]
    """
    return Slots(
        tuple(_colour(schedule, stage, receive_first) for stage in range(schedule.num_stages))
    )


def _colour(schedule: Schedule, stage: int, receive_first: bool) -> tuple[int, ...]:
    spans = intervals(schedule, stage, receive_first=receive_first)
    free: list[int] = []
    ending: list[tuple[int, int]] = []
    slot_of: dict[int, int] = {}
    used = 0
    for microbatch, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        while ending and ending[0][0] < first:
            heappush(free, heappop(ending)[1])
        if free:
            slot = heappop(free)
        else:
            slot, used = used, used + 1
        slot_of[microbatch] = slot
        heappush(ending, (last, slot))
    return tuple(slot_of[microbatch] for microbatch in range(schedule.num_microbatches))
