"""`fzero train` in several processes: all train, process 0 writes what is not a checkpoint."""

from __future__ import annotations

import atexit
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import fzero as fz
from torch_bridge.run import outputs
from torch_bridge.run.corpus import Batch, Source
from torch_bridge.run.errors import CommandError
from torch_bridge.run.settings import TrainSettings


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
    """The settings of this process: beside process 0 they write metrics and the like nowhere,
    nor to other places (`--log`)."""
    if world.process_id == 0:
        return settings
    scratch = Path(tempfile.mkdtemp(prefix="fzero-train-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    if settings.resume and (settings.out / outputs.METRICS).exists():
        shutil.copy(settings.out / outputs.METRICS, scratch / outputs.METRICS)
    return dataclasses.replace(settings, out=scratch, log=())


class Feed:
    """Batches of a text, of which each process gathers its own sequences.

    Where the processes do not divide a batch as the plan does, each gathers all of it, and keeps
    what its devices take.

    Args:
        corpus: the text.
        layout: of the training.
    """

    def __init__(self, corpus: Source, layout: fz.Layout) -> None:
        self.corpus, self._layout = corpus, layout

    def train(self, seed: int, step: int, size: int) -> Any:
        """The batch of a step; see `Source`."""
        who = self._whose(size)
        return self._placed(self.corpus.train_batch(seed, step, size, who), who)

    def validation(self, size: int) -> Iterator[Any]:
        """All that validates; see `Source`."""
        who = self._whose(size)
        for batch in self.corpus.validation_batches(size, who):
            yield self._placed(batch, who)

    def _whose(self, size: int) -> tuple[int, int]:
        devices = self._layout.batch_sharding.mesh.devices.size
        even = size % math.lcm(self._layout.batch_multiple, devices) == 0
        return (jax.process_index(), jax.process_count()) if even else (0, 1)

    def _placed(self, batch: Batch, who: tuple[int, int]) -> Any:
        return fz.local_batch(batch, self._layout) if who[1] > 1 else batch
