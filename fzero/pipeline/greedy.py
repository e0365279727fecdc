"""List scheduling: lets every idle rank start the most urgent action that is ready.

Time runs forward over all ranks at once, so that a rank never waits for a value that does not
exist yet while it could work. What "urgent" means is a `Policy`; `optimize` tries several.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fzero.pipeline.actions import Action, Schedule
from fzero.pipeline.order import Value, gives, needs
from fzero.pipeline.simulate import Cost


Placement = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Policy:
    """What a rank prefers when several actions are ready.

    Attributes:
        caps: for each rank and chunk, how many activations the rank may hold in all after a
            forward of that chunk. A later chunk needs a larger cap than an earlier one: else the
            first chunk takes every place, and no microbatch comes through to free one.
        backward_first: whether a ready backward goes before a ready forward.
        deepest_first: whether, of several chunks, the one nearest to the loss goes first.
        split: whether backwards are split in `I` and `W`.
        patience: share of a `W` that a rank would rather idle than start one when an `F` or `I`
            is known to arrive in that time.
    """

    caps: tuple[tuple[int, ...], ...]
    backward_first: bool = True
    deepest_first: bool = True
    split: bool = True
    patience: float = 0.0


def list_schedule(
    placement: Placement, microbatches: int, cost: Cost, policy: Policy
) -> Schedule | None:
    """Schedules greedily.

    Args:
        placement: the stages of each rank, in the order of the pipeline.
        microbatches: number of microbatches.
        cost: seconds of each action.
        policy: what to prefer.

    Returns:
        A legal schedule that keeps the caps, or `None` when the caps leave no way on.

    Example:
        >>> caps = ((2,), (1,))
        >>> print(list_schedule([[0], [1]], 2, Cost(), Policy(caps, split=False)))
                   0   1   2   3
        rank 0:  0F0 0F1 0B0 0B1
        rank 1:  1F0 1B0 1F1 1B1
    """
    ranks = [
        _Rank(rank, stages, microbatches, policy, cost) for rank, stages in enumerate(placement)
    ]
    num_stages = sum(len(stages) for stages in placement)
    home = {stage: rank for rank, stages in enumerate(placement) for stage in stages}
    given: dict[Value, tuple[float, float, int]] = {}

    def arrival(action: Action, rank: int) -> float | None:
        """When an action's inputs are there, as far as they are scheduled already."""
        latest = 0.0
        for value in needs(action, num_stages):
            if value not in given:
                return None
            end, sent, giver = given[value]
            latest = max(latest, end if giver == rank else sent)
        return latest

    # Wake-up times; a rank looks for work when it gets free and when a value arrives.
    events: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(ranks))]
    while events:
        now, rank = heapq.heappop(events)
        worker = ranks[rank]
        if worker.free_s > now:
            continue
        action = worker.choose(now, [(a, arrival(a, rank)) for a in worker.offers()])
        if action is None:
            continue
        end = now + cost.seconds(action)
        sent = end + cost.send_seconds(action.stage)
        given[gives(action)] = (end, sent, rank)
        worker.start(action, end)
        heapq.heappush(events, (end, rank))
        if action.kind != "W":
            taker = home.get(action.stage + (1 if action.kind == "F" else -1))
            if taker is not None and taker != rank:
                heapq.heappush(events, (sent, taker))
    finished = all(worker.finished for worker in ranks)
    return Schedule(worker.actions for worker in ranks) if finished else None


class _Rank:
    """What one rank has done and may do next."""

    def __init__(
        self, rank: int, stages: Sequence[int], microbatches: int, policy: Policy, cost: Cost
    ) -> None:
        self.actions: list[Action] = []
        self.free_s = 0.0
        self._stages = stages
        self._microbatches = microbatches
        self._policy = policy
        self._cost = cost
        self._caps = policy.caps[rank]
        self._forwards = [0] * len(stages)
        self._backwards = [0] * len(stages)
        self._delayed: deque[Action] = deque()
        self._live = 0

    @property
    def finished(self) -> bool:
        """Whether every microbatch has passed every chunk and left nothing behind."""
        return not self._live and all(n == self._microbatches for n in self._backwards)

    def offers(self) -> list[Action]:
        """The next forward and backward of each chunk, most urgent first."""
        chunks = range(len(self._stages))
        deep = list(reversed(chunks)) if self._policy.deepest_first else list(chunks)
        backwards = [
            Action("I" if self._policy.split else "B", self._stages[c], self._backwards[c])
            for c in deep
            if self._backwards[c] < self._forwards[c]
        ]
        forwards = [
            Action("F", self._stages[c], self._forwards[c])
            for c in deep
            if self._forwards[c] < self._microbatches and self._live < self._caps[c]
        ]
        return backwards + forwards if self._policy.backward_first else forwards + backwards

    def choose(self, now: float, offers: list[tuple[Action, float | None]]) -> Action | None:
        """The first offer that has arrived, else a delayed `W`, else nothing."""
        soonest = None
        for action, arrival in offers:
            if arrival is not None and arrival <= now:
                return action
            if arrival is not None:
                soonest = arrival if soonest is None else min(soonest, arrival)
        if not self._delayed:
            return None
        weight = self._delayed[0]
        # Without an F or I on its way nothing can be gained by waiting; with one, its arrival
        # wakes this rank up again.
        if soonest is not None and soonest - now < self._policy.patience * self._cost.seconds(
            weight
        ):
            return None
        return weight

    def start(self, action: Action, end: float) -> None:
        """Books an action that ends at `end`."""
        self.actions.append(action)
        self.free_s = end
        chunk = self._stages.index(action.stage)
        if action.kind == "F":
            self._forwards[chunk] += 1
            self._live += 1
        elif action.kind == "W":
            self._delayed.remove(action)
            self._live -= 1
        else:
            self._backwards[chunk] += 1
            if action.kind == "I":
                self._delayed.append(action._replace(kind="W"))
            else:
                self._live -= 1
