"""Flags of more than one command, each declared once; a command may give its own help."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer


json_flag = partial(typer.Option, "--json", help="Print JSON.")
# A file; a directory to write is `torch_bridge.cli.flags.options.DirectoryOption`.
out_flag = partial(typer.Option, "--out")

JsonOption = Annotated[bool, json_flag()]
