"""The disk tier: arrays in a file without a name, and back to the same devices.

    handles = disk.write([w, b], "/nvme/offload", ["params/w", "params/b"])
    w, b = disk.read(handles)

Each process writes the shards that it can address, each distinct one once, into its own file
(`fzero.storage.scratch`). The space belongs to the handles: it goes when they do. Bytes are written
as they are in memory, so every dtype comes back exactly, NaN payloads included.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from fzero.errors import PlacementError
from fzero.storage import requests
from fzero.storage.handle import Handle, typed
from fzero.storage.requests import Shard
from fzero.storage.scratch import (
    UNCHANGED,
    Bytes,
    Extent,
    Scratch,
    advice,
    aligned,
    padded,
    scratch,
)
from fzero.tree import is_plain, leaf_bytes


__all__ = ["DiskArray", "read", "read_async", "write", "write_async"]

# Which part of an array: first and last element (exclusive) in each dim.
Index = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _StoredShard:
    """One shard in the file.

    Args:
        index: the slice of the array.
        nbytes: of that slice.
        extent: where it is.
        checksums: of its chunks.
    """

    index: Index
    nbytes: int
    extent: Extent
    checksums: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DiskArray(Handle):
    """An array on disk: what `write` gives for a `jax.Array`, and `read` takes.

    An immutable handle. The space is let go when it is garbage collected, by `delete`, or when the
    process ends. `jax.tree` sees it as a leaf; jax itself cannot compute with it.

    Args:
        shape: of the whole array.
        dtype: of the array.
        sharding: that the array had, in device memory, and will have again.
        name: the leaf's path, for messages.
        weak_type: whether it is made of Python numbers, which jit looks at.

    Raises:
        PlacementError: where it is used as if it were an array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    name: str
    weak_type: bool
    _file: Scratch = field(repr=False)
    _shards: tuple[_StoredShard, ...] = field(repr=False)

    def __post_init__(self) -> None:
        extents = [shard.extent for shard in self._shards]
        release = weakref.finalize(self, self._file.release, extents)
        release.atexit = False  # the kernel does it
        object.__setattr__(self, "_finalizer", release)

    @property
    def directory(self) -> Path:
        """Where the bytes are; the file has no name there."""
        return self._file.directory

    def is_deleted(self) -> bool:
        """Whether the bytes are gone for good."""
        return not self._finalizer.alive  # type: ignore[attr-defined]

    def delete(self) -> None:
        """Lets the space go; once is enough."""
        self._finalizer()  # type: ignore[attr-defined]

    def describe(self) -> str:
        """How it is read and written: `direct`, or `buffered` and why."""
        return self._file.mode

    def _where(self) -> str:
        return (
            f"`{self.name}` ({typed(self.shape, self.dtype)}, {self.nbytes:,} bytes) is on disk in"
            f" {self.directory}; expected an array in device memory. `fz.reload(state)` brings it"
            " back."
        )

    def __deepcopy__(self, _: Any) -> DiskArray:
        return self

    def __reduce__(self) -> Any:
        raise PlacementError(
            f"`{self.name}` is on disk in {self.directory}: a handle cannot be pickled, because its"
            " bytes go when this process does. Reload the state first, or save a checkpoint."
        )


def write(
    arrays: Sequence[jax.Array], path: str | os.PathLike[str], names: Sequence[str]
) -> list[DiskArray]:
    """Writes arrays to disk; they stay as they are.

    Args:
        arrays: in device or pinned host memory, whole or sharded.
        path: a directory for offloaded state, on a fast disk of this machine; made if its parent
            exists. Processes may share it.
        names: the leaves' paths, for messages.

    Returns:
        A handle for each array.

    Raises:
        PlacementError: something cannot be written. Nothing is left behind.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path:
        ...     (handle,) = write([jnp.arange(4.0)], path, ["w"])
        ...     read([handle])
        ...     handle.delete()
        [Array([0., 1., 2., 3.], dtype=float32)]
    """
    if len(arrays) != len(names):
        raise PlacementError(
            f"offload to disk: {len(arrays)} arrays, {len(names)} names; expected a name for each"
        )
    for array, name in zip(arrays, names, strict=True):
        _check(array, name)
    if not arrays:
        return []
    file = scratch(path)
    distinct = [_distinct(array) for array in arrays]
    sizes = [leaf_bytes(data) for shards in distinct for data in shards.values()]
    extents = _take(file, sizes, arrays, names)
    ranges = iter(zip(extents, sizes, strict=True))
    leaves: list[list[tuple[Index, Shard]]] = []
    for array, name, shards in zip(arrays, names, distinct, strict=True):
        leaves.append([])
        for number, (index, data) in enumerate(shards.items()):
            what = functools.partial(_what, name, number, len(shards), array.shape, array.dtype)
            memory = functools.partial(_bytes_of, data)
            leaves[-1].append((index, Shard(file, *next(ranges), what, memory)))
    try:
        with _bare_errors():
            requests.write([shard for leaf in leaves for _, shard in leaf])
    except BaseException:
        file.release(extents)
        raise
    return [
        _handle(file, array, name, leaf)
        for array, name, leaf in zip(arrays, names, leaves, strict=True)
    ]


def read(leaves: Sequence[DiskArray], memory_kind: str = "device") -> list[jax.Array]:
    """Reads arrays back, with the shardings that they had. They stay on disk, too.

    Args:
        leaves: what `write` gave.
        memory_kind: where to; `"pinned_host"` reads into host memory, without the device.

    Returns:
        A new array for each.

    Raises:
        PlacementError: something is damaged, or cannot be read.
    """
    for leaf in leaves:
        if not isinstance(leaf, DiskArray):
            raise PlacementError(
                f"reload from disk: expected handles that `write` gave, got {type(leaf).__name__}"
            )
        if leaf.is_deleted():
            raise PlacementError(
                f"reload from disk: `{leaf.name}` was deleted ({leaf.directory}). Reload before the"
                " handle is deleted, or restore a checkpoint."
            )
    returning = [_Returning(leaf, memory_kind) for leaf in leaves]
    with _bare_errors():
        requests.read([shard for leaf in returning for shard in leaf.shards()])
    _place([(leaf, *copy) for leaf in returning for copy in leaf.waiting])
    return [leaf.array() for leaf in returning]


def write_async(
    arrays: Sequence[jax.Array], path: str | os.PathLike[str], names: Sequence[str]
) -> Future[list[DiskArray]]:
    """`write` in the background; the arrays must not be donated or deleted until it is done.

    Args:
        arrays: as for `write`.
        path: as for `write`.
        names: as for `write`.

    Returns:
        The future of what `write` returns, or raises.
    """
    return requests.executor().submit(write, list(arrays), path, list(names))


def read_async(leaves: Sequence[DiskArray], memory_kind: str = "device") -> Future[list[jax.Array]]:
    """`read` in the background.

    Args:
        leaves: as for `read`.
        memory_kind: as for `read`.

    Returns:
        The future of what `read` returns, or raises.
    """
    return requests.executor().submit(read, list(leaves), memory_kind)


def _check(array: Any, name: str) -> None:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise PlacementError(
            f"offload to disk: `{name}` is a {type(array).__name__}; expected a jax.Array."
        )
    if not is_plain(array):
        raise PlacementError(
            f"offload to disk: `{name}` holds random keys ({array.dtype}), whose bytes mean nothing"
            " without their kind; expected numbers. Leave it where it is: it is small."
        )
    if array.is_deleted():
        raise PlacementError(
            f"offload to disk: `{name}` is deleted: its memory went to the result of a call that it"
            " was donated to, or `delete` was called. Offload that call's result."
        )


def _take(
    file: Scratch, sizes: Sequence[int], arrays: Sequence[jax.Array], names: Sequence[str]
) -> list[Extent]:
    try:
        return file.take(sizes)
    except OSError as error:
        largest = max(range(len(arrays)), key=lambda i: arrays[i].nbytes)
        needed, free = sum(map(padded, sizes)), file.free_bytes()
        what = _what(names[largest], 0, 1, arrays[largest].shape, arrays[largest].dtype)
        full = error.errno == errno.ENOSPC
        raise PlacementError(
            f"offload to disk: {needed:,} bytes to write, {free:,} bytes free in {file.directory};"
            f" the largest is {what}. {'' if full else f'{error.strerror}. '}"
            f"{advice(error)} To write less, pass `fraction`. {UNCHANGED}"
        ) from error


def _distinct(array: jax.Array) -> dict[Index, jax.Array]:
    """The shards that this process holds, each once."""
    found: dict[Index, jax.Array] = {}
    for shard in array.addressable_shards:
        found.setdefault(_index(shard.index, array.shape), shard.data)
    return found


def _bytes_of(data: jax.Array) -> Bytes:
    """The bytes of an array on one device; a view of them if the host can read them there."""
    (device,) = data.devices()
    if device.platform != "cpu":
        # A new array object: jax keeps a copy that it makes with the object it was asked of.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    # (With `jax.device_get`, jax 0.11 would not take it as a donation afterwards, on CPUs.)
    return np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)


def _handle(
    file: Scratch, array: jax.Array, name: str, shards: Sequence[tuple[Index, Shard]]
) -> DiskArray:
    stored = tuple(
        _StoredShard(index, shard.nbytes, shard.extent, tuple(shard.checksums))
        for index, shard in shards
    )
    sharding = array.sharding
    if sharding.memory_kind not in (None, "device"):
        sharding = sharding.with_memory_kind("device")
    weak = bool(array.weak_type)
    return DiskArray(array.shape, np.dtype(array.dtype), sharding, name, weak, file, stored)


# Copies of fewer bytes wait for each other: in one call of jax each costs less, and the threads
# that read do not wait for the interpreter.
_SMALL = 1 << 20


class _Returning:
    """An array being read: each shard's bytes go to all devices that hold it."""

    def __init__(self, leaf: DiskArray, memory_kind: str) -> None:
        self._leaf = leaf
        self._sharding = leaf.sharding
        # `leaf.sharding` itself where possible: an equal one would be another object.
        if memory_kind != (leaf.sharding.memory_kind or "device"):
            self._sharding = leaf.sharding.with_memory_kind(memory_kind)
        self._alone = len(leaf.sharding.device_set) == 1
        self.arrays: dict[jax.Device, jax.Array] = {}
        self.waiting: list[tuple[jax.Device, Any]] = []

    def shards(self) -> list[Shard]:
        """What is to be read."""
        leaf, devices = self._leaf, dict[Index, list[jax.Device]]()
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            devices.setdefault(_index(index, leaf.shape), []).append(device)
        found = []
        for number, stored in enumerate(leaf._shards):
            about = leaf.name, number, len(leaf._shards), leaf.shape, leaf.dtype
            found.append(Shard(
                leaf._file, stored.extent, stored.nbytes, functools.partial(_what, *about),
                functools.partial(aligned, stored.extent.nbytes), stored.checksums,
                functools.partial(self._keep, stored, devices[stored.index]),
            ))  # fmt: skip
        return found

    def _keep(self, stored: _StoredShard, devices: Sequence[jax.Device], data: Bytes) -> None:
        shape = [stop - start for start, stop in stored.index]
        value = data[: stored.nbytes].view(self._leaf.dtype).reshape(shape)
        if stored.nbytes < _SMALL:
            self.waiting += [(device, value) for device in devices]
        else:
            _place([(self, device, value) for device in devices])

    def sharding_on(self, device: jax.Device) -> Sharding:
        """Where a shard goes."""
        if self._alone:
            return self._sharding
        return SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)

    def array(self) -> jax.Array:
        """The whole, once everything is there. Maybe no shard of it is in this process."""
        leaf, sharding = self._leaf, self._sharding
        if self._alone and self.arrays:
            (array,) = self.arrays.values()
        else:
            arrays = [self.arrays[x] for x in sharding.addressable_devices_indices_map(leaf.shape)]
            with jax.enable_x64(True):
                array = jax.make_array_from_single_device_arrays(
                    leaf.shape, sharding, arrays, dtype=leaf.dtype
                )
        if leaf.weak_type:  # in device memory, where programs run
            array = jax.device_put(array, leaf.sharding)
            # Python numbers have 64 bits just where those are switched on.
            with jax.enable_x64(leaf.dtype.itemsize == 8 * (1 + (leaf.dtype.kind == "c"))):
                array = jax.device_put(_weakly(leaf.sharding)(array), sharding)
        return array


def _place(copies: Sequence[tuple[_Returning, jax.Device, Any]]) -> None:
    if not copies:
        return
    shardings = [leaf.sharding_on(device) for leaf, device, _ in copies]
    # 64-bit values keep their dtype: a thread that reads may not have them switched on.
    with jax.enable_x64(True):
        arrays = jax.device_put([value for _, _, value in copies], shardings)
    for (leaf, device, _), array in zip(copies, arrays, strict=True):
        leaf.arrays[device] = array


@functools.lru_cache(maxsize=64)
def _weakly(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """A copy that is weakly typed. Nothing else in jax makes a typed array so."""

    def copy(array: jax.Array) -> jax.Array:
        return jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)

    return jax.jit(copy, out_shardings=sharding)


def _index(index: Sequence[slice] | None, shape: Sequence[int]) -> Index:
    return tuple(one.indices(dim)[:2] for one, dim in zip(index or (), shape, strict=True))


def _what(name: str, number: int, count: int, shape: Sequence[int], dtype: Any) -> str:
    whole = f"`{name}` ({typed(shape, dtype)})"
    return whole if count == 1 else f"shard {number} of {count} of {whole}"


@contextlib.contextmanager
def _bare_errors() -> Iterator[None]:
    """Errors without frames: those hold views of the arrays, which could then not be donated."""
    try:
        yield
    except PlacementError as error:
        cause = error.__cause__ and error.__cause__.with_traceback(None)
        raise error.with_traceback(None) from cause
