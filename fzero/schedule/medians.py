"""The timeline of a step that ran, and what its actions usually took."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from fzero.schedule.actions import Schedule
from fzero.schedule.simulate import Cost, Event, Timeline


def measured(schedule: Schedule, events: Sequence[Event]) -> Timeline:
    """The timeline of actions that ran; its `cost` has the medians of each stage."""
    return Timeline(schedule, medians(events, schedule), "measured", tuple(events))


def medians(events: Sequence[Event], schedule: Schedule) -> Cost:
    """The usual seconds of each stage's actions; of stages of other processes, all stages'."""
    by: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        seconds = event.end_s - event.start_s
        for stage in (event.action.stage, -1):
            by[stage, event.action.kind].append(seconds)
    kinds = {kind for _, kind in by}

    def cost(stage: int) -> Cost:
        own = {k: statistics.median(by.get((stage, k)) or by[-1, k]) for k in sorted(kinds)}
        whole = own.get("B", own.get("I", 0.0) + own.get("W", 0.0))
        # A stage has all three: which it needs is the schedule's affair.
        return Cost(own["F"], whole, own.get("I", whole), own.get("W", whole))

    return Cost(per_stage=tuple(cost(stage) for stage in range(schedule.num_stages)))
