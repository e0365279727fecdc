"""Help in groups: the model and data, training, the plan, what is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand


def grouped(**groups: str) -> type[TyperCommand]:
    """A class of commands whose help has a heading for each group of options.

    Args:
        groups: headings with `_` for blanks, and the names of parameters, in one string.

    Returns:
        For `app.command(cls=...)`. Options in no group stay under "Options".

    Example:
        >>> import typer
        >>> app = typer.Typer(add_completion=False, rich_markup_mode=None)
        >>> @app.command(cls=grouped(What_to_do="steps"))
        ... def run(steps: int = 3) -> None: ...
        >>> command = typer.main.get_command(app)
        >>> "What to do:" in command.get_help(typer.Context(command))
        True
    """
    headings = {name: heading for heading, names in groups.items() for name in names.split()}

    class Grouped(TyperCommand):
        def format_options(self, ctx: Any, formatter: Any) -> None:
            rows: dict[str, list[Sequence[str]]] = {"Arguments": []}
            rows |= {heading.replace("_", " "): [] for heading in groups}
            rows["Options"] = []
            for param in self.get_params(ctx):
                record = param.get_help_record(ctx)
                other = "Arguments" if param.param_type_name == "argument" else "Options"
                if record is not None:
                    heading = headings.get(param.name or "", other)
                    rows[heading.replace("_", " ")].append(record)
            for heading, records in rows.items():
                if records:
                    with formatter.section(heading):
                        formatter.write_dl(records)

    return Grouped
