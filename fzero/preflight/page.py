"""A prediction as one HTML page: the numbers and words; `page.html.jinja` lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.preflight.result import Preflight, describe_plan
from fzero.preflight.tables import duration, merged, size
from fzero.report.pages import render
from fzero.schedule import kinds


_WIDTH = 960
_ROW = 26
_LABEL = 120
# Okabe and Ito's colours (and Tol's wine), which people with any colour vision can tell apart.
COLOURS = {
    "params": "#0072B2", "compute": "#56B4E9", "opt_state": "#009E73", "buffers": "#999999",
    "ema": "#117733", "grads": "#CC79A7", "batch": "#F0E442", "saved activations": "#E69F00",
    "secondary shards": "#882255",
    "gradients": "#CC79A7", "temporaries": "#D55E00", "reserve": "#555555", "free": "#eeeeee",
}  # fmt: skip
_KERNELS, _HIDDEN, _OPEN = "#0072B2", "#009E73", "#D55E00"


class _Bar(NamedTuple):
    """A rectangle of a drawing, with words for who points at it."""

    x: float
    y: int
    width: float
    fill: str
    words: str
    height: int = 22
    edge: bool = False


def page(found: Preflight, title: str = "") -> str:
    """The whole page.

    Args:
        found: the prediction.
        title: what it is about; the plan by default.

    Returns:
        HTML that refers to nothing outside itself.

    Raises:
        FzeroError: jinja2 is not installed.
    """
    plan = describe_plan(found)
    return render(
        "preflight/page.html.jinja",
        title or f"{plan} on {found.topology}",
        found=found,
        plan=plan,
        width=_WIDTH,
        verdict=_verdict(found),
        memory=_memory(found),
        times=_times(found),
        timeline=_step(found) if found.pipeline is None else _pipeline(found),
        collectives=_collectives(found),
    )


def _verdict(found: Preflight) -> str:
    words = "fits" if found.fits else "does not fit"
    spare = f"{size(abs(found.spare_bytes))} {'to spare' if found.fits else 'too much'}"
    fraction = found.memory_fraction_needed
    hint = "" if fraction is None else f"; set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}"
    peak, memory = size(found.memory.peak), size(found.rates.memory_bytes)
    return f"{words}: peak {peak} of {memory}, {spare}{hint}"


def _memory(found: Preflight) -> dict[str, Any]:
    """One bar of everything that is held, one of the device, and the table of its parts."""
    memory = found.memory
    items = [(name.removeprefix("state: "), count) for name, count in memory.parts()]
    shown = [*items, ("reserve", found.rates.reserve_bytes)]
    held = sum(count for _, count in shown)
    whole = max(found.rates.memory_bytes, held)
    shown.append(("free", whole - held))
    rows = [[name, f"{count:,}", size(count)] for name, count in [*items, ("peak", memory.peak)]]
    return {
        "bars": [*_side_by_side(items, 14), *_side_by_side(shown, 68)],
        "limit": _WIDTH * found.rates.memory_bytes / whole,
        "key": [(COLOURS[name], name) for name, _ in shown],
        "rows": rows,
    }


def _side_by_side(items: Sequence[tuple[str, int]], y: int) -> list[_Bar]:
    """Bars over the whole width."""
    whole = max(1, sum(count for _, count in items))
    bars, x = [], 0.0
    for name, count in items:
        width = _WIDTH * count / whole
        bars.append(_Bar(x, y, width, COLOURS[name], f"{name}: {size(count)}", height=34))
        x += width
    return bars


def _times(found: Preflight) -> list[list[str]]:
    b = found.bounds
    again = f"{found.compiled_flops / 1e12:.2f} TFLOP, {found.recomputed_fraction:.0%} recomputed"
    return [
        [f"matmuls at the peak ({again})", duration(b.compute_seconds), ""],
        ["device memory at its peak", duration(b.memory_seconds), ""],
        ["links at their peak", duration(b.link_seconds), ""],
        [f"at best ({b.limit} is the most)", duration(b.best_seconds), f"{b.best_mfu:.1%}"],
        ["likely", duration(b.likely_seconds), f"{b.likely_mfu:.1%}"],
        ["nothing beside collectives", duration(b.serial_seconds), f"{b.serial_mfu:.1%}"],
    ]


def _step(found: Preflight) -> dict[str, Any]:
    """Two lanes: what computes, and what communicates beside it or alone."""
    b, sums = found.bounds, found.traffic
    adds = sums.exposed_seconds
    hidden = sums.seconds / found.rates.link_share - adds
    scale = (_WIDTH - _LABEL) / max(b.likely_seconds, adds + hidden, 1e-12)
    kernels = max(0.0, b.likely_seconds - adds)
    spans = [
        (0.0, 0, kernels, _KERNELS, "kernels"),
        (0.0, 1, hidden, _HIDDEN, "hidden"),
        (kernels, 1, adds, _OPEN, "in the open"),
    ]
    return {
        "label": "likely time of a step",
        "height": 2 * _ROW + 6,
        "lanes": [(20, "kernels"), (20 + _ROW, "collectives")],
        "bars": [
            _Bar(_LABEL + scale * at, 4 + lane * _ROW, scale * max(0.0, long), fill,
                 f"{words}: {duration(long)}")
            for at, lane, long, fill, words in spans
        ],
        "key": [(fill, words) for *_, fill, words in spans],
        "note": f"{duration(b.likely_seconds)}: sums, not the order of things.",
    }  # fmt: skip


def _pipeline(found: Preflight) -> dict[str, Any]:
    """A lane per rank, every action at its simulated time."""
    own = found.pipeline
    assert own is not None
    scale = (_WIDTH - _LABEL) / max(own.makespan_seconds, 1e-12)
    bars = [
        _Bar(
            _LABEL + scale * start, 4 + rank * _ROW, scale * (end - start), kinds.COLOURS[kind],
            f"{kinds.WORDS[kind]} of microbatch {microbatch} on stage {stage}:"
            f" {duration(end - start)}",
            edge=True,
        )
        for rank, kind, stage, microbatch, start, end in own.events
    ]  # fmt: skip
    used = dict.fromkeys(event[1] for event in own.events)
    return {
        "label": "simulated pipeline",
        "height": len(own.peak_live_per_rank) * _ROW + 6,
        "lanes": [
            (20 + rank * _ROW, f"rank {rank}: {size(peak)}")
            for rank, peak in enumerate(own.peak_bytes_per_rank)
        ],
        "bars": bars,
        "key": [(kinds.COLOURS[kind], kinds.WORDS[kind]) for kind in used],
        "note": f"{own.schedule}: {duration(own.makespan_seconds)},"
        f" {own.bubble_fraction:.1%} idle (simulated)",
    }


def _collectives(found: Preflight) -> dict[str, Any]:
    used = sorted(merged(found.collectives), key=lambda c: -c.total_bytes)
    rows = [
        [
            c.kind + ("*" if c.estimated else ""), c.axes,
            "across hosts" if c.crosses_hosts else "in a host", size(c.bytes), str(c.times),
            size(c.total_bytes), str(c.num_matmuls), str(c.num_kernels),
            duration(c.times * c.exposed_seconds),
        ]
        for c in used
    ]  # fmt: skip
    sums = found.traffic
    caption = (
        f"{size(sums.communicated_bytes)} sent: {size(sums.exposed_bytes)} with no kernel between"
        f" start and done, {size(sums.without_matmul_bytes)} with no matmul (shaded);"
        f" {size(sums.cross_host_bytes)} in collectives across hosts, {size(sums.network_bytes)}"
        " through each network card"
    )
    marked = [i for i, c in enumerate(used) if not c.num_matmuls]
    return {"rows": rows, "caption": caption, "marked": marked}
