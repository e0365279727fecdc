"""Say what a training step needs, and how long it takes."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer

import fzero as fz
import torch_bridge as tb
from fzero.cli import command_app
from fzero.cli.flags import json_flag
from fzero.preflight.measure import Measured, compared, measure
from fzero.preflight.page import page
from fzero.preflight.sweep import Tried, parse_choices, sweep
from fzero.preflight.tables import size
from fzero.preflight.topology import Topology, parse
from torch_bridge.cli.flags.headings import (
    MORE_PLANS,
    RESULTS,
    CommandWithHeadings,
    of_devices,
    of_more_plans,
    of_plan,
    of_results,
)
from torch_bridge.cli.flags.options import (
    BatchOption,
    ClipOption,
    Gather,
    GatherOption,
    MicrobatchesOption,
    Precision,
    PrecisionOption,
    SeqOption,
    ZeroOption,
    model_flag,
)
from torch_bridge.cli.flags.preflight_settings import PreflightSettings
from torch_bridge.run import models
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import BATCH


ModelOption = Annotated[
    str,
    model_flag(
        help="hf:DIR or hf:CONFIG.json (weights are never read), or path/to/file.py:factory, a "
        "function that returns a torch.nn.Module, or a pair of an fzero Model and a function of "
        "(rows, seq) that gives the shapes of a batch.",
    ),
]
TopologyOption = Annotated[
    str,
    of_devices(
        help="GPUs, which need not be here: h200:8 (8 in a host), h100:8x8 (8 hosts of 8); "
        "a100-40, a100-80, h100, h200, b200; or cpu:8."
    ),
]
DataAxisOption = Annotated[
    int | None, of_plan(help="Devices in a sharding group.  [default: all that remain]")
]
ReplicaOption = Annotated[int, of_plan(help="Sharding groups (hybrid sharding).")]
PipeOption = Annotated[int, of_plan(help="Ranks of a pipeline.")]
ScheduleOption = Annotated[str | None, of_plan(help="The pipeline's schedule.")]
RematOption = Annotated[
    str | None,
    of_plan(help="What a stack keeps: none (all), dots or layer; by memory if not said."),
]
ReduceOption = Annotated[
    str,
    of_plan(
        help="When gradients are reduced: after each microbatch, or once a step (ZeRO-0 and 1)."
    ),
]
ReduceDtypeOption = Annotated[
    str | None,
    of_plan(help="What gradients are added in over devices: fp32.  [default: the precision]"),
]
GatherDtypeOption = Annotated[
    str | None, of_plan(help="What ZeRO-3 gathers send: int8.  [default: the precision]")
]
SecondaryOption = Annotated[
    str | None,
    of_plan(help="Neighbours that keep layers for the backward pass (ZeRO-3): host, or a number."),
]
JsonOption = Annotated[bool, json_flag(rich_help_panel=RESULTS)]
HtmlOption = Annotated[
    Path | None, of_results(help="Write a report there: one page that needs nothing else.")
]
ExplainOption = Annotated[
    bool,
    of_more_plans(
        "--explain", help="Try plans against the three largest costs; print them ranked."
    ),
]
RatesOption = Annotated[
    Path | None,
    of_devices(help="JSON of fz.Rates' fields that differ from the GPU's own, flops_share say."),
]
SweepOption = Annotated[
    list[str] | None,
    of_more_plans(help="Plans to try: zero=0,1,2,3 data=8 pipe=1,2,4 remat=layer,dots."),
]
MoreSweep = Annotated[
    list[str] | None,
    typer.Argument(
        rich_help_panel=MORE_PLANS, metavar="FIELD=VALUES", help="Further words of --sweep."
    ),
]
MeasureOption = Annotated[
    bool, of_devices("--measure", help="Run the step on devices that are here; print both.")
]

app = command_app()


@app.command(cls=CommandWithHeadings)
def preflight(
    model: ModelOption,
    topology: TopologyOption = "h200:8",
    zero: ZeroOption = 3,
    gather: GatherOption = Gather.eager,
    data: DataAxisOption = None,
    replica: ReplicaOption = 1,
    pipe: PipeOption = 1,
    schedule: ScheduleOption = None,
    microbatches: MicrobatchesOption = 1,
    remat: RematOption = None,
    reduce: ReduceOption = "microbatch",
    reduce_dtype: ReduceDtypeOption = None,
    gather_dtype: GatherDtypeOption = None,
    secondary: SecondaryOption = None,
    batch: BatchOption = BATCH,
    seq: SeqOption = 1024,
    precision: PrecisionOption = Precision.bf16,
    clip: ClipOption = 1.0,
    as_json: JsonOption = False,
    html: HtmlOption = None,
    sweep: SweepOption = None,
    more_sweep: MoreSweep = None,
    measure: MeasureOption = False,
    rates: RatesOption = None,
    explain: ExplainOption = False,
) -> None:
    """Compile a training step for GPUs that need not be here, and say what it will do.

    Prints bytes per device, whether they fit, every collective and what hides it, FLOPs and the
    time of a step. Nothing is allocated: a model of any size will do. Compiling for GPUs takes
    jax's CUDA plugin: pip install "fzero[preflight]".
    """
    flags = dict(locals())
    given = {name: getattr(value, "value", value) for name, value in flags.items()}
    words = (*(given.pop("sweep") or []), *(given.pop("more_sweep") or []))
    settings = PreflightSettings(**given, sweep=words)
    settings.check()
    _run(settings)


def _run(settings: PreflightSettings) -> None:
    """Predicts, and prints or writes what was found."""
    topology = parse(settings.topology)
    _start(topology, settings.measure)
    model, batch = _model_and_batch(settings)
    tx = optax.adamw(1e-3)
    if settings.sweep:
        _sweep(settings, model, tx, batch, topology)
        return
    plan = settings.plan()
    found = fz.preflight(model, tx, plan, batch, topology, rates=settings.read_rates())
    measured = None
    if settings.measure:
        sizes = plan.sizes(topology.num_devices)
        devices = _devices(topology)[: plan.pipe * sizes["data"] * sizes["replica"]]
        measured = measure(model, tx, plan, batch, devices=devices)
    if settings.html is not None:
        # The text first: a failure leaves an older page as it was.
        text = page(found, title=f"{Path(settings.model).name} on {topology}")
        settings.html.write_text(text, encoding="utf-8")
    _print(settings, found, measured)


def _model_and_batch(settings: PreflightSettings) -> tuple[fz.Model, Any]:
    """The model behind `--model`, whose files' values are never read, and the shapes of a batch.

    To be measured it is also run, which takes values: random ones.
    """
    rows, seq, runs = settings.batch, settings.seq, settings.measure
    made = models.load_shapes(settings.model, runs)
    if not isinstance(made, models.LoadedModel):
        model, shapes = made
        return model, shapes(rows, seq)
    models.check_length(made, seq)
    with models.without_values(not runs):
        converted = tb.convert(made.module, models.example_ids(seq))
    ids = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    return converted.model(models.next_token_loss), {"input_ids": ids, "labels": ids}


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
    model: fz.Model,
    tx: optax.GradientTransformation,
    batch: Any,
    topology: Topology,
) -> None:
    def told(one: Tried) -> None:
        words = " ".join(f"{name}={value}" for name, value in one.choice.items())
        peak = "" if one.found is None else f", peak {size(one.found.memory.peak)}"
        print(f"{words}: {one.verdict}{peak}", file=sys.stderr, flush=True)

    found = sweep(
        lambda plan: model,
        tx,
        settings.plan(),
        parse_choices(settings.sweep),
        batch,
        topology,
        rates=settings.read_rates(),
        progress=told,
    )
    print(json.dumps(found.to_json()) if settings.as_json else found)


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
