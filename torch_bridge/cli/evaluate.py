"""Print the validation loss of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fzero.cli import command_app
from torch_bridge.cli.flags.options import (
    SHARDED_OVER,
    DataOption,
    MoreData,
    Precision,
    batch_flag,
    devices_flag,
    eval_sequences_flag,
    model_flag,
    precision_flag,
    seq_flag,
    zero_flag,
)
from torch_bridge.run import compose
from torch_bridge.run.outputs import WEIGHTS, RunRecord
from torch_bridge.run.settings import (
    BATCH,
    HF_PREFIX,
    SEQ,
    STDLIB,
    ZERO,
    DataSettings,
    EvalSettings,
    resolve_sources,
)


Settings = TypeVar("Settings", DataSettings, EvalSettings)

app = command_app()


@app.command("eval")
def evaluate(
    model: Annotated[
        str, model_flag(help="A directory that `fzero train` wrote, or what it takes.")
    ],
    data: DataOption = None,
    more_data: MoreData = None,
    seq: Annotated[int | None, seq_flag()] = None,
    batch: Annotated[int | None, batch_flag(help="Sequences per evaluation step.")] = None,
    eval_sequences: Annotated[int | None, eval_sequences_flag()] = None,
    zero: Annotated[int | None, zero_flag()] = None,
    devices: Annotated[
        int | None,
        devices_flag(help=f"{SHARDED_OVER}  [default: as in the training run, else all]"),
    ] = None,
    precision: Annotated[Precision | None, precision_flag(help="What forward computes in.")] = None,
) -> None:
    """Print the validation loss of a model: of what `fzero train` wrote, the one it printed last.

    What is not given is as in the training run, or else as `fzero train` would choose.
    """
    known = _defaults(model)
    sources = resolve_sources(data, more_data) if data or more_data else None
    text = _with(known.data, sources=sources, seq=seq, eval_sequences=eval_sequences)
    text.check()
    compose.evaluate(_with(
        known, data=text, batch=batch, zero=zero, devices=devices,
        precision=precision and precision.value,
    ))  # fmt: skip


def _with(known: Settings, **given: Any) -> Settings:
    """Settings with what was given in the place of what is known."""
    return replace(known, **{name: value for name, value in given.items() if value is not None})


def _defaults(model: str) -> EvalSettings:
    """As the training run had it, where `model` is what one wrote; else as a new run would."""
    directory = Path(model.removeprefix(HF_PREFIX)).expanduser()
    record = RunRecord.read(directory) if directory.is_dir() else None
    if record is not None:
        return EvalSettings(
            model=record.factory or f"{HF_PREFIX}{directory}",
            weights=directory / WEIGHTS if record.factory else None,
            data=record.data,
            batch=record.batch,
            zero=record.zero,
            devices=record.devices,
            precision=record.precision,
            fingerprint=record.fingerprint,
        )
    return EvalSettings(
        model=f"{HF_PREFIX}{directory}" if directory.is_dir() else model,
        weights=None,
        data=DataSettings((STDLIB,), SEQ),
        batch=BATCH,
        zero=ZERO,
        devices=None,
        precision=Precision.fp32.value,
        fingerprint=None,
    )
