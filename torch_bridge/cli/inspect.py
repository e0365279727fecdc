"""Show what a checkpoint of PyTorch holds."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fzero.cli import command_app
from fzero.cli.flags import JsonOption
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.read import checkpoint


app = command_app()


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(help="File or directory.")],
    as_json: JsonOption = False,
) -> None:
    """Show format, version, tensors, dtypes, shapes, ties and optimizer state of a checkpoint.

    Nothing in it is ever executed, and no tensor is read.
    """
    found = checkpoint(path)
    print(json.dumps(_plain(found), indent=2) + "\n" if as_json else _table(found), end="")


def _plain(found: Checkpoint) -> dict[str, Any]:
    optimizer = found.optimizer
    return {
        "path": found.path,
        "format": found.format,
        "version": found.version,
        "bytes": found.num_bytes,
        "tensors": {
            name: {"dtype": _dtype(tensor.torch_dtype), "shape": list(tensor.shape)}
            for name, tensor in found.tensors.items()
        },
        "ties": dict(found.ties),
        "optimizer": None if optimizer is None else {
            "step": optimizer.step,
            "parameters": list(optimizer.exp_avg),
            "named": optimizer.named,
            "groups": [_readable(group) for group in optimizer.groups],
        },
        "unread": found.unread,
        "extra": _readable(found.extra),
    }  # fmt: skip


def _readable(value: Any) -> Any:
    """A value as JSON has it; what it does not have, in words."""
    if isinstance(value, dict):
        return {str(key): _readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_readable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _table(found: Checkpoint) -> str:
    printed = io.StringIO()
    console = Console(width=100, color_system=None, file=printed)
    version = f" ({found.version})" if found.version else ""
    console.print(_text(f"{found.path}: {found.format}{version}"))
    table = Table(box=box.SIMPLE_HEAD)
    for title, justify in (("tensor", "left"), ("dtype", "left"), ("shape", "left"),
                           ("bytes", "right")):  # fmt: skip
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    also: dict[str, list[str]] = {}
    for name, kept in found.ties.items():
        also.setdefault(kept, []).append(name)
    for name, tensor in found.tensors.items():
        names = ", also ".join([name, *also.get(name, [])])
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        table.add_row(_text(names), _dtype(tensor.torch_dtype), shape, f"{tensor.num_bytes:,}")
    console.print(table)
    console.print(_text(f"{len(found.tensors)} tensors, {found.num_bytes:,} bytes"))
    optimizer = found.optimizer
    if optimizer is not None:
        kind = "parameters" if optimizer.named else "numbered parameters"
        console.print(
            _text(f"Adam at step {optimizer.step}, moments of {len(optimizer.exp_avg)} {kind}")
        )
        for group in optimizer.groups:
            plain = {k: v for k, v in group.items() if k != "params" and v is not None}
            count = len(group.get("params", ()))
            console.print(_text(f"  {count} parameters: {json.dumps(_readable(plain))}"))
    if found.unread is not None:
        console.print(_text(f"optimizer state that cannot be read: {found.unread}"))
    if found.extra:
        console.print(_text(f"also: {json.dumps(_readable(found.extra))}"[:2000]))
    return printed.getvalue()


def _text(text: str) -> Text:
    """A file's words as they are: no markup, and no control characters for the terminal."""
    return Text("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
