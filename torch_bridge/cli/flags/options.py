"""Options of more than one command, each declared once.

A `..._flag` is one whose help, type or limits depend on the command; a command gives them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from torch_bridge.cli.flags.headings import (
    MODEL_AND_DATA,
    of_model_and_data,
    of_plan,
    of_results,
    of_training,
    of_validation,
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


model_flag = partial(of_model_and_data, "--model", show_default=False)
data_flag = partial(of_model_and_data, "--data", show_default=False)
seq_flag = partial(of_model_and_data, "--seq", help="Tokens per sequence.")
batch_flag = partial(of_model_and_data, "--batch")
zero_flag = partial(
    of_plan,
    "--zero",
    min=0,
    max=3,
    help="ZeRO stage: from 1 the optimizer's state is divided (2 is the same), at 3 weights.",
)
precision_flag = partial(of_plan, "--precision", help="What forward and backward compute in.")
seed_flag = partial(of_training, "--seed")
eval_sequences_flag = partial(
    of_validation,
    "--eval-sequences",
    help="Validation sequences to score, spread over all of them.",
)
devices_flag = partial(of_plan, "--devices")
# Of `devices_flag`, with the default behind it.
SHARDED_OVER = "Devices the state is sharded over; on a CPU, virtual ones."

TrainedModelOption = Annotated[
    str | None,
    model_flag(
        help="hf:DIR (config.json, with or without weights), hf:CONFIG.json (random weights from "
        "the seed), or path/to/file.py:factory, a function that returns a torch.nn.Module.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    data_flag(
        help="Text files, any number of them, or stdlib: the source of this Python's own "
        "standard library.  [default: stdlib]",
    ),
]
MoreData = Annotated[
    list[str] | None,
    typer.Argument(
        rich_help_panel=MODEL_AND_DATA,
        metavar="PATH",
        help="Further files of --data.",
        show_default=False,
    ),
]
DevicesOption = Annotated[int | None, devices_flag(help=f"{SHARDED_OVER}  [default: all]")]
ZeroOption = Annotated[int, zero_flag()]
GatherOption = Annotated[
    Gather,
    of_plan(
        help="Stages 1 and 2 gather updated parameters at the end of a step, or layer by layer in "
        "the next one's forward pass."
    ),
]
DirectoryOption = Annotated[
    Path, of_results(help="Directory to write; must be empty or not exist.")
]
StepsOption = Annotated[int, of_training(help="Optimizer steps.")]
BatchOption = Annotated[
    int, batch_flag(help="Sequences per step, over all devices and microbatches.")
]
SeqOption = Annotated[int, seq_flag()]
LrOption = Annotated[
    float,
    of_training(help="Peak learning rate: 5 % of the steps lead up to it, then a cosine down."),
]
MicrobatchesOption = Annotated[
    int, of_plan(help="Into how many a batch is cut on each device, to save memory.")
]
PrecisionOption = Annotated[Precision, precision_flag()]
ClipOption = Annotated[
    float | None, of_plan(help="Clips the global gradient norm to at most this.")
]
EvalEveryOption = Annotated[
    int,
    of_validation(min=0, help="Steps between validations; 0: only before the first, at the end."),
]
SeedOption = Annotated[
    int,
    seed_flag(min=0, max=2**63 - 1, help="Of random weights, the order of the data, and dropout."),
]
OverwriteOption = Annotated[bool, of_results("--overwrite", help="Replace what --out holds.")]
SaveEveryOption = Annotated[
    int,
    of_results(
        min=0, help="Steps between checkpoints to resume from; 0: only when Ctrl-C ends the run."
    ),
]
ResumeOption = Annotated[
    bool,
    of_results(
        "--resume",
        help="Go on from --out's newest checkpoint, with the same flags; or begin anew where the"
        " run was ended before its first one.",
    ),
]
LogOption = Annotated[
    list[str] | None,
    of_results(
        "--log",
        help="Where figures go besides metrics.jsonl: tensorboard or wandb, if installed.",
        show_default=False,
    ),
]
PlanOption = Annotated[
    Path | None,
    of_plan(
        "--plan",
        help="A run in TOML or JSON: [run], [data], [plan] (any field of fz.Plan), [optimizer] and "
        "[schedule] (an optax function's name and arguments). Flags go before it.",
        show_default=False,
    ),
]
PlanSetOption = Annotated[
    list[str] | None,
    of_plan("--plan-set", help="A field of the plan, over all else: pipe=4."),
]
