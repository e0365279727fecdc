"""Arrays for the tests of the disk tier, and what they are compared by: bits, places, kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding


NARROW = (
    "bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32",
    "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float16", "bfloat16",
    "float32", "complex64",
)  # fmt: skip
WIDE = ("int64", "uint64", "float64", "complex128")  # with x64 switched on

LAYOUTS = (
    "one device", "sharded", "second dim", "both dims", "two axes on a dim", "replicated",
    "partly replicated", "some devices", "host, sharded", "host, partly replicated",
    "host, one device",
)  # fmt: skip


def any_bits(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Random bits: signalling NaNs with payloads, negative zeros and infinities among them."""
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    random = np.random.default_rng(seed)
    size = int(np.prod(shape, dtype=np.int64))
    if name == "bool":
        return random.integers(0, 2, size).astype(bool).reshape(shape)
    if dtype.itemsize == 1 and "int" in name:
        info = jnp.iinfo(dtype)
        numbers = random.integers(int(info.min), int(info.max) + 1, size)
        return numbers.astype(np.int16).astype(dtype).reshape(shape)
    raw = random.integers(0, 256, size * dtype.itemsize).astype(np.uint8)
    if name == "float4_e2m1fn":
        raw &= 15
    values = raw.view(dtype)
    if dtype.kind == "f" and size > 1:
        values[:2] = -0.0, np.nan
    return values.reshape(shape)


def layout(name: str) -> jax.sharding.Sharding:
    """One of `LAYOUTS`: over eight devices, of an array of (8k, 4m, ...)."""
    devices = np.array(jax.devices())
    flat, grid = Mesh(devices, ("x",)), Mesh(devices.reshape(4, 2), ("a", "b"))
    few, turned = Mesh(devices[2:6], ("x",)), Mesh(devices[::-1].reshape(2, 4), ("a", "b"))

    def over(mesh: Mesh, *spec: Any, **kind: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*spec), **kind)

    return {
        "one device": SingleDeviceSharding(devices[3]),
        "sharded": over(flat, "x"),
        "second dim": over(turned, None, "b"),
        "both dims": over(grid, "a", "b"),
        "two axes on a dim": over(grid, ("b", "a")),
        "replicated": over(flat),
        "partly replicated": over(grid, "a"),
        "some devices": over(few, "x"),
        "host, sharded": over(flat, "x", memory_kind="pinned_host"),
        "host, partly replicated": over(grid, None, "b", memory_kind="pinned_host"),
        "host, one device": SingleDeviceSharding(devices[1], memory_kind="pinned_host"),
    }[name]


def bits(array: Any) -> bytes:
    """All bytes of an array."""
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def assert_same(new: jax.Array, old: jax.Array) -> None:
    """The same array, in device memory: bits, dtype, layout, and what jit looks at."""
    assert isinstance(new, jax.Array)
    assert (new.shape, new.dtype) == (old.shape, old.dtype)
    expected = old.sharding
    if expected.memory_kind != "device":
        expected = expected.with_memory_kind("device")
    assert new.sharding == expected
    assert new.weak_type == old.weak_type
    pairs = zip(new.addressable_shards, old.addressable_shards, strict=True)
    for got, wanted in pairs:
        assert (got.device, got.index) == (wanted.device, wanted.index)
        assert got.data.sharding.memory_kind == "device"
        assert bits(got.data) == bits(wanted.data)


def files_in(path: Path) -> list[int]:
    """Descriptors of this process's files in a directory, with a name or without."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if name.startswith(f"{os.path.realpath(path)}/"):
            found.append(int(number))
    return found


def bytes_held(path: Path) -> int:
    """How long those files are."""
    return sum(os.fstat(fd).st_size for fd in files_in(path))


def patch_bytes(path: Path, position: int, data: bytes) -> bytes:
    """Writes over the one file in a directory, as a failing disk would; what was there."""
    (fd,) = files_in(path)
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # without O_DIRECT
    try:
        before = os.pread(other, len(data), position)
        os.pwrite(other, data, position)
        os.fsync(other)
    finally:
        os.close(other)
    return before


def find_bytes(path: Path, data: bytes) -> int:
    """Where a shard is in the one file in a directory: it starts a block."""
    (fd,) = files_in(path)
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        found = file.read()
    return next(at for at in range(0, len(found), 4096) if found.startswith(data, at))
