"""Slots made explicit: every read and write of an activation slot, in order, and a check of them.

`slots` needs no such program: it counts. This module is for assignments and orders that come from
elsewhere, such as DeepSpeed's `microbatch % num_pipe_buffers`, where it matters whether a rank
receives the next activation before or after it has sent the last gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fzero.errors import ScheduleError
from fzero.schedule.actions import Action, Schedule
from fzero.schedule.grid import format_grid


Operation = Literal["RECV_F", "F", "SEND_F", "RECV_B", "B", "I", "W", "SEND_B"]

Program = Sequence[Sequence["Instruction"]]


class Instruction(NamedTuple):
    """One step that reads or writes the slot of a microbatch on a stage.

    `RECV_F` writes the slot, or `F` where nothing is received. All others read it: `SEND_B` too,
    because the gradient that it sends lies with the activation that it belongs to.

    Example:
        >>> Instruction("RECV_F", stage=2, microbatch=2, slot=0)
        2RECV_F2@0
    """

    operation: Operation
    stage: int
    microbatch: int
    slot: int

    def __str__(self) -> str:
        return f"{self.stage}{self.operation}{self.microbatch}@{self.slot}"

    def __repr__(self) -> str:
        return str(self)


def lower(
    schedule: Schedule, assignment: Sequence[Sequence[int]], *, receive_first: bool = False
) -> tuple[tuple[Instruction, ...], ...]:
    """Writes out a schedule with its communications and slots.

    Args:
        schedule: a legal schedule.
        assignment: the slot of each microbatch, `assignment[stage][microbatch]`.
        receive_first: whether, between two actions, a rank receives what the second needs before
            it sends what the first gave.

    Returns:
        The instructions of each rank.

    Raises:
        ScheduleError: the assignment lacks a stage or a microbatch.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> lower(one_f_one_b(2, 1), [[0], [0]])[1]
        (1RECV_F0@0, 1F0@0, 1B0@0, 1SEND_B0@0)
    """
    _require_assignment(schedule, assignment)
    return tuple(
        tuple(
            Instruction(operation, a.stage, a.microbatch, assignment[a.stage][a.microbatch])
            for operation, a in _operations(schedule, rank, receive_first)
        )
        for rank in range(schedule.num_ranks)
    )


def check_program(program: Program) -> None:
    """Proves that no slot is written while an earlier microbatch in it has a read to come.

    Args:
        program: the instructions of each rank, in order.

    Raises:
        ScheduleError: a slot is overwritten, or read while it holds another microbatch; the
            message marks the instruction.

    Example:
        >>> from fzero.pipeline import one_f_one_b
        >>> cyclic = [[microbatch % n for microbatch in range(8)] for n in (4, 3, 2, 1)]
        >>> check_program(lower(one_f_one_b(4, 8), cyclic))
    """
    for rank, row in enumerate(program):
        pending = Counter((i.stage, i.microbatch) for i in row)
        written: set[tuple[int, int]] = set()
        holds: dict[tuple[int, int], int] = {}
        for cell, instruction in enumerate(row):
            operation, stage, microbatch, slot = instruction
            key = (stage, microbatch)
            held = holds.get((stage, slot))
            if key not in written:
                if operation not in ("RECV_F", "F"):
                    _fail(program, rank, cell, f"reads slot {slot} before anything is in it")
                if held is not None and pending[stage, held]:
                    reader = next(i for i in row[cell:] if i[1:3] == (stage, held))
                    _fail(
                        program,
                        rank,
                        cell,
                        f"overwrites slot {slot}, which holds microbatch {held} until {reader} has "
                        f"read it; run {reader} first, or give stage {stage} one slot more",
                    )
                written.add(key)
                holds[stage, slot] = microbatch
            elif held != microbatch:
                _fail(program, rank, cell, f"reads slot {slot}, which holds microbatch {held}")
            pending[key] -= 1


def intervals(
    schedule: Schedule, stage: int, *, receive_first: bool = False
) -> dict[int, tuple[int, int]]:
    """When the activation of each microbatch is alive on a stage.

    Args:
        schedule: a legal schedule.
        stage: the stage.
        receive_first: see `lower`.

    Returns:
        For each microbatch the first and the last position, among the rank's instructions, that
        touches its slot.
    """
    rank = schedule.stage_to_rank[stage]
    spans: dict[int, tuple[int, int]] = {}
    for position, (_, action) in enumerate(_operations(schedule, rank, receive_first)):
        if action.stage == stage:
            first, _ = spans.get(action.microbatch, (position, position))
            spans[action.microbatch] = (first, position)
    return spans


def _operations(
    schedule: Schedule, rank: int, receive_first: bool
) -> list[tuple[Operation, Action]]:
    last = schedule.num_stages - 1
    found: list[tuple[Operation, Action]] = []
    sent: list[tuple[Operation, Action]] = []

    def remote(stage: int) -> bool:
        return 0 <= stage <= last and schedule.stage_to_rank[stage] != rank

    for action in schedule.rank_actions(rank):
        forward, split_off = action.kind == "F", action.kind == "W"
        before, after = action.stage - 1, action.stage + 1
        received: list[tuple[Operation, Action]] = []
        if not split_off and remote(before if forward else after):
            received = [("RECV_F" if forward else "RECV_B", action)]
        found += received + sent if receive_first else sent + received
        found.append((action.kind, action))
        sent = []
        if not split_off and remote(after if forward else before):
            sent = [("SEND_F" if forward else "SEND_B", action)]
    return found + sent


def _require_assignment(schedule: Schedule, assignment: Sequence[Sequence[int]]) -> None:
    if len(assignment) != schedule.num_stages:
        raise ScheduleError(
            f"assignment: expected a row of slots for each of {schedule.num_stages} stages, got "
            f"{len(assignment)} rows"
        )
    for stage, row in enumerate(assignment):
        if len(row) != schedule.num_microbatches or any(slot < 0 for slot in row):
            raise ScheduleError(
                f"assignment, stage {stage}: expected a slot from 0 on for each of "
                f"{schedule.num_microbatches} microbatches, got {list(row)}"
            )


def _fail(program: Program, rank: int, cell: int, what: str) -> None:
    instruction = program[rank][cell]
    raise ScheduleError(
        f"rank {rank}, cell {cell}: {instruction} {what}\n{format_grid(program, [(rank, cell)])}"
    )
