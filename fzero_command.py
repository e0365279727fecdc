"""The `fzero` command: mounts the subcommands that installed packages register.

A subcommand is an entry point of the group `fzero.commands` whose value is a `typer.Typer` app.
That is how `torch_bridge` provides `train` and `eval` while fzero itself never imports it, and how
`fzero --help` stays quick: a subcommand's module is imported only when that subcommand runs. This
module is beside the package, not in it, because importing `fzero` imports jax.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


GROUP = "fzero.commands"
# fzero's own subcommands, in the notation of entry points: no metadata needed when run from a
# source tree.
BUILT_IN = {
    "calibrate": "fzero.cli.calibrate:app",
    "doctor": "fzero.cli.doctor:app",
    "launch": "fzero.cli.launch:app",
    "report": "fzero.cli.report:app",
    "schedule": "fzero.cli.schedule:app",
}
# What shells expect of a command that was called with something it cannot carry out.
EXIT_USAGE = 2
EXIT_FAILED = 1
DEBUG = "--debug"


class _LazyCommands(TyperGroup):
    """A group that imports the module of a subcommand only to run it, not to list it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that carries the one-line help: listings and completion need no more."""
        point = commands().get(cmd_name)
        return None if point is None else TyperCommand(cmd_name, help=_first_line(point))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        point = commands().get(str(name))
        if point is None:
            return name, found, rest
        loaded = typer.main.get_command(point.load())
        loaded.name = name
        return name, loaded, rest


app = typer.Typer(
    cls=_LazyCommands,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    # A local of a failed command can be a whole model: never print locals.
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show where an error came from; goes anywhere in a command.")
    ] = False,
) -> None:
    """Train, evaluate and plan models whose state is one immutable, sharded value."""


def command_app(**more: Any) -> typer.Typer:
    """The app of a subcommand: plain help, which wraps; its errors are told by `main`."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # brackets stay brackets
        **more,
    )


def commands() -> dict[str, EntryPoint]:
    """The subcommands found: fzero's own, then those that installed packages register."""
    own = {
        name: EntryPoint(name, value, GROUP)
        for name, value in BUILT_IN.items()
        if _module_file(value.partition(":")[0]) is not None
    }
    return own | {point.name: point for point in entry_points(group=GROUP)}


def main() -> None:
    """Runs the command line. An error is a line and an exit status; with --debug, a traceback."""
    given, own = sys.argv[1:], sys.argv[1:]
    if DEBUG in given[: given.index("--") if "--" in given else None]:
        own.remove(DEBUG)
    try:
        app(own, prog_name="fzero")
    except Exception as error:
        if len(own) < len(given):
            raise
        status, shown = _told(error)
        # Other processes of the run, if there are any, are told, too.
        join = sys.modules.get("fzero.hosts.join")
        if join is not None:
            join.fail(error, status, shown)
        print(shown, file=sys.stderr)
        sys.exit(status)


def _told(error: Exception) -> tuple[int, str]:
    """Exit status and words: of errors raised on purpose all, of others the first line."""
    shown, errors = f"{type(error).__name__}: {error}", sys.modules.get("fzero.errors")
    if errors is not None and isinstance(error, errors.FzeroError):
        return EXIT_USAGE, shown
    first = shown.partition("\n")[0]
    return EXIT_FAILED, f"{first} (fzero {DEBUG} ... shows where it came from)"


def _first_line(point: EntryPoint) -> str:
    """The first line of the docstring of the module behind `point`, read without importing it."""
    path = _module_file(point.module)
    if path is None:
        return f"(not importable: {point.value})"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def _module_file(module: str) -> Path | None:
    """The source file of a module; only its top-level package is looked up, nothing is imported."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    for root in spec.submodule_search_locations:
        path = Path(root, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None
