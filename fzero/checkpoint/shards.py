"""Leaves that not every process has a shard of: each process writes its own shards of them.

Orbax writes arrays that all processes hold shards of. Leaves of a pipeline's stage are at home on
one rank, whose devices are one process's, or some processes'. Their shards are written here, as one
zarr array a leaf with whole shards as its chunks, so that no two processes write into one file.
What makes a checkpoint whole or not there at all (a temporary directory, a rename when everybody
has written) stays orbax's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import numpy as np

from fzero.checkpoint.urls import kvstore
from fzero.tree import leaf_bytes


FOLDER = "parts"  # as checkpoints have it
# A chunk is compressed in memory, and read whole for any slice of it.
CHUNK_BYTES = 64 * 2**20
_Shards = list[tuple[tuple[slice, ...], np.ndarray[Any, Any]]]


@dataclass
class Shards:
    """One process's shards of an array, in its memory.

    Args:
        shape: of the whole.
        chunk: of what is written at once; whole shards, or rows of them.
        shards: where they belong, and their values.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    shards: _Shards


def shards_of(leaf: Any) -> Shards:
    """What this process writes of an array: of each shard, one process's first copy.

    Args:
        leaf: an array on devices, or one that every process has on its host.
    """
    if isinstance(leaf, jax.Array):
        return Shards(leaf.shape, _chunk(leaf), _own_shards(leaf))
    own = [((slice(None),) * leaf.ndim, leaf)] if jax.process_index() == 0 else []
    return Shards(leaf.shape, _rows(leaf, leaf.shape), own)


def is_elsewhere(leaf: Any) -> bool:
    """Whether some process has no shard of an array."""
    if not isinstance(leaf, jax.Array) or jax.process_count() == 1:
        return False
    devices: Any = leaf.sharding.device_set
    owners = {device.process_index for device in devices}
    return len(owners) < jax.process_count()


def shards_path(folder: PurePath, key: str) -> dict[str, Any]:
    """Where a leaf is, as `tensorstore.open` takes it.

    Args:
        folder: of one checkpoint.
        key: the leaf's.
    """
    return {"driver": "zarr", "kvstore": kvstore(folder / FOLDER / key)}


def _own_shards(leaf: jax.Array) -> _Shards:
    """The shards that this process writes: of each shard, one process's first copy."""
    return [
        (shard.index, np.array(shard.data))
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _chunk(leaf: jax.Array) -> tuple[int, ...]:
    """The shape of a chunk: a shard, or equal rows of it."""
    return _rows(leaf, leaf.sharding.shard_shape(leaf.shape))


def _rows(leaf: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    rows, *rest = shape or (1,)
    size = leaf_bytes(leaf, shape)
    while size > CHUNK_BYTES and rows % 2 == 0:
        rows, size = rows // 2, size // 2
    return (rows, *rest)[: len(shape)]


async def write_shards(kvstore: Any, shards: Shards) -> None:
    """Writes one process's shards of an array.

    Args:
        kvstore: where the array is, as tensorstore takes it.
        shards: what to write.
    """
    import tensorstore

    if not shards.shards:
        return
    spec = {
        "driver": "zarr",
        "kvstore": kvstore,
        "metadata": {"compressor": {"id": "zstd", "level": 1}},
    }
    # Whoever comes first writes the description; the others find the same one.
    array = await tensorstore.open(
        spec, create=True, open=True, dtype=tensorstore.dtype(shards.shards[0][1].dtype),
        shape=shards.shape, chunk_layout=tensorstore.ChunkLayout(chunk_shape=shards.chunk),
    )  # fmt: skip
    for index, value in shards.shards:
        await array[index].write(value)
