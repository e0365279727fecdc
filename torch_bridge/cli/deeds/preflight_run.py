"""What `fzero preflight` does: a model of shapes, a prediction, and how it is shown."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fzero as fz
import torch_bridge as tb
from fzero.preflight.measure import Measured, compared, measure
from fzero.preflight.page import page
from fzero.preflight.sweep import Tried, parse_choices, sweep
from fzero.preflight.tables import size
from fzero.preflight.topology import Topology, parse
from torch_bridge.cli import models
from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.flags.preflight_settings import PreflightSettings


Shapes = Callable[[int, int], Any]
"""The shapes of a batch of so many rows and tokens."""


def run(settings: PreflightSettings) -> None:
    """Predicts, and prints or writes what was found.

    Raises:
        CommandError: the model cannot be made, or devices to measure on are not there.
        PreflightError, PlanError, BatchError, ConversionError: as `fz.preflight` and `tb.convert`.
    """
    topology = parse(settings.topology)
    _start(topology, settings.measure)
    source = _Source(settings.model, settings.seq, settings.measure)
    batch = source.shapes(settings.batch, settings.seq)
    tx = optax.adamw(1e-3)
    if settings.sweep:
        _sweep(settings, source, tx, batch, topology)
        return
    plan = settings.plan()
    model = source.model
    found = fz.preflight(model, tx, plan, batch, topology, rates=settings.read_rates())
    measured = None
    if settings.measure:
        devices = _devices(topology)[: _num_devices(plan, topology)]
        measured = measure(model, tx, plan, batch, devices=devices)
    if settings.html is not None:
        # The text first: a failure leaves an older page as it was.
        text = page(found, title=f"{Path(settings.model).name} on {topology}")
        settings.html.write_text(text, encoding="utf-8")
    _print(settings, found, measured)


def _start(topology: Topology, measures: bool) -> None:
    """Settles which devices jax starts; nothing where it already runs."""
    with contextlib.suppress(RuntimeError):
        if not topology.is_gpu:
            jax.config.update("jax_num_cpu_devices", topology.num_devices)
        else:
            # A program for a described GPU cannot be read back from a cache.
            jax.config.update("jax_enable_compilation_cache", False)
        if not (topology.is_gpu and measures):
            # A described GPU needs none, and the plugin would look for one.
            jax.config.update("jax_platforms", "cpu")


def _print(settings: PreflightSettings, found: fz.Preflight, measured: Measured | None) -> None:
    if settings.as_json:
        extra: dict[str, Any] = {} if measured is None else {"measured": vars(measured)}
        if settings.explain:
            extra["explanation"] = found.explain().to_json()
        print(json.dumps(found.to_json() | extra))
        return
    print(found)
    if measured is not None:
        print(f"\n{compared(found, measured)}")
    if settings.explain:
        print(f"\n{found.explain()}")
    if settings.html is not None:
        print(f"\nwritten to {settings.html}")


def _sweep(
    settings: PreflightSettings,
    source: _Source,
    tx: optax.GradientTransformation,
    batch: Any,
    topology: Topology,
) -> None:
    def told(one: Tried) -> None:
        words = " ".join(f"{name}={value}" for name, value in one.choice.items())
        peak = "" if one.found is None else f", peak {size(one.found.memory.peak)}"
        print(f"{words}: {one.verdict}{peak}", file=sys.stderr, flush=True)

    found = sweep(
        lambda plan: source.model,
        tx,
        settings.plan(),
        parse_choices(settings.sweep),
        batch,
        topology,
        rates=settings.read_rates(),
        progress=told,
    )
    print(json.dumps(found.to_json()) if settings.as_json else found)


def _num_devices(plan: fz.Plan, topology: Topology) -> int:
    sizes = plan.sizes(topology.num_devices)
    return plan.pipe * sizes["data"] * sizes["replica"]


def _devices(topology: Topology) -> list[Any]:
    """Devices to measure on.

    Raises:
        CommandError: there are fewer, or others.
    """
    kind = "cpu" if not topology.is_gpu else "gpu"
    try:
        found = jax.devices(kind)
    except RuntimeError:
        found = []
    name = topology.kind.partition("-")[0].upper()
    if topology.is_gpu:
        found = [device for device in found if name in device.device_kind.upper()]
    if len(found) < topology.num_devices:
        raise CommandError(
            f"--measure: {topology} needs {topology.num_devices} devices of that kind, there are "
            f"{len(found)} here; leave out --measure, or ask about devices that are here "
            f"(--topology cpu:{topology.per_host})"
        )
    return list(found)


class _Source:
    """The model behind `--model`: files' values are never read, only shapes.

    Args:
        spec: as given to `--model`.
        seq: tokens per sequence.
        runs: whether the model is also run, which takes values: random ones.
    """

    def __init__(self, spec: str, seq: int, runs: bool) -> None:
        self.seq, self.runs = seq, runs
        self._own: tuple[fz.Model, Shapes] | None = None
        self._loaded: models.LoadedModel | None = None
        made = models.load_shapes(spec, runs)
        if isinstance(made, models.LoadedModel):
            models.check_length(made, seq)
            self._loaded = made
        else:
            self._own = made

    def shapes(self, rows: int, seq: int) -> Any:
        """Shapes of a batch."""
        if self._own is not None:
            return self._own[1](rows, seq)
        ids = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
        return {"input_ids": ids, "labels": ids}

    @cached_property
    def model(self) -> fz.Model:
        """The model, converted if it is one of torch."""
        if self._own is not None:
            return self._own[0]
        assert self._loaded is not None
        with models.without_values(not self.runs):
            converted = tb.convert(self._loaded.module, models.example_ids(self.seq))
        return converted.model(models.next_token_loss)
