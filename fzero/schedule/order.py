"""What an action needs, what it gives, and an order in which all of them can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fzero.errors import ScheduleError
from fzero.schedule.actions import Action, Cell, Kind, Rows, Schedule


class Value(NamedTuple):
    """What an action computes: `F` an output, `I` an input gradient, `W` a weight gradient.

    `B` gives `I` as far as other actions can tell: nothing waits for its weight gradient.
    """

    kind: Kind
    stage: int
    microbatch: int


class Placed(NamedTuple):
    """An action and its cell of the grid."""

    rank: int
    cell: int
    action: Action


def placed(schedule: Schedule) -> Iterator[Placed]:
    """Every action of a schedule with its position, rank by rank."""
    for rank, row in enumerate(schedule.ranks):
        for cell, action in enumerate(row):
            if action is not None:
                yield Placed(rank, cell, action)


def gives(action: Action) -> Value:
    """The value that other actions may wait for.

    Args:
        action: any action.

    Returns:
        Its output, input gradient or weight gradient.
    """
    kind: Kind = "I" if action.kind == "B" else action.kind
    return Value(kind, action.stage, action.microbatch)


def needs(action: Action, num_stages: int) -> tuple[Value, ...]:
    """The values that must exist before an action can run.

    Args:
        action: any action.
        num_stages: number of stages of the pipeline.

    Returns:
        For `F` the output of the stage before; for `B` and `I` the stage's own forward and the
        input gradient of the stage after; for `W` the stage's own `I`.

    Example:
        >>> needs(Action("B", 0, 3), num_stages=2)
        (Value(kind='F', stage=0, microbatch=3), Value(kind='I', stage=1, microbatch=3))
    """
    kind, stage, microbatch = action
    if kind == "F":
        return (Value("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Value("I", stage, microbatch),)
    own = Value("F", stage, microbatch)
    if stage == num_stages - 1:
        return (own,)
    return (own, Value("I", stage + 1, microbatch))


class Progress(NamedTuple):
    """A run of a schedule as far as it gets.

    Attributes:
        done: the actions in an order that respects both dependencies and rank orders.
        stopped: for each rank the cell at which it waits forever, or `None` when it finished.
    """

    done: list[Placed]
    stopped: list[int | None]


def run(rows: Rows, num_stages: int) -> Progress:
    """Runs the rank orders with sends that never block, as far as dependencies allow.

    Args:
        rows: the grid; idle cells cost nothing.
        num_stages: number of stages of the pipeline.

    Returns:
        The actions in a possible order and where each rank stopped.
    """
    have: set[Value] = set()
    waiting: dict[Value, list[int]] = {}
    next_cell = [0] * len(rows)
    done: list[Placed] = []
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop(0)
        row = rows[rank]
        while next_cell[rank] < len(row):
            cell = next_cell[rank]
            action = row[cell]
            if action is not None:
                missing = next((v for v in needs(action, num_stages) if v not in have), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                done.append(Placed(rank, cell, action))
                value = gives(action)
                have.add(value)
                awake.extend(waiting.pop(value, ()))
            next_cell[rank] += 1
    stopped = [c if c < len(row) else None for c, row in zip(next_cell, rows, strict=True)]
    return Progress(done, stopped)


def require_run(schedule: Schedule) -> list[Placed]:
    """The actions of a schedule in an order that respects dependencies and rank orders.

    Args:
        schedule: a legal schedule.

    Returns:
        Every action with its cell.

    Raises:
        ScheduleError: it cannot run to its end.
    """
    result = run(schedule.ranks, schedule.num_stages)
    if any(cell is not None for cell in result.stopped):
        where = [f"rank {r} at cell {c}" for r, c in enumerate(result.stopped) if c is not None]
        raise ScheduleError(
            f"the schedule cannot run to its end: {', '.join(where)} wait for ever; "
            f"fzero.pipeline.check says why"
        )
    return result.done


def is_aligned(schedule: Schedule) -> bool:
    """Whether every action stands in a later column than all that it needs.

    Args:
        schedule: any schedule.

    Returns:
        True when the ranks could run the grid in lock step, column by column.
    """
    column = {gives(action): cell for _, cell, action in placed(schedule)}
    return all(
        column.get(value, cell) < cell
        for _, cell, action in placed(schedule)
        for value in needs(action, schedule.num_stages)
    )


def align(schedule: Schedule) -> Schedule:
    """The same orders on a grid of equal cells: each action in its earliest possible column.

    Args:
        schedule: a legal schedule, with or without idle cells.

    Returns:
        A schedule whose idle cells make every dependency point to an earlier column.

    Raises:
        ScheduleError: the schedule cannot run to its end.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> print(align(one_f_one_b(2, 2)))
                   0   1   2   3   4   5
        rank 0:  0F0 0F1   . 0B0   . 0B1
        rank 1:    . 1F0 1B0 1F1 1B1
    """
    column: dict[Value, int] = {}
    rows: list[list[Cell]] = [[] for _ in schedule.ranks]
    for rank, _, action in require_run(schedule):
        earliest = max((column[v] + 1 for v in needs(action, schedule.num_stages)), default=0)
        row = rows[rank]
        row.extend([None] * (earliest - len(row)))
        column[gives(action)] = len(row)
        row.append(action)
    return Schedule(rows)
