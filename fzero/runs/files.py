"""The directory of a run, read: what `fzero train` wrote, as far as it got."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fzero.errors import FzeroError, ScheduleError
from fzero.runs.trace import Copy
from fzero.schedule.actions import Action, Schedule
from fzero.schedule.medians import measured
from fzero.schedule.simulate import Event, Timeline, simulate


METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
ABOUT = "about.json"
TIMELINE = "timeline.json"
RUN = "run.json"
SUMMARY = "summary.json"

Entry = dict[str, Any]


class RunError(FzeroError, ValueError):
    """A directory is no run, or a file in it cannot be read."""


@dataclass(frozen=True)
class Run:
    """A run as its files have it. What a file does not say is empty.

    Args:
        path: the directory.
        metrics: a line for each step and each validation.
        timings: a line for each thing that took time, and for each placement.
        about: environment, collectives and the like.
        settings: sections of run.json.
        summary: of a run that ended by itself; else empty.
        timeline: of one step of a pipeline, and its copies; else empty.
        said: what is missing or cut, in words.
    """

    path: Path
    metrics: tuple[Entry, ...]
    timings: tuple[Entry, ...]
    about: Entry
    settings: Entry
    summary: Entry
    timeline: Entry
    said: tuple[str, ...]

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.absolute().name

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Training loss by step."""
        return self.values("loss")

    @property
    def validation(self) -> list[tuple[int, float]]:
        """Validation loss by steps done."""
        return self.values("val_loss")

    def values(self, name: str) -> list[tuple[int, float]]:
        """A metric by step; where it was not finite, not a number."""
        return [
            (entry["step"], float("nan") if entry[name] is None else entry[name])
            for entry in self.metrics
            if name in entry
        ]

    @property
    def step_seconds(self) -> list[tuple[int, float]]:
        """Seconds of each step but those that compiled."""
        found = {e["step"]: e["seconds"] for e in self.timings if e["what"] == "step"}
        return sorted(found.items())

    @property
    def tokens_per_step(self) -> int | None:
        """Of the global batch."""
        batch = self.settings.get("run", {}).get("batch")
        seq = self.settings.get("data", {}).get("seq")
        return batch * seq if batch and seq else None

    @property
    def seconds(self) -> dict[str, float]:
        """Where time went: seconds by what was done."""
        found: dict[str, float] = {}
        for entry in self.timings:
            if "seconds" in entry:
                found[entry["what"]] = found.get(entry["what"], 0.0) + entry["seconds"]
        return found

    @property
    def placements(self) -> list[Entry]:
        """Where the state was, by steps done."""
        return [entry for entry in self.timings if entry["what"] == "placement"]

    @cached_property
    def measured(self) -> Timeline | None:
        """The timeline of a pipeline's step as it ran."""
        if "events" not in self.timeline:
            return None
        schedule = Schedule.from_json(io.StringIO(json.dumps(self.timeline["schedule"])))
        events = tuple(
            Event(rank, Action.parse(text), start, end)
            for rank, text, start, end in self.timeline["events"]
        )
        return measured(schedule, events)

    @cached_property
    def simulated(self) -> Timeline | None:
        """The same step on paper, with the medians of what was measured and no other waiting."""
        measured = self.measured
        return None if measured is None else simulate(measured.schedule, measured.cost)

    @property
    def copies(self) -> list[Copy]:
        """Copies of parked leaves in one step."""
        return [Copy(*one) for one in self.timeline.get("copies", ())]


def read_run(path: Path) -> Run:
    """Reads the directory of a run, also of one that is going on or was killed.

    Args:
        path: the directory.

    Raises:
        RunError: it is no run, or a file in it is damaged; says which and what is expected.
    """
    if not path.is_dir():
        what = "a file" if path.exists() else "no such directory"
        raise RunError(f"report: {path}: expected the directory of a run, got {what}")
    if not (path / METRICS).is_file():
        others = sorted(one.name for one in path.iterdir())[:4]
        raise RunError(
            f"report: {path} is no run: expected what `fzero train --out {path}` writes"
            f" ({METRICS}, {RUN}), found {', '.join(others) or 'nothing'}"
        )
    said: list[str] = []
    metrics, timings = (_lines(path / name, said) for name in (METRICS, TIMINGS))
    files = [_object(path / name) for name in (ABOUT, RUN, SUMMARY, TIMELINE)]
    about, settings, summary, timeline = files
    if not summary:
        last = metrics[-1]["step"] if metrics else 0
        said.append(f"there is no {SUMMARY}: the run goes on, or was killed after step {last}")
    run = Run(path, metrics, timings, about, settings, summary, timeline, tuple(said))
    try:
        _ = run.measured
    except (ScheduleError, KeyError, ValueError, TypeError) as error:
        raise RunError(f"report: {path / TIMELINE}: expected a timeline: {error}") from error
    return run


def _lines(path: Path, said: list[str]) -> tuple[Entry, ...]:
    """The lines of a file; a last one that is cut is left out, and said."""
    if not path.is_file():
        said.append(f"there is no {path.name}")
        return ()
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    entries: list[Entry] = []
    whole, rest = texts[:-1], texts[-1]
    for number, text in enumerate(whole, 1):
        try:
            entry = json.loads(text)
            entry["step"]
        except (ValueError, TypeError, KeyError):
            raise RunError(
                f"report: {path}, line {number}: expected a JSON object with a step, got"
                f" {text[:60]!r}"
            ) from None
        entries.append(entry)
    if rest:
        reached = f"up to step {entries[-1]['step']}" if entries else "nothing"
        said.append(f"the last line of {path.name} is cut: read {reached}")
    return tuple(entries)


def _object(path: Path) -> Entry:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"report: {path}: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"report: {path}: expected a JSON object, got {type(found).__name__}")
    return found


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Settings in which runs differ, as `section.name` with a value for each."""
    flat = [
        {f"{s}.{k}": json.dumps(v) for s, own in run.settings.items() for k, v in own.items()}
        for run in runs
    ]
    names = sorted({name for own in flat for name in own})
    rows = [(name, [own.get(name, "-") for own in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
