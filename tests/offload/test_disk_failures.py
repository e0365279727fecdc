"""What goes wrong with disks: each error says what, where and what to do, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import disk_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disk_cases import assert_same, bits, bytes_held, files_in, find_bytes, layout, patch_bytes

import fzero as fz
from fzero import PlacementError
from fzero.storage import disk, requests, scratch


CHILD = Path(__file__).with_name("disk_child.py")
UNCHANGED = "What was to be written is still in memory, unchanged"


def sample() -> list[jax.Array]:
    """Files of one chunk and of several, whole and sharded; no leaf's bytes lie in another's."""
    large = jax.device_put(disk_cases.any_bits("float32", (8, 150_001), 1), layout("sharded"))
    return [large, jnp.arange(1000.0), jnp.arange(1000.0) + 1, jnp.float32(np.pi)]


NAMES = ["params/w", "opt_state/mu", "opt_state/nu", "count"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A shard of 600 kB in ten chunks."""
    monkeypatch.setattr(requests, "CHUNK", 16 * scratch.BLOCK)


@pytest.fixture
def written(tmp_path):
    arrays = sample()
    return arrays, disk.write(arrays, tmp_path, NAMES)


def refused(handles, broken: int) -> str:
    """Reads; the broken leaf is refused, all others come."""
    with pytest.raises(PlacementError) as caught:
        disk.read(handles)
    for number, handle in enumerate(handles):
        if number != broken:
            disk.read([handle])
    said = str(caught.value)
    assert f"`{NAMES[broken]}`" in said
    assert "this leaf needs a checkpoint" in said
    return said


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_damaged_byte_of_any_shard(written, where, tmp_path):
    arrays, handles = written
    for broken, array in enumerate(arrays):
        shards = {str(shard.index): bits(shard.data) for shard in array.addressable_shards}
        for data in shards.values():
            position = int(where * (len(data) - 1))
            at = find_bytes(tmp_path, data) + position
            before = patch_bytes(tmp_path, at, bytes([data[position] ^ 1]))
            said = refused(handles, broken)
            assert str(tmp_path) in said
            low, high = re.search(r"bytes ([\d,]+) to ([\d,]+) have", said).groups()
            assert int(low.replace(",", "")) <= position < int(high.replace(",", ""))
            assert re.search(r"checksum [0-9a-f]{16}, written with [0-9a-f]{16}", said)
            patch_bytes(tmp_path, at, before)
    disk.read(handles)


def test_a_truncated_file(written, tmp_path):
    """What lies before its end can be read, whatever was written first."""
    arrays, handles = written
    (file,) = files_in(tmp_path)
    ends = [
        max(find_bytes(tmp_path, data) + len(data) for data in map(bits, shards))
        for shards in ([shard.data for shard in array.addressable_shards] for array in arrays)
    ]
    cut = find_bytes(tmp_path, bits(arrays[0].addressable_shards[3].data)) + 8192
    os.ftruncate(file, cut)
    with pytest.raises(
        PlacementError, match=r"shard \d of 8 of `params/w` \(float32\[8,150001\]\)"
    ):
        disk.read(handles[:1])
    for array, handle, end in zip(arrays[1:], handles[1:], ends[1:], strict=True):
        if end <= cut:
            assert_same(disk.read([handle])[0], array)
        else:
            with pytest.raises(PlacementError, match=r"the file ends before"):
                disk.read([handle])


def test_memory_that_happens_to_hold_the_leaf_is_not_what_was_read(tmp_path, monkeypatch):
    """Fresh memory often is what the same leaf was in before."""
    array = jnp.arange(1000.0) + 1
    handles = disk.write([array], tmp_path, ["w"])
    (file,) = files_in(tmp_path)
    os.ftruncate(file, 0)

    def lucky(nbytes):
        memory = scratch.aligned(nbytes)
        memory[: array.nbytes] = np.frombuffer(bits(array), np.uint8)
        return memory

    monkeypatch.setattr(disk, "aligned", lucky)
    with pytest.raises(PlacementError, match=r"the file ends before"):
        disk.read(handles)


def test_bytes_in_the_wrong_place(tmp_path):
    """A checksum belongs to one place in one file, whatever is in it."""
    handles = disk.write([jnp.zeros(3000), jnp.arange(3000.0) + 1], tmp_path, ["a", "b"])
    one, two = bits(jnp.zeros(3000)), bits(jnp.arange(3000.0) + 1)
    at = find_bytes(tmp_path, two)
    patch_bytes(tmp_path, 0, two)
    with pytest.raises(PlacementError, match=r"`a` .* is not what was written"):
        disk.read(handles)
    patch_bytes(tmp_path, 0, one)
    patch_bytes(tmp_path, at, one)
    with pytest.raises(PlacementError, match=r"`b` .* is not what was written"):
        disk.read(handles)
    # Also where the same bytes were written before: space that is used again has its own.
    handles[1].delete()
    disk.read(handles[:1])


def test_the_directory_may_go(written, tmp_path):
    """The file has no name in it. A new call says that it is gone, or gets a new one."""
    arrays, handles = written
    shutil.rmtree(tmp_path)
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)
    again = disk.write(arrays, tmp_path, NAMES)
    for new, old in zip(disk.read(again), arrays, strict=True):
        assert_same(new, old)
    assert tmp_path.is_dir()


def raising_after(calls: int, code: int):
    """A disk on which one request, and all after it, fail."""
    count, lock, pwritev = iter(range(10**6)), threading.Lock(), os.pwritev

    def failing(fd, pieces, offset):
        with lock:
            if next(count) >= calls:
                raise OSError(code, os.strerror(code))
        return pwritev(fd, pieces, offset)

    return mock.patch.object(os, "pwritev", failing)


@pytest.mark.parametrize("calls", [1, 5, 40, 79])
@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "The disk is full: free space there, or pass another `path`"),
     (errno.EIO, "kernel's log")],
    ids=["full", "broken"],
)  # fmt: skip
def test_a_request_fails(tmp_path, calls, code, advice):
    arrays = sample()
    before = [bits(array) for array in arrays]
    (kept,) = disk.write([jnp.arange(7.0)], tmp_path, ["kept"])
    with raising_after(calls, code), pytest.raises(PlacementError) as caught:
        disk.write(arrays, tmp_path, NAMES)
    said = str(caught.value)
    assert os.strerror(code) in said
    assert advice in said
    assert UNCHANGED in said
    assert re.search(r"`(params/w|opt_state/mu|opt_state/nu|count)` \(float32\[", said)
    assert [bits(array) for array in arrays] == before
    # The call before is as it was; of this one nothing is left.
    assert bits(disk.read([kept])[0]) == bits(jnp.arange(7.0))
    del kept
    assert bytes_held(tmp_path) == 0
    # Usable means: can be donated, even while the error is still at hand.
    where = arrays[1].unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(arrays[1]).unsafe_buffer_pointer() == where
    assert caught.value.__cause__.errno == code
    # And written, once there is room.
    del caught
    gc.collect()
    assert files_in(tmp_path) == []
    arrays[1] = jnp.arange(1000.0)
    for new, old in zip(disk.read(disk.write(arrays, tmp_path, NAMES)), arrays, strict=True):
        assert_same(new, old)


def test_a_short_request_goes_on_where_it_stopped(tmp_path):
    arrays = sample()

    def stingy(call):
        def some(fd, pieces, offset):
            size = sum(map(len, pieces))
            if size == scratch.BLOCK:
                return call(fd, pieces, offset)
            whole, left = [], max(scratch.BLOCK, size // 3 // 512 * 512)
            for piece in pieces:
                whole.append(piece[:left])
                left -= len(whole[-1])
            call(fd, [piece for piece in whole if len(piece)], offset)
            return max(scratch.BLOCK, size // 3 // 512 * 512 - 100)

        return some

    with mock.patch.object(os, "pwritev", stingy(os.pwritev)):
        handles = disk.write(arrays, tmp_path, NAMES)
    with mock.patch.object(os, "preadv", stingy(os.preadv)):
        for new, old in zip(disk.read(handles), arrays, strict=True):
            assert_same(new, old)


def without_direct(call, *arguments):
    """`fcntl` where no file can be read and written past the page cache."""
    if arguments[1] == fcntl.F_SETFL and arguments[2] & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return call(*arguments)


def test_buffered_files_are_on_disk_before_memory_is_given_up(tmp_path):
    """Where direct requests do not work: found by trying, and said in words."""
    arrays, synced, fdatasync = sample(), [], os.fdatasync
    with (
        mock.patch.object(fcntl, "fcntl", functools.partial(without_direct, fcntl.fcntl)),
        mock.patch.object(os, "fdatasync", lambda fd: synced.append(fdatasync(fd))),
    ):
        handles = disk.write(arrays, tmp_path, NAMES)
    assert len(synced) == 1
    assert handles[0].describe().startswith("buffered: no O_DIRECT for blocks of 4096 bytes")
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)
    held = bytes_held(tmp_path)

    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        mock.patch.object(os, "fdatasync", failing),
        pytest.raises(PlacementError, match="Input/output"),
    ):
        disk.write(arrays, tmp_path, NAMES)
    assert bytes_held(tmp_path) <= 2 * held
    assert disk.write(arrays, tmp_path, NAMES)
    assert bytes_held(tmp_path) <= 2 * held


def test_what_the_disk_keeps_for_root_is_not_free(tmp_path):
    """File systems keep some blocks that only root may use: an ordinary user's write would fail."""
    real = os.fstatvfs

    def nearly_full(fd):
        found = real(fd)
        return mock.Mock(f_bavail=2, f_bfree=found.f_bfree, f_frsize=4096)

    with (
        mock.patch.object(os, "fstatvfs", nearly_full),
        pytest.raises(PlacementError, match=r"12,288 bytes to write, 8,192 bytes free in .*full"),
    ):
        disk.write([jnp.arange(3000.0)], tmp_path, ["w"])
    assert bytes_held(tmp_path) == 0


def test_no_place_to_write(tmp_path):
    w = jnp.arange(3.0)
    with pytest.raises(PlacementError, match=r"does not exist, nor does its parent"):
        disk.write([w], tmp_path / "mistyped" / "offload", ["w"])
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(PlacementError, match=rf"cannot write in {path}.*{UNCHANGED}"):
            disk.write([w], path, ["w"])
    assert (tmp_path / "file").read_text() == "mine"


def test_what_cannot_be_written(tmp_path):
    w = jnp.arange(3.0)
    with pytest.raises(PlacementError, match=r"`rng` holds random keys \(key<fry>\)"):
        disk.write([w, jax.random.key(0)], tmp_path, ["w", "rng"])
    with pytest.raises(PlacementError, match=r"`w` is a ndarray; expected a jax.Array"):
        disk.write([np.arange(3)], tmp_path, ["w"])
    with pytest.raises(PlacementError, match=r"2 arrays, 1 names"):
        disk.write([w, w], tmp_path, ["w"])
    with pytest.raises(PlacementError, match=r"`w` is a \w*Tracer"):
        jax.jit(lambda x: disk.write([x], tmp_path, ["w"]))(w)
    jax.jit(lambda x: x + 1, donate_argnums=0)(w)
    with pytest.raises(PlacementError, match=r"`w` is deleted"):
        disk.write([w], tmp_path, ["w"])
    with pytest.raises(PlacementError, match=r"expected handles .*, got ndarray"):
        disk.read([np.arange(3)])
    assert os.listdir(tmp_path) == []
    assert disk.write([], tmp_path / "none" / "such", []) == []


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """What a child saw on file systems of its own, which only it could see."""
    out = tmp_path_factory.mktemp("mounts")
    command = ["unshare", "--mount", sys.executable, CHILD, "mounts", out]
    if os.geteuid():
        command[1:1] = ["--user", "--map-root-user"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_is_noticed_before_writing(mounted):
    assert re.search(r"8,\d{3},\d{3} bytes to write, [\d,]+ bytes free", mounted["announced"])
    assert "the largest is `w` (float32[2000000])" in mounted["announced"]
    assert UNCHANGED in mounted["announced"]


def test_a_disk_that_fills_up_while_writing(mounted):
    for case in ("full", "full_small_shards", "reserved"):
        assert "The disk is full: free space there, or pass another `path`" in mounted[case], case
        assert UNCHANGED in mounted[case]
    assert "No space left on device" in mounted["full"]
    assert mounted["left"] == []
    assert mounted["equal_after"]


def test_a_read_only_disk(mounted):
    assert re.search(r"cannot write in .*: Read-only file system", mounted["read_only"])
    assert "Pass a `path` that this process may write to" in mounted["read_only"]
    assert UNCHANGED in mounted["read_only"]


def test_a_limit_on_the_size_of_files(tmp_path):
    """`ulimit -f`, in a process of its own."""
    done = subprocess.run([sys.executable, CHILD, "limit", tmp_path], capture_output=True,
                          text=True, timeout=600, check=True)  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    assert "File too large" in said["error"]
    assert "raise the limit (ulimit -f)" in said["error"]
    assert said["left"] == []
    assert said["equal_after"]
    assert said["kept_after_fork"]  # a fork of it pretended to own it, and let it go
    assert os.listdir(tmp_path) == []


def test_errors_are_errors_of_fzero():
    assert fz.PlacementError is PlacementError
