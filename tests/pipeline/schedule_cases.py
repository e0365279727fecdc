"""Every builder over a grid of sizes, and reference data, for all schedule tests."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings

from fzero.pipeline import BUILDERS, Schedule, schedule


DATA = Path(__file__).parent / "data"
# For every @given: the same examples in every run, and no deadline on a busy machine.
# `make nightly-random` looks at more of each kind.
EXAMPLES = 300 if os.environ.get("FZERO_NIGHTLY") else 40
repeatable = settings(deadline=None, derandomize=True, max_examples=EXAMPLES)

TRAINING = [name for name, builder in BUILDERS.items() if builder.trains]


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """A schedule by ranks instead of stages."""
    chunks = chunks or BUILDERS[name].chunks or 2
    return schedule(name, stages=ranks * chunks, microbatches=microbatches, chunks=chunks)


def all_sizes(most_ranks: int, most_microbatches: int) -> Iterator[tuple[str, int, int, int]]:
    """Yields (name, ranks, microbatches, chunks); M < S and a single rank included."""
    for name, builder in BUILDERS.items():
        for chunks in [builder.chunks] if builder.chunks else [1, 2, 3]:
            for ranks in range(1, most_ranks + 1):
                for microbatches in range(1, most_microbatches + 1):
                    yield name, ranks, microbatches, chunks


def read_rows(rows: list[str]) -> Schedule:
    """A schedule from CSV rows."""
    return Schedule.from_csv(io.StringIO("".join(f"{row}\r\n" for row in rows)))


def load(name: str) -> dict:
    """Reference data from the `data` folder."""
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def merge_split_backward(schedule):
    """Writes an `I` that is directly followed by its own `W` as one `B`, without idle cells."""
    rows = []
    for rank in range(schedule.num_ranks):
        row = []
        for action in schedule.rank_actions(rank):
            if row and row[-1].kind == "I" and action == row[-1]._replace(kind="W"):
                row[-1] = action._replace(kind="B")
            else:
                row.append(action)
        rows.append(row)
    return Schedule(rows)
