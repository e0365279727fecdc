"""The pictures of a report, as SVG to stand in a page."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

from fzero.errors import FzeroError
from fzero.runs.files import Run
from fzero.schedule.kinds import COLOURS
from fzero.schedule.simulate import Timeline
from fzero.units import byte_unit


# Okabe and Ito's colours, told apart with every common colour blindness: one for each run.
RUNS = ("#0072B2", "#D55E00")
CLASSES = {
    "params": "#0072B2", "compute": "#56B4E9", "opt_state": "#009E73", "buffers": "#999999",
    "ema": "#F0E442", "grads": "#CC79A7", "error": "#882255",
}  # fmt: skip
TIMES = {
    "first step": "#E69F00", "step": "#0072B2", "validation": "#56B4E9", "checkpoint": "#009E73",
}  # fmt: skip
# On the colours of actions, whatever the page's are.
NUMBERS = "#101010"
# Lines of this many points and more are drawn as running medians over them.
_MANY = 60


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches.

    Raises:
        FzeroError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FzeroError(
            "report: expected matplotlib to be installed; pip install 'fzero[report]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def svg(drawn: Any, name: str) -> str:
    """A figure as an `<svg>` element whose text is text."""
    from matplotlib import rc_context

    out = io.StringIO()
    # The salt keeps the ids of several pictures on a page apart, and the same from day to day.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        drawn.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # The picture's own description has addresses of standards, which a page on its own needs not.
    head, _, body = text[text.index("<svg") :].partition("<metadata>")
    body = head + body.partition("</metadata>")[2] if body else head
    # Paper and ink are the page's, which has two of each.
    body = body.replace("#ffffff", "var(--page)").replace("#000000", "currentColor")
    return body.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def _bare(axes: Any, title: str, xlabel: str = "", ylabel: str = "") -> Any:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return axes


def loss(runs: Sequence[Run]) -> str:
    """Training loss of each step, and validation losses."""
    drawn = figure(9, 3.4)
    axes = _bare(drawn.add_subplot(), "Loss", "step", "nats per token")
    for run, colour in zip(runs, RUNS, strict=False):
        steps, values = _points(run.losses)
        own = f" ({run.name})" if len(runs) > 1 else ""
        axes.plot(steps, values, color=colour, alpha=0.35, linewidth=0.8)
        axes.plot(steps, _running(values), color=colour, linewidth=1.6, label=f"training{own}")
        steps, values = _points(run.validation)
        axes.plot(steps, values, "o:", color=colour, markersize=5, markerfacecolor="white",
                  label=f"validation{own}")  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    return svg(drawn, "loss")


def rates(runs: Sequence[Run]) -> str:
    """Tokens per second, and the norm of gradients, of each step."""
    drawn = figure(9, 2.6)
    left, right = drawn.subplots(1, 2)
    for run, colour in zip(runs, RUNS, strict=False):
        tokens = run.tokens_per_step
        steps, seconds = _points(run.step_seconds)
        if tokens is not None:
            speed = [tokens / one for one in seconds]
            left.plot(steps, speed, color=colour, alpha=0.35, linewidth=0.8)
            left.plot(steps, _running(speed), color=colour, linewidth=1.4, label=run.name)
        steps, norms = _points(run.values("grad_norm"))
        right.plot(steps, norms, color=colour, linewidth=1.0, label=run.name)
    _bare(left, "Tokens per second, steps alone", "step").set_ylim(bottom=0)
    _bare(right, "Norm of gradients", "step").set_ylim(bottom=0)
    if len(runs) > 1:
        left.legend(frameon=False, fontsize=8)
    return svg(drawn, "rates")


def placement(run: Run) -> str:
    """Bytes of each state class over steps, a panel for each tier; the line is what is in use."""
    entries = run.placements
    tiers = [t for t in ("device", "host", "disk") if any(_held(e, t) for e in entries)]
    if not tiers:
        return ""
    drawn = figure(9, 2.6)
    panels = drawn.subplots(1, len(tiers), squeeze=False)[0]
    steps = [entry["step"] for entry in entries]
    for axes, tier in zip(panels, tiers, strict=True):
        sizes = {c: [_held(e, tier).get(c, 0) for e in entries] for c in CLASSES}
        used = [e["bytes_in_use"] for e in entries if e.get("bytes_in_use") is not None]
        most = max(sum(column) for column in zip(*sizes.values(), strict=True))
        scale, unit = byte_unit(most)
        below = [0.0] * len(steps)
        for name, counts in sizes.items():
            if not any(counts):
                continue
            above = [b + c / scale for b, c in zip(below, counts, strict=True)]
            axes.fill_between(steps, below, above, color=CLASSES[name], label=name, linewidth=0)
            below = above
        if tier == "device" and len(used) == len(steps):
            axes.plot(steps, [one / scale for one in used], color="black", linewidth=1.2,
                      label="arrays in use")  # fmt: skip
        _bare(axes, f"{tier}: {unit} per device", "step").set_ylim(bottom=0)
        axes.margins(x=0)
    handles = {h[1]: h[0] for axes in panels for h in zip(*axes.get_legend_handles_labels(),
                                                          strict=True)}  # fmt: skip
    drawn.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, ncols=7,
                 loc="outside lower left")  # fmt: skip
    return svg(drawn, f"placement {run.name}")


def times(runs: Sequence[Run]) -> str:
    """Where time went, a bar for each run."""
    drawn = figure(9, 0.9 + 0.45 * len(runs))
    axes = _bare(drawn.add_subplot(), "Where time went", "seconds")
    for row, run in enumerate(runs):
        at = 0.0
        for what, seconds in run.seconds.items():
            colour = TIMES.get(what, "#999999")
            axes.barh(row, seconds, left=at, color=colour, height=0.6,
                      label=what if not row else None)  # fmt: skip
            at += seconds
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper right", bbox_to_anchor=(1, 1.35))
    return svg(drawn, "where time went")


def pipeline(run: Run) -> str:
    """The measured step over the simulated one, on one scale."""
    measured, simulated = run.measured, run.simulated
    if measured is None or simulated is None:
        return ""
    ranks = measured.schedule.num_ranks
    drawn = figure(9, 1.0 + 0.6 * ranks)
    upper, lower = drawn.subplots(2, 1, sharex=True)
    scale = 1e3
    for axes, timeline, word in ((upper, measured, "measured"), (lower, simulated, "simulated")):
        _draw(axes, timeline, scale)
        idle = f"{timeline.makespan_s * scale:.1f} ms, {timeline.bubble_fraction:.0%} idle"
        _bare(axes, f"{word}: {idle}").grid(visible=False)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
    lower.set_xlabel("milliseconds")
    upper.set_xlim(0, scale * max(measured.makespan_s, simulated.makespan_s))
    return svg(drawn, f"pipeline {run.name}")


def _draw(axes: Any, timeline: Timeline, scale: float) -> None:
    for event in timeline.events:
        start, long = event.start_s * scale, (event.end_s - event.start_s) * scale
        axes.broken_barh(
            [(start, long)], (event.rank - 0.42, 0.84), facecolors=COLOURS[event.action.kind],
            edgecolors="white", linewidth=0.6,
        )  # fmt: skip
        if long > 0.012 * timeline.makespan_s * scale:
            axes.text(start + long / 2, event.rank, str(event.action.microbatch), ha="center",
                      va="center", fontsize=7, color=NUMBERS)  # fmt: skip


def _held(entry: dict[str, Any], tier: str) -> dict[str, int]:
    own: dict[str, int] = entry["bytes_per_device"].get(tier, {})
    return own


def _points(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in pairs], [value for _, value in pairs]


def _running(values: Sequence[float]) -> list[float]:
    """Running medians, of longer lines over more points; what is not a number is left out."""
    half = len(values) // _MANY
    if not half:
        return list(values)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    kept = ([v for v in window if math.isfinite(v)] for window in windows)
    return [statistics.median(window) if window else float("nan") for window in kept]
