"""What came of a configuration file: plan, optimizer, schedule, and what became of every key."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax
from rich import box
from rich.console import Console
from rich.table import Table

import fzero as fz


Schedule = Callable[[Any], Any]


@dataclass(frozen=True)
class Note:
    """What became of one key.

    Args:
        key: where it stands, as in `zero_optimization.stage`.
        value: what it says there.
        became: what says the same here; empty where nothing does.
        why: in words, where it is not the same thing by another name.
    """

    key: str
    value: Any
    became: str
    why: str = ""


@dataclass(frozen=True)
class Imported:
    """A configuration of another trainer as fzero says it; `print` shows what became of each key.

    Args:
        plan: layout, precision, microbatches, clipping, tiers.
        tx: the optimizer, with the schedule in it; `None` where the file names none.
        schedule: update number (from 0) to learning rate; `None` where it is constant, or where
            there is no optimizer.
        batch_size: rows of a batch over all devices and microbatches, where the file says it.
        notes: a `Note` for each key, in the file's order.
    """

    plan: fz.Plan
    tx: optax.GradientTransformation | None
    schedule: Schedule | None
    batch_size: int | None
    notes: tuple[Note, ...]

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("key", "value", "here", "why"):
            table.add_column(name, overflow="fold")
        for note in self.notes:
            table.add_row(note.key, f"{note.value}", note.became or "-", note.why)
        out = io.StringIO()
        console = Console(file=out, width=110, highlight=False, markup=False, emoji=False)
        console.print(f"fz.{self.plan!r}")
        if self.batch_size is not None:
            console.print(f"batches of {self.batch_size} rows")
        console.print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()
