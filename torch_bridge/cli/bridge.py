"""Check that a PyTorch module computes the same in JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app


app = command_app(no_args_is_help=True)


@app.callback()
def _group() -> None:
    """PyTorch modules in JAX."""


@app.command("check")
def check(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="hf:DIR or hf:CONFIG.json (random weights from the seed if there are none), or "
            "path/to/file.py:factory, a function that returns a torch.nn.Module.",
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=DTYPE[SHAPE]",
            help="An argument of forward, once for each: x=float32[2,3,8,8], or "
            "ids=int64[2,16]<100 for integers below 100. The first size is the batch.  "
            "[default: found in the config]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows in the example.")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per row.")] = 16,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Convert a module and compare values, loss, gradients and statistics with PyTorch, in fp32.

    Prints a table by submodule and the first value that differs; exits with 1 if one does.
    """
    # torch and transformers take seconds to import.
    from torch_bridge.cli.deeds import bridge_run

    report = bridge_run.check(model, inputs or [], batch, seq, seed)
    if json_file is not None:
        json_file.write_text(report.parity.to_json(), encoding="utf-8")
    print(report.text, end="")
    raise typer.Exit(0 if report.parity.agrees else 1)
