"""Leaves to their tiers and back, without waiting: what streaming and `replan` are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from fzero.errors import PlacementError
from fzero.sharding.buckets import Parking
from fzero.storage import disk
from fzero.storage.disk import DiskArray
from fzero.storage.tiers import (
    DEVICE,
    DISK,
    Leaf,
    Slabs,
    host_sharding,
    lies_in,
    on_device,
    settled,
    slabs_of,
    tier_of,
    whole_leaf,
)


class Inbound:
    """Slabs on their way to their devices.

    Args:
        slabs: arrays, wherever they are, and arrays on disk, which are read together.
    """

    def __init__(self, slabs: Sequence[Any]) -> None:
        self._on_disk = [i for i, one in enumerate(slabs) if isinstance(one, DiskArray)]
        rest = [i for i in range(len(slabs)) if i not in self._on_disk]
        shardings = [on_device(slabs[i].sharding) for i in rest]
        arrays = jax.device_put([slabs[i] for i in rest], shardings)
        self._arrays = dict(zip(rest, arrays, strict=True))
        self._read: Future[list[jax.Array]] | None = None
        if self._on_disk:
            self._read = disk.read_async([slabs[i] for i in self._on_disk])

    def settled(self) -> list[jax.Array]:
        """The arrays on their devices; those that were in host memory may still be on their way.

        Raises:
            PlacementError: something cannot be read.
        """
        if self._read is not None:
            self._arrays.update(zip(self._on_disk, self._read.result(), strict=True))
        return [self._arrays[i] for i in range(len(self._arrays))]


class Outbound:
    """Arrays on their way to where a plan keeps them. They are given away.

    Nothing is let go before all of them are there: neither the arrays, nor what they replace.

    Args:
        arrays: on the device.
        parking: of each.
        path: directory for those that go to disk, which are written together.
        replaced: what is released afterwards.
    """

    def __init__(
        self,
        arrays: Sequence[jax.Array],
        parking: Sequence[Parking],
        path: str,
        replaced: Sequence[Any] = (),
    ) -> None:
        self._arrays, self._names = arrays, [one.name for one in parking]
        self._replaced = replaced
        self._on_disk = [i for i, one in enumerate(parking) if one.tier == DISK]
        on_host = [i for i in range(len(arrays)) if i not in self._on_disk]
        copies = _to_host([arrays[i] for i in on_host])
        self._parked: dict[int, Any] = dict(zip(on_host, copies, strict=True))
        self._written: Future[list[DiskArray]] | None = None
        if self._on_disk:
            out = [arrays[i] for i in self._on_disk]
            names = [self._names[i] for i in self._on_disk]
            self._written = disk.write_async(out, path, names)

    def settled(self, otherwise: Callable[[str, PlacementError], Any] | None = None) -> list[Any]:
        """What was made of the arrays, each where it is kept.

        Args:
            otherwise: if given, what cannot be written stays in host memory, and this is called
                with its name and the reason.

        Raises:
            PlacementError: something cannot be written; nothing was let go.
        """
        jax.block_until_ready(list(self._parked.values()))
        if self._written is not None:
            out = [self._arrays[i] for i in self._on_disk]
            try:
                written: Sequence[Any] = self._written.result()
            except PlacementError as error:
                if otherwise is None:
                    raise
                for i in self._on_disk:
                    otherwise(self._names[i], error)
                written = jax.block_until_ready(_to_host(out))
            self._parked.update(zip(self._on_disk, written, strict=True))
        for one in (*self._arrays, *self._replaced):
            one.delete()
        return [self._parked[i] for i in range(len(self._arrays))]


def _to_host(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    copies: list[jax.Array] = jax.device_put(
        list(arrays), [host_sharding(array.sharding) for array in arrays]
    )
    return copies


def cut_up(array: jax.Array, cut: tuple[int, int]) -> list[jax.Array]:
    """The slabs of an array on its devices."""
    return _cutter(cut, array.sharding)(array)


@functools.cache
def _cutter(cut: tuple[int, int], sharding: Any) -> Callable[[jax.Array], list[jax.Array]]:
    dim, count = cut

    def slabs(array: jax.Array) -> list[jax.Array]:
        rows = array.shape[dim] // count
        return [
            jax.lax.slice_in_dim(array, i * rows, (i + 1) * rows, axis=dim) for i in range(count)
        ]

    return jax.jit(slabs, out_shardings=sharding)


def park(array: jax.Array, parking: Parking, path: str) -> Leaf:
    """An array on the device as a plan keeps it; the array is given away.

    Raises:
        PlacementError: it cannot be written.
    """
    if parking.cut is None:
        return Outbound([array], [parking], path).settled()[0]
    slabs = cut_up(array, parking.cut)
    shape, dtype, sharding = tuple(array.shape), array.dtype, array.sharding
    array.delete()  # there is no room for both
    kept = Outbound(slabs, [parking] * len(slabs), path).settled()
    return Slabs(shape, dtype, sharding, parking.cut[0], tuple(kept))


def is_parked_so(leaf: Leaf, parking: Parking) -> bool:
    """Whether a leaf is where a plan keeps it, in the same slabs."""
    if not lies_in(leaf, parking.tier):
        return False
    cut = (leaf.dim, len(leaf.slabs)) if isinstance(leaf, Slabs) else None
    return cut == parking.cut


def unpark(leaf: Leaf) -> jax.Array:
    """A leaf on its devices, wherever it is; itself if it is there."""
    leaf = settled(leaf)
    if tier_of(leaf) == DEVICE:
        return leaf
    arrays = Inbound(slabs_of(leaf)).settled()
    return whole_leaf(leaf, arrays) if isinstance(leaf, Slabs) else arrays[0]
