"""`fzero train` in several processes: all train, process 0 writes what is not a checkpoint."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path

import fzero as fz
from torch_bridge.cli import outputs
from torch_bridge.cli.errors import CommandError
from torch_bridge.cli.settings import TrainSettings


def join(settings: TrainSettings) -> fz.World:
    """Joins the other processes, where the environment says that there are any.

    Raises:
        CommandError: something was asked for that takes one process.
    """
    world = fz.join()
    if world.num_processes != 1 and settings.verify:
        raise CommandError(
            "--verify compares within one process: train without it, and load --out in PyTorch"
        )
    return world


def own(settings: TrainSettings, world: fz.World) -> TrainSettings:
    """The settings of this process: beside process 0 they write metrics and the like nowhere."""
    if world.process_id == 0:
        return settings
    scratch = Path(tempfile.mkdtemp(prefix="fzero-train-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    if settings.resume and (settings.out / outputs.METRICS).exists():
        shutil.copy(settings.out / outputs.METRICS, scratch / outputs.METRICS)
    return dataclasses.replace(settings, out=scratch)
