"""Train a PyTorch language model on text."""

from __future__ import annotations

from typing import Annotated

import typer

from fzero.cli import command_app
from torch_bridge.cli.flags.headings import CommandWithHeadings, of_validation
from torch_bridge.cli.flags.options import (
    BatchOption,
    ClipOption,
    DataOption,
    DevicesOption,
    DirectoryOption,
    EvalEveryOption,
    Gather,
    GatherOption,
    LogOption,
    LrOption,
    MicrobatchesOption,
    MoreData,
    OverwriteOption,
    PlanOption,
    PlanSetOption,
    Precision,
    PrecisionOption,
    ResumeOption,
    SaveEveryOption,
    SeedOption,
    SeqOption,
    StepsOption,
    TrainedModelOption,
    ZeroOption,
    eval_sequences_flag,
)
from torch_bridge.cli.flags.run_flags import sections_of, settings_of
from torch_bridge.run import compose
from torch_bridge.run.settings import (
    BATCH,
    EVAL_SEQUENCES,
    SEQ,
    ZERO,
    DataSettings,
    resolve_sources,
)
from torch_bridge.run.tasks import Pretraining


VerifyOption = Annotated[
    bool,
    of_validation(
        "--verify", help="At the end, load the result in plain PyTorch and compare; fails if off."
    ),
]
EvalSequencesOption = Annotated[int, eval_sequences_flag()]

app = command_app()


@app.command(cls=CommandWithHeadings)
def train(
    context: typer.Context,
    out: DirectoryOption,
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
    given = dict(locals())
    sections = sections_of(given, data=DataSettings)
    rows = sections["data"]
    told = rows.pop("sources", None)
    named = data is not None or more_data is not None
    sources = resolve_sources(*((data, more_data) if named or told is None else (told, None)))
    settings = settings_of(given, sections, DataSettings(sources, **rows))
    settings.check()
    raise typer.Exit(compose.train(settings, Pretraining(settings.text)))
