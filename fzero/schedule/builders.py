"""Builders of the schedules that run forwards and whole backwards (by name: `schedule.names`).

`stages` is always the number S of stages that a model is cut into, and `chunks` how many of them
one rank holds: there are S / chunks ranks. Stage k is on rank `k % ranks` (looped placement), so a
microbatch visits every rank `chunks` times. The V-shaped schedules are in `zero_bubble`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fzero.errors import ScheduleError
from fzero.schedule.actions import Action, Schedule, natural


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches.

    Returns:
        The schedule. Every rank holds all `microbatches` activations at its peak.

    Raises:
        ScheduleError: a number is not positive.

    Example:
        >>> print(gpipe(2, 2))
                   0   1   2   3
        rank 0:  0F0 0F1 0B0 0B1
        rank 1:  1F0 1F1 1B0 1B1

    Source: Huang et al., GPipe (2019), section 2.3.
    """
    stages, count = _sizes(stages, microbatches)
    return Schedule(_alternate(rank, count, warmup=count) for rank in range(stages))


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward: the same time as GPipe with the fewest live activations.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches.

    Returns:
        The schedule. Rank s holds `min(stages - s, microbatches)` activations at its peak.

    Raises:
        ScheduleError: a number is not positive.

    Example:
        >>> print(one_f_one_b(2, 3))
                   0   1   2   3   4   5
        rank 0:  0F0 0F1 0B0 0F2 0B1 0B2
        rank 1:  1F0 1B0 1F1 1B1 1F2 1B2

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (2021), section 3.2
        (PipeDream-Flush).
    """
    stages, count = _sizes(stages, microbatches)
    return Schedule(_alternate(r, count, warmup=stages - r) for r in range(stages))


def eager_one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B that runs twice as many forwards ahead, so that sends overlap with computation.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches.

    Returns:
        The schedule. Rank s holds `min(2 * (stages - s) - 1, microbatches)` activations.

    Raises:
        ScheduleError: a number is not positive.

    Example:
        >>> eager_one_f_one_b(2, 4).rank_actions(0)
        (0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3)

    Source: Zhuang et al., On Optimizing the Communication of Model Parallelism (2022), section 4.
    """
    stages, count = _sizes(stages, microbatches)
    return Schedule(_alternate(r, count, 2 * (stages - r) - 1) for r in range(stages))


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B over several chunks per rank: a smaller bubble for more live activations and sends.

    Args:
        stages: number of stages in all, a multiple of `chunks`.
        microbatches: number of microbatches. They pass the chunks in groups of as many as there
            are ranks; where that does not divide, the first groups are one or more larger, which
            keeps the time of the closed form for every number that is not less than the ranks.
        chunks: stages per rank.

    Returns:
        The schedule for `stages / chunks` ranks.

    Raises:
        ScheduleError: a number is not positive or `chunks` does not divide `stages`.

    Example:
        >>> interleaved(4, 2).rank_actions(0)
        (0F0, 0F1, 2F0, 2F1, 2B0, 2B1, 0B0, 0B1)

    Source: Narayanan et al., Efficient Large-Scale Language Model Training (2021), section 2.2.
    """
    ranks, count = ranks_for(stages, chunks), natural("microbatches", microbatches)
    sizes = _group_sizes(count, ranks)
    forwards = list(_grouped(sizes, range(chunks)))
    backwards = list(_grouped(sizes, range(chunks - 1, -1, -1)))
    rows = []
    for rank in range(ranks):
        # The first backward of the last chunk waits for the first group to pass all chunks.
        ahead = min((chunks - 1) * sizes[0] + 2 * (ranks - 1 - rank) + 1, len(forwards))
        rows.append(_zip_1f1b(rank, ranks, forwards, backwards, ahead))
    return Schedule(rows)


def looped_bfs(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """All microbatches through one chunk before the next: each weight is gathered once a pass.

    Args:
        stages: number of stages in all, a multiple of `chunks`.
        microbatches: number of microbatches.
        chunks: stages per rank.

    Returns:
        The schedule for `stages / chunks` ranks. Every rank holds `chunks * microbatches`
        activations at its peak, as GPipe does.

    Raises:
        ScheduleError: a number is not positive or `chunks` does not divide `stages`.

    Example:
        >>> looped_bfs(4, 2).rank_actions(1)
        (1F0, 1F1, 3F0, 3F1, 3B1, 3B0, 1B1, 1B0)

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (2022), section 4.1.
    """
    ranks, count = ranks_for(stages, chunks), natural("microbatches", microbatches)
    rows = []
    for rank in range(ranks):
        order = [(c * ranks + rank, m) for c in range(chunks) for m in range(count)]
        forwards = [Action("F", stage, m) for stage, m in order]
        # Exactly reversed, so that the backward of the last chunk starts with the microbatch
        # whose activations are newest.
        rows.append(forwards + [Action("B", stage, m) for stage, m in reversed(order)])
    return Schedule(rows)


def inference(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Forwards only, for evaluation.

    Args:
        stages: number of stages in all, a multiple of `chunks`.
        microbatches: number of microbatches.
        chunks: stages per rank.

    Returns:
        The schedule for `stages / chunks` ranks. Nothing is kept for a backward.

    Raises:
        ScheduleError: a number is not positive or `chunks` does not divide `stages`.

    Example:
        >>> inference(2, 2).ranks
        ((0F0, 0F1), (1F0, 1F1))
    """
    ranks, count = ranks_for(stages, chunks), natural("microbatches", microbatches)
    order = list(_grouped(_group_sizes(count, ranks), range(chunks)))
    return Schedule(
        [Action("F", chunk * ranks + rank, m) for chunk, m in order] for rank in range(ranks)
    )


def ranks_for(stages: int, chunks: int) -> int:
    """The number of ranks that hold `stages` stages in `chunks` chunks each.

    Args:
        stages: number of stages in all.
        chunks: stages per rank.

    Returns:
        `stages / chunks`.

    Raises:
        ScheduleError: a number is not positive or `chunks` does not divide `stages`.

    Example:
        >>> ranks_for(8, chunks=2)
        4
    """
    stages, chunks = natural("stages", stages), natural("chunks", chunks)
    if stages % chunks:
        raise ScheduleError(
            f"stages ({stages}) must be divisible by chunks ({chunks}): every rank holds the same "
            f"number of stages; take {stages - stages % chunks or chunks} or "
            f"{stages - stages % chunks + chunks} stages"
        )
    return stages // chunks


def _sizes(stages: int, microbatches: int) -> tuple[int, int]:
    return natural("stages", stages), natural("microbatches", microbatches)


def _alternate(stage: int, count: int, warmup: int) -> list[Action]:
    """Runs `warmup` forwards, then backwards and forwards in turn, then the backwards left."""
    order = [(0, m) for m in range(count)]
    return _zip_1f1b(stage, 1, order, order, min(warmup, count))


def _group_sizes(count: int, ranks: int) -> list[int]:
    """Splits microbatches in groups of at least `ranks`, the larger ones first.

    Larger first, because a group that is larger than the first would need forwards further ahead
    than the first did, and deadlock.
    """
    groups = max(1, count // ranks)
    size, larger = divmod(count, groups)
    return [size + 1] * larger + [size] * (groups - larger)


def _grouped(sizes: Sequence[int], chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields (chunk, microbatch): a group passes all chunks before the next group does."""
    first = 0
    for size in sizes:
        for chunk in chunks:
            for microbatch in range(first, first + size):
                yield chunk, microbatch
        first += size


def _zip_1f1b(
    rank: int,
    ranks: int,
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    ahead: int,
) -> list[Action]:
    """Runs `ahead` forwards before the first backward, then one forward after each backward."""
    f = [Action("F", chunk * ranks + rank, m) for chunk, m in forwards]
    b = [Action("B", chunk * ranks + rank, m) for chunk, m in backwards]
    row = f[:ahead]
    for index, backward in enumerate(b):
        row.append(backward)
        row.extend(f[ahead + index : ahead + index + 1])
    return row
