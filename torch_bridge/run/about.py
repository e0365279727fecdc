"""What a run leaves for `fzero report` besides metrics: where it ran, what its step sends, the
timeline of one step of a pipeline and of its copies."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import jax
import optax

import fzero as fz
from fzero.pipeline import recorded
from fzero.preflight import hlo
from fzero.runs.files import ABOUT, TIMELINE
from fzero.runs.trace import Copies
from torch_bridge.run import devices, outputs
from torch_bridge.run.figures.gauge import Gauge


# The step whose timeline is kept: by then everything is compiled, and caches are warm.
RECORDED_STEP = 3


def write(
    out: Path,
    model: fz.Model,
    tx: optax.GradientTransformation,
    plan: fz.Plan,
    num_devices: int,
    gauge: Gauge,
) -> None:
    """Writes about.json: the environment, and what the plan does with the model, from shapes."""
    about = fz.describe(plan, model, tx, num_devices=num_devices)
    outputs.write_json(
        out / ABOUT,
        {
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["fzero", *sys.argv[1:]]),
            "host": platform.node(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "processes": jax.process_count(),
            "devices": devices.describe(num_devices),
            "versions": outputs.versions(),
            "parameters": about.num_elements,
            "plan": plan.to_json(),
            "flops_per_token": gauge.flops_per_token,
            "peak_flops_per_s": gauge.peak_flops_per_s,
            "elements_gathered": about.elements_gathered,
            "elements_reduced": about.elements_reduced,
            "reduction": about.reduction,
        },
    )


class Observed:
    """A training step whose collectives, and whose timeline of one step, are written down.

    Args:
        step: from `fz.train_step`.
        out: the run's directory.
        steps: of the run.
    """

    def __init__(self, step: Any, out: Path, steps: int) -> None:
        self._step, self._out, self._calls = step, out, 0
        self._at = min(RECORDED_STEP, steps)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Takes a step."""
        self._calls += 1
        if self._calls == self._at and (self._step.plan.pipe > 1 or self._step.stream is not None):
            return self._recorded(state, batch)
        taken: tuple[Any, dict[str, Any]] = self._step(state, batch)
        if self._calls == 1 and self._step.plan.pipe == 1:
            # Many programs, none of which is the step; a text that cannot be read; a full disk.
            with contextlib.suppress(fz.FzeroError, hlo.HloError, OSError):
                # What the call compiled: neither traces nor compiles again.
                self._write_collectives(self._step.lower(taken[0], batch).compile().as_text())
        return taken

    def _write_collectives(self, text: str) -> None:
        axes = dict(self._step.blueprint.mesh.shape)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for one in hlo.collectives(text, mesh_axes=axes):
            key = one.kind, one.axes, one.dtype
            row = rows.setdefault(
                key,
                {"kind": one.kind, "axes": list(one.axes or ()), "dtype": one.dtype,
                 "times": 0, "wire_bytes": 0.0},
            )  # fmt: skip
            times = 1 if one.times is None else one.times
            row["times"] += times
            row["wire_bytes"] += times * one.wire_bytes
        path = self._out / ABOUT
        if path.exists():  # of several processes, one has written it
            about = json.loads(path.read_text(encoding="utf-8"))
            outputs.write_json(path, about | {"collectives": list(rows.values())})

    def _recorded(self, state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        copies = Copies()
        pipelined = self._step.plan.pipe > 1
        stream = self._step.stream
        if stream is not None:
            stream.observer = copies
        try:
            with recorded(self._step) if pipelined else contextlib.nullcontext() as kept:
                taken: tuple[Any, dict[str, Any]] = self._step(state, batch)
                jax.block_until_ready(taken[1])
        finally:
            if stream is not None:
                stream.observer = None
        found: dict[str, Any] = {"step": self._calls, "copies": copies.spans()}
        if kept is not None:
            timeline = kept.timeline()
            found["schedule"] = json.loads(timeline.schedule.to_json())
            found["events"] = [
                [e.rank, str(e.action), e.start_s, e.end_s] for e in timeline.events
            ]  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk is no reason to lose the run
            outputs.write_json(self._out / TIMELINE, found)
        return taken
