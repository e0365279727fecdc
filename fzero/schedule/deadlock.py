"""Whether a schedule runs to its end when a send waits for its receive.

What a schedule needs depends on how its executor communicates. Three meanings, each stricter than
the one before:

- `buffered`: a send returns at once (JAX's asynchronous dispatch, `isend` with the wait at the
  end). Only a cycle of dependencies can deadlock. Every shipped schedule is free of it.
- `batched`: sends wait for their receives, but the send of one action's result and the receives
  for the next action are posted together and waited for together, as Megatron-LM and PyTorch do
  with `send_forward_recv_backward`. 1F1B is free of deadlock so.
- `sequential`: one blocking communication at a time: receive, compute, send. GPipe is free of
  deadlock so; 1F1B is not: a stage that sends its activation forward meets the next stage sending
  its gradient back, and each waits for the other to receive. (DeepSpeed runs 1F1B with one
  blocking call at a time by letting stages of odd and even number order the two calls
  differently; that is an order of communications, not of actions.)

A value that stays on its rank is never sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fzero.schedule.actions import Action, Schedule
from fzero.schedule.grid import Position
from fzero.schedule.order import Value, gives, needs, placed, run


Sends = Literal["buffered", "batched", "sequential"]
SENDS: tuple[Sends, ...] = get_args(Sends)

# For a rank that waits: the rank it waits for, the cell it waits at, and a sentence.
_Blocked = Callable[[int], tuple[int, Position, str]]


@dataclass(frozen=True)
class Deadlock:
    """A cycle of ranks, each of which waits for the next.

    Attributes:
        cells: the cell at which each rank of the cycle waits.
        story: one sentence per rank.
    """

    cells: tuple[Position, ...]
    story: tuple[str, ...]


def find_deadlock(schedule: Schedule, sends: Sends = "buffered") -> Deadlock | None:
    """Runs the communications of a schedule and reports the cycle in which it stops.

    Args:
        schedule: a schedule in which each action occurs once and each stage has one rank.
        sends: what a send waits for; see the module's text.

    Returns:
        The deadlock, or `None` when every rank finishes.

    Example:
        >>> from fzero.pipeline import gpipe, one_f_one_b
        >>> find_deadlock(one_f_one_b(4, 8), "batched") is None
        True
        >>> print(*find_deadlock(one_f_one_b(2, 2), "sequential").story, sep="; ")
        rank 0 sends 0F1 to rank 1; rank 1 sends 1B0 to rank 0
    """
    if sends == "buffered":
        return _dependency_cycle(schedule)
    return _rendezvous_cycle(schedule, sends)


def _dependency_cycle(schedule: Schedule) -> Deadlock | None:
    stopped = run(schedule.ranks, schedule.num_stages).stopped
    first = next((rank for rank, cell in enumerate(stopped) if cell is not None), None)
    if first is None:
        return None
    cell_of = {gives(one.action): one for one in placed(schedule)}

    def ran(value: Value) -> bool:
        rank, cell, _ = cell_of[value]
        end = stopped[rank]
        return end is None or cell < end

    def blocked(rank: int) -> tuple[int, Position, str]:
        cell = stopped[rank]
        assert cell is not None  # only ranks that stopped are followed
        action = schedule.ranks[rank][cell]
        assert action is not None  # idle cells never stop a rank
        missing = next(v for v in needs(action, schedule.num_stages) if not ran(v))
        owner, later, giver = cell_of[missing]
        behind = f", {later - (stopped[owner] or 0)} cells after the one it waits at"
        story = f"rank {rank} waits at {action} for {giver} on rank {owner}"
        return owner, (rank, cell), story + behind

    return _follow(first, blocked)


@dataclass(frozen=True)
class _Post:
    """One end of a communication: `rank` sends or receives `action`'s result at `cell`."""

    action: Action
    sends: bool
    peer: int
    cell: int

    def tell(self, rank: int) -> str:
        verb, where = ("sends", "to") if self.sends else ("waits for", "from")
        return f"rank {rank} {verb} {self.action} {where} rank {self.peer}"


def _rendezvous_cycle(schedule: Schedule, sends: Sends) -> Deadlock | None:
    programs = [_steps(schedule, rank, sends) for rank in range(schedule.num_ranks)]
    position = [-1] * len(programs)
    open_posts: list[dict[Action, _Post]] = [{} for _ in programs]
    ready: deque[int] = deque(range(len(programs)))
    while ready:
        rank = ready.popleft()
        while not open_posts[rank] and position[rank] + 1 < len(programs[rank]):
            position[rank] += 1
            for post in programs[rank][position[rank]]:
                other = open_posts[post.peer].pop(post.action, None)
                if other is None:
                    open_posts[rank][post.action] = post
                elif not open_posts[post.peer]:
                    ready.append(post.peer)
    first = next((rank for rank, posts in enumerate(open_posts) if posts), None)
    if first is None:
        return None

    def blocked(rank: int) -> tuple[int, Position, str]:
        post = next(iter(open_posts[rank].values()))
        return post.peer, (rank, post.cell), post.tell(rank)

    return _follow(first, blocked)


def _steps(schedule: Schedule, rank: int, sends: Sends) -> list[list[_Post]]:
    """The communications of one rank: those in one inner list are posted and awaited together."""
    steps: list[list[_Post]] = []
    sent: list[_Post] = []
    for cell, action in enumerate(schedule.ranks[rank]):
        if action is None:
            continue
        received = _receives(schedule, rank, cell, action)
        if sends == "batched":
            steps.append(sent + received)
        else:
            steps.extend([[post] for post in sent + received])
        sent = _sends(schedule, rank, cell, action)
    steps.append(sent)
    return [step for step in steps if step]


def _receives(schedule: Schedule, rank: int, cell: int, action: Action) -> list[_Post]:
    giver = action._replace(stage=action.stage + (-1 if action.kind == "F" else 1))
    if action.kind == "W" or not 0 <= giver.stage < schedule.num_stages:
        return []
    peer = schedule.stage_to_rank[giver.stage]
    return [] if peer == rank else [_Post(_message(giver), False, peer, cell)]


def _sends(schedule: Schedule, rank: int, cell: int, action: Action) -> list[_Post]:
    taker = action.stage + (1 if action.kind == "F" else -1)
    if action.kind == "W" or not 0 <= taker < schedule.num_stages:
        return []
    peer = schedule.stage_to_rank[taker]
    return [] if peer == rank else [_Post(_message(action), True, peer, cell)]


def _message(action: Action) -> Action:
    # The two ends may disagree on whether the giver's backward is split; the message is the same.
    return action if action.kind == "F" else action._replace(kind="B")


def _follow(first: int, blocked: _Blocked) -> Deadlock:
    """Follows who waits for whom from `first` until a rank comes up again."""
    seen: list[int] = []
    found: list[tuple[Position, str]] = []
    rank = first
    while rank not in seen:
        seen.append(rank)
        following, cell, story = blocked(rank)
        found.append((cell, story))
        rank = following
    cycle: Sequence[tuple[Position, str]] = found[seen.index(rank) :]
    return Deadlock(tuple(c for c, _ in cycle), tuple(s for _, s in cycle))
