"""What a run shows while it trains: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


# A log of a long run stays readable: about this many lines for its training steps.
PLAIN_LINES = 20
# Columns below which numbers have no room beside a bar.
NARROW = 110


class Display(Protocol):
    """Shows training steps and, between them, lines of text."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def step(self, step: int, loss: float, tokens_per_s: float | None, gauge: str = "") -> None:
        """Step number `step` (from 1) is done; `gauge` says how the devices do."""

    def line(self, text: str) -> None:
        """A line that stays."""


def display(num_steps: int, console: Console | None = None) -> Display:
    """The display for this terminal, or for the pipe or file that stands in its place."""
    console = console or Console(highlight=False, soft_wrap=True)
    return _Bar(num_steps, console) if console.is_terminal else _Plain(num_steps, console)


class _Bar:
    def __init__(self, num_steps: int, console: Console) -> None:
        self._narrow = console.width < NARROW
        bar = () if self._narrow else (TextColumn("step"), BarColumn())
        self._progress = Progress(
            *bar[:1],
            MofNCompleteColumn(),
            *bar[1:],
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("{task.fields[gauge]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._task = self._progress.add_task("train", total=num_steps, loss="-", rate="-", gauge="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: int, loss: float, tokens_per_s: float | None, gauge: str = "") -> None:
        if self._narrow:
            gauge = gauge.partition("/device")[0]
        self._progress.update(
            self._task, completed=step, loss=f"{loss:.4f}", rate=_rate(tokens_per_s), gauge=gauge
        )

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class _Plain:
    def __init__(self, num_steps: int, console: Console) -> None:
        self._num_steps = num_steps
        self._interval = max(1, num_steps // PLAIN_LINES)
        self._console = console

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: int, loss: float, tokens_per_s: float | None, gauge: str = "") -> None:
        if step == 1 or step % self._interval == 0 or step == self._num_steps:
            self.line(
                f"step {step}/{self._num_steps}  loss {loss:.4f}  {_rate(tokens_per_s)} tokens/s"
                f"{'  ' if gauge else ''}{gauge}"
            )

    def line(self, text: str) -> None:
        self._console.print(text, markup=False)
        self._console.file.flush()  # a pipe is read while the run goes on


def _rate(tokens_per_s: float | None) -> str:
    return "-" if tokens_per_s is None else f"{tokens_per_s:,.0f}"
