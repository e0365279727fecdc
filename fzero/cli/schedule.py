"""Build, draw, check and compare pipeline schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from fzero.cli import command_app
from fzero.cli.flags import JsonOption
from fzero.errors import ScheduleError
from fzero.schedule.actions import Schedule
from fzero.schedule.check import check
from fzero.schedule.draw import draw
from fzero.schedule.names import BUILDERS, Builder, schedule
from fzero.schedule.plot import plot
from fzero.schedule.simulate import Cost, Timeline, simulate


class _Schedules(TyperGroup):
    """A group whose commands are schedules, so that an unknown one is answered with the list."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            ctx.fail(
                f"expected a schedule ({', '.join(BUILDERS)}), check or compare, got {args[0]!r}"
            )
        return super().resolve_command(ctx, args)


app = command_app(
    cls=_Schedules,
    no_args_is_help=True,
    help="Pipeline schedules without a device: build one by name, check a file, compare all.",
)

_COST_HELP = "Seconds of each action, like f=1,b=2,send=0.1; keys f, b, i, w, send."
_COST_KEYS = ("f", "b", "i", "w", "send")

stages_flag = partial(typer.Option, "--stages")
Stages = Annotated[int, stages_flag(help="Stages in all; stages / chunks ranks.")]
Microbatches = Annotated[int, typer.Option(help="Microbatches of one step.")]
CostText = Annotated[str, typer.Option("--cost", help=_COST_HELP)]


def parse_cost(text: str) -> Cost:
    """Reads costs from the command line.

    Args:
        text: `key=seconds` pairs with commas between, keys `f, b, i, w, send`.

    Returns:
        The cost.

    Raises:
        ScheduleError: a key is not known or a value is not a number.

    Example:
        >>> parse_cost("f=1,b=2.5,send=0.1").b
        2.5
    """
    values: dict[str, Any] = {}
    for pair in filter(None, (entry.strip() for entry in text.split(","))):
        key, equals, value = pair.partition("=")
        try:
            number = float(value)
        except ValueError:
            equals = ""
            number = 0.0
        if key not in _COST_KEYS or not equals:
            raise ScheduleError(
                f"--cost: expected pairs like f=1,b=2 with the keys {', '.join(_COST_KEYS)}, "
                f"got {pair!r}"
            )
        values[key] = number
    return Cost(**values)


def describe(timeline: Timeline) -> dict[str, Any]:
    """A timeline as plain data for JSON.

    Args:
        timeline: what `simulate` returned.

    Returns:
        The totals, the numbers of each rank and the grid.
    """
    grid = json.loads(timeline.schedule.to_json())
    return {
        "num_ranks": timeline.schedule.num_ranks,
        "num_stages": timeline.schedule.num_stages,
        "num_microbatches": timeline.schedule.num_microbatches,
        "makespan_s": timeline.makespan_s,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fraction_per_rank": timeline.bubble_fraction_per_rank,
        "span_s_per_rank": timeline.span_s_per_rank,
        "peak_live_per_rank": timeline.peak_live_per_rank,
        "deadlock_free": check(timeline.schedule).deadlock_free,
        **grid,
    }


def _fail(error: ScheduleError) -> typer.Exit:
    # Plain print: rich would take the brackets of a message for markup and wrap the grid.
    typer.echo(str(error), err=True)
    return typer.Exit(1)


def _build_command(builder: Builder) -> Callable[..., None]:
    default = builder.chunks

    def build(
        stages: Stages,
        microbatches: Microbatches,
        chunks: Annotated[int | None, typer.Option(help="Stages per rank.")] = default,
        cost: CostText = "f=1,b=2",
        plot_to: Annotated[
            Path | None, typer.Option("--plot", help="Write a picture: .png or .svg.")
        ] = None,
        csv_to: Annotated[
            Path | None, typer.Option("--csv", help="Write the schedule in PyTorch's format.")
        ] = None,
        as_json: JsonOption = False,
        width: Annotated[int, typer.Option(help="Characters for the time axis.")] = 100,
    ) -> None:
        try:
            built = schedule(builder.name, stages=stages, microbatches=microbatches, chunks=chunks)
            check(built)
            timeline = simulate(built, parse_cost(cost))
            if csv_to is not None:
                built.to_csv(csv_to)
            if plot_to is not None:
                plot(timeline, plot_to, title=builder.name)
            typer.echo(json.dumps(describe(timeline)) if as_json else draw(timeline, width=width))
        except ScheduleError as error:
            raise _fail(error) from None

    return build


for _builder in BUILDERS.values():
    app.command(_builder.name, help=f"Build a schedule: {_builder.summary}.")(
        _build_command(_builder)
    )


@app.command("check")
def check_file(
    file: Annotated[Path, typer.Argument(help="A schedule in PyTorch's compute-only CSV.")],
) -> None:
    """Prove the schedule in a file, or mark what makes it illegal.

    Exits with 1 if it is illegal.
    """
    try:
        loaded = Schedule.from_csv(file)
        proof = check(loaded)
    except ScheduleError as error:
        raise _fail(error) from None
    typer.echo(
        f"{file}: legal. {loaded.num_ranks} ranks, {loaded.num_stages} stages, "
        f"{loaded.num_microbatches} microbatches, {proof.num_actions} actions; slots per stage "
        f"{proof.slots.per_stage}; no deadlock with {' or '.join(proof.deadlock_free)} sends"
    )


@app.command("compare")
def compare(
    stages: Annotated[
        int, stages_flag(help="Ranks; a schedule with two chunks makes twice as many stages.")
    ],
    microbatches: Microbatches,
    cost: CostText = "f=1,b=2",
) -> None:
    """Compare all schedules on as many ranks.

    Where a rank has two chunks, each costs half.
    """
    try:
        table = comparison(stages, microbatches, parse_cost(cost))
    except ScheduleError as error:
        raise _fail(error) from None
    Console().print(table)


def comparison(ranks: int, microbatches: int, cost: Cost) -> Table:
    """A table of all schedules that train, for one model on a number of ranks.

    Args:
        ranks: number of ranks. A schedule with two chunks cuts the same model in twice as many
            stages, each with half the cost.
        microbatches: number of microbatches.
        cost: seconds of each action of a whole rank's share; sends cost the same for any cut.

    Returns:
        A row per schedule: bubble; the largest idle share between a rank's own first and last
        action; peak in whole rank shares; makespan, asynchronous and in lock step; and the
        strictest meaning of a send that cannot deadlock.
    """
    # At most 80 columns: that is what a pipe gets.
    table = Table(
        title=f"{ranks} ranks, {microbatches} microbatches",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("schedule", no_wrap=True)
    for name in ("chunks", "bubble %", "span %", "peak", "makespan", "lock step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sends", no_wrap=True)
    for builder in BUILDERS.values():
        if not builder.trains:
            continue
        chunks = builder.chunks or 2
        built = schedule(
            builder.name, stages=ranks * chunks, microbatches=microbatches, chunks=chunks
        )
        divided = replace(cost, per_stage=(1 / chunks,) * (ranks * chunks))
        timeline = simulate(built, divided)
        spans = zip(timeline.idle_s_in_span_per_rank, timeline.span_s_per_rank, strict=True)
        table.add_row(
            builder.name,
            str(chunks),
            f"{100 * timeline.bubble_fraction:.1f}",
            f"{100 * max(idle / span if span else 0.0 for idle, span in spans):.1f}",
            f"{max(timeline.peak_live_per_rank) / chunks:g}",
            f"{timeline.makespan_s:g}",
            f"{simulate(built, divided, mode='lockstep').makespan_s:g}",
            check(built).deadlock_free[-1],
        )
    return table
