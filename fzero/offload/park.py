"""One leaf to its tier and back, without waiting: what streaming and `replan` are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from fzero.offload import disk
from fzero.offload.chunks import Parking
from fzero.offload.disk import DiskArray
from fzero.offload.tiers import (
    DEVICE,
    HOST,
    Leaf,
    Pieces,
    arrived,
    host_sharding,
    joined,
    on_device,
    parts_of,
    tier_of,
)


Moving = Any  # jax.Array | Future[list[jax.Array]] | Future[list[DiskArray]]


def start_fetch(part: Any) -> Moving:
    """Starts bringing an array or file to its devices."""
    if isinstance(part, DiskArray):
        return disk.read_async([part])
    return jax.device_put(part, on_device(part.sharding))


def start_leave(array: jax.Array, tier: str, path: str, name: str) -> Moving:
    """Starts sending an array to a tier, and gives it away: it is released when it is gone."""
    if tier == HOST:
        moving = jax.device_put(array, host_sharding(array.sharding))
        array.delete()  # the runtime keeps the memory for as long as the copy reads it
        return moving
    future = disk.write_async([array], path, [name])

    def gone(done: Future[Any]) -> None:
        if not done.exception():
            array.delete()

    future.add_done_callback(gone)
    return future


def finish(moving: Moving) -> Any:
    """The array or file, where it is going; arrays may still be on their way."""
    return moving.result()[0] if isinstance(moving, Future) else moving


def wait(moving: Sequence[Moving]) -> None:
    """Until all have left where they came from."""
    jax.block_until_ready([finish(one) for one in moving if not isinstance(one, Future)])
    for one in moving:
        finish(one)


def cut_up(array: jax.Array, cut: tuple[int, int]) -> list[jax.Array]:
    """The pieces of an array on its devices."""
    return _cutter(cut, array.sharding)(array)


@functools.cache
def _cutter(cut: tuple[int, int], sharding: Any) -> Callable[[jax.Array], list[jax.Array]]:
    dim, count = cut

    def pieces(array: jax.Array) -> list[jax.Array]:
        rows = array.shape[dim] // count
        return [
            jax.lax.slice_in_dim(array, i * rows, (i + 1) * rows, axis=dim) for i in range(count)
        ]

    return jax.jit(pieces, out_shardings=sharding)


def park(array: jax.Array, parking: Parking, path: str, name: str) -> Leaf:
    """An array on the device as a plan keeps it; the array is given away."""
    parts = [array] if parking.cut is None else cut_up(array, parking.cut)
    shape, dtype, sharding = tuple(array.shape), array.dtype, array.sharding
    if parking.cut is not None:
        array.delete()
    moving = [start_leave(part, parking.tier, path, name) for part in parts]
    wait(moving)
    gone = tuple(finish(one) for one in moving)
    if parking.cut is None:
        return gone[0]
    return Pieces(shape, dtype, sharding, parking.cut[0], gone)


def is_parked_so(leaf: Leaf, parking: Parking) -> bool:
    """Whether a leaf is where a plan keeps it, in the same pieces."""
    if tier_of(leaf) != parking.tier:
        return False
    cut = (leaf.dim, len(leaf.parts)) if isinstance(leaf, Pieces) else None
    return cut == parking.cut


def unpark(leaf: Leaf) -> jax.Array:
    """A leaf on its devices, wherever it is; itself if it is there."""
    leaf = arrived(leaf)
    if tier_of(leaf) == DEVICE:
        return leaf
    parts = [finish(one) for one in [start_fetch(part) for part in parts_of(leaf)]]
    return joined(leaf, parts) if isinstance(leaf, Pieces) else parts[0]
