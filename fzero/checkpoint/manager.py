"""What orbax does for checkpoints in directories.

Imported when the first checkpoint is written or read: orbax takes a third as long to import as jax.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from fzero.checkpoint.shards import FOLDER, shards_of, write_shards
from fzero.checkpoint.urls import kvstore


# How often a process looks whether its own part failed, while it waits for the others.
LOOK_S = 0.05


class ShardsHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes this process's shards of leaves; reading is `restore`'s."""

    def __init__(self, failed: list[BaseException]) -> None:
        self._failed = failed

    async def async_save(self, directory: Any, args: ShardsSave) -> list[Any]:
        """Copies the shards to the host; they are written when the directory is there."""
        for leaf in args.leaves.values():
            leaf.copy_to_host_async()
        own = {key: shards_of(leaf) for key, leaf in args.leaves.items()}

        async def write() -> None:
            for key in list(own):
                await write_shards(kvstore(directory / key), own.pop(key))

        job = CommitFutureAwaitingContractedSignals(write(), name="fzero_parts")
        return [_Noticed(job, self._failed)]

    def save(self, directory: Any, args: ShardsSave) -> None:
        """Writes at once."""
        raise NotImplementedError("checkpoints are written in the background")

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Nothing: leaves are read slice by slice."""
        raise NotImplementedError("leaves are read slice by slice")


@ocp.args.register_with_handler(ShardsHandler, for_save=True, for_restore=True)
@dataclass
class ShardsSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `ShardsHandler` writes.

    Args:
        leaves: arrays by key; every process has all keys.
    """

    leaves: Mapping[str, jax.Array]


class _Noticed:
    """What a handler does in the background, as orbax awaits it; says how it failed."""

    def __init__(self, job: Future, failed: list[BaseException]) -> None:
        self._job, self._failed = job, failed

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the job."""
        try:
            return self._job.result(timeout)
        except BaseException as error:
            self._failed.append(error)
            raise

    def cancel(self) -> bool | None:
        """Ends the job."""
        return self._job.cancel()


class _ArraysHandler(ocp.PyTreeCheckpointHandler):  # type: ignore[misc]
    """Orbax's for arrays that all processes hold shards of."""

    def __init__(self, failed: list[BaseException]) -> None:
        super().__init__(use_ocdbt=True, use_zarr3=False)  # see `array_path`
        self._failed = failed

    async def async_save(self, *args: Any, **more: Any) -> list[Any]:
        """As orbax's."""
        return [_Noticed(job, self._failed) for job in await super().async_save(*args, **more)]


@ocp.args.register_with_handler(_ArraysHandler, for_save=True, for_restore=True)
@dataclass
class _ArraysSave(ocp.args.PyTreeSave):  # type: ignore[misc]
    """What `_ArraysHandler` writes."""


class _ToldHere(logging.Filter):
    """Drops the tracebacks that orbax logs of a write that fails, some ten times over.

    `fzero.wait`, or the next `fzero.save`, says what failed, once. Those of others who write with
    orbax stay, but while a checkpoint of fzero's is being written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.writing: weakref.WeakSet[Manager] = weakref.WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        told = self.writing and record.exc_info and "orbax" in Path(record.pathname).parts
        return not told


_TOLD_HERE = _ToldHere()


class Manager:
    """Writes the checkpoints of a directory.

    Args:
        path: the directory.
        keep: how many of the newest stay.
    """

    def __init__(self, path: str, keep: int | None) -> None:
        self._failed: list[BaseException] = []
        logging.getLogger("absl").addFilter(_TOLD_HERE)  # once, however often it is added
        # Of a folder that cannot be made in the background, orbax's threads wait for ten minutes,
        # and the end of the process for them.
        make = ocp.AsyncOptions(create_directories_asynchronously=jax.process_count() > 1)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, async_options=make)
        handlers = {
            "state": _ArraysHandler(self._failed),
            "meta": ocp.JsonCheckpointHandler(),
            FOLDER: ShardsHandler(self._failed),
        }
        self._manager = ocp.CheckpointManager(path, options=options, item_handlers=handlers)
        self.latest_step, self.close = self._manager.latest_step, self._manager.close

    def save(self, number: int, args: Any) -> None:
        """Begins to write; `wait_until_finished` says what fails, a folder not made included."""
        _TOLD_HERE.writing.add(self)
        try:
            self._manager.save(number, args=args)
        except OSError as error:
            if jax.process_count() > 1:
                raise
            self._failed.append(error)

    def wait_until_finished(self) -> None:
        """Until what is being written is there.

        Between processes orbax lets one whose part failed wait for the others, which wait for its
        part: what failed is raised before.
        """
        try:
            while jax.process_count() > 1 and self._manager.is_saving_in_progress():
                if self._failed:
                    raise self._failed[0]
                time.sleep(LOOK_S)
            self._manager.wait_until_finished()
            if self._failed:
                raise self._failed[0]
        finally:
            _TOLD_HERE.writing.discard(self)


def items(arrays: Mapping[str, Any], shards: Mapping[str, Any], meta: Mapping[str, Any]) -> Any:
    """What a manager saves: arrays, shards of arrays, and what is known of them."""
    return ocp.args.Composite(
        **({"state": _ArraysSave(arrays)} if arrays else {}),
        **({FOLDER: ShardsSave(shards)} if shards else {}),
        meta=ocp.args.JsonSave(meta),
    )


def read_json(folder: Path) -> Any:
    """What was written as JSON."""
    # Not with orbax, which lets all processes wait for each other: one may ask alone.
    return json.loads((folder / "metadata").read_text())
