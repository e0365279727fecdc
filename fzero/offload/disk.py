"""The disk tier: arrays as files, one per shard, and back to the same devices.

    handles = disk.write([w, b], "/nvme/offload", ["params/w", "params/b"])
    w, b = disk.read(handles)

Each process writes the shards that it can address, each distinct one once, into a directory of its
own (`fzero.offload.owners`). The files belong to the handles: they go when the handles do. Bytes
are written as they are in memory, so every dtype comes back exactly, NaN payloads included.

Plain system calls instead of tensorstore, which was slower: `fzero.offload.files` says more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from fzero.errors import PlacementError
from fzero.offload import files, owners
from fzero.offload.owners import sweep
from fzero.tree import is_plain


__all__ = ["DiskArray", "read", "read_async", "sweep", "write", "write_async"]

# Which part of an array: first and last element (exclusive) in each dim.
Index = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Shard:
    """What is in one file.

    Args:
        file: its name.
        index: the part of the array.
        nbytes: of that part.
        seed: of its checksums.
        checksums: of its chunks.
    """

    file: str
    index: Index
    nbytes: int
    seed: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class DiskArray:
    """The shards of one array as files: what `write` gives for a `jax.Array`, and `read` takes.

    An immutable handle. The files are removed when it is garbage collected, by `delete`, or when
    the process ends. `jax.tree` sees it as a leaf; jax itself cannot compute with it.

    Args:
        shape: of the whole array.
        dtype: of the array.
        sharding: that the array had, in device memory, and will have again.
        name: the leaf's path, for messages.
        directory: where the files are.

    Raises:
        PlacementError: where it is used as if it were an array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding
    name: str
    directory: Path
    _shards: tuple[_Shard, ...] = field(repr=False)
    _mode: files.Mode = field(repr=False)
    # Arrays can be weakly typed (made of Python numbers) and not committed to their device: jit
    # would compile anew, or refuse to mix devices, if these came back otherwise.
    _weak: bool = field(repr=False)
    _committed: bool = field(repr=False)
    _finalizer: weakref.finalize[..., Any] | None = field(default=None, init=False, repr=False)

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Dims."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Whether the files are gone for good."""
        return self._finalizer is not None and not self._finalizer.alive

    def delete(self) -> None:
        """Removes the files; once is enough."""
        if self._finalizer is not None:
            self._finalizer()

    def describe(self) -> str:
        """How the files are read and written: `direct`, or `buffered` and why."""
        return self._mode.describe()

    def _own(self, call: owners.Call) -> DiskArray:
        release = weakref.finalize(self, call.release, [shard.file for shard in self._shards])
        object.__setattr__(self, "_finalizer", release)
        return self

    def _used(self, *_: Any, **__: Any) -> Any:
        raise PlacementError(
            f"`{self.name}` ({_typed(self.shape, self.dtype)}, {self.nbytes:,} bytes) is on disk in"
            f" {self.directory}; expected an array in device memory. `fz.reload(state)` brings it"
            " back."
        )

    __array__ = _used

    def __copy__(self) -> DiskArray:
        return self

    def __deepcopy__(self, _: Any) -> DiskArray:
        return self

    def __reduce__(self) -> Any:
        raise PlacementError(
            f"`{self.name}` is on disk in {self.directory}: a handle cannot be pickled, because its"
            " files go when this process does. Reload the state first, or save a checkpoint."
        )


def write(
    arrays: Sequence[jax.Array], path: str | os.PathLike[str], names: Sequence[str]
) -> list[DiskArray]:
    """Writes arrays to disk; they stay as they are.

    Args:
        arrays: in device or pinned host memory, whole or sharded.
        path: a directory for offloaded state, on a fast disk of this machine; made if its parent
            exists. Processes may share it.
        names: the leaves' paths, for messages and for the manifest.

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
    call = owners.begin(path, len(arrays))
    try:
        parts = [
            _outgoing(call, number, *leaf)
            for number, leaf in enumerate(zip(arrays, names, strict=True))
        ]
        outgoing = [file for leaf in parts for _, file in leaf]
        _check_space(call, outgoing)
        files.transfer(outgoing)
        leaves = [
            _handle(call, array, name, leaf)
            for array, name, leaf in zip(arrays, names, parts, strict=True)
        ]
        call.write_manifest(_FORMAT, [_described(leaf) for leaf in leaves])
    except BaseException as error:
        call.abandon()
        if isinstance(error, PlacementError):
            # Without frames: those below hold views of the arrays, which could then not be donated.
            raise error.with_traceback(None) from _bare(error.__cause__)
        raise
    return [leaf._own(call) for leaf in leaves]


def read(leaves: Sequence[DiskArray], memory_kind: str = "device") -> list[jax.Array]:
    """Reads arrays back, with the shardings that they had. The files stay.

    Args:
        leaves: what `write` gave.
        memory_kind: where to; `"pinned_host"` reads into host memory, without the device.

    Returns:
        A new array for each.

    Raises:
        PlacementError: a file is missing, damaged or not the one that was written.
    """
    for leaf in leaves:
        if not isinstance(leaf, DiskArray):
            raise PlacementError(
                f"reload from disk: expected handles that `write` gave, got {type(leaf).__name__}"
            )
        if leaf.is_deleted():
            raise PlacementError(
                f"reload from disk: the files of `{leaf.name}` were deleted ({leaf.directory})."
                " Reload before the handle is deleted, or restore a checkpoint."
            )
    arriving = [_Arriving(leaf, memory_kind) for leaf in leaves]
    try:
        files.transfer([file for leaf in arriving for file in leaf.incoming()])
    except PlacementError as error:
        raise error.with_traceback(None) from _bare(error.__cause__)
    _place_small(arriving)
    return [leaf.array() for leaf in arriving]


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
    return files.executor().submit(write, list(arrays), path, list(names))


def read_async(leaves: Sequence[DiskArray], memory_kind: str = "device") -> Future[list[jax.Array]]:
    """`read` in the background.

    Args:
        leaves: as for `read`.
        memory_kind: as for `read`.

    Returns:
        The future of what `read` returns, or raises.
    """
    return files.executor().submit(read, list(leaves), memory_kind)


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


def _check_space(call: owners.Call, outgoing: Sequence[files.Outgoing]) -> None:
    """Better than to notice after minutes of writing."""
    needed = sum(files.padded(file.nbytes) for file in outgoing)
    free = files.free_bytes(call.directory)
    if needed > free:
        most = max(outgoing, key=lambda file: file.nbytes)
        raise PlacementError(
            f"offload to disk: {needed:,} bytes to write, {free:,} bytes free in"
            f" {call.owner.base}; the largest is {most.what()}. The disk is full: free space there,"
            " pass another `path`, or offload less (`fraction`). Nothing was moved: all arrays are"
            " in memory, unchanged."
        )


def _outgoing(
    call: owners.Call, number: int, array: jax.Array, name: str
) -> list[tuple[Index, files.Outgoing]]:
    """The files of one array: a distinct shard each."""
    distinct: dict[Index, jax.Array] = {}
    for shard in array.addressable_shards:
        distinct.setdefault(_index(shard.index, array.shape), shard.data)
    found = []
    for part, (index, data) in enumerate(distinct.items()):
        file = f"{number:05d}-{part:03d}.shard"
        what = functools.partial(_what, name, part, len(distinct), array.shape, array.dtype)
        source = functools.partial(_bytes_of, data)
        nbytes = data.size * data.dtype.itemsize
        seed = files.seed_of(call.identity(file))
        path = call.directory / file
        found.append((index, files.Outgoing(source, path, what, nbytes, call.mode, seed)))
    return found


def _bytes_of(data: jax.Array) -> files.Bytes:
    """The bytes of an array on one device; a view of them if the host can read them there."""
    (device,) = data.devices()
    if device.platform != "cpu":
        # A new array object: jax keeps a copy that it makes with the object it was asked of.
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    return np.ascontiguousarray(jax.device_get(data)).reshape(-1).view(np.uint8)


def _handle(
    call: owners.Call, array: jax.Array, name: str, parts: list[tuple[Index, files.Outgoing]]
) -> DiskArray:
    shards = tuple(
        _Shard(file.path.name, index, file.nbytes, file.seed, tuple(file.checksums))
        for index, file in parts
    )
    sharding = array.sharding
    if sharding.memory_kind not in (None, "device"):
        sharding = sharding.with_memory_kind("device")
    dtype, flags = np.dtype(array.dtype), (bool(array.weak_type), bool(array.committed))
    return DiskArray(array.shape, dtype, sharding, name, call.directory, shards, call.mode, *flags)


class _Arriving:
    """An array being read: each file's bytes go to all devices that hold that shard."""

    def __init__(self, leaf: DiskArray, memory_kind: str) -> None:
        self._leaf = leaf
        self.pieces: dict[jax.Device, jax.Array] = {}
        self.small: list[tuple[jax.Device, Any]] = []
        self.dtype = leaf.dtype
        # `leaf.sharding` itself where possible: an equal one would be another object.
        self._sharding = leaf.sharding
        if memory_kind != (leaf.sharding.memory_kind or "device"):
            self._sharding = leaf.sharding.with_memory_kind(memory_kind)
        self._loose = not leaf._committed and self._sharding is leaf.sharding
        self._alone = len(leaf.sharding.device_set) == 1

    def incoming(self) -> list[files.Incoming]:
        """Its files."""
        leaf, devices = self._leaf, dict[Index, list[jax.Device]]()
        for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            devices.setdefault(_index(index, leaf.shape), []).append(device)
        found = []
        for part, shard in enumerate(leaf._shards):
            done = functools.partial(self._place, shard, devices[shard.index])
            about = leaf.name, part, len(leaf._shards), leaf.shape, leaf.dtype
            what = functools.partial(_what, *about)
            path = leaf.directory / shard.file
            others = path, what, shard.nbytes, leaf._mode, shard.seed
            found.append(files.Incoming(shard.checksums, done, *others))
        return found

    def _place(self, shard: _Shard, devices: Sequence[jax.Device], data: files.Bytes) -> None:
        shape = [stop - start for start, stop in shard.index]
        value = data.view(self._leaf.dtype).reshape(shape)
        if self._loose:
            with _exact(self._leaf.dtype), jax.default_device(devices[0]):
                self.pieces[devices[0]] = jax.device_put(value)
        elif shard.nbytes < _SMALL:
            self.small += [(device, value) for device in devices]
        else:
            places = [self.place(device) for device in devices]
            with _exact(self._leaf.dtype):
                pieces = jax.device_put([value] * len(places), places)
            self.pieces.update(zip(devices, pieces, strict=True))

    def place(self, device: jax.Device) -> Sharding:
        """Where a piece goes."""
        if self._alone:
            return self._sharding
        return SingleDeviceSharding(device, memory_kind=self._sharding.memory_kind)

    def array(self) -> jax.Array:
        """The whole, once all files are there."""
        leaf, sharding = self._leaf, self._sharding
        if self._alone and not leaf._weak:
            return self.pieces.popitem()[1]
        with _exact(leaf.dtype):
            if self._loose:
                return _weakly(None)(self.pieces.popitem()[1])
            order = sharding.addressable_devices_indices_map(leaf.shape)
            array = jax.make_array_from_single_device_arrays(
                leaf.shape, sharding, [self.pieces[device] for device in order], dtype=leaf.dtype
            )
            if leaf._weak:  # in device memory, where programs run
                array = jax.device_put(array, leaf.sharding)
                array = jax.device_put(_weakly(leaf.sharding)(array), sharding)
        return array


# Shards below this many bytes wait for each other: in one call of jax each costs less, and the
# threads that read do not wait for the interpreter.
_SMALL = 1 << 20


def _place_small(arriving: Sequence[_Arriving]) -> None:
    for wide in (False, True):
        late = [
            (leaf, device, value)
            for leaf in arriving
            for device, value in leaf.small
            if _is_wide(leaf.dtype) == wide
        ]
        if late:
            places = [leaf.place(device) for leaf, device, _ in late]
            with _exact(late[0][0].dtype):
                pieces = jax.device_put([value for _, _, value in late], places)
            for (leaf, device, _), piece in zip(late, pieces, strict=True):
                leaf.pieces[device] = piece


@functools.lru_cache(maxsize=64)
def _weakly(sharding: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    """A copy that is weakly typed. Nothing else in jax makes a typed array so."""

    def copy(array: jax.Array) -> jax.Array:
        return jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)

    return jax.jit(copy, out_shardings=sharding)


def _is_wide(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 8 * (1 + (dtype.kind == "c"))


def _exact(dtype: np.dtype[Any]) -> contextlib.AbstractContextManager[Any]:
    """Where 64-bit values keep their dtype: the thread that reads may not have it switched on."""
    return jax.enable_x64(True) if _is_wide(dtype) else contextlib.nullcontext()


def _index(index: Sequence[slice] | None, shape: Sequence[int]) -> Index:
    return tuple(part.indices(dim)[:2] for part, dim in zip(index or (), shape, strict=True))


# With the lines of `_described`, all that a reader of the manifest has to know.
_FORMAT = {
    "block_bytes": files.BLOCK,
    "checksum": "XXH3 (64 bits) of each chunk, padded with zeros to whole blocks; a chunk's seed is"
    " that of its shard plus the chunk's number",
}


# Of few different ones, thousands of times.
_text = functools.lru_cache(maxsize=256)(str)


def _described(leaf: DiskArray) -> dict[str, Any]:
    """A leaf's line in the manifest."""
    return {
        "name": leaf.name,
        "shape": leaf.shape,
        "dtype": _text(leaf.dtype),
        "sharding": _text(leaf.sharding),
        "memory_kind": leaf.sharding.memory_kind,
        "chunk_bytes": files.CHUNK,
        "shards": [
            {
                "file": shard.file,
                "index": shard.index,
                "bytes": shard.nbytes,
                "file_bytes": files.padded(shard.nbytes),
                "seed": f"{shard.seed:016x}",
                "checksums": [f"{value:016x}" for value in shard.checksums],
            }
            for shard in leaf._shards
        ],
    }


def _what(name: str, part: int, parts: int, shape: Sequence[int], dtype: Any) -> str:
    whole = f"`{name}` ({_typed(shape, dtype)})"
    return whole if parts == 1 else f"shard {part} of {parts} of {whole}"


def _typed(shape: Sequence[int], dtype: Any) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def _bare(cause: BaseException | None) -> BaseException | None:
    return cause.with_traceback(None) if cause else None
