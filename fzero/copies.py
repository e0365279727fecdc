"""Host values onto devices, shard by shard, and values that are read only where they are needed."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from fzero.zero.partition import Home


Index = tuple[slice, ...]
# Start and stop for each dim.
Spans = tuple[tuple[int, int], ...]


class LazyArray(abc.ABC):
    """A value that is read piece by piece: an initial leaf of a model may be one.

    `fz.init` asks for the piece that each device keeps, so that no host ever holds the whole. A
    subclass sets `shape` and `dtype` (what `read` returns) and defines `read`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abc.abstractmethod
    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """A piece: one slice with start, stop and step 1 for each dim."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The whole value."""
        whole = self.read(tuple(slice(0, n) for n in self.shape))
        return np.array(whole, dtype=dtype, copy=copy)


class Stacked(LazyArray):
    """Equal layers' leaves as the one leaf of a `Stack`: dim 0 counts the layers.

    Args:
        rows: arrays or `LazyArray`s of one shape and dtype; only those that are asked for are read.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = tuple(rows)
        self.shape = (len(self.rows), *self.rows[0].shape)
        self.dtype = np.dtype(self.rows[0].dtype)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        first, *rest = index
        inner = tuple(rest)
        found = np.empty([s.stop - s.start for s in index], self.dtype)
        for place, row in enumerate(self.rows[first]):
            found[place] = row.read(inner) if isinstance(row, LazyArray) else row[inner]
        return found


def copy_leaf(leaf: Any, to: jax.ShapeDtypeStruct, home: Home | None = None) -> jax.Array:
    """A leaf on the devices of a shape, with zeros where the shape is longer.

    Args:
        leaf: an array of at most that shape, or a `LazyArray`, of which each shard is read alone.
        to: shape, dtype and sharding wanted.
        home: where it lives in a pipeline: says which layer each row of `to` holds.
    """
    if isinstance(leaf, LazyArray):
        return _one_by_one(leaf, to, home)
    host = np.asarray(leaf)
    if home is not None:
        host = np.asarray(home.arrange(host))
    if host.shape != to.shape:
        widths = [(0, new - old) for old, new in zip(host.shape, to.shape, strict=True)]
        host = np.pad(host, widths)
    return copy_shards(host, to)


def copy_shards(host: np.ndarray[Any, Any], to: jax.ShapeDtypeStruct) -> jax.Array:
    """A host array on the devices of a shape."""
    # Each shard is copied first: the CPU backend adopts aligned numpy memory (jax#37830), and a
    # step would then write into an array that belongs to somebody else.
    return jax.make_array_from_callback(
        to.shape, to.sharding, lambda index: np.array(host[index], dtype=to.dtype, copy=True)
    )


def _one_by_one(leaf: LazyArray, to: jax.ShapeDtypeStruct, home: Home | None) -> jax.Array:
    """Reads a shard, puts it where it belongs and forgets it, before the next one is read."""
    devices: dict[Spans, list[Any]] = {}
    for device, index in to.sharding.addressable_devices_indices_map(to.shape).items():
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, to.shape, strict=True))
        devices.setdefault(spans, []).append(device)
    placed = []
    for spans, replicas in devices.items():
        shard = _shard(leaf, to, home, spans)
        for number, device in enumerate(replicas):
            place = SingleDeviceSharding(device, memory_kind=to.sharding.memory_kind)
            # Memory that the CPU backend adopts must not be two arrays' (see `copy_shards`).
            placed.append(jax.device_put(shard.copy() if number else shard, place))
            placed[-1].block_until_ready()
    return jax.make_array_from_single_device_arrays(to.shape, to.sharding, placed)


def _shard(
    leaf: LazyArray, to: jax.ShapeDtypeStruct, home: Home | None, spans: Spans
) -> np.ndarray[Any, Any]:
    """What one device keeps of a leaf that is read piece by piece."""
    shard = np.zeros([stop - start for start, stop in spans], to.dtype)
    if home is None or not home.rows:
        ends = [(start, min(stop, n)) for (start, stop), n in zip(spans, leaf.shape, strict=True)]
        _fill(shard, leaf, ends)
        return shard
    for place, row in enumerate(home.rows[slice(*spans[0])]):
        if row >= 0:
            inner = zip(spans[1:], leaf.shape[1:], strict=True)
            ends = [(row, row + 1), *((start, min(stop, n)) for (start, stop), n in inner)]
            _fill(shard[place : place + 1], leaf, ends)
    return shard


def _fill(shard: np.ndarray[Any, Any], leaf: LazyArray, spans: list[tuple[int, int]]) -> None:
    if all(start < stop for start, stop in spans):
        here = tuple(slice(0, stop - start) for start, stop in spans)
        shard[here] = leaf.read(tuple(slice(*span) for span in spans))
