"""Convert a checkpoint of PyTorch into another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fzero.cli import command_app


app = command_app()
Format = Literal["safetensors", "pt", "lightning", "dcp", "dcp-flat", "universal"]
Dtype = Literal["fp32", "bf16", "fp16", "fp64"]


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File or directory.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="File or directory; replaced at the end.")
    ],
    to: Annotated[
        Format | None, typer.Option(help="Format.  [default: what OUT's suffix says]")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Dtype of floating-point weights.  [default: as in IN]")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Weights in one file of a safetensors directory.")
    ] = "5GB",
) -> None:
    """Convert a checkpoint, tensor by tensor: bit by bit, unless --dtype says otherwise.

    Nothing in IN is ever executed. Adam's moments come along where both formats have them.
    """
    # torch takes seconds to import.
    from torch_bridge.cli.deeds import checkpoint_run

    print(checkpoint_run.convert(source, target, to, dtype, max_shard_size))
