"""The best known schedule for given costs under a limit on live activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fzero.errors import ScheduleError
from fzero.pipeline.actions import Action, Schedule, natural
from fzero.pipeline.builders import ranks_for
from fzero.pipeline.greedy import Placement, Policy, list_schedule
from fzero.pipeline.names import BUILDERS
from fzero.pipeline.order import gives, merge_split_backward, needs, run
from fzero.pipeline.simulate import Cost, Event, Timeline, simulate


# Simulations that the local search may spend. It stops gaining long before that on every schedule
# tried so far; the number bounds the time (one simulation takes about 10 microseconds an action).
SEARCH_BUDGET = 300

# A shorter makespan must be shorter by more than rounding, or the search walks in circles.
_GAIN = 1e-9


def optimize(
    cost: Cost,
    stages: int,
    microbatches: int,
    memory_limit: int | None = None,
    *,
    chunks: int = 1,
    search_budget: int = SEARCH_BUDGET,
) -> Schedule:
    """Finds the shortest schedule that keeps a limit on live activations.

    Tries every builder that fits, then greedy list schedules with several preferences, then swaps
    neighbours on the critical path of the best. Deterministic. It is a heuristic: never worse
    than the best builder that fits, not proven best.

    Args:
        cost: seconds of each action, measured or predicted; asynchronous ranks.
        stages: number of stages in all; `stages / chunks` ranks.
        microbatches: number of microbatches.
        memory_limit: most live activations on any rank, one per microbatch and stage, counted as
            `Timeline.peak_live_per_rank` counts them. `None` is no limit.
        chunks: stages per rank. With 2, looped and V-shaped placements compete.
        search_budget: simulations that the local search may spend; 0 turns it off.

    Returns:
        A legal schedule.

    Raises:
        ScheduleError: nothing fits the limit, or a number is not positive.

    Example:
        >>> best = optimize(Cost(f=1, i=1, w=1), stages=4, microbatches=8, memory_limit=4)
        >>> timeline = simulate(best, Cost(f=1, i=1, w=1))
        >>> timeline.makespan_s, max(timeline.peak_live_per_rank)
        (27.0, 4)

    Source: heuristics after Qi et al., Zero Bubble Pipeline Parallelism (2023), section 3.
    """
    ranks, count = ranks_for(stages, chunks), natural("microbatches", microbatches)
    limit = count * chunks if memory_limit is None else memory_limit
    if limit < chunks:
        raise ScheduleError(
            f"optimize: no schedule fits memory_limit={memory_limit}: a microbatch on its way to "
            f"the loss holds one activation in each of {chunks} chunks of a rank; allow at least "
            f"{chunks}, or take fewer chunks"
        )
    floor = _lower_bound(cost, stages, ranks, count, chunks)
    best: _Candidate | None = None
    for schedule in _candidates(cost, stages, count, limit, chunks):
        candidate = _measure(schedule, cost)
        if candidate.peak <= limit and (best is None or candidate.key < best.key):
            best = candidate
    # A limit of one microbatch's chunks always leaves the greedy schedule that runs them in turn.
    assert best is not None
    return _search(best, cost, limit, floor, search_budget).schedule


@dataclass(frozen=True)
class _Candidate:
    schedule: Schedule
    timeline: Timeline

    @property
    def peak(self) -> int:
        return max(self.timeline.peak_live_per_rank)

    @property
    def key(self) -> tuple[float, int]:
        """Shorter first; of equals, the one that holds less."""
        return (round(self.timeline.makespan_s, 9), self.peak)


def _measure(schedule: Schedule, cost: Cost) -> _Candidate:
    return _Candidate(schedule, simulate(schedule, cost))


def _candidates(cost: Cost, stages: int, count: int, limit: int, chunks: int) -> Iterator[Schedule]:
    for builder in BUILDERS.values():
        if builder.trains and builder.chunks in (None, chunks):
            yield builder.build(stages, count, chunks)
    for placement in _placements(stages, chunks):
        for policy in _policies(placement, count, limit, chunks):
            found = list_schedule(placement, count, cost, policy)
            if found is not None:
                yield found
                if policy.split:
                    yield merge_split_backward(found)


def _placements(stages: int, chunks: int) -> list[Placement]:
    ranks = stages // chunks
    found: list[Placement] = [[range(rank, stages, ranks) for rank in range(ranks)]]
    if chunks == 2 and ranks > 1:
        found.append([(rank, stages - 1 - rank) for rank in range(ranks)])
    return found


def _policies(placement: Placement, count: int, limit: int, chunks: int) -> Iterator[Policy]:
    ranks = len(placement)
    for ahead in (1, 2, ranks + count):
        caps = []
        for rank in range(ranks):
            # 1F1B holds one activation for each hop to the last rank and back (ahead = 1); twice
            # as many hide sends and uneven stages (2); the limit alone is the last choice.
            whole = min(limit, chunks * max(1, ahead * (ranks - rank)) + (chunks - 1) * ranks)
            whole = max(whole, chunks)
            caps.append(tuple(whole - (chunks - 1 - c) for c in range(chunks)))
        for split in (True, False):
            for backward_first in (True, False):
                for patience in (0.0, 0.5, 1.0) if split else (0.0,):
                    for deepest in (True, False) if chunks > 1 else (True,):
                        yield Policy(tuple(caps), backward_first, deepest, split, patience)
    # With a split backward the delayed W's hold places too: every rank gets the whole limit.
    full = tuple(tuple(limit - (chunks - 1 - c) for c in range(chunks)) for _ in range(ranks))
    for patience in (0.0, 0.25, 0.5, 1.0):
        yield Policy(full, patience=patience)


def _lower_bound(cost: Cost, stages: int, ranks: int, count: int, chunks: int) -> float:
    """No schedule is shorter: some rank must wait for its first input and then do all its work."""
    if chunks > 1:
        return 0.0  # the placement is open, so no rank's work is known
    longest = head = 0.0
    for stage in range(stages):
        f, b, i, w = (cost.seconds(Action(k, stage, 0)) for k in ("F", "B", "I", "W"))
        longest = max(longest, head + count * (f + min(b, i + w)))
        head += f + cost.send_seconds(stage)
    return longest


def _search(best: _Candidate, cost: Cost, limit: int, floor: float, budget: int) -> _Candidate:
    """Swaps neighbours on the critical path as long as that makes the step shorter."""
    improved = True
    while improved and budget > 0 and best.timeline.makespan_s > floor + _GAIN:
        improved = False
        for schedule in _neighbours(best.timeline):
            if budget <= 0:
                break
            budget -= 1
            if any(cell is not None for cell in run(schedule.ranks, schedule.num_stages).stopped):
                continue
            candidate = _measure(schedule, cost)
            shorter = candidate.timeline.makespan_s < best.timeline.makespan_s - _GAIN
            if shorter and candidate.peak <= limit:
                best, improved = candidate, True
                break
    return best


def _neighbours(timeline: Timeline) -> Iterator[Schedule]:
    """Schedules in which one critical action runs before its neighbour, or a `W` much later."""
    rows = [list(timeline.schedule.rank_actions(r)) for r in range(timeline.schedule.num_ranks)]
    for event in _critical_path(timeline):
        row = rows[event.rank]
        place = row.index(event.action)
        if place and not _depends(event.action, row[place - 1]):
            yield _moved(rows, event.rank, place, place - 1)
        if event.action.kind == "W":
            for later in _gaps_after(timeline, event):
                yield _moved(rows, event.rank, place, later)


def _critical_path(timeline: Timeline) -> list[Event]:
    """The chain of actions without slack that ends the step, last first."""
    by_value = {gives(event.action): event for event in timeline.events}
    event: Event | None = max(timeline.events, key=lambda e: (e.end_s, -e.rank))
    path: list[Event] = []
    while event is not None:
        path.append(event)
        row = timeline.rank_events[event.rank]
        index = row.index(event)
        before = row[index - 1] if index else None
        if before is not None and before.end_s >= event.start_s:
            event = before
            continue
        inputs = [by_value[v] for v in needs(event.action, timeline.schedule.num_stages)]
        event = max(inputs, key=lambda e: e.end_s, default=None)
    return path


def _gaps_after(timeline: Timeline, event: Event) -> Iterable[int]:
    """The first places after an action at which its rank idles, and the end of the row."""
    row = timeline.rank_events[event.rank]
    start = row.index(event)
    gaps = [k for k in range(start + 1, len(row)) if row[k].start_s > row[k - 1].end_s]
    # Before the action that waits, one less because the W itself leaves its old place.
    return [*(k - 1 for k in gaps[:3]), len(row) - 1]


def _depends(action: Action, before: Action) -> bool:
    if (action.stage, action.microbatch) == (before.stage, before.microbatch):
        return True
    return before.kind == "F" and action.kind == "F" and action.microbatch == before.microbatch


def _moved(rows: list[list[Action]], rank: int, old: int, new: int) -> Schedule:
    row = list(rows[rank])
    row.insert(new, row.pop(old))
    return Schedule([*rows[:rank], row, *rows[rank + 1 :]])
