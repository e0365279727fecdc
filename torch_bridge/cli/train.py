"""Train a PyTorch language model on text."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.grouped import grouped
from torch_bridge.cli.plan_file import SECTIONS, Sections, read_run, set_fields
from torch_bridge.cli.settings import (
    BATCH,
    EVAL_SEQUENCES,
    SEQ,
    ZERO,
    DataSettings,
    TrainSettings,
    resolve_sources,
)


class Precision(StrEnum):
    """What the model computes in; the parameters that are trained and written are always fp32."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


class Gather(StrEnum):
    """When stages 1 and 2 gather updated parameters; see `fzero.Plan`."""

    eager = "eager"
    lazy = "lazy"


ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        help="hf:DIR (config.json, with or without weights), hf:CONFIG.json (random weights from "
        "the seed), or path/to/file.py:factory, a function that returns a torch.nn.Module.",
    ),
]
TrainedModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="hf:DIR (config.json, with or without weights), hf:CONFIG.json (random weights from "
        "the seed), or path/to/file.py:factory, a function that returns a torch.nn.Module.",
        show_default=False,
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Text files, any number of them, or stdlib: the source of this Python's own "
        "standard library.  [default: stdlib]",
        show_default=False,
    ),
]
MoreData = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH", help="Further files of --data.", show_default=False),
]
DevicesOption = Annotated[
    int | None,
    typer.Option(help="Devices the state is sharded over; on a CPU, virtual ones.  [default: all]"),
]
ZeroOption = Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")]
GatherOption = Annotated[
    Gather,
    typer.Option(
        help="Stages 1 and 2 gather updated parameters at the end of a step, or layer by layer in "
        "the next one's forward pass."
    ),
]
OutOption = Annotated[Path, typer.Option(help="Directory to write; must be empty or not exist.")]
StepsOption = Annotated[int, typer.Option(help="Optimizer steps.")]
BatchOption = Annotated[
    int, typer.Option(help="Sequences per step, over all devices and microbatches.")
]
SeqOption = Annotated[int, typer.Option(help="Tokens per sequence.")]
LrOption = Annotated[
    float,
    typer.Option(help="Peak learning rate: 5 % of the steps lead up to it, then a cosine down."),
]
MicrobatchesOption = Annotated[
    int, typer.Option(help="Pieces a batch is cut into on each device, to save memory.")
]
PrecisionOption = Annotated[Precision, typer.Option(help="What forward and backward compute in.")]
ClipOption = Annotated[
    float | None, typer.Option(help="Largest global gradient norm.  [default: none]")
]
EvalEveryOption = Annotated[
    int,
    typer.Option(min=0, help="Steps between validations; 0: only before the first, at the end."),
]
EvalSequencesOption = Annotated[
    int, typer.Option(help="Validation sequences to score, spread over all of them.")
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="Of random weights, the order of the data, and dropout.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")]
SaveEveryOption = Annotated[
    int,
    typer.Option(
        min=0, help="Steps between checkpoints to resume from; 0: only when Ctrl-C ends the run."
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", help="Go on from --out's newest checkpoint, with the same flags."),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="At the end, load the result in plain PyTorch and compare; fails if off."
    ),
]

LogOption = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        help="Where figures go besides metrics.jsonl: tensorboard or wandb, if installed.",
        show_default=False,
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="A run in TOML or JSON: [run], [data], [plan] (any field of fz.Plan), [optimizer] and "
        "[schedule] (an optax function's name and arguments). Flags go before it.",
        show_default=False,
    ),
]
PlanSetOption = Annotated[
    list[str] | None,
    typer.Option("--plan-set", help="A field of the plan, over all else: pipe=4."),
]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it wraps, and brackets stay brackets
)


@app.command(
    cls=grouped(
        Model_and_data="model data more_data seq",
        Training="steps batch lr clip seed",
        Plan="plan plan_set zero microbatches precision gather devices",
        Validation="eval_every eval_sequences verify",
        Results="out overwrite log save_every resume",
    )
)
def train(
    context: typer.Context,
    out: OutOption,
    model: TrainedModelOption = None,
    data: DataOption = None,
    more_data: MoreData = None,
    steps: StepsOption = 200,
    batch: BatchOption = BATCH,
    seq: SeqOption = SEQ,
    lr: LrOption = 1e-3,
    zero: ZeroOption = ZERO,
    gather: GatherOption = Gather.eager,
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = 1,
    precision: PrecisionOption = Precision.fp32,
    clip: ClipOption = None,
    eval_every: EvalEveryOption = 100,
    eval_sequences: EvalSequencesOption = EVAL_SEQUENCES,
    seed: SeedOption = 0,
    plan: PlanOption = None,
    plan_set: PlanSetOption = None,
    log: LogOption = None,
    overwrite: OverwriteOption = False,
    verify: VerifyOption = False,
    save_every: SaveEveryOption = 0,
    resume: ResumeOption = False,
) -> None:
    """Train a PyTorch language model on text, and write a checkpoint that PyTorch loads.

    --out gets model.safetensors and config.json (transformers loads them with from_pretrained),
    metrics.jsonl, loss.png, summary.json, and run.json, which --plan runs again. Ctrl-C stops after
    the current step and writes what was reached, and a checkpoint that --resume goes on from as if
    nothing had been.
    """
    flags: dict[str, dict[str, Any]] = {
        "run": {
            "model": model, "steps": steps, "batch": batch, "lr": lr, "devices": devices,
            "eval_every": eval_every, "seed": seed, "save_every": save_every, "verify": verify,
        },
        "data": {"seq": seq, "eval_sequences": eval_sequences},
        "plan": {
            "zero": zero, "gather": gather.value, "microbatches": microbatches,
            "precision": precision.value, "clip": clip,
        },
    }  # fmt: skip
    sections = resolved(context, flags, plan, plan_set)
    told = sections["data"].pop("sources", None)
    given = data is not None or more_data is not None
    sources = resolve_sources(*((data, more_data) if given or told is None else (told, None)))
    run = sections["run"]
    if run["model"] is None:
        raise CommandError("--model is missing: give it, or [run] model in --plan's file")
    settings = TrainSettings(
        data=DataSettings(sources, **sections["data"]),
        out=out,
        plan_fields=sections["plan"],
        optimizer=sections["optimizer"] or None,
        schedule=sections["schedule"] or None,
        overwrite=overwrite,
        resume=resume,
        log=tuple(log or ()),
        **run,
    )
    settings.check()
    from torch_bridge.cli import run as runs  # torch takes seconds: after what needs none

    raise typer.Exit(runs.pretrain(settings))


# Fields that flags have other names than.
_FIELDS = {
    "clip": "clip_norm", "lora": "rank", "data": "sources", "eval_data": "eval_sources",
}  # fmt: skip


def resolved(
    context: typer.Context,
    flags: Mapping[str, Mapping[str, Any]],
    file: Path | None,
    assignments: list[str] | None,
) -> Sections:
    """A run's sections: defaults, below the file, below flags that were given, below --plan-set."""
    own = {name: [_FIELDS.get(flag, flag) for flag in values] for name, values in flags.items()}
    own["data"] = [*dict.fromkeys(["sources", *own["data"]])]
    sections = {name: {} for name in SECTIONS} if file is None else read_run(file, own)
    for name, values in flags.items():
        for flag, value in values.items():
            source = context.get_parameter_source(flag)
            field = _FIELDS.get(flag, flag)
            if field not in sections[name] or getattr(source, "name", "") == "COMMANDLINE":
                sections[name][field] = value
    set_fields(sections, assignments or [])
    return sections
