"""Convert a checkpoint of PyTorch into another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from fzero.cli import command_app
from torch_bridge.formats.read import checkpoint
from torch_bridge.formats.write import format_of, holds_optimizer, write


Format = Literal["safetensors", "pt", "lightning", "dcp", "dcp-flat", "universal"]
Dtype = Literal["fp32", "bf16", "fp16", "fp64"]
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

app = command_app()


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
    found = checkpoint(source)
    if dtype is not None:
        found = found.cast(_DTYPES[dtype])
    kind = to or format_of(target)
    write(found, target, kind, max_shard_size)
    if found.unread is not None:
        optimizer = f"; without the optimizer state: {found.unread}"
    elif found.optimizer is None:
        optimizer = ""
    elif not holds_optimizer(kind):
        optimizer = f"; {kind} has no place for the optimizer state"
    else:
        optimizer = f"; with Adam's moments at step {found.optimizer.step}"
    print(
        f"{target}: {kind}, {len(found.tensors)} tensors, {found.num_bytes:,} bytes,"
        f" from {found.format}{optimizer}"
    )
