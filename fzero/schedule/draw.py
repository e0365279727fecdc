"""A timeline as text for the terminal."""

from __future__ import annotations

import math

from fzero.errors import ScheduleError
from fzero.schedule.actions import Kind
from fzero.schedule.simulate import Event, Timeline


IDLE = "."
_FILL: dict[Kind, str] = {"F": "=", "B": "-", "I": "-", "W": "~"}

# Below this nothing but colons would be left of a schedule.
_MIN_WIDTH = 20


def draw(timeline: Timeline, *, width: int = 100) -> str:
    """Draws ranks by time: `F3==` a forward of microbatch 3, `B3--`, `I3--`, `W3~~`, `.` idle.

    Args:
        timeline: what `simulate` returned.
        width: most characters for the time axis. Where an action gets too few of them for its
            microbatch number, it shows its kind alone.

    Returns:
        The drawing: a line per rank with its bubble and peak, then the totals.

    Raises:
        ScheduleError: the width is too small.

    Example:
        >>> from fzero.pipeline import Cost, one_f_one_b, simulate
        >>> print(draw(simulate(one_f_one_b(2, 3), Cost(f=1, b=2))))
        rank 0 |F0=F1=......B0----F2=B1----...B2----| idle 25.0 %, peak 2
        rank 1 |...F0=B0----F1=B1----F2=B2----......| idle 25.0 %, peak 1
        makespan 12, bubble 25.0 %, peak 2
    """
    if width < _MIN_WIDTH:
        raise ScheduleError(f"draw: expected a width of at least {_MIN_WIDTH}, got {width}")
    scale = _scale(timeline, width)
    length = round(timeline.makespan_s * scale)
    label = len(f"rank {timeline.schedule.num_ranks - 1}")
    lines = []
    for rank, row in enumerate(timeline.rank_events):
        text = [IDLE] * length
        for event in row:
            first, last = round(event.start_s * scale), round(event.end_s * scale)
            text[first:last] = _cell(event, last - first)
        bubble = 100 * timeline.bubble_fraction_per_rank[rank]
        peak = timeline.peak_live_per_rank[rank]
        lines.append(
            f"{f'rank {rank}':<{label}} |{''.join(text)}| idle {bubble:.1f} %, peak {peak}"
        )
    lines.append(
        f"makespan {timeline.makespan_s:g}, bubble {100 * timeline.bubble_fraction:.1f} %, "
        f"peak {max(timeline.peak_live_per_rank)}"
    )
    return "\n".join(lines)


def _scale(timeline: Timeline, width: int) -> float:
    """Characters per second: enough for every number, but no more than the width."""
    lasting = [e for e in timeline.events if e.end_s > e.start_s]
    if not lasting:
        return 0.0
    shortest = min(e.end_s - e.start_s for e in lasting)
    wanted = max((len(_name(e)) + 1) * shortest / (e.end_s - e.start_s) for e in lasting)
    fitting = width / timeline.makespan_s * shortest
    # Whole characters for the shortest action: equal actions then look equal.
    most = min(math.ceil(wanted), math.floor(fitting))
    return (most or fitting) / shortest


def _name(event: Event) -> str:
    return f"{event.action.kind}{event.action.microbatch}"


def _cell(event: Event, size: int) -> str:
    name = _name(event)
    if len(name) > size:
        name = event.action.kind
    return name[:size].ljust(size, _FILL[event.action.kind])
