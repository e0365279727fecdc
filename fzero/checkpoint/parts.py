"""Leaves that not every process has a part in: each process writes its own part of them.

Orbax writes arrays that all processes hold shards of. Leaves of a pipeline's stage are at home on
one rank, whose devices are one process's, or some processes'. Their shards are written here, as one
zarr array a leaf with whole shards as its chunks, so that no two processes write into one file.
What makes a checkpoint whole or not there at all (a temporary directory, a rename when everybody
has written) stays orbax's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future


FOLDER = "parts"
# A chunk is compressed in memory, and read whole for any piece of it.
CHUNK_BYTES = 64 * 2**20
_Shards = list[tuple[tuple[slice, ...], np.ndarray[Any, Any]]]


def is_elsewhere(leaf: Any) -> bool:
    """Whether some process has no shard of an array."""
    if not isinstance(leaf, jax.Array) or jax.process_count() == 1:
        return False
    devices: Any = leaf.sharding.device_set
    owners = {device.process_index for device in devices}
    return len(owners) < jax.process_count()


def part_path(folder: PurePath, key: str) -> dict[str, Any]:
    """Where a leaf is, as `tensorstore.open` takes it.

    Args:
        folder: of one checkpoint.
        key: the leaf's.
    """
    return {"driver": "zarr", "kvstore": url_of(folder / FOLDER / key)}


def url_of(folder: Any) -> str:
    """A directory as tensorstore takes it."""
    text = str(folder)
    return f"{text if '://' in text else f'file://{text}'}/"


class PartsHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes this process's shards of leaves; reading is `restore`'s."""

    async def async_save(self, directory: Any, args: PartsSave) -> list[Future]:
        """Copies the shards to the host; they are written when the directory is there."""
        for leaf in args.leaves.values():
            leaf.copy_to_host_async()
        own = {key: _own_shards(leaf) for key, leaf in args.leaves.items()}
        about = {key: (leaf.shape, _chunk(leaf)) for key, leaf in args.leaves.items()}

        async def write() -> None:
            for key in list(own):
                await _write(directory, key, *about[key], own.pop(key))

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


def _own_shards(leaf: jax.Array) -> _Shards:
    """The shards that this process writes: of each piece, one process's first copy."""
    return [
        (shard.index, np.array(shard.data))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _chunk(leaf: jax.Array) -> tuple[int, ...]:
    """The shape of a chunk: a shard, or equal rows of it."""
    rows, *rest = leaf.sharding.shard_shape(leaf.shape) or (1,)
    size = rows * int(np.prod(rest)) * leaf.dtype.itemsize
    while size > CHUNK_BYTES and rows % 2 == 0:
        rows, size = rows // 2, size // 2
    return (rows, *rest)[: leaf.ndim]


async def _write(
    directory: Any, key: str, shape: tuple[int, ...], chunk: tuple[int, ...], shards: _Shards
) -> None:
    if not shards:
        return
    spec = {
        "driver": "zarr",
        "kvstore": url_of(directory / key),
        "metadata": {"compressor": {"id": "zstd", "level": 1}},
    }
    # Whoever comes first writes the description; the others find the same one.
    array = await tensorstore.open(
        spec, create=True, open=True, dtype=tensorstore.dtype(shards[0][1].dtype), shape=shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
    )  # fmt: skip
    for index, value in shards:
        await array[index].write(value)
