"""Say what a training step needs, and how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app
from torch_bridge.cli.flags.headings import (
    MORE_PLANS,
    CommandWithHeadings,
    of_devices,
    of_model_and_data,
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
)
from torch_bridge.cli.flags.preflight_settings import PreflightSettings
from torch_bridge.cli.flags.settings import BATCH


ModelOption = Annotated[
    str,
    of_model_and_data(
        "--model",
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
DataOption = Annotated[
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
JsonOption = Annotated[bool, of_results("--json", help="Print JSON.")]
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
    data: DataOption = None,
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
    # torch and transformers take seconds to import: after what can be refused without them.
    from torch_bridge.cli.deeds import preflight_run

    preflight_run.run(settings)
