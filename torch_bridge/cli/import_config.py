"""Translate a configuration of DeepSpeed or Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app
from torch_bridge.cli.errors import CommandError


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
        int | None, typer.Option(min=1, help="Devices of the run, where the file does not say.")
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
    import json

    import torch_bridge as tb
    from torch_bridge.configs.keys import read

    given = {}
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
        found = tb.from_accelerate(file, auto=given)
    elif {"learning_rate", "per_device_train_batch_size", "output_dir"} & set(values):
        found = tb.from_training_arguments(file, devices=devices, num_steps=num_steps)
    else:
        found = tb.from_deepspeed(file, devices=devices, auto=given)
    typer.echo(str(found))
