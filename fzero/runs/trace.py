"""A pipeline's step and the copies of parked leaves as a trace that Perfetto and Chrome open."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fzero.offload.stream import Visit
from fzero.schedule.simulate import Timeline


# What a trace calls the kinds of actions.
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
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
    return f"part {visit.part}" + ("" if visit.piece is None else f", piece {visit.piece}")


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
        Complete events (`"ph": "X"`) in microseconds, and the names of processes and threads.

    Example:
        >>> from fzero.pipeline import gpipe, simulate
        >>> trace = chrome_trace([("simulated", simulate(gpipe(2, 2)))])
        >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"][:2]
        ['forward 0', 'forward 1']

    Source: Trace Event Format (Chromium), complete and metadata events.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines):
        events.append(_named("process_name", pid, 0, name))
        for rank, row in enumerate(timeline.rank_events):
            events.append(_named("thread_name", pid, rank, f"rank {rank}"))
            events += [
                _complete(
                    f"{KINDS[e.action.kind]} {e.action.microbatch}", pid, rank, e.start_s, e.end_s,
                    kind=e.action.kind, stage=e.action.stage, microbatch=e.action.microbatch,
                )
                for e in row
            ]  # fmt: skip
    lanes = list(dict.fromkeys(copy.lane for copy in copies))
    pid = len(timelines)
    if lanes:
        events.append(_named("process_name", pid, 0, "copies, as the host sees them"))
        events += [_named("thread_name", pid, tid, lane) for tid, lane in enumerate(lanes)]
    for copy in copies:
        tid = lanes.index(copy.lane)
        events.append(_complete(copy.name, pid, tid, copy.start_s, copy.end_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(
    name: str, pid: int, tid: int, start_s: float, end_s: float, **args: Any
) -> dict[str, Any]:
    return {
        "name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start_s * _MICRO,
        "dur": (end_s - start_s) * _MICRO, "args": args,
    }  # fmt: skip
