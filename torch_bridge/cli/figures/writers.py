"""Further places for a run's figures: TensorBoard and Weights & Biases, by their own writers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch_bridge.cli.errors import CommandError


KINDS = ("tensorboard", "wandb")


class Writer(Protocol):
    """Takes figures by step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step."""

    def close(self) -> None:
        """Nothing more will come."""


def check_writers(names: tuple[str, ...]) -> None:
    """Refuses what nothing here writes.

    Raises:
        CommandError: no such writer, or its package is missing.
    """
    import importlib.util

    for name in names:
        if name not in KINDS:
            raise CommandError(f"--log {name}: expected one of {', '.join(KINDS)}")
        if importlib.util.find_spec(name) is None:
            raise CommandError(f"--log {name} takes the package {name}: pip install {name}")


@contextlib.contextmanager
def open_writers(
    names: tuple[str, ...], out: Path, run: Mapping[str, Any]
) -> Iterator[Sequence[Writer]]:
    """The writers asked for, closed in the end.

    Args:
        names: see `KINDS`.
        out: the run's directory; TensorBoard's files go into its `tensorboard`.
        run: the run as JSON, for those that keep it.
    """
    made: list[Writer] = [
        _TensorBoard(out) if name == "tensorboard" else _Wandb(out, run) for name in names
    ]
    with contextlib.ExitStack() as closing:
        for writer in made:
            closing.callback(writer.close)
        yield made


class _TensorBoard:
    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, out: Path, run: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(project="fzero", dir=str(out), config=dict(run))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
