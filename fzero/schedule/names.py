"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fzero.errors import ScheduleError
from fzero.schedule import builders, zero_bubble
from fzero.schedule.actions import Schedule


@dataclass(frozen=True)
class Builder:
    """A named schedule.

    Attributes:
        name: what `schedule` finds it by.
        build: takes stages, microbatches and chunks.
        chunks: stages per rank where the schedule fixes it, or `None` where the caller chooses.
        summary: one line for a list of schedules.
        trains: whether it has backwards.
    """

    name: str
    build: Callable[[int, int, int], Schedule]
    chunks: int | None
    summary: str
    trains: bool = True


def _fixed(build: Callable[[int, int], Schedule]) -> Callable[[int, int, int], Schedule]:
    return lambda stages, microbatches, chunks: build(stages, microbatches)


BUILDERS: Mapping[str, Builder] = {
    b.name: b
    for b in (
        Builder("gpipe", _fixed(builders.gpipe), 1, "all forwards, then all backwards"),
        Builder("1f1b", _fixed(builders.one_f_one_b), 1, "GPipe's time, fewest activations"),
        Builder("eager_1f1b", _fixed(builders.eager_one_f_one_b), 1, "1F1B that hides sends"),
        Builder("interleaved", builders.interleaved, None, "1F1B over chunks, smaller bubble"),
        Builder("looped_bfs", builders.looped_bfs, None, "chunk by chunk, best with ZeRO-3"),
        Builder("zb_h1", _fixed(zero_bubble.zb_h1), 1, "split backward, 1F1B's peak memory"),
        Builder("zb_h2", _fixed(zero_bubble.zb_h2), 1, "split backward, no idle, twice the memory"),
        Builder("zb_v", _fixed(zero_bubble.zb_v), 2, "V of two chunks, no idle, 1F1B's peak"),
        Builder("dualpipe_v", _fixed(zero_bubble.dualpipe_v), 2, "V that pairs F with B"),
        Builder("inference", builders.inference, None, "forwards only", trains=False),
    )
}

# Where the caller may choose and does not. Evaluation has no bubble worth splitting stages for.
_DEFAULT_CHUNKS = {"interleaved": 2, "looped_bfs": 2, "inference": 1}


def stages_per_rank(name: str) -> int:
    """Stages that one rank holds when nobody says how many.

    Args:
        name: one of `BUILDERS`.

    Returns:
        1, or 2 for the V-shaped schedules, `interleaved` and `looped_bfs`.

    Raises:
        ScheduleError: the name is not known.
    """
    fixed = _builder(name).chunks
    return fixed if fixed is not None else _DEFAULT_CHUNKS[name]


def _builder(name: str) -> Builder:
    builder = BUILDERS.get(name)
    if builder is None:
        raise ScheduleError(
            f"schedule: expected one of {', '.join(BUILDERS)}, got {name!r}; "
            f"Schedule.from_csv reads any other from a file"
        )
    return builder


def schedule(name: str, *, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Builds a schedule by name.

    Args:
        name: one of `BUILDERS`.
        stages: number of stages in all; `stages / chunks` ranks.
        microbatches: number of microbatches.
        chunks: stages per rank. `None` takes the schedule's own: 1, or 2 for the V-shaped ones,
            `interleaved` and `looped_bfs`.

    Returns:
        The schedule.

    Raises:
        ScheduleError: the name is not known, or the sizes do not fit.

    Example:
        >>> schedule("1f1b", stages=4, microbatches=8)
        Schedule(num_ranks=4, num_stages=4, num_microbatches=8)
        >>> schedule("zb_v", stages=8, microbatches=8)
        Schedule(num_ranks=4, num_stages=8, num_microbatches=8)
    """
    builder = _builder(name)
    fixed = builder.chunks
    if fixed is not None and chunks not in (None, fixed):
        raise ScheduleError(
            f"schedule {name}: expected chunks={fixed} (its only form), got chunks={chunks}; leave "
            f"chunks out, or take interleaved or looped_bfs"
        )
    if chunks is None:
        chunks = stages_per_rank(name)
    return builder.build(stages, microbatches, chunks)
