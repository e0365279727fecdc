"""Proof that a schedule is legal, or the cell that makes it illegal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fzero.errors import ScheduleError
from fzero.schedule.actions import Action, Kind, Schedule
from fzero.schedule.deadlock import SENDS, Deadlock, Sends, find_deadlock
from fzero.schedule.grid import Position, format_grid
from fzero.schedule.instructions import check_program, lower
from fzero.schedule.liveness import Slots, slots
from fzero.schedule.order import gives, is_aligned, needs, placed


Positions = dict[Action, Position]


@dataclass(frozen=True)
class Proof:
    """What `check` found out about a legal schedule.

    Attributes:
        num_actions: number of actions of all ranks.
        trains: whether it has backwards.
        deadlock_free: the meanings of a send under which every rank finishes; see `deadlock`.
        aligned: whether the grid can run in lock step, every dependency in an earlier column.
        slots: the minimal slots per stage.
    """

    num_actions: int
    trains: bool
    deadlock_free: tuple[Sends, ...]
    aligned: bool
    slots: Slots


def check(
    schedule: Schedule,
    *,
    sends: Sends = "buffered",
    assignment: Sequence[Sequence[int]] | None = None,
    receive_first: bool = False,
) -> Proof:
    """Proves a schedule: complete, in order, one rank per stage, no deadlock, no slot overwritten.

    Args:
        schedule: any schedule.
        sends: what a send may wait for; the schedule must be free of deadlock under it. Which
            others it also survives is in the result.
        assignment: the slot of each microbatch, `assignment[stage][microbatch]`, to prove.
            `None` takes the minimal one of `slots`.
        receive_first: the order of communications between two actions; see `instructions.lower`.

    Returns:
        What was proven.

    Raises:
        ScheduleError: it is illegal; the message prints the grid with the offending cell marked.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> check(one_f_one_b(4, 8)).deadlock_free
        ('buffered', 'batched')
        >>> from fzero.schedule.actions import rows_of
        >>> check(rows_of([["0F0", "0B0", "0B1", "0F1"]]))
        Traceback (most recent call last):
            ...
        fzero.errors.ScheduleError: rank 0, cell 2: 0B1 runs before 0F1, which it needs; move it \
behind
                   0   1    2   3
        rank 0:  0F0 0B0 >0B1<0F1
    """
    if sends not in SENDS:
        raise ScheduleError(f"sends: expected one of {', '.join(SENDS)}, got {sends!r}")
    if not schedule.actions:
        raise ScheduleError("expected a schedule with actions, got an empty one")
    _check_one_rank_per_stage(schedule)
    positions = _check_once(schedule)
    trains = any(action.kind != "F" for action in positions)
    _check_complete(schedule, positions, trains)
    _check_rank_order(schedule)
    deadlocks = {meaning: find_deadlock(schedule, meaning) for meaning in SENDS}
    for meaning in dict.fromkeys(("buffered", sends)):
        _check_deadlock(schedule, meaning, deadlocks[meaning])
    minimal = slots(schedule, receive_first=receive_first)
    chosen = minimal.assignment if assignment is None else assignment
    check_program(lower(schedule, chosen, receive_first=receive_first))
    return Proof(
        num_actions=len(positions),
        trains=trains,
        deadlock_free=tuple(s for s in SENDS if deadlocks[s] is None),
        aligned=is_aligned(schedule),
        slots=minimal,
    )


def check_forwards_in_order(schedule: Schedule, stages: Mapping[int, str]) -> None:
    """Proves that forwards of some stages run in the order of microbatches.

    Args:
        schedule: a legal schedule.
        stages: of each such stage, why.

    Raises:
        ScheduleError: one runs before a forward of an earlier microbatch.
    """
    last: dict[int, tuple[Action, Position]] = {}
    for rank, cell, action in placed(schedule):
        if action.kind != "F" or action.stage not in stages:
            continue
        before, where = last.get(action.stage, (action, (rank, cell)))
        if before.microbatch > action.microbatch:
            _fail(
                schedule,
                [where, (rank, cell)],
                f"{before} runs before {action}: expected forwards of stage {action.stage} in the"
                f" order of microbatches, as {stages[action.stage]}; sort them, or take a named"
                " schedule",
            )
        last[action.stage] = action, (rank, cell)


def _check_one_rank_per_stage(schedule: Schedule) -> None:
    for rank in range(schedule.num_ranks):
        if not schedule.rank_actions(rank):
            _fail(schedule, [(rank, 0)], f"rank {rank} has no actions; give it a stage or drop it")
    held = Counter((action.stage, rank) for rank, _, action in placed(schedule))
    home: dict[int, int] = {}
    for (stage, rank), count in sorted(held.items()):
        # The rank with most of a stage's actions is taken for its home, the rest for strays.
        if stage not in home or count > held[stage, home[stage]]:
            home[stage] = rank
    for rank, cell, action in placed(schedule):
        if home[action.stage] != rank:
            _fail(
                schedule,
                [(rank, cell)],
                f"{action} is on rank {rank}, but stage {action.stage} is on rank "
                f"{home[action.stage]}; a stage's parameters live on one rank",
            )


def _check_once(schedule: Schedule) -> Positions:
    positions: Positions = {}
    for rank, cell, action in placed(schedule):
        if action in positions:
            _fail(
                schedule,
                [(rank, cell)],
                f"{action} runs twice, first in cell {positions[action][1]}; take one out",
            )
        positions[action] = (rank, cell)
    for action, (rank, cell) in positions.items():
        halves = [p for p in (action._replace(kind=k) for k in _SPLIT) if p in positions]
        if action.kind == "B" and halves:
            later = max([(rank, cell), *(positions[p] for p in halves)])
            _fail(
                schedule,
                [later],
                f"{action} and {halves[0]} both compute the backward of microbatch "
                f"{action.microbatch}; keep B, or I with W",
            )
    return positions


_SPLIT: tuple[Kind, Kind] = ("I", "W")


def _check_complete(schedule: Schedule, positions: Positions, trains: bool) -> None:
    homes = schedule.stage_to_rank
    for stage in range(schedule.num_stages):
        if stage not in homes:
            end = (0, len(schedule.ranks[0]))
            _fail(schedule, [end], f"stage {stage} of {schedule.num_stages} is on no rank")
        for microbatch in range(schedule.num_microbatches):
            _check_microbatch(schedule, positions, stage, microbatch, trains)


def _check_microbatch(
    schedule: Schedule, positions: Positions, stage: int, microbatch: int, trains: bool
) -> None:
    expected: tuple[Kind, ...] = ("F",)
    if trains:
        split = any(Action(kind, stage, microbatch) in positions for kind in _SPLIT)
        expected = ("F", "I", "W") if split else ("F", "B")
    there = [a for a in (Action(k, stage, microbatch) for k in expected) if a in positions]
    for kind in expected:
        missing = Action(kind, stage, microbatch)
        if missing in positions:
            continue
        rank = schedule.stage_to_rank[stage]
        # Marks the actions that the missing one belongs to, or the end of the row.
        marks = [positions[a] for a in there] or [(rank, len(schedule.ranks[rank]))]
        has = f"it has {', '.join(map(str, there))}" if there else "it has no action there at all"
        _fail(
            schedule,
            marks,
            f"stage {stage} lacks {missing}: expected {', '.join(expected)} of each of "
            f"{schedule.num_microbatches} microbatches, {has}",
        )


def _check_rank_order(schedule: Schedule) -> None:
    """Whatever an action needs from its own rank must stand before it."""
    cell_of = {gives(one.action): one for one in placed(schedule)}
    for rank, cell, action in placed(schedule):
        for value in needs(action, schedule.num_stages):
            other, later, needed = cell_of[value]
            if other == rank and later > cell:
                _fail(
                    schedule,
                    [(rank, cell)],
                    f"{action} runs before {needed}, which it needs; move it behind",
                )


def _check_deadlock(schedule: Schedule, sends: Sends, deadlock: Deadlock | None) -> None:
    if deadlock is None:
        return
    remedy = (
        "no executor can run this order"
        if sends == "buffered"
        else "reorder, or run it with an executor whose sends wait for less"
    )
    story = "; ".join(deadlock.story)
    _fail(schedule, deadlock.cells, f"deadlock with {sends} sends: {story}; {remedy}")


def _fail(schedule: Schedule, marks: Sequence[Position], what: str) -> None:
    rank, cell = marks[0]
    where = f"rank {rank}, cell {cell}"
    raise ScheduleError(f"{where}: {what}\n{format_grid(schedule.ranks, marks)}")
