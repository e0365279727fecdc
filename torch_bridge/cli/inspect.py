"""Show what a checkpoint of PyTorch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app


app = command_app()


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(help="File or directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show format, version, tensors, dtypes, shapes, ties and optimizer state of a checkpoint.

    Nothing in it is ever executed, and no tensor is read.
    """
    # torch takes seconds to import.
    from torch_bridge.cli.deeds import checkpoint_run

    print(checkpoint_run.inspect(path, as_json), end="")
