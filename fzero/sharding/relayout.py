"""The one way for a leaf from how it is kept to how it shall be kept: arrays, files, lazy values.

A leaf may be kept with zeros at the end of the dim that is split, and in a pipeline with the layers
of a stack in the rows of the ranks that run them (`Kept`). What a device shall keep is put together
from slices of what there is, shard by shard: nobody holds more than the shards of one leaf beside
what was there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from fzero.axes import PIPE
from fzero.compat import is_key
from fzero.processes import in_turn
from fzero.sharding.lazy_array import Index, LazyArray
from fzero.sharding.split import Home, Split


# Start and stop for each dim.
Spans = tuple[tuple[int, int], ...]
# What helps where the layers of a state would have to be on one rank.
TO_ONE_RANK = (
    "bring the state to one rank with fz.replan(state, model, tx, plan, plan.replace(pipe=1))"
)


@dataclass(frozen=True)
class Kept:
    """How a leaf is kept, whatever it is split over.

    Args:
        shape: its shape without padding; `rows` counted where there are any.
        stored: its shape with padding.
        rows: of a stack that is cut over the ranks of a pipeline, the layer in each row of dim 0;
            -1 for a row of zeros. Empty where the layers are in order.
    """

    shape: tuple[int, ...]
    stored: tuple[int, ...]
    rows: tuple[int, ...] = ()

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Kept:
        """A leaf in its own shape."""
        return Kept(tuple(shape), tuple(shape))

    @staticmethod
    def of(split: Split, sharded: bool = True) -> Kept:
        """A leaf of a layout.

        Args:
            split: how the leaf is split.
            sharded: whether it is kept so; padding is added for that only.
        """
        stored = split.stored_shape if sharded else split.shape
        return Kept(split.shape, stored, _rows(split.home))

    @staticmethod
    def at(home: Home | None, stored: tuple[int, ...]) -> Kept:
        """A leaf that is not split over devices, at a home."""
        return Kept(tuple(stored), tuple(stored), _rows(home))

    @property
    def logical(self) -> tuple[int, ...]:
        """The leaf's own shape, layers counted."""
        if not self.rows:
            return self.shape
        return (sum(row >= 0 for row in self.rows), *self.shape[1:])

    @property
    def padding(self) -> list[Index]:
        """Where there are zeros behind its own shape."""
        return [
            tuple(slice(n, m) if d == dim else slice(0, k) for d, k in enumerate(self.stored))
            for dim, (n, m) in enumerate(zip(self.shape, self.stored, strict=True)) if n < m
        ]  # fmt: skip

    def alike(self, other: Kept) -> bool:
        """Whether both keep one array."""
        return self.stored == other.stored and self.rows == other.rows


def _rows(home: Home | None) -> tuple[int, ...]:
    return () if home is None else home.reordered


def ways_of(leaf: Any) -> tuple[int, ...]:
    """How many ways, which padding makes equal, each dim of a kept leaf is cut."""
    shard = leaf.sharding.shard_shape(tuple(leaf.shape))
    ways = tuple(n // m if m else 1 for n, m in zip(leaf.shape, shard, strict=True))
    # In a pipeline dim 0 is layers in the rows of ranks, of which `Kept.rows` tells.
    return (1, *ways[1:]) if over_ranks(leaf) else ways


def over_ranks(leaf: Any) -> bool:
    """Whether the layers of a stack's leaf are spread over the ranks of a pipeline."""
    return PIPE in getattr(getattr(leaf, "sharding", None), "spec", ())


def filled_up(shape: tuple[int, ...], ways: Sequence[int]) -> tuple[int, ...]:
    """A shape padded to be cut so many ways; itself if it has another number of dims."""
    if len(shape) != len(ways):
        return shape
    return tuple(-(-n // of) * of for n, of in zip(shape, ways, strict=True))


def relayout(source: Any, old: Kept, new: Kept, to: Any) -> jax.Array:
    """A leaf as it shall be kept. Every bit of it stays.

    Args:
        source: what there is: a `jax.Array`, an array on the host, or a `LazyArray` (a file, an
            initial value), of shape `old.stored`.
        old: how that is kept.
        new: how it shall be kept.
        to: shape, dtype and sharding wanted; the shape is `new.stored`.

    Returns:
        The leaf; it shares memory with `source` only if that is a `jax.Array` with the same
        content (`old.alike(new)`).
    """
    if isinstance(source, jax.Array):
        if old.alike(new):
            return place(source, to.sharding)
        if not source.is_fully_addressable:  # no process sees all shards
            return _program(old, new, to.sharding)(source)
        source = _Shards(source)
    elif not isinstance(source, LazyArray):
        source = _Host(np.asarray(source))
    devices: dict[Spans, list[Any]] = {}
    for device, index in to.sharding.addressable_devices_indices_map(to.shape).items():
        spans = tuple(s.indices(n)[:2] for s, n in zip(index, to.shape, strict=True))
        devices.setdefault(spans, []).append(device)
    placed = []
    for spans, replicas in devices.items():
        shard = _shard(source, old, new, spans, to.dtype)
        for number, device in enumerate(replicas):
            there = SingleDeviceSharding(device, memory_kind=to.sharding.memory_kind)
            # The CPU backend adopts aligned numpy memory (jax#37830): it must be one array's alone.
            placed.append(jax.device_put(shard.copy() if number else shard, there))
            placed[-1].block_until_ready()
    # A process without a device of the leaf has nobody to ask for the dtype.
    return jax.make_array_from_single_device_arrays(to.shape, to.sharding, placed, dtype=to.dtype)


def copy_leaf(leaf: Any, to: Any, home: Home | None = None) -> jax.Array:
    """A value in its own shape on the devices of a shape, with zeros where the shape is longer.

    Args:
        leaf: an array of at most that shape, or a `LazyArray`, of which each shard is read alone.
        to: shape, dtype and sharding wanted.
        home: where it lives in a pipeline: says which layer each row of `to` holds.

    Returns:
        An array that shares no memory with `leaf`.
    """
    source = leaf if isinstance(leaf, LazyArray) else np.asarray(leaf)
    old = Kept.whole(source.shape)
    rows = _rows(home)
    shape = (len(rows), *old.shape[1:]) if rows else old.shape
    return relayout(source, old, Kept(shape, tuple(to.shape), rows), to)


def place(array: jax.Array, sharding: Any) -> jax.Array:
    """An array in a sharding; itself if it has it. Random keys of any kind, too."""
    if array.sharding == sharding:
        return array
    if is_key(array):
        data = jax.device_put(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    placed: jax.Array = jax.device_put(array, sharding)
    return placed


def _shard(
    source: LazyArray, old: Kept, new: Kept, spans: Spans, dtype: Any
) -> np.ndarray[Any, Any]:
    """What one device shall keep."""
    shard = np.zeros([stop - start for start, stop in spans], dtype)
    if not spans:
        shard[()] = source.read(())
        return shard
    # Beyond its own shape a leaf is zero; dims behind the first are the same in both.
    ends = [(a, min(b, n)) for (a, b), n in zip(spans[1:], new.shape[1:], strict=True)]
    if any(start >= stop for start, stop in ends):
        return shard
    inner = tuple(slice(*span) for span in ends)
    here = tuple(slice(0, stop - start) for start, stop in ends)
    for at, row, count in _runs(old, new, *spans[0]):
        shard[(slice(at, at + count), *here)] = source.read((slice(row, row + count), *inner))
    return shard


def _runs(old: Kept, new: Kept, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Rows `start` to `stop` of dim 0: index among them, row as it was kept, how many in a row."""
    if old.rows == new.rows:
        stop = min(stop, new.shape[0])
        if start < stop:
            yield 0, start, stop - start
        return
    row_of = {layer: row for row, layer in enumerate(old.rows)} if old.rows else None
    layers = new.rows[start:stop] if new.rows else range(start, min(stop, new.shape[0]))
    run: tuple[int, int, int] | None = None
    for at, layer in enumerate(layers):
        if layer < 0:
            continue
        row = layer if row_of is None else row_of[layer]
        if run is not None and (at, row) == (run[0] + run[2], run[1] + run[2]):
            run = (run[0], run[1], run[2] + 1)
            continue
        if run is not None:
            yield run
        run = (at, row, 1)
    if run is not None:
        yield run


class _Host(LazyArray):
    """An array on the host."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value, self.shape, self.dtype = value, value.shape, value.dtype

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        return self.value[index]


class _Shards(LazyArray):
    """An array on devices of this process; each shard comes to the host once."""

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)
        self._shards: dict[Spans, Any] = {}
        for shard in array.addressable_shards:
            index = zip(shard.index, array.shape, strict=True)
            self._shards.setdefault(tuple(s.indices(n)[:2] for s, n in index), shard.data)

    def read(self, index: Index) -> np.ndarray[Any, Any]:
        """As for every `LazyArray`."""
        wanted = [(s.start, s.stop) for s in index]
        found = np.empty([stop - start for start, stop in wanted], self.dtype)
        for spans, data in self._shards.items():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, spans, strict=True)]
            if all(start < stop for start, stop in common):
                there = tuple(slice(*s) for s in _from(common, wanted))
                self._shards[spans] = np.asarray(data)
                found[there] = self._shards[spans][tuple(slice(*s) for s in _from(common, spans))]
        return found


def _from(spans: Any, origin: Any) -> Any:
    """Spans counted from the starts of others."""
    pairs = zip(spans, origin, strict=True)
    return [(start - first, stop - first) for (start, stop), (first, _) in pairs]


@functools.lru_cache(maxsize=256)
def _program(old: Kept, new: Kept, sharding: Any) -> Any:
    """The same as a program of all processes, over the same devices."""

    def change(leaf: jax.Array) -> jax.Array:
        leaf = leaf[tuple(map(slice, old.shape))]
        if old.rows != new.rows:
            leaf = Home((0,), old.rows).restore(leaf)
            leaf = Home((0,), new.rows).arrange(leaf)
        return jnp.pad(leaf, [(0, b - a) for a, b in zip(leaf.shape, new.stored, strict=True)])

    return in_turn(sharding.device_set, jax.jit(change, out_shardings=sharding))
