"""What orbax does for checkpoints in directories.

Imported when the first checkpoint is written or read: orbax takes a third as long to import as jax.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

from fzero.checkpoint.parts import FOLDER, part_of, write_part
from fzero.checkpoint.urls import kvstore


class PartsHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes this process's shards of leaves; reading is `restore`'s."""

    async def async_save(self, directory: Any, args: PartsSave) -> list[Future]:
        """Copies the shards to the host; they are written when the directory is there."""
        for leaf in args.leaves.values():
            leaf.copy_to_host_async()
        own = {key: part_of(leaf) for key, leaf in args.leaves.items()}

        async def write() -> None:
            for key in list(own):
                await write_part(kvstore(directory / key), own.pop(key))

        return [CommitFutureAwaitingContractedSignals(write(), name="fzero_parts")]

    def save(self, directory: Any, args: PartsSave) -> None:
        """Writes at once."""
        raise NotImplementedError("checkpoints are written in the background")

    def restore(self, directory: Any, args: Any = None) -> Any:
        """Nothing: leaves are read piece by piece."""
        raise NotImplementedError("leaves are read piece by piece")


@ocp.args.register_with_handler(PartsHandler, for_save=True, for_restore=True)
@dataclass
class PartsSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What `PartsHandler` writes.

    Args:
        leaves: arrays by key; every process has all keys.
    """

    leaves: Mapping[str, jax.Array]


def open_manager(path: str, keep: int | None) -> ocp.CheckpointManager:
    """A writer for a directory, which keeps so many of the newest checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False),  # see `array_path`
        "meta": ocp.JsonCheckpointHandler(),
        FOLDER: PartsHandler(),
    }
    return ocp.CheckpointManager(path, options=options, item_handlers=handlers)


def items(arrays: Mapping[str, Any], parts: Mapping[str, Any], meta: Mapping[str, Any]) -> Any:
    """What a manager saves: arrays, parts of arrays, and what is known of them."""
    return ocp.args.Composite(
        **({"state": ocp.args.PyTreeSave(arrays)} if arrays else {}),
        **({FOLDER: PartsSave(parts)} if parts else {}),
        meta=ocp.args.JsonSave(meta),
    )


def read_json(folder: Path) -> Any:
    """What was written as JSON."""
    # Not with orbax, which lets all processes wait for each other: one may ask alone.
    return json.loads((folder / "metadata").read_text())
