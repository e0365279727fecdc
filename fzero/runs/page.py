"""A run, or two side by side, as one HTML page that needs nothing else."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fzero.preflight.tables import duration, size
from fzero.report.pages import render
from fzero.runs import pictures
from fzero.runs.files import Run, differences
from fzero.schedule.kinds import COLOURS, WORDS


TEMPLATE = "runs/page.html.jinja"
_NONE = "-"


def page(runs: Sequence[Run]) -> str:
    """The page.

    Args:
        runs: one, or two to compare.

    Returns:
        HTML that refers to nothing outside itself.

    Raises:
        FzeroError: jinja2 or matplotlib is not installed.
    """
    return render(
        TEMPLATE,
        title=" and ".join(run.name for run in runs),
        runs=runs,
        figures=_rows(runs, FIGURES),
        differences=differences(runs),
        loss=pictures.loss(runs),
        rates=pictures.rates(runs),
        times=pictures.times(runs) if any(run.seconds for run in runs) else "",
        seconds=_rows(runs, _spent(runs)),
        placements=[(run, pictures.placement(run), _bytes_in_tiers(run)) for run in runs],
        collectives=[(run, _collectives(run), _planned(run)) for run in runs],
        pipelines=[(run, pictures.pipeline(run)) for run in runs if run.measured is not None],
        copies=[(run, _copies(run)) for run in runs if run.copies],
        environment=_rows(runs, ENVIRONMENT),
        plans=[(run, _plan(run)) for run in runs],
        actions=[(COLOURS[kind], word) for kind, word in WORDS.items()],
    )  # fmt: skip


Reader = Callable[[Run], str | None]


def _rows(runs: Sequence[Run], readers: dict[str, Reader]) -> list[tuple[str, list[str]]]:
    """Rows with a value for each run; those that no run has are left out."""
    rows = [(name, [read(run) for run in runs]) for name, read in readers.items()]
    return [
        (name, [_NONE if value is None else value for value in values])
        for name, values in rows
        if any(value is not None for value in values)
    ]


def tokens_per_s(run: Run) -> float | None:
    """Tokens per second of the median step; the first, which compiles, aside."""
    seconds = [one for _, one in run.step_seconds]
    if not seconds or run.tokens_per_step is None:
        return None
    return run.tokens_per_step / statistics.median(seconds)


def _flops(run: Run) -> str | None:
    rate, flops = tokens_per_s(run), run.about.get("flops_per_token")
    if rate is None or flops is None:
        return None
    peak = run.about.get("peak_flops_per_s")
    share = "no data sheet to be a share of" if peak is None else f"MFU {rate * flops / peak:.1%}"
    return f"{rate * flops / 1e12:.3g} TFLOP/s of the model's matmuls ({share})"


def _first_last(pairs: Sequence[tuple[int, float]]) -> str | None:
    if not pairs:
        return None
    (_, first), (step, last) = pairs[0], pairs[-1]
    return f"{first:.4f} → {last:.4f} after step {step}"


def _steps(run: Run) -> str:
    done = run.losses[-1][0] if run.losses else 0
    asked = run.settings.get("run", {}).get("steps")
    return f"{done:,}" + (f" of {asked:,}" if asked else "")


def _rate(run: Run) -> str | None:
    rate = tokens_per_s(run)
    return None if rate is None else f"{rate:,.0f}"


def _step(run: Run) -> str | None:
    seconds = [one for _, one in run.step_seconds]
    if not seconds:
        return None
    return f"{duration(statistics.median(seconds))}, the slowest {duration(max(seconds))}"


def _most(run: Run) -> str | None:
    held = [e["bytes_per_device"].get("device", {}).get("total", 0) for e in run.placements]
    peaks = [e["peak_bytes"] for e in run.placements if e.get("peak_bytes") is not None]
    peak = f", {size(max(peaks))} at the peak" if peaks else "; the device does not tell its peak"
    return f"{size(max(held))} of state{peak}" if held else None


def _parameters(run: Run) -> str | None:
    count = run.about.get("parameters", run.summary.get("parameters"))
    return None if count is None else f"{count:,}"


FIGURES: dict[str, Reader] = {
    "model": lambda run: run.settings.get("run", {}).get("model"),
    "parameters": _parameters,
    "steps": _steps,
    "training loss": lambda run: _first_last(run.losses),
    "validation loss": lambda run: _first_last(run.validation),
    "tokens per second": _rate,
    "a step": _step,
    "FLOP/s": _flops,
    "bytes on the fullest device": _most,
}


def _spent(runs: Sequence[Run]) -> dict[str, Reader]:
    names = dict.fromkeys(name for run in runs for name in run.seconds)

    def read(name: str) -> Reader:
        def one(run: Run) -> str | None:
            whole, own = sum(run.seconds.values()), run.seconds.get(name)
            return None if own is None else f"{duration(own)} ({own / whole:.0%})"

        return one

    return {name: read(name) for name in names}


def _devices(run: Run) -> str | None:
    found = run.about.get("devices")
    if found is None:
        return None
    processes = run.about.get("processes", 1)
    several = f" in {processes} processes" if processes > 1 else ""
    return f"{found['count']} x {found['kind']} ({found['platform']}){several}"


def _versions(run: Run) -> str | None:
    found = run.about.get("versions")
    return ", ".join(f"{name} {number}" for name, number in found.items()) if found else None


ENVIRONMENT: dict[str, Reader] = {
    "started": lambda run: run.about.get("started"),
    "command": lambda run: run.about.get("command"),
    "devices": _devices,
    "host": lambda run: run.about.get("host"),
    "system": lambda run: run.about.get("system"),
    "versions": _versions,
}


def _bytes_in_tiers(run: Run) -> list[list[str]]:
    """The last placement: state class, then bytes in each tier."""
    if not run.placements:
        return []
    held = run.placements[-1]["bytes_per_device"]
    names = dict.fromkeys([name for own in held.values() for name in own if name != "total"])
    return [
        [name, *(f"{held.get(tier, {}).get(name, 0):,}" for tier in ("device", "host", "disk"))]
        for name in (*names, "total")
    ]


def _collectives(run: Run) -> list[list[str]]:
    """What the compiled step sends, the largest first."""
    rows = sorted(run.about.get("collectives", ()), key=lambda row: -row["wire_bytes"])
    return [
        [row["kind"], ", ".join(row["axes"]) or _NONE, row["dtype"], f"{row['times']:,}",
         size(row["wire_bytes"])]
        for row in rows
    ]  # fmt: skip


def _planned(run: Run) -> str:
    about = run.about
    if "elements_gathered" not in about:
        return "The run says nothing of what it sends."
    return (
        f"By the plan a device receives {about['elements_gathered']:,} elements of weights a step"
        f" and sends {about['elements_reduced']:,} of gradients ({about['reduction']})."
    )


def _copies(run: Run) -> list[list[str]]:
    by: dict[str, list[float]] = {}
    for copy in run.copies:
        by.setdefault(copy.lane, []).append(copy.end_s - copy.start_s)
    return [[lane, f"{len(own)}", duration(sum(own))] for lane, own in by.items()]


def _plan(run: Run) -> list[tuple[str, str]]:
    plan: dict[str, Any] = run.about.get("plan") or run.settings.get("plan", {})
    return [(name, json.dumps(value)) for name, value in plan.items()]
