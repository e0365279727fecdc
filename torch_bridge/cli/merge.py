"""Put an adapter into its model, or take it out again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app


app = command_app()


@app.command()
def merge(
    model: Annotated[
        str, typer.Option("--model", help="A directory of transformers: the adapter's base.")
    ],
    adapter: Annotated[
        Path, typer.Option(help="A directory with an adapter, of PEFT or `fzero finetune`.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; must be empty or not exist.")],
    undo: Annotated[
        bool, typer.Option("--undo", help="--model has the adapter in it: write the one without.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = (
        False
    ),
) -> None:
    """Write a model with an adapter in its weights: transformers loads it, and needs no PEFT.

    Weights keep their dtype: the sum is computed in fp32 and rounded once.
    """
    # torch and transformers take seconds to import.
    from torch_bridge.cli.deeds import merge_run

    merge_run.merge(model, adapter, out, undo, overwrite)
