"""The disk tier gives back every array as it was, bit for bit, and cleans up after itself."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
from pathlib import Path
from unittest import mock

import disk_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from disk_cases import LAYOUTS, assert_same, bits, bytes_held, files_in, layout
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero import PlacementError
from fzero.storage import disk, requests, scratch
from fzero.storage.tiers import Slabs
from tests.support.memory import resident_bytes


def there_and_back(arrays: list[jax.Array], path: Path) -> None:
    handles = disk.write(arrays, path, [f"leaf/{i}" for i in range(len(arrays))])
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)
        assert not old.is_deleted()


@pytest.fixture
def small_chunks(monkeypatch):
    """Three chunks where there would be one: the same code, less to write."""
    monkeypatch.setattr(requests, "CHUNK", 2 * scratch.BLOCK)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (5, 3, 7)], ids=str)
def test_every_dtype(tmp_path, shape):
    values = [disk_cases.any_bits(name, shape, seed) for seed, name in enumerate(disk_cases.NARROW)]
    arrays = [jax.device_put(value) for value in values]
    assert [str(array.dtype) for array in arrays] == list(disk_cases.NARROW)
    assert [bits(array) for array in arrays] == [bits(value) for value in values]
    there_and_back(arrays, tmp_path)


def test_64_bits_come_back_where_they_are_switched_off(tmp_path):
    with jax.enable_x64(True):
        arrays = [
            jax.device_put(disk_cases.any_bits(name, (9, 8), 1), place)
            for name in disk_cases.WIDE
            for place in (None, layout("second dim"))
        ]
    assert {str(array.dtype) for array in arrays} == set(disk_cases.WIDE)
    there_and_back(arrays, tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_sharding(tmp_path, name):
    sharding = layout(name)
    arrays = [
        jax.device_put(disk_cases.any_bits(name, (16, 8), 3), sharding)
        for name in ("float32", "bfloat16", "int4")
    ]
    handles = disk.write(arrays, tmp_path, ["w", "v", "u"])
    distinct = 0
    for handle, array in zip(handles, arrays, strict=True):
        assert (handle.shape, handle.dtype) == (array.shape, array.dtype)
        assert (handle.size, handle.ndim, handle.nbytes) == (array.size, array.ndim, array.nbytes)
        distinct += len({str(shard.index) for shard in array.addressable_shards})
    (file,) = files_in(tmp_path)
    assert os.fstat(file).st_size == 4096 * distinct  # replicas are written once
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)
    for new, old in zip(disk.read(handles, "pinned_host"), arrays, strict=True):
        assert new.sharding == old.sharding.with_memory_kind("pinned_host")
        assert bits(new) == bits(old)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8192, 8193, 24576, 24577, 40000])
def test_sizes_around_blocks_and_chunks(tmp_path, small_chunks, size):
    array = jax.device_put(disk_cases.any_bits("uint8", (size,), size))
    there_and_back([array, array[: size // 2]], tmp_path)


def test_every_byte_is_written_once_and_small_neighbours_together(tmp_path, small_chunks):
    block, sent = scratch.BLOCK, []
    arrays = [jnp.full((size,), 3, jnp.uint8) for size in (6 * block, block, block)]
    kept = disk.write(arrays, tmp_path, ["a", "b", "c"])
    real = os.pwritev

    def pwritev(fd, pieces, offset):
        sent.append(sum(map(len, pieces)))
        return real(fd, pieces, offset)

    with mock.patch.object(os, "pwritev", pwritev):
        more = disk.write(arrays, tmp_path, ["a", "b", "c"])
    assert sent == [2 * block] * 4
    for new, old in zip(disk.read([*kept, *more]), [*arrays, *arrays], strict=True):
        assert_same(new, old)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dims=st.lists(st.integers(0, 12), max_size=4),
    dtype=st.sampled_from(disk_cases.NARROW),
    name=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**16),
)
def test_random_shapes(tmp_path_factory, dims, dtype, name, seed):
    sharding = layout(name)
    if len(sharding.device_set) > 1:  # divisible where it is split
        dims = [8, 4, *dims[2:]] if len(dims) < 2 else [8 * dims[0], 4 * dims[1], *dims[2:]]
    array = jax.device_put(disk_cases.any_bits(dtype, tuple(dims), seed), sharding)
    there_and_back([array], tmp_path_factory.getbasetemp() / "random")


def test_large_arrays_in_many_chunks(tmp_path):
    array = jax.device_put(disk_cases.any_bits("float32", (8, 700_001), 5),
                           layout("some devices"))  # fmt: skip
    assert array.nbytes // 4 > requests.CHUNK  # each shard takes two
    there_and_back([array, jnp.arange(2_000_003)], tmp_path)


def test_python_numbers_stay_what_they_are(tmp_path):
    """And arrays that jax may put anywhere come back to where they were."""
    weak = [jnp.asarray(0.1), jnp.full((4, 8), -0.0), jnp.asarray(7), jnp.asarray(1j)]
    weak.append(jax.device_put(jnp.full((8, 4), 1.5), layout("both dims")))
    assert all(array.weak_type for array in weak)
    free = jnp.arange(3.0)
    assert not free.committed
    there_and_back([*weak, free, jax.device_put(free, jax.devices()[0])], tmp_path)


def test_a_handle_of_what_was_in_host_memory_is_of_a_place_on_the_device(tmp_path):
    old = jax.device_put(jnp.arange(32.0).reshape(8, 4), layout("both dims"))
    there = jax.device_put(old, old.sharding.with_memory_kind("pinned_host"))
    (handle,) = disk.write([there], tmp_path, ["w"])
    assert handle.sharding == old.sharding
    assert_same(disk.read([handle])[0], old)


def test_values_stay_when_what_was_read_is_donated(tmp_path):
    """jax takes the memory that a file was read into for its own, on all devices at once."""
    old = jax.device_put(jnp.arange(4096.0), layout("replicated"))
    (handle,) = disk.write([old], tmp_path, ["w"])
    (new,), (again,) = disk.read([handle]), disk.read([handle])
    (doubled,) = jax.jit(lambda x: (2 * x,), donate_argnums=0)(new)
    assert new.is_deleted()
    for _ in range(4):  # other reads do not get its memory while it is used
        assert_same(disk.read([handle])[0], old)
    assert_same(again, old)
    assert all(bits(shard.data) == bits(2 * old) for shard in doubled.addressable_shards)


def test_arrays_read_again_and_again(tmp_path):
    """Into the memory of arrays that are gone, while others live, are donated, or on their way."""
    old = [jax.device_put(disk_cases.any_bits("uint32", (8, 50_000), seed), layout(name))
           for seed, name in enumerate(("one device", "replicated", "one device"))]  # fmt: skip
    handles = disk.write(old, tmp_path, ["a", "b", "c"])
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    living: list[tuple[jax.Array, jax.Array]] = []
    for turn in range(30):
        new = disk.read(handles)
        living += [(step(new[0]), old[0] + 1), (new[1], old[1]), (new[2] * 2, old[2] * 2)]
        living = living[turn % 5 :]
        for got, wanted in living:
            assert bits(got) == bits(wanted)


def test_what_was_written_can_be_donated(tmp_path):
    old = jax.device_put(jnp.arange(4096.0), layout("sharded"))
    where = old.addressable_shards[0].data.unsafe_buffer_pointer()
    (handle,) = disk.write([old], tmp_path, ["w"])
    new = jax.jit(lambda x: x + 1, donate_argnums=0)(old)
    assert new.addressable_shards[0].data.unsafe_buffer_pointer() == where
    assert bits(disk.read([handle])[0] + 1) == bits(new)


def test_calls_in_the_background(tmp_path, small_chunks):
    """More at once than there are threads: each makes progress by itself."""
    arrays = [jnp.arange(5000.0) + i for i in range(30)]
    writing = [disk.write_async([a], tmp_path, [f"w{i}"]) for i, a in enumerate(arrays)]
    handles = [future.result(timeout=600)[0] for future in writing]
    reading = [disk.read_async([handle]) for handle in handles]
    for old, future in zip(arrays, reading, strict=True):
        assert_same(future.result(timeout=600)[0], old)
    kind = disk.read_async(handles[:1], "pinned_host").result(timeout=600)[0].sharding.memory_kind
    assert kind == "pinned_host"
    with pytest.raises(PlacementError, match=r"`w` is a int"):
        disk.write_async([3], tmp_path, ["w"]).result(timeout=600)


def test_space_lives_as_long_as_its_handles(tmp_path, monkeypatch):
    path = tmp_path / "new"  # made by `write`
    arrays = [jnp.arange(30_000.0), jnp.arange(40_000.0)]
    w, v = disk.write(arrays, path, ["w", "v"])
    (u,) = disk.write([jnp.arange(50_000.0)], path, ["u"])
    assert os.listdir(path) == []  # the file has no name
    assert bytes_held(path) == 4096 * (30 + 40 + 49)
    w.delete()
    w.delete()
    assert (w.is_deleted(), v.is_deleted()) == (True, False)
    with pytest.raises(PlacementError, match=r"`w` was deleted"):
        disk.read([v, w])
    # Its space is used again, and the rest of it, too.
    (t, s) = disk.write([jnp.arange(20_000.0), jnp.arange(10_000.0)], path, ["t", "s"])
    assert bytes_held(path) == 4096 * (30 + 40 + 49)
    for handle, size in ((v, 40), (u, 50), (t, 20), (s, 10)):
        assert bits(disk.read([handle])[0]) == bits(jnp.arange(size * 1000.0))
    tree = {"v": v, "w": 1}
    assert jax.tree.leaves(tree) == [v, 1]
    assert copy.deepcopy(tree)["v"] is v
    assert copy.copy(v) is v
    # What is free at the end goes back to the disk if it is much; with the last handle all goes.
    monkeypatch.setattr(scratch, "SPARE", 40 * 4096)
    u.delete()
    assert bytes_held(path) == 4096 * (30 + 40)
    del u, v, w, t, s, handle, tree
    gc.collect()
    assert files_in(path) == []


def test_freed_space_of_neighbours_is_one_space(tmp_path):
    """In whatever order it is freed."""
    rows = [jnp.arange(10_000.0) + i for i in range(8)]
    (last,) = disk.write([jnp.zeros(3)], tmp_path, ["last"])
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        handles = disk.write(rows, tmp_path, [f"w{i}" for i in range(8)])
        size = bytes_held(tmp_path)
        for i in order:
            handles[i].delete()
        (large,) = disk.write([jnp.arange(30_000.0)], tmp_path, ["large"])
        assert bytes_held(tmp_path) == size
        assert bits(disk.read([large])[0]) == bits(jnp.arange(30_000.0))
        for handle, row in zip(handles[3:], rows[3:], strict=True):
            assert bits(disk.read([handle])[0]) == bits(row)
        del handles, handle, large
    assert bits(disk.read([last])[0]) == bits(jnp.zeros(3))


def test_space_goes_with_a_cycle_of_garbage(tmp_path):
    """Handles may die at any moment, in any thread, also while another call takes space."""
    for number in range(20):
        (handle,) = disk.write([jnp.arange(3.0)], tmp_path, [f"w{number}"])
        circle = [handle]
        circle.append(circle)
        del handle, circle
    gc.collect()
    assert files_in(tmp_path) == []


def test_handles_that_die_while_space_is_taken(tmp_path):
    """The garbage collector may find one in the middle of that, in the same thread."""
    (handle,) = disk.write([jnp.arange(9000.0)], tmp_path, ["w"])
    allocate = os.posix_fallocate

    def dying(*args):
        handle.delete()
        return allocate(*args)

    with mock.patch.object(os, "posix_fallocate", dying):
        (other,) = disk.write([jnp.arange(3.0)], tmp_path, ["v"])
    assert handle.is_deleted()
    (again,) = disk.write([jnp.arange(9000.0) + 1], tmp_path, ["w"])  # whoever comes next has it
    assert bytes_held(tmp_path) == 4096 * (9 + 1)
    assert bits(disk.read([other])[0]) == bits(jnp.arange(3.0))
    assert bits(disk.read([again])[0]) == bits(jnp.arange(9000.0) + 1)


def test_a_file_system_without_unnamed_files(tmp_path):
    """There the file has a name for a moment."""
    opened = os.open

    def refusing(path, flags, *mode, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *mode, **more)

    with mock.patch.object(os, "open", refusing):
        (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    assert os.listdir(tmp_path) == []
    assert bits(disk.read([handle])[0]) == bits(jnp.arange(3.0))


def test_a_handle_is_no_array(tmp_path):
    (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["opt_state/mu"])
    with pytest.raises(
        PlacementError, match=r"`opt_state/mu` \(float32\[3\], 12 bytes\) is on disk"
    ):
        np.asarray(handle)
    for use in (lambda: jnp.add(handle, 1), lambda: jax.jit(lambda x: x)(handle)):
        with pytest.raises(PlacementError, match=r"`opt_state/mu` .* is on disk"):
            use()
    for use in (lambda x: x / 2, lambda x: 1 - x, lambda x: -x, lambda x: x[0], float,
                lambda x: x.copy(), lambda x: x.astype("bfloat16")):  # fmt: skip
        with pytest.raises(PlacementError, match=r"`opt_state/mu` .* is on disk"):
            jax.tree.map(use, {"mu": handle})
    with pytest.raises(PlacementError, match=r"cannot be pickled"):
        pickle.dumps(handle)
    with pytest.raises(AttributeError):
        handle.shape = (4,)
    assert handle.describe() == "direct" or handle.describe().startswith("buffered: ")


ASKED = (
    lambda x: x.at[0].set(1), lambda x: x.mean(), lambda x: x.T, lambda x: x == 0, bool, len, list,
    lambda x: jnp.float32(1) != x, np.asarray, np.sum, lambda x: optax.tree.norm({"mu": x}),
)  # fmt: skip


@pytest.mark.parametrize("where", ["on disk", "in pieces"])
def test_what_a_leaf_would_be_asked_for_is_refused_and_not_guessed(where, tmp_path):
    """Python answers `leaf == 0` and `bool(leaf)` for any object, numpy makes an array of it."""
    whole = jnp.zeros(4)
    (handle,) = disk.write([whole], tmp_path, ["opt_state/mu"])
    if where == "in pieces":
        handle = Slabs((4,), whole.dtype, whole.sharding, 0, (whole[:2], whole[2:]))
    for ask in ASKED:
        with pytest.raises(PlacementError, match=r"float32\[4\].* `fz.reload\(state\)` brings"):
            ask(handle)
    assert handle in [handle]
    assert handle != Slabs((4,), whole.dtype, None, 0, ())
    assert not hasattr(handle, "at")  # an error of attributes, as Python expects


def test_fifty_cycles_leave_nothing(tmp_path):
    """Neither memory nor files, descriptors nor threads."""
    arrays = [jax.device_put(disk_cases.any_bits("float32", (64, 8 * 1024), 1), layout(name))
              for name in ("some devices", "second dim")]  # fmt: skip
    arrays += [jnp.arange(n) for n in (1, 9)]
    names = [str(i) for i in range(len(arrays))]

    def cycle() -> None:
        nonlocal arrays
        handles = disk.write(arrays, tmp_path, names)
        for array in arrays:
            array.delete()
        arrays = disk.read(handles)

    def held() -> tuple[int, int]:
        gc.collect()
        ours = [t for t in threading.enumerate() if t.name.startswith("fzero-disk")]
        return len(ours), resident_bytes()

    expected = [bits(array) for array in arrays]
    for _ in range(10):
        cycle()
    _, memory_before = held()
    for _ in range(50):
        cycle()
    threads_after, memory_after = held()
    assert [bits(array) for array in arrays] == expected
    assert files_in(tmp_path) == []
    assert threads_after <= requests.DEPTH + 2
    assert memory_after - memory_before < 4 << 20  # a cycle moves 4 MiB each way


def test_what_a_full_disk_refuses_takes_no_space_that_was_free(tmp_path, monkeypatch):
    """It had found room for some of it among what others had let go."""
    file = scratch.scratch(tmp_path)
    first, _ = file.take([8 * scratch.BLOCK, scratch.BLOCK])
    file.release([first])
    with monkeypatch.context() as full:
        full.setattr(type(file), "free_bytes", lambda self: 0)
        with pytest.raises(OSError, match="No space left"):
            file.take([4 * scratch.BLOCK, 100 * scratch.BLOCK])
    assert file.take([8 * scratch.BLOCK]) == [first]


def test_a_deleted_state_takes_no_disk_while_its_handle_lives(tmp_path):
    (handle,) = disk.write([jnp.arange(30_000.0)], tmp_path, ["w"])
    handle.delete()
    assert bytes_held(tmp_path) == 0


def test_a_folder_in_the_place_of_another_has_files_of_its_own(tmp_path):
    (tmp_path / "here").mkdir()
    first = scratch.scratch(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "away")
    assert scratch.scratch(tmp_path / "here") is not first


def test_a_forked_process_has_files_of_its_own(tmp_path, monkeypatch):
    first, own = scratch.scratch(tmp_path), os.getpid()
    assert scratch.scratch(tmp_path) is first
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        assert scratch.scratch(tmp_path) is not first
