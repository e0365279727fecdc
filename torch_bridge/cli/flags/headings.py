"""Headings of the help: the model and data, training, the plan, what is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand


MODEL_AND_DATA = "Model and data"
MORE_PLANS = "More plans"
RESULTS = "Results"
# The headings, in order of the help, and how an option under each is declared.
HEADINGS = (
    MODEL_AND_DATA, "Adapters", "Training", "Plan", "Devices", "Validation", MORE_PLANS, RESULTS,
)  # fmt: skip
of_model_and_data = partial(typer.Option, rich_help_panel=MODEL_AND_DATA)
of_adapters = partial(typer.Option, rich_help_panel="Adapters")
of_training = partial(typer.Option, rich_help_panel="Training")
of_plan = partial(typer.Option, rich_help_panel="Plan")
of_devices = partial(typer.Option, rich_help_panel="Devices")
of_validation = partial(typer.Option, rich_help_panel="Validation")
of_more_plans = partial(typer.Option, rich_help_panel=MORE_PLANS)
of_results = partial(typer.Option, rich_help_panel=RESULTS)


class CommandWithHeadings(TyperCommand):
    """A command whose help has headings for its options; those of no other stay under "Options".

    Example:
        >>> import typer
        >>> from typing import Annotated
        >>> app = typer.Typer(add_completion=False, rich_markup_mode=None)
        >>> @app.command(cls=CommandWithHeadings)
        ... def run(steps: Annotated[int, of_training(help="How many.")] = 3) -> None: ...
        >>> command = typer.main.get_command(app)
        >>> "Training:" in command.get_help(typer.Context(command))
        True
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options under their headings."""
        rows: dict[str, list[Sequence[str]]] = {
            heading: [] for heading in ("Arguments", *HEADINGS, "Options")
        }
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            other = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                rows[getattr(param, "rich_help_panel", None) or other].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
