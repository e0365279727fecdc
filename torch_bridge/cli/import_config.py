"""Translate a configuration of DeepSpeed or Accelerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import torch_bridge as tb
from fzero.cli import command_app
from torch_bridge.cli.flags.options import devices_flag
from torch_bridge.configs.keys import Given, read
from torch_bridge.run.errors import CommandError


app = command_app()


@app.command()
def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="ds_config.json, the YAML of `accelerate config`, or TrainingArguments as JSON."
        ),
    ],
    devices: Annotated[
        int | None, devices_flag(min=1, help="Devices of the run, where the file does not say.")
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option(min=1, help="Updates of the run, for TrainingArguments.")
    ] = None,
    auto: Annotated[
        list[str] | None,
        typer.Option(help="A value that the file leaves to the Trainer: optimizer.params.lr=3e-4."),
    ] = None,
) -> None:
    """Print the plan that a DeepSpeed, Accelerate or Trainer configuration means.

    Every key is listed: what says the same here, or why nothing has to. A key that would change
    numbers and has no counterpart is an error.
    """
    given = Given()
    for item in auto or []:
        key, sign, value = item.partition("=")
        try:
            given[key] = json.loads(value)
        except ValueError as error:
            raise CommandError(
                f"--auto {item}: expected key=value, with a value in JSON" if sign else
                f"--auto {item}: expected key=value"
            ) from error  # fmt: skip
    _, values = read(file)
    if {"distributed_type", "fsdp_config"} & set(values):
        _refuse(file, "of accelerate", {"--devices": devices, "--num-steps": num_steps})
        found = tb.from_accelerate(file, auto=given)
    elif {"learning_rate", "per_device_train_batch_size", "output_dir"} & set(values):
        _refuse(file, "of TrainingArguments", {"--auto": auto})
        found = tb.from_training_arguments(file, devices=devices, num_steps=num_steps)
    else:
        _refuse(file, "of DeepSpeed", {"--num-steps": num_steps})
        found = tb.from_deepspeed(file, devices=devices, auto=given)
    if unasked := given.unasked():
        raise CommandError(f"--auto {', '.join(unasked)}: {file} has no 'auto' there; see its keys")
    typer.echo(str(found))


def _refuse(file: Path, kind: str, flags: dict[str, Any]) -> None:
    """Refuses flags that say nothing beside a file of this kind."""
    if idle := [flag for flag, value in flags.items() if value]:
        raise CommandError(f"{', '.join(idle)}: {file} is a file {kind}, which takes none")
