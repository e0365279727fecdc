"""How long a schedule takes and what it holds, from the cost of each action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from fzero.errors import ScheduleError
from fzero.schedule.actions import Action, Kind, Schedule
from fzero.schedule.grid import short
from fzero.schedule.order import Placed, Value, align, gives, is_aligned, needs, require_run


Mode = Literal["async", "lockstep", "measured"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Cost:
    """What one action of one stage costs, in seconds (or any unit: results have the same one).

    Args:
        f: seconds of a forward of one stage.
        b: seconds of a whole backward; `i + w` when left out, 2 when those are too.
        i: seconds of an input gradient; `b / 2` when left out.
        w: seconds of a weight gradient; what is left of `b` when left out.
        send: seconds from the end of an action until its result is on the next rank. A send
            delays the receiver only: the sender goes on computing.
        per_stage: a factor on `f, b, i, w` for each stage, or a whole `Cost` for each.
        activation_bytes: bytes that one live activation of one stage holds; one number, or one
            for each stage.

    Raises:
        ScheduleError: a cost is negative or not finite.

    Example:
        >>> Cost(f=1, b=3).seconds(Action("W", 0, 0))
        1.5
        >>> Cost(f=1, per_stage=(1.0, 2.0)).seconds(Action("F", 1, 0))
        2.0
    """

    f: float = 1.0
    b: float | None = None
    i: float | None = None
    w: float | None = None
    send: float = 0.0
    per_stage: Sequence[float | Cost] | None = None
    activation_bytes: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        # Lists are welcome; tuples keep the value hashable.
        if self.per_stage is not None:
            object.__setattr__(self, "per_stage", tuple(self.per_stage))
        if not isinstance(self.activation_bytes, int):
            object.__setattr__(self, "activation_bytes", tuple(self.activation_bytes))
        for name in ("f", "b", "i", "w", "send"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ScheduleError(f"Cost.{name}: expected seconds of at least 0, got {value!r}")
        for kind in ("B", "I", "W"):
            if self._base(kind) < 0:
                raise ScheduleError(
                    f"Cost: expected b >= i and b >= w where one of i, w is left out, got "
                    f"b={self.b}, i={self.i}, w={self.w}; give all three"
                )

    def seconds(self, action: Action) -> float:
        """Seconds that an action takes.

        Args:
            action: the action.

        Returns:
            Its cost on its stage.

        Raises:
            ScheduleError: `per_stage` does not reach to the action's stage.
        """
        own = self._of_stage(action.stage)
        if isinstance(own, Cost):
            return own._base(action.kind)
        return own * self._base(action.kind)

    def send_seconds(self, stage: int) -> float:
        """Seconds until a result of a stage is on another rank.

        Args:
            stage: the stage that sends.

        Returns:
            The stage's own `send` when `per_stage` holds whole costs, else `send`.
        """
        own = self._of_stage(stage)
        return own.send if isinstance(own, Cost) else self.send

    def bytes_of(self, stage: int) -> int:
        """Bytes of one live activation of a stage.

        Args:
            stage: the stage.

        Returns:
            The bytes, 0 when not given.
        """
        if isinstance(self.activation_bytes, int):
            return self.activation_bytes
        return _entry(self.activation_bytes, stage, "activation_bytes")

    def _of_stage(self, stage: int) -> float | Cost:
        return 1.0 if self.per_stage is None else _entry(self.per_stage, stage, "per_stage")

    def _base(self, kind: Kind) -> float:
        if kind == "F":
            return self.f
        whole = self.b
        if whole is None:
            # Two matmuls in the backward for one in the forward: the usual b = 2 f, i = w = f.
            whole = (1.0 if self.i is None else self.i) + (1.0 if self.w is None else self.w)
        if kind == "B":
            return whole
        own, other = (self.i, self.w) if kind == "I" else (self.w, self.i)
        if own is not None:
            return own
        return whole / 2 if other is None else whole - other


def _entry(values: Sequence[_T], stage: int, name: str) -> _T:
    if stage >= len(values):
        raise ScheduleError(
            f"Cost.{name}: expected an entry for stage {stage}, got {len(values)} entries; give "
            f"one for every stage"
        )
    return values[stage]


class Event(NamedTuple):
    """An action with its time.

    Attributes:
        rank: the rank that runs it.
        action: the action.
        start_s: seconds from the start of the step.
        end_s: seconds from the start of the step.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float


class Level(NamedTuple):
    """What a rank holds from a time on.

    Attributes:
        time_s: seconds from the start of the step.
        live: number of live activations.
        live_bytes: their bytes.
    """

    time_s: float
    live: int
    live_bytes: int


@dataclass(frozen=True, repr=False)
class Timeline:
    """A step, simulated or measured: what runs when, and what is held.

    Attributes:
        schedule: what was simulated; on the lock-step grid when mode is `lockstep`.
        cost: the costs it was simulated with.
        mode: `async`, `lockstep`, or `measured` (`fzero.pipeline.recorded`): its cost has medians.
        events: all actions, ordered by rank and then time.
    """

    schedule: Schedule
    cost: Cost
    mode: Mode
    events: tuple[Event, ...]

    def __repr__(self) -> str:
        return (
            f"Timeline({self.schedule!r}, {self.mode}, makespan_s={self.makespan_s:.4g},"
            f" bubble_fraction={self.bubble_fraction:.4g},"
            f" peak_live_per_rank={short(self.peak_live_per_rank)})"
        )

    @cached_property
    def rank_events(self) -> tuple[tuple[Event, ...], ...]:
        """The events of each rank in order."""
        rows: list[list[Event]] = [[] for _ in range(self.schedule.num_ranks)]
        for event in self.events:
            rows[event.rank].append(event)
        return tuple(tuple(row) for row in rows)

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end of all ranks."""
        return max((event.end_s for event in self.events), default=0.0)

    @cached_property
    def busy_s_per_rank(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(math.fsum(e.end_s - e.start_s for e in row) for row in self.rank_events)

    @cached_property
    def span_s_per_rank(self) -> tuple[float, ...]:
        """Seconds from the start of each rank's first action to the end of its last.

        "Zero bubble" is a statement about spans: the ranks still start one after another, which
        costs only where the step ends with a global barrier, as clipping by the norm does.
        """
        return tuple(row[-1].end_s - row[0].start_s if row else 0.0 for row in self.rank_events)

    @property
    def bubble_fraction_per_rank(self) -> tuple[float, ...]:
        """Idle share of the makespan of each rank."""
        total = self.makespan_s
        return tuple(1 - busy / total if total else 0.0 for busy in self.busy_s_per_rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the makespan of all ranks."""
        ranks = self.bubble_fraction_per_rank
        return math.fsum(ranks) / len(ranks) if ranks else 0.0

    @property
    def idle_s_in_span_per_rank(self) -> tuple[float, ...]:
        """Idle seconds of each rank between its first and its last action."""
        pairs = zip(self.span_s_per_rank, self.busy_s_per_rank, strict=True)
        return tuple(span - busy for span, busy in pairs)

    @cached_property
    def memory_per_rank(self) -> tuple[tuple[Level, ...], ...]:
        """The levels of live activations of each rank over time.

        An activation counts from the start of its `F` to the end of its `B`, of its `W` where the
        backward is split, or of its `F` where there is none.
        """
        return tuple(self._levels(row) for row in self.rank_events)

    @property
    def peak_live_per_rank(self) -> tuple[int, ...]:
        """Most live activations at once on each rank, one per microbatch and stage."""
        return tuple(max((lv.live for lv in row), default=0) for row in self.memory_per_rank)

    @property
    def peak_bytes_per_rank(self) -> tuple[int, ...]:
        """Most bytes of live activations at once on each rank; 0 without `activation_bytes`."""
        return tuple(max((lv.live_bytes for lv in row), default=0) for row in self.memory_per_rank)

    def _levels(self, row: Sequence[Event]) -> tuple[Level, ...]:
        # On one rank actions do not overlap: in order of actions, each release precedes the next
        # hold even when both have the same time.
        last = {(e.action.stage, e.action.microbatch): e for e in row}
        levels = [Level(0.0, 0, 0)]
        live, held = 0, 0
        for event in row:
            action = event.action
            size = self.cost.bytes_of(action.stage)
            if action.kind == "F":
                live, held = live + 1, held + size
                levels.append(Level(event.start_s, live, held))
            if last[action.stage, action.microbatch] is event:
                live, held = live - 1, held - size
                levels.append(Level(event.end_s, live, held))
        return tuple(levels)


def simulate(schedule: Schedule, cost: Cost | None = None, *, mode: Mode = "async") -> Timeline:
    """Runs a schedule on paper.

    Args:
        schedule: a legal schedule.
        cost: seconds of each action; the default is forward 1, backward 2, sends 0.
        mode: `async` starts an action as soon as its rank is free and its inputs have come.
            `lockstep` runs the grid column by column, as one program for all ranks does: a column
            takes as long as its longest action, and then as the longest send out of it. Where
            the schedule's own idle cells do not line up its dependencies, it is aligned first.

    Returns:
        The timeline.

    Raises:
        ScheduleError: the schedule cannot run to its end, or costs lack a stage.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> timeline = simulate(one_f_one_b(4, 8), Cost(f=1, b=2))
        >>> timeline.makespan_s, timeline.peak_live_per_rank
        (33.0, (4, 3, 2, 1))
        >>> simulate(one_f_one_b(4, 8), Cost(f=1, b=2), mode="lockstep").makespan_s
        40.0
    """
    cost = Cost() if cost is None else cost
    if mode == "async":
        events = _asynchronous(schedule, cost)
    elif mode == "lockstep":
        if not is_aligned(schedule):
            schedule = align(schedule)
        events = _lock_step(schedule, cost)
    else:
        raise ScheduleError(f"simulate, mode: expected 'async' or 'lockstep', got {mode!r}")
    # Ordered by rank alone: within a rank they already come in order, and an action that takes
    # no time must not change places with its neighbour.
    return Timeline(schedule, cost, mode, tuple(sorted(events, key=lambda e: e.rank)))


def _asynchronous(schedule: Schedule, cost: Cost) -> list[Event]:
    rank_free = [0.0] * schedule.num_ranks
    given: dict[Value, tuple[float, float, int]] = {}
    events: list[Event] = []
    for rank, _, action in require_run(schedule):
        start = rank_free[rank]
        for value in needs(action, schedule.num_stages):
            end, sent, giver = given[value]
            start = max(start, end if giver == rank else sent)
        end = start + cost.seconds(action)
        given[gives(action)] = (end, end + cost.send_seconds(action.stage), rank)
        rank_free[rank] = end
        events.append(Event(rank, action, start, end))
    return events


def _lock_step(schedule: Schedule, cost: Cost) -> list[Event]:
    columns: dict[int, list[Placed]] = {}
    for placed in require_run(schedule):
        columns.setdefault(placed.cell, []).append(placed)
    now = 0.0
    events: list[Event] = []
    for _, column in sorted(columns.items()):
        for rank, _, action in column:
            events.append(Event(rank, action, now, now + cost.seconds(action)))
        now += max(cost.seconds(placed.action) for placed in column)
        sends = [cost.send_seconds(p.action.stage) for p in column if _leaves(schedule, p)]
        now += max(sends, default=0.0)
    return events


def _leaves(schedule: Schedule, placed: Placed) -> bool:
    """Whether the result of an action goes to another rank."""
    kind, stage, _ = placed.action
    taker = stage + 1 if kind == "F" else stage - 1
    if kind == "W" or not 0 <= taker < schedule.num_stages:
        return False
    return schedule.stage_to_rank[taker] != placed.rank
