"""Tables, sizes and durations as people read them."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fzero.preflight.network import CollectiveUse
from fzero.units import byte_unit


if TYPE_CHECKING:
    from rich.table import Table


WIDTH = 100


def text_of(*items: Any) -> str:
    """Tables and lines as plain text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, markup=False, emoji=False)
    for item in items:
        console.print(item)
        console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def size(count: float) -> str:
    """Bytes in the unit that reads best.

    Example:
        >>> size(1536), size(141 * 2**30)
        ('1.5 KiB', '141.0 GiB')
    """
    scale, unit = byte_unit(count)
    return f"{count:.0f} B" if scale == 1 else f"{count / scale:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    Example:
        >>> duration(0.0123), duration(2.5)
        ('12.3 ms', '2.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def table_of(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; the first `left` columns hold words, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def merged(found: Iterable[CollectiveUse]) -> list[CollectiveUse]:
    """Collectives with those of equal description added up."""
    by_description: dict[Any, CollectiveUse] = {}
    for c in found:
        key = dataclasses.replace(
            c, times=0, where="", seconds=0.0, exposed_best_seconds=0.0, exposed_seconds=0.0
        )
        old = by_description.get(key)
        if old is None:
            by_description[key] = c
            continue
        times = old.times + c.times
        added = (old.times * old.exposed_seconds + c.times * c.exposed_seconds) / times
        by_description[key] = dataclasses.replace(old, times=times, exposed_seconds=added)
    return list(by_description.values())
