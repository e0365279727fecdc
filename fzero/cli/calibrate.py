"""Measure this device once, for predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app
from fzero.cli.flags import json_flag, out_flag
from fzero.errors import PreflightError
from fzero.preflight.tables import table_of, text_of


FileOption = Annotated[
    Path | None,
    out_flag(help="Write the rates there, as JSON: `fzero preflight --rates FILE` takes it."),
]
SmallOption = Annotated[
    bool, typer.Option("--small", help="Small sizes, in seconds: a trial, not a calibration.")
]
RatesOption = Annotated[bool, json_flag(help="Print the rates file, not a table.")]

app = command_app()


@app.command()
def calibrate(
    out: FileOption = None, small: SmallOption = False, as_json: RatesOption = False
) -> None:
    """Measure what matmuls, attention, elementwise work, copies and launches reach on this device.

    Takes half a minute on a GPU that nothing else uses. What is measured replaces the shares of
    the data sheet's peaks that predictions assume.
    """
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise PreflightError(f"calibrate: --out {out}: expected a file in a directory that exists")
    # jax takes a second to import: after --help.
    from fzero.preflight.calibrate import SMALL
    from fzero.preflight.calibrate import calibrate as measure

    found = measure(effort=SMALL if small else None)
    text = json.dumps(found.rates(), indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    table = table_of(f"{found.device}, {found.date}", "what", "measured", "of the peak")
    for name, value in found.measured.items():
        of = f"{value / found.peaks[_precision(name)]:.0%}" if _precision(name) else ""
        table.add_row(name.replace("/", " "), _shown(name, value), of)
    print(text_of(table))
    if out is not None:
        print(f"\nwritten to {out}")


def _precision(name: str) -> str:
    """What a measurement computed in; empty where it counts no FLOPs."""
    if name == "attention":
        return "bf16"
    return name.partition("/")[0].split()[1] if name.startswith("matmul ") else ""


def _shown(name: str, value: float) -> str:
    if name == "launch":
        return f"{value * 1e6:.1f} us"
    return f"{value / 1e12:.2f} TFLOP/s" if _precision(name) else f"{value / 1e9:.1f} GB/s"
