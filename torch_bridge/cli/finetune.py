"""Train adapters, or a whole model, on conversations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fzero.cli import command_app
from torch_bridge.cli.flags.headings import (
    CommandWithHeadings,
    of_adapters,
    of_model_and_data,
    of_validation,
)
from torch_bridge.cli.flags.options import (
    BatchOption,
    ClipOption,
    DevicesOption,
    DirectoryOption,
    EvalEveryOption,
    LogOption,
    LrOption,
    MicrobatchesOption,
    OverwriteOption,
    PlanOption,
    PlanSetOption,
    Precision,
    PrecisionOption,
    ResumeOption,
    SaveEveryOption,
    SeedOption,
    StepsOption,
    TrainedModelOption,
    ZeroOption,
    data_flag,
    seq_flag,
)
from torch_bridge.cli.flags.run_flags import sections_of, settings_of
from torch_bridge.run import compose
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import BATCH, ZERO, TrainSettings, path_of
from torch_bridge.run.tuning_settings import LoraSettings, RowSettings
from torch_bridge.run.tuning_task import Tuning


SEQ = 1024
LR = 2e-4

DocumentsOption = Annotated[
    list[str] | None,
    data_flag(
        help='JSONL with "messages", "prompt" and "completion", or "text"; or folders that '
        "datasets wrote. Once for each.",
    ),
]
EvalDocumentsOption = Annotated[
    list[str] | None,
    of_validation(help="The same to validate with.  [default: every twentieth document]"),
]
LoraOption = Annotated[
    int | None, of_adapters(help="Rank of adapters; without it all parameters are trained.")
]
TargetsOption = Annotated[
    list[str] | None,
    of_adapters(
        help="Layers with an adapter, by the end of their names (once for each), or "
        "all-linear.  [default: all-linear]",
        show_default=False,
    ),
]
AlphaOption = Annotated[
    float | None, of_adapters(help="Adapters count alpha / rank.  [default: twice the rank]")
]
DropoutOption = Annotated[float, of_adapters(help="Of what adapters see.")]
BaseOption = Annotated[
    str | None,
    of_adapters(
        help="What frozen weights are kept in: fp32, bf16, nf4, nf4-double, int8. [as --precision]"
    ),
]
RowOption = Annotated[int, seq_flag(help="Tokens of a row.")]
PackOption = Annotated[
    bool, of_model_and_data("--pack/--no-pack", help="Several documents in a row, each alone.")
]
TooLongOption = Annotated[
    str, of_model_and_data(help="What becomes of documents longer than a row: error, cut or skip.")
]
TemplateOption = Annotated[
    str | None, of_model_and_data(help="A file with a chat template; else the tokenizer's own.")
]

app = command_app()


@app.command(cls=CommandWithHeadings)
def finetune(
    context: typer.Context,
    out: DirectoryOption,
    model: TrainedModelOption = None,
    data: DocumentsOption = None,
    eval_data: EvalDocumentsOption = None,
    lora: LoraOption = None,
    targets: TargetsOption = None,
    alpha: AlphaOption = None,
    dropout: DropoutOption = 0.0,
    base: BaseOption = None,
    seq: RowOption = SEQ,
    pack: PackOption = True,
    too_long: TooLongOption = "error",
    template: TemplateOption = None,
    steps: StepsOption = 200,
    batch: BatchOption = BATCH,
    lr: LrOption = LR,
    zero: ZeroOption = ZERO,
    devices: DevicesOption = None,
    microbatches: MicrobatchesOption = 1,
    precision: PrecisionOption = Precision.fp32,
    clip: ClipOption = None,
    eval_every: EvalEveryOption = 100,
    seed: SeedOption = 0,
    plan: PlanOption = None,
    plan_set: PlanSetOption = None,
    log: LogOption = None,
    overwrite: OverwriteOption = False,
    save_every: SaveEveryOption = 0,
    resume: ResumeOption = False,
) -> None:
    """Train a model of transformers on conversations: adapters with --lora, else all of it.

    --out gets adapter_model.safetensors and adapter_config.json, which PEFT loads (or
    model.safetensors and config.json, which transformers loads), the tokenizer, metrics.jsonl,
    loss.png, summary.json, and run.json, which --plan runs again. Ctrl-C and SIGTERM stop after the
    current step and write what was reached, and a checkpoint that --resume goes on from.
    """
    settings = _settings(dict(locals()))
    settings.check()
    assert isinstance(settings.data, RowSettings)
    raise typer.Exit(compose.train(settings, Tuning(settings.data, settings.lora)))


def _settings(given: dict[str, Any]) -> TrainSettings:
    """The run, from flags and a file."""
    if given["targets"] == ["all-linear"]:
        given["targets"] = "all-linear"
    sections = sections_of(given, data=RowSettings, lora=LoraSettings)
    rows, adapter = (dict(sections[name]) for name in ("data", "lora"))
    if sections["run"].get("verify"):
        raise CommandError(
            f"--plan {given['plan']}: [run] verify is of `fzero train`: it compares with PyTorch on"
            " plain text; take it out"
        )
    for name in ("sources", "eval_sources"):
        paths = rows.get(name) or []
        rows[name] = tuple(str(path_of(one)) for one in paths)
    if rows["template"] is not None:
        rows["template"] = str(path_of(rows["template"]))
    tuning = LoraSettings.of(adapter)
    if tuning is None and any(adapter.get(n) for n in ("targets", "alpha", "dropout", "base")):
        raise CommandError("--targets, --alpha, --dropout and --base are of adapters: give --lora")
    return settings_of(given, sections, RowSettings(**rows), tuning)
