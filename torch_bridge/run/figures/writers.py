"""Further places for a run's figures: TensorBoard and Weights & Biases, by their own writers."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_bridge.run.errors import CommandError


KINDS = ("tensorboard", "wandb")


Writer = Callable[[int, Mapping[str, float]], None]
"""Takes figures of a step."""


def check_writers(names: tuple[str, ...]) -> None:
    """Refuses what nothing here writes.

    Raises:
        CommandError: no such writer, or its package is missing.
    """
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
    with contextlib.ExitStack() as closing:
        yield [
            closing.enter_context(_tensorboard(out) if name == "tensorboard" else _wandb(out, run))
            for name in names
        ]


@contextlib.contextmanager
def _tensorboard(out: Path) -> Iterator[Writer]:
    from torch.utils.tensorboard import SummaryWriter

    made: Any = SummaryWriter(str(out / "tensorboard"))

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            made.add_scalar(name, value, step)

    with made:
        yield write


@contextlib.contextmanager
def _wandb(out: Path, run: Mapping[str, Any]) -> Iterator[Writer]:
    import wandb

    made: Any = wandb.init(project="fzero", dir=str(out), config=dict(run))
    try:
        yield lambda step, values: made.log(dict(values), step=step)
    finally:
        made.finish()
