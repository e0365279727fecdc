"""A pipeline's step and the copies of parked leaves as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.offload.stream import Visit
from fzero.schedule.actions import Action
from fzero.schedule.kinds import WORDS
from fzero.schedule.order import gives, needs
from fzero.schedule.simulate import Timeline


# What a trace calls the kinds of actions.
_MICRO = 1e6


class Copy(NamedTuple):
    """One span of a step, or of an offload, as the host sees it.

    Attributes:
        lane: `to the device`, `from the device`, `to host`, ...
        name: what is copied.
        start_s: seconds from the first event.
        end_s: likewise.
    """

    lane: str
    name: str
    start_s: float
    end_s: float


class Copies:
    """Takes note of copies: an `observer` of `fz.offload`, `fz.reload`, `fz.enter`, and of a
    step's `stream`.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> copies, state = Copies(), fz.init(model, optax.adam(0.1), fz.Plan(data=1))
        >>> state = fz.offload(state, "opt_state", observer=copies)
        >>> [copy.lane for copy in copies.spans()]
        ['to host']
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[tuple[float, str, Any]] = []

    def __call__(self, event: str, *about: Any) -> None:
        """Takes note of an event; the arguments are those that the observer is given."""
        with self._lock:
            self._seen.append((time.perf_counter(), event, about))

    def spans(self) -> list[Copy]:
        """What was copied, in order of starts."""
        if not self._seen:
            return []
        first, last = self._seen[0][0], self._seen[-1][0]
        moved = [(at - first, event, about) for at, event, about in self._seen]
        by_visit = isinstance(moved[0][2][0], Visit)
        found = _of_visits(moved, last - first) if by_visit else _of_moves(moved, last - first)
        return sorted(found, key=lambda copy: copy.start_s)


def _of_visits(seen: Sequence[tuple[float, str, Any]], end: float) -> list[Copy]:
    """Spans of a streamed update: what a visit made has left when its successor says `gone`."""
    found, coming, leaving = [], dict[Visit, float](), list[tuple[Visit, float]]()
    for at, event, (visit,) in seen:
        name = _visit_name(visit)
        if event == "fetch":
            coming[visit] = at
        elif event == "run":
            found.append(Copy("to the device, then run", name, coming.pop(visit, at), at))
        elif event == "leave":
            leaving.append((visit, at))
        elif event == "gone" and len(leaving) > 1:
            before, since = leaving.pop(0)
            found.append(Copy("from the device", _visit_name(before), since, at))
    return found + [Copy("from the device", _visit_name(v), since, end) for v, since in leaving]


def _visit_name(visit: Visit) -> str:
    return f"section {visit.section}" + ("" if visit.slab is None else f", slab {visit.slab}")


def _of_moves(seen: Sequence[tuple[float, str, Any]], end: float) -> list[Copy]:
    """Spans of moves by hand: from `copy` to `done`."""
    found, under_way = [], dict[Any, float]()
    for at, event, (tier, paths) in seen:
        key = tier, tuple(paths)
        if event == "copy":
            under_way[key] = at
        elif event == "done" and key in under_way:
            found.append(Copy(f"to {tier}", _leaves(paths), under_way.pop(key), at))
    return found + [
        Copy(f"to {tier}", _leaves(paths), at, end) for (tier, paths), at in under_way.items()
    ]


def _leaves(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{len(paths)} leaves from {paths[0]}"


def chrome_trace(
    timelines: Sequence[tuple[str, Timeline]] = (), copies: Sequence[Copy] = ()
) -> dict[str, Any]:
    """A trace for ui.perfetto.dev and chrome://tracing, as a dict to write as JSON.

    Args:
        timelines: names and timelines, such as `[("measured", ...), ("simulated", ...)]`; each is
            a process, each rank a thread.
        copies: what `Copies.spans` gives.

    Returns:
        Complete events (`"ph": "X"`) in whole microseconds, flow events (`"s"` to `"f"`) from an
        action to those of other ranks that take what it gives, and the names of processes and
        threads. Spans that overlap are on threads of their own, for viewers leave such out.

    Example:
        >>> from fzero.pipeline import gpipe, simulate
        >>> trace = chrome_trace([("simulated", simulate(gpipe(2, 2)))])
        >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"][:2]
        ['forward 0', 'forward 1']

    Source: Trace Event Format (Chromium), complete, flow and metadata events.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines):
        events.append(_named("process_name", pid, 0, name))
        spans = {
            f"rank {rank}": [
                _Span(
                    f"{WORDS[e.action.kind]} {e.action.microbatch}", e.start_s, e.end_s, e.action
                )
                for e in row
            ]
            for rank, row in enumerate(timeline.rank_events)
        }  # fmt: skip
        threads = _threads(pid, spans)
        events += threads + _flows(threads, timeline.schedule.num_stages)
    if copies:
        pid = len(timelines)
        events.append(_named("process_name", pid, 0, "copies, as the host sees them"))
        lanes: dict[str, list[_Span]] = {}
        for copy in copies:
            lanes.setdefault(copy.lane, []).append(_Span(copy.name, copy.start_s, copy.end_s))
        events += _threads(pid, lanes)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Span(NamedTuple):
    name: str
    start_s: float
    end_s: float
    action: Action | None = None


def _threads(pid: int, lanes: dict[str, list[_Span]]) -> list[dict[str, Any]]:
    """The events of a process: each lane is as many threads as it has spans at once."""
    events: list[dict[str, Any]] = []
    tid = 0
    for lane, spans in lanes.items():
        ends: list[int] = []  # of each of the lane's threads
        for span in sorted(spans, key=lambda span: span.start_s):
            # Rounded ends, not durations: what touches in seconds touches in microseconds.
            start, end = round(span.start_s * _MICRO), round(span.end_s * _MICRO)
            row = next((i for i, before in enumerate(ends) if before <= start), len(ends))
            if row == len(ends):
                ends.append(end)
                words = lane if not row else f"{lane} ({row + 1})"
                events.append(_named("thread_name", pid, tid + row, words))
            ends[row] = end
            about = {} if span.action is None else span.action._asdict()
            events.append(
                {"name": span.name, "cat": "step", "ph": "X", "pid": pid, "tid": tid + row,
                 "ts": start, "dur": end - start, "args": about}
            )  # fmt: skip
        tid += max(1, len(ends))
    return events


def _flows(events: Sequence[dict[str, Any]], num_stages: int) -> list[dict[str, Any]]:
    """Arrows from each action to those on other threads that take what it gives."""
    done = [(Action(**event["args"]), event) for event in events if event["ph"] == "X"]
    given = {gives(action): event for action, event in done}
    found: list[dict[str, Any]] = []
    for action, to in done:
        for value in needs(action, num_stages):
            source = given.get(value)
            if source is None or source["tid"] == to["tid"] or source["ts"] > to["ts"]:
                continue
            # Within the action, or it would belong to the one that follows.
            sent = min(source["ts"] + max(0, source["dur"] - 1), to["ts"])
            arrow = {"name": "sent", "cat": "sent", "id": f"{to['pid']}.{len(found) // 2}"}
            found += [
                arrow | {"ph": "s", "pid": source["pid"], "tid": source["tid"], "ts": sent},
                arrow | {"ph": "f", "bp": "e", "pid": to["pid"], "tid": to["tid"], "ts": to["ts"]},
            ]
    return found


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
