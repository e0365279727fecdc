"""The schedules that split the backward in `I` and `W` and fill the bubble with `W`.

Only the input gradient is on the way from the last stage to the first, so the weight gradient can
wait for an idle moment. It pays with memory: what `W` reads lives until `W` has run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fzero.schedule.actions import Action, Kind, Schedule, natural
from fzero.schedule.builders import ranks_for


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with weight gradients moved into the bubble, at 1F1B's worst-case memory on every rank.

    Args:
        stages: number p of stages, one per rank.
        microbatches: number of microbatches.

    Returns:
        The schedule. Rank s delays its first s weight gradients and holds at most p activations.

    Raises:
        ScheduleError: a number is not positive.

    Example:
        >>> zb_h1(2, 3).rank_actions(1)
        (1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2)

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.1 and figure 3 (top).
    """
    return _single_chunk(stages, microbatches, ahead_per_hop=1, delay_per_rank=1)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """No idle time between a rank's first and last action, for about twice 1F1B's memory.

    Args:
        stages: number p of stages, one per rank.
        microbatches: number of microbatches; no idle time needs at least `2 * stages - 1`.

    Returns:
        The schedule. Rank s runs `2 * (p - 1 - s) + 1` forwards before its first backward, delays
        its first 2s weight gradients and holds at most `2 * p - 1` activations.

    Raises:
        ScheduleError: a number is not positive.

    Example:
        >>> zb_h2(2, 3).rank_actions(1)
        (1F0, 1I0, 1F1, 1I1, 1F2, 1I2, 1W0, 1W1, 1W2)

    Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.2 and figure 3 (bottom).
    """
    return _single_chunk(stages, microbatches, ahead_per_hop=2, delay_per_rank=2)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks per rank in the shape of a V: no idle time at 1F1B's peak memory, even over ranks.

    Rank s of p holds stages s and 2p - 1 - s, so the last stage is on the first rank and its
    backward starts there without a send.

    Args:
        stages: number of stages in all, even; p = `stages / 2` ranks.
        microbatches: number of microbatches; no idle time needs at least `2 * p - 1`.

    Returns:
        The schedule. Every rank holds at most 2p chunk activations.

    Raises:
        ScheduleError: a number is not positive or `stages` is odd.

    Example:
        >>> zb_v(2, 2).rank_actions(0)
        (0F0, 1F0, 1I0, 1W0, 0F1, 0I0, 0W0, 1F1, 1I1, 1W1, 0I1, 0W1)

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (2024), section 2 (V-ZB).
    """
    ranks, count = ranks_for(stages, 2), natural("microbatches", microbatches)
    whole = max(count, 2 * ranks - 1)
    rows = [_zb_v_row(rank, ranks, whole) for rank in range(ranks)]
    return Schedule(rows).first_microbatches(count)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: a V of two chunks per rank that pairs forwards with backwards.

    The pairs that DualPipeV overlaps stand in adjacent cells here, forward first: an executor may
    run them side by side, and any executor may run them in turn.

    Args:
        stages: number of stages in all, even; p = `stages / 2` ranks.
        microbatches: number of microbatches. The published order needs at least `stages`; for
            fewer, it is the order for `stages` microbatches without those that are missing.

    Returns:
        The schedule. Every rank holds at most 2p + 1 chunk activations.

    Raises:
        ScheduleError: a number is not positive or `stages` is odd.

    Example:
        >>> dualpipe_v(2, 2).rank_actions(0)
        (0F0, 1F0, 0F1, 1B0, 1F1, 0B0, 1B1, 0I1, 0W1)

    Source: DeepSeek-V3 Technical Report (2024), section 3.2.1, and the DualPipeV note in
        github.com/deepseek-ai/DualPipe.
    """
    ranks, count = ranks_for(stages, 2), natural("microbatches", microbatches)
    whole = max(count, 2 * ranks)
    rows = [_dualpipe_v_row(rank, ranks, whole) for rank in range(ranks)]
    return Schedule(rows).first_microbatches(count)


def _single_chunk(
    stages: int, microbatches: int, ahead_per_hop: int, delay_per_rank: int
) -> Schedule:
    stages, count = natural("stages", stages), natural("microbatches", microbatches)
    rows = []
    for rank in range(stages):
        row = _Row((rank,))
        row.add("F", 0, min(ahead_per_hop * (stages - 1 - rank) + 1, count))
        while row.done("I", 0) < count:
            row.add("I", 0)
            if row.done("I", 0) > delay_per_rank * rank:
                row.flush_one()
            if row.done("F", 0) < count:
                row.add("F", 0)
        row.flush_all()
        rows.append(row.actions)
    return Schedule(rows)


def _zb_v_row(rank: int, ranks: int, count: int) -> list[Action]:
    hops = ranks - rank  # ranks from here to the bottom of the V, itself included
    row = _Row((rank, 2 * ranks - 1 - rank))
    row.add("F", 0, 2 * hops - 1)
    for _ in range(rank):
        row.add("F", 1)
        row.add("F", 0)
    for _ in range(hops):
        row.add("F", 1)
        row.backward(1)
    while row.done("F", 1) < row.done("F", 0) or row.done("F", 0) < count:
        if row.done("F", 0) < count:
            row.add("F", 0)
        row.backward(0)
        row.add("F", 1)
        row.backward(1)
    # Cool-down: gradients travel up both arms of the V, so only they run until the upper arm is
    # empty; then weight gradients fill the gaps between the input gradients of the lower arm.
    for _ in range(rank):
        row.add("I", 0)
        row.add("I", 1)
    for _ in range(hops):
        row.add("I", 0)
        row.flush_one(0)
    row.flush_all(1)
    row.flush_all(0)
    return row.actions


def _dualpipe_v_row(rank: int, ranks: int, count: int) -> list[Action]:
    below = ranks - 1 - rank
    row = _Row((rank, 2 * ranks - 1 - rank))
    row.add("F", 0, 2 * below)  # 1: down the first arm
    for _ in range(rank + 1):  # 2: both arms
        row.add("F", 0)
        row.add("F", 1)
    for _ in range(below):  # 3: the first backwards, weight gradients at once
        row.backward(1)
        row.add("F", 1)
    for _ in range(count - 2 * ranks + rank + 1):  # 4: the main part
        row.add("F", 0)
        row.add("B", 1)
        row.add("F", 1)
        row.add("B", 0)
    for _ in range(below):  # 5: no forwards of the first arm are left
        row.add("B", 1)
        row.add("F", 1)
        row.add("B", 0)
    # 6: no forwards are left. The second half of these backwards delays its weight gradients.
    for step in range(rank + 1):
        row.add("I" if 2 * step > rank else "B", 1)
        row.add("I" if 2 * step >= rank else "B", 0)
    for _ in range(below):  # 7: fill the gaps between the last input gradients
        row.flush_one()
        row.add("I", 0)
    row.flush_all()  # 8
    return row.actions


class _Row:
    """Writes the actions of one rank; counts microbatches and delayed weight gradients."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._done: dict[tuple[Kind, int], int] = {}
        self._delayed: deque[tuple[int, int]] = deque()

    def done(self, kind: Kind, chunk: int) -> int:
        """Number of microbatches that went through `kind`; `B` counts as `I`."""
        return self._done.get((kind, chunk), 0)

    def add(self, kind: Kind, chunk: int, times: int = 1) -> None:
        """Appends the next microbatches of a chunk."""
        for _ in range(times):
            counted: Kind = "I" if kind == "B" else kind
            microbatch = self.done(counted, chunk)
            self._done[counted, chunk] = microbatch + 1
            self.actions.append(Action(kind, self._stages[chunk], microbatch))
            if kind == "I":
                self._delayed.append((chunk, microbatch))

    def backward(self, chunk: int) -> None:
        """Appends `I` and its own `W`."""
        self.add("I", chunk)
        self._flush(self._delayed.pop())

    def flush_one(self, chunk: int | None = None) -> None:
        """Appends the oldest delayed `W`, of one chunk or of any."""
        found = next((d for d in self._delayed if chunk in (None, d[0])), None)
        if found is not None:
            self._delayed.remove(found)
            self._flush(found)

    def flush_all(self, chunk: int | None = None) -> None:
        """Appends all delayed `W`, of one chunk or of all, oldest first."""
        for found in [d for d in self._delayed if chunk in (None, d[0])]:
            self._delayed.remove(found)
            self._flush(found)

    def _flush(self, delayed: tuple[int, int]) -> None:
        chunk, microbatch = delayed
        self.actions.append(Action("W", self._stages[chunk], microbatch))
