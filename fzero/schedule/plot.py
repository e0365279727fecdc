"""A timeline as a picture: ranks by time above, what they hold below."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from fzero.errors import ScheduleError
from fzero.schedule.kinds import COLOURS, WORDS
from fzero.schedule.simulate import Timeline
from fzero.units import byte_unit


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_BUBBLE = "#ECECEC"

# Inches. A cell of a third of an inch holds two digits; beyond the longest figure they shrink.
_INCHES_PER_CELL = 0.30
_WIDTH_RANGE = (9.0, 26.0)
_INCHES_PER_RANK = 0.42


def plot(timeline: Timeline, path: str | PathLike[str], *, title: str | None = None) -> None:
    """Draws a timeline to a file.

    Ranks by time, one colour per kind, paler for later chunks, microbatch numbers in the cells,
    bubbles in grey; below, the live activations of each rank over time (bytes, when the cost has
    `activation_bytes`).

    Args:
        timeline: what `simulate` returned.
        path: the file; its ending picks the format, `.png` or `.svg`.
        title: the first words of the heading.

    Raises:
        ScheduleError: matplotlib is not installed, or the ending is not one it can write.
    """
    figure = _new_figure(timeline)
    upper, lower = figure.subplots(
        2, 1, sharex=True, height_ratios=[max(2.0, timeline.schedule.num_ranks * 0.75), 2.8]
    )
    _draw_ranks(upper, timeline, figure.get_size_inches()[0])
    _draw_memory(lower, timeline)
    upper.set_title(_heading(timeline, title), loc="left", fontsize=11, pad=26)
    _legend(upper, timeline)
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ScheduleError(f"plot: cannot write {path}: {error}") from error


def _new_figure(timeline: Timeline) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScheduleError(
            "plot: expected matplotlib to be installed, got no such module; install it, or use "
            "fzero.pipeline.draw for a drawing in the terminal"
        ) from error
    shortest = min((e.end_s - e.start_s for e in timeline.events if e.end_s > e.start_s), default=1)
    low, high = _WIDTH_RANGE
    width = min(max(timeline.makespan_s / shortest * _INCHES_PER_CELL + 1.6, low), high)
    height = 3.6 + _INCHES_PER_RANK * timeline.schedule.num_ranks
    # A figure of its own, not pyplot's: no global state, no window, safe in threads.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_ranks(axes: Axes, timeline: Timeline, width_inches: float) -> None:
    inches_per_second = (width_inches - 1.6) / (timeline.makespan_s or 1.0)
    for rank, row in enumerate(timeline.rank_events):
        axes.broken_barh([(0.0, timeline.makespan_s)], (rank - 0.45, 0.9), facecolors=_BUBBLE)
        stages = sorted({e.action.stage for e in row})
        for event in row:
            seconds = event.end_s - event.start_s
            chunk = stages.index(event.action.stage)
            axes.broken_barh(
                [(event.start_s, seconds)],
                (rank - 0.45, 0.9),
                facecolors=_paler(COLOURS[event.action.kind], chunk, len(stages)),
                edgecolors="white",
                linewidth=0.8,
            )
            number = str(event.action.microbatch)
            # 72 points an inch; a digit is about 0.6 of its height wide.
            size = min(9.0, seconds * inches_per_second * 72 / (0.6 * len(number) + 0.5))
            if size >= 3.5:
                axes.text(
                    event.start_s + seconds / 2, rank, number, ha="center", va="center",
                    fontsize=size, color="#1A1A1A",
                )  # fmt: skip
    ranks = range(timeline.schedule.num_ranks)
    idle = timeline.bubble_fraction_per_rank
    axes.set_yticks(list(ranks), [f"rank {r}" for r in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, timeline.makespan_s or 1.0)
    for rank in ranks:
        axes.text(
            1.004, rank, f"{100 * idle[rank]:.0f} % idle", transform=axes.get_yaxis_transform(),
            va="center", fontsize=8, color="#666666",
        )  # fmt: skip
    axes.tick_params(left=False, bottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    from matplotlib import colormaps

    in_bytes = max(timeline.peak_bytes_per_rank) > 0
    size, unit = byte_unit(max(timeline.peak_bytes_per_rank)) if in_bytes else (1, "")
    peaks = timeline.peak_bytes_per_rank if in_bytes else timeline.peak_live_per_rank
    count = timeline.schedule.num_ranks
    for rank, levels in enumerate(timeline.memory_per_rank):
        # A release and a hold at one instant are no dip in memory: draw what the instant ends with.
        ends = {level.time_s: level.live_bytes if in_bytes else level.live for level in levels}
        values = [value / size for value in ends.values()]
        colour = colormaps["viridis"](0.9 * rank / max(1, count - 1))
        axes.step(
            [*ends, timeline.makespan_s],
            [*values, values[-1]],
            where="post",
            color=colour,
            linewidth=1.6,
            label=f"rank {rank}: peak {peaks[rank] / size:.4g}",
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"live activations{f' [{unit}]' if unit else ''}", fontsize=9)
    axes.set_xlabel("time (in the unit of the cost)", fontsize=9)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for name in ("top", "right"):
        axes.spines[name].set_visible(False)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=min(count, 8), frameon=False,
        fontsize=8, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip


def _legend(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    used = [kind for kind in COLOURS if any(e.action.kind == kind for e in timeline.events)]
    patches: list[Any] = [Patch(facecolor=COLOURS[k], label=WORDS[k]) for k in used]
    patches.append(Patch(facecolor=_BUBBLE, label="bubble"))
    chunks = timeline.schedule.num_chunks
    if chunks > 1:
        pale = _paler(COLOURS["F"], chunks - 1, chunks)
        patches.append(Patch(facecolor=pale, label="paler: later chunk of the rank"))
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(-0.005, 1.0), ncols=len(patches),
        frameon=False, fontsize=9, handlelength=1.2, columnspacing=1.4,
    )  # fmt: skip


def _heading(timeline: Timeline, title: str | None) -> str:
    schedule = timeline.schedule
    phrases = [] if title is None else [title]
    phrases.append(
        f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, "
        f"{schedule.num_microbatches} microbatches"
    )
    phrases.append(
        f"makespan {timeline.makespan_s:.4g}, bubble {100 * timeline.bubble_fraction:.1f} %"
    )
    return "   |   ".join(phrases)


def _paler(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Mixes white into a colour: the first chunk is pure, the last one half white."""
    share = 0.5 * chunk / max(1, chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return tuple(c + (1 - c) * share for c in (red, green, blue))  # type: ignore[return-value]
