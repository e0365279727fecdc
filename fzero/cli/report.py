"""Draw a run, or two compared, as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fzero.cli import command_app
from fzero.cli.flags import out_flag


RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory of a run.", show_default=False)
]
OtherArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[OTHER]", help="Another one, to compare.", show_default=False),
]
PageOption = Annotated[
    Path | None, out_flag(help="The page.  [default: report.html in RUN]", show_default=False)
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the recorded step of a pipeline, and copies of what is parked, as a trace for "
        "ui.perfetto.dev or chrome://tracing; no page.",
        show_default=False,
    ),
]

app = command_app()


@app.command()
def report(
    run: RunArgument, other: OtherArgument = None, out: PageOption = None, trace: TraceOption = None
) -> None:
    """Draw what `fzero train` wrote: loss, rates, placement, collectives, pipeline, time.

    The page is one file that needs no network. It is also written for a run that goes on or was
    killed, as far as its files reach.
    """
    # jax takes a second to import: after --help.
    from fzero.runs.files import RunError, read_run
    from fzero.runs.page import page
    from fzero.runs.trace import chrome_trace

    runs = [read_run(one) for one in (run, other) if one is not None]
    for one in runs:
        for line in one.said:
            print(f"{one.path}: {line}")
    target = trace or out or run / "report.html"
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise RunError(f"report: {target}: expected a file in a directory that exists")
    if trace is not None:
        first = runs[0]
        timelines = [("measured", first.measured), ("simulated", first.simulated)]
        known = [(name, timeline) for name, timeline in timelines if timeline is not None]
        if not known and not first.copies:
            raise RunError(
                f"report: {run} has no timeline: expected a run of a pipeline (pipe=2 or more)"
                " or with tiers, of at least one step after the first"
            )
        text = json.dumps(chrome_trace(known, first.copies))
    else:
        text = page(runs)
    target.write_text(text, encoding="utf-8")
    print(f"written to {target}")
