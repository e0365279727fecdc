"""A prediction as tables for people."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table


if TYPE_CHECKING:
    from fzero.preflight.links import CollectiveUse
    from fzero.preflight.result import Preflight

WIDTH = 100
# Collectives of a smaller share of the bytes (norms, losses, counters) are told in one line.
_SMALL_SHARE = 1e-3


def rendered(found: Preflight) -> str:
    """The prediction as text."""
    parts = [heading(found), memory_table(found), collectives_table(found), time_table(found)]
    if found.pipeline is not None:
        parts.append(pipeline_table(found))
    return text_of(*parts, *(f"note: {note}" for note in found.notes))


def text_of(*parts: Any) -> str:
    """Tables and lines as plain text."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part)
        console.print()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def size(count: float) -> str:
    """Bytes in the unit that reads best.

    Example:
        >>> size(1536), size(141 * 2**30)
        ('1.5 KiB', '141.0 GiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    Example:
        >>> duration(0.0123), duration(2.5)
        ('12.3 ms', '2.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def heading(found: Preflight) -> str:
    """What was asked, and the answer."""
    verb = "fits" if found.fits else "does NOT fit"
    spare = size(abs(found.spare_bytes))
    by = f"{spare} to spare" if found.fits else f"{spare} too much"
    lines = [
        f"{describe_plan(found)} on {found.topology}: {found.num_elements:,} parameters",
        f"{verb}: peak {size(found.memory.peak)} of {size(found.rates.memory_bytes)} per device,"
        f" {size(found.rates.reserve_bytes)} kept in reserve, {by}",
    ]
    fraction = found.memory_fraction_needed
    if fraction is not None:
        lines.append(f"set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}: jax's own 0.75 is less")
    return "\n".join(lines)


def describe_plan(found: Preflight) -> str:
    """The plan's sizes in words."""
    plan = found.plan
    sizes = [f"ZeRO-{plan.zero}"]
    for name in ("pipe", "replica"):
        if getattr(plan, name) > 1:
            sizes.append(f"{name}={getattr(plan, name)}")
    data = plan.data or found.topology.num_devices // (plan.pipe * plan.replica)
    return ", ".join([*sizes, f"data={data}", f"microbatches={plan.microbatches}", plan.precision])


def table_of(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table; the first `left` columns hold words, the others numbers."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right", no_wrap=True)
    return table


def memory_table(found: Preflight) -> Table:
    """Bytes per device."""
    table = table_of("memory per device", "what", "bytes", "")
    memory = found.memory
    for name, count in memory.parts():
        table.add_row(name, f"{count:,}", size(count))
    table.add_section()
    table.add_row("peak", f"{memory.peak:,}", size(memory.peak))
    return table


def collectives_table(found: Preflight) -> Table:
    """What is sent, over which links, and what is computed meanwhile."""
    table = table_of(
        "collectives per device and step, and the kernels beside each", "kind", "axis", "links",
        "size", "times", "sent", "matmuls", "other", "adds", left=3,
    )  # fmt: skip
    rows = merged(found.collectives)
    least = _SMALL_SHARE * found.traffic.communicated_bytes
    small = [c for c in rows if c.total_bytes < least]
    for c in rows:
        if c.total_bytes < least:
            continue
        links = "across hosts" if c.crosses_hosts else "in a host"
        where = "*" if c.estimated else ""
        table.add_row(
            c.kind + where, c.axes, links, size(c.bytes), str(c.times), size(c.total_bytes),
            str(c.num_matmuls), str(c.num_kernels), duration(c.times * c.exposed_seconds),
        )  # fmt: skip
    if small:
        total = sum(c.total_bytes for c in small)
        count = str(sum(c.times for c in small))
        table.add_row("small ones", "", "", "", count, size(total), "", "", "")
    table.add_section()
    sums = found.traffic
    share = f"{_share(sums.without_matmul_bytes, sums.communicated_bytes)} without matmuls"
    exposed = f"{_share(sums.exposed_bytes, sums.communicated_bytes)} exposed"
    table.add_row(
        "all", "", "", "", "", size(sums.communicated_bytes), "", "",
        duration(sums.exposed_seconds),
    )  # fmt: skip
    table.caption = f"{exposed}, {share}"
    if sums.cross_host_bytes:
        table.caption += (
            f"; {size(sums.cross_host_bytes)} in collectives across hosts, of which each network"
            f" card carries {size(sums.network_bytes)}"
        )
    table.caption_justify = "left"
    return table


def merged(found: Iterable[CollectiveUse]) -> list[CollectiveUse]:
    """Collectives with those of equal description added up."""
    kept: dict[Any, CollectiveUse] = {}
    for c in found:
        key = dataclasses.replace(
            c, times=0, where="", seconds=0.0, exposed_best_seconds=0.0, exposed_seconds=0.0
        )
        old = kept.get(key)
        if old is None:
            kept[key] = c
            continue
        times = old.times + c.times
        added = (old.times * old.exposed_seconds + c.times * c.exposed_seconds) / times
        kept[key] = dataclasses.replace(old, times=times, exposed_seconds=added)
    return list(kept.values())


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"


def time_table(found: Preflight) -> Table:
    """Seconds of a step and MFU."""
    table = table_of("time of a step", "what", "seconds", "MFU")
    b = found.bounds
    again = f"{found.compiled_flops / 1e12:.2f} TFLOP, {found.recomputed_fraction:.0%} recomputed"
    table.add_row(f"matmuls at the peak ({again})", duration(b.compute_seconds), "")
    table.add_row("device memory at its peak", duration(b.memory_seconds), "")
    table.add_row("links at their peak", duration(b.link_seconds), "")
    if b.bubble_seconds:
        table.add_row("a rank waits for others", duration(b.bubble_seconds), "")
    table.add_section()
    for name, seconds, mfu in (
        (f"at best ({b.limit} is the most)", b.best_seconds, b.best_mfu),
        ("likely", b.likely_seconds, b.likely_mfu),
        ("nothing beside collectives", b.serial_seconds, b.serial_mfu),
    ):
        table.add_row(name, duration(seconds), f"{mfu:.0%}")
    table.caption = f"compiled in {found.compile_seconds:.1f} s; rates: {found.rates.source}"
    table.caption_justify = "left"
    return table


def pipeline_table(found: Preflight) -> Table:
    """What each rank of a pipeline does and holds."""
    assert found.pipeline is not None
    own = found.pipeline
    title = (
        f"pipeline {own.schedule}: {duration(own.makespan_seconds)},"
        f" {own.bubble_fraction:.1%} idle (simulated)"
    )
    table = table_of(title, "rank", "live activations", "peak")
    for rank, (live, peak) in enumerate(
        zip(own.peak_live_per_rank, own.peak_bytes_per_rank, strict=True)
    ):
        table.add_row(str(rank), str(live), size(peak))
    table.add_section()
    for stage, seconds in enumerate(own.stage_seconds):
        words = ", ".join(f"{kind} {duration(s)}" for kind, s in seconds.items())
        table.add_row(f"stage {stage}", words, "")
    return table
