"""What goes wrong with disks: each error says what, where and what to do, and nothing is lost."""

from __future__ import annotations

import errno
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
from disk_cases import assert_same, bits, layout

import fzero as fz
from fzero import PlacementError
from fzero.offload import disk, files


CHILD = Path(__file__).with_name("disk_child.py")
UNCHANGED = "Nothing was moved: all arrays are in memory, unchanged"


def sample() -> list[jax.Array]:
    """Files of one chunk and of several, whole and sharded."""
    large = jax.device_put(disk_cases.any_bits("float32", (8, 150_001), 1), layout("sharded"))
    return [large, jnp.arange(1000.0), jnp.arange(1000.0) + 1, jnp.float32(3)]


NAMES = ["params/w", "opt_state/mu", "opt_state/nu", "count"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A shard of 600 kB in ten chunks."""
    monkeypatch.setattr(files, "CHUNK", 16 * files.BLOCK)


@pytest.fixture
def written(tmp_path):
    arrays = sample()
    return arrays, disk.write(arrays, tmp_path, NAMES)


def file_names() -> list[str]:
    return [f"00000-{part:03d}.shard" for part in range(8)] + [
        f"0000{number}-000.shard" for number in (1, 2, 3)
    ]


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
def test_a_damaged_byte_in_any_file(written, where):
    _, handles = written
    for name in file_names():
        path, broken = handles[0].directory / name, int(name[:5])
        data = bytearray(path.read_bytes())
        position = int(where * (len(data) - 1))
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([data[position] ^ 1]))
        said = refused(handles, broken)
        assert str(path) in said
        low, high = re.search(r"bytes ([\d,]+) to ([\d,]+) have", said).groups()
        assert int(low.replace(",", "")) <= position < int(high.replace(",", ""))
        assert re.search(r"checksum [0-9a-f]{16}, written with [0-9a-f]{16}", said)
        path.write_bytes(data)
    disk.read(handles)


@pytest.mark.parametrize("length", [0, 1, 4096, -1, -4096])
def test_a_truncated_file(written, length):
    _, handles = written
    path = handles[0].directory / "00000-003.shard"
    size = path.stat().st_size
    os.truncate(path, length % size if length < 0 else length)
    said = refused(handles, 0)
    assert "shard 3 of 8 of `params/w` (float32[8,150001])" in said
    assert f"{size:,} bytes were written, {path.stat().st_size:,} are there" in said


def test_a_file_that_shrinks_while_it_is_read(written):
    _, handles = written
    path, preadv = handles[0].directory / "00000-000.shard", os.preadv

    def shrinking(fd, buffers, offset):
        if os.path.samefile(f"/proc/self/fd/{fd}", path):
            os.truncate(path, files.BLOCK)
        return preadv(fd, buffers, offset)

    with mock.patch.object(os, "preadv", shrinking):
        assert "it ends at byte" in refused(handles, 0)


def test_a_file_that_grew(written):
    _, handles = written
    path = handles[0].directory / "00003-000.shard"
    path.write_bytes(path.read_bytes() * 2)
    assert "4,096 bytes were written, 8,192 are there" in refused(handles, 3)


def test_a_missing_file_and_a_missing_directory(written):
    _, handles = written
    os.unlink(handles[0].directory / "00002-000.shard")
    assert "the file is missing" in refused(handles, 2)
    shutil.rmtree(handles[0].directory.parent)
    with pytest.raises(PlacementError, match="the file is missing"):
        disk.read(handles)
    # A new call gets a new directory.
    arrays = sample()
    again = disk.write(arrays, handles[0].directory.parents[1], NAMES)
    for new, old in zip(disk.read(again), arrays, strict=True):
        assert_same(new, old)


def test_swapped_files_of_one_size(written):
    _, handles = written
    one, two = (handles[0].directory / f"0000{number}-000.shard" for number in (1, 2))
    assert one.stat().st_size == two.stat().st_size
    three = one.with_name("three")
    for source, to in ((one, three), (two, one), (three, two)):
        os.rename(source, to)
    with pytest.raises(PlacementError, match="damaged, or another file's"):
        disk.read(handles[1:2])
    with pytest.raises(PlacementError, match="damaged, or another file's"):
        disk.read(handles[2:3])


def test_a_checksum_belongs_to_one_file_and_one_place_in_it(tmp_path):
    """So a file of another process, call, leaf or shard is refused whatever is in it."""
    array = jax.device_put(jnp.zeros((16, 20_000)), layout("sharded"))  # the same bytes everywhere
    handles = [disk.write([array, array], tmp_path, ["a", "b"]) for _ in range(2)]
    found = []
    for call in handles:
        for leaf in json.loads((call[0].directory / "manifest.json").read_text())["leaves"]:
            found += [value for shard in leaf["shards"] for value in shard["checksums"]]
    assert len(found) == 2 * 2 * 8 * 3
    assert len(set(found)) == len(found)


def test_a_file_of_another_process(written, tmp_path):
    """A program with the same idea of names writes into our directory."""
    _, handles = written
    path = handles[0].directory / "00001-000.shard"
    other = np.random.default_rng(0).bytes(path.stat().st_size)
    replacement = path.with_name("replacement")
    replacement.write_bytes(other)
    os.rename(replacement, path)
    assert "damaged, or another file's" in refused(handles, 1)


def raising_after(calls: int, code: int):
    """A disk on which one request, and all after it, fail."""
    count, lock, pwrite = iter(range(10**6)), threading.Lock(), os.pwrite

    def failing(fd, data, offset):
        with lock:
            if next(count) >= calls:
                raise OSError(code, os.strerror(code))
        return pwrite(fd, data, offset)

    return mock.patch.object(os, "pwrite", failing)


@pytest.mark.parametrize("calls", [1, 5, 40, 82])
@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "The disk is full: free space there, or pass another `path`"),
     (errno.EIO, "kernel's log")],
    ids=["full", "broken"],
)  # fmt: skip
def test_a_request_fails(tmp_path, calls, code, advice):
    arrays = sample()
    before = [bits(array) for array in arrays]
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    (kept,) = disk.write([jnp.arange(7.0)], tmp_path, ["kept"])
    with raising_after(calls, code), pytest.raises(PlacementError) as caught:
        disk.write(arrays, tmp_path, NAMES)
    said = str(caught.value)
    assert os.strerror(code) in said
    assert advice in said
    assert UNCHANGED in said
    assert re.search(r"`(params/w|opt_state/mu|opt_state/nu|count)` \(float32\[", said)
    assert [bits(array) for array in arrays] == before
    # Of this call nothing is left; the call before is as it was.
    assert sorted(os.listdir(kept.directory.parent)) == [kept.directory.name, "owner.json"]
    assert bits(disk.read([kept])[0]) == bits(jnp.arange(7.0))
    kept.delete()
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    # Usable means: can be donated, even while the error is still at hand.
    where = arrays[1].unsafe_buffer_pointer()
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(arrays[1]).unsafe_buffer_pointer() == where
    assert caught.value.__cause__.errno == code
    # And written, once there is room.
    arrays[1] = jnp.arange(1000.0)
    for new, old in zip(disk.read(disk.write(arrays, tmp_path, NAMES)), arrays, strict=True):
        assert_same(new, old)


def test_a_short_write_goes_on_where_it_stopped(tmp_path):
    pwrite = os.pwrite
    arrays = sample()

    def stingy(fd, data, offset):
        count = pwrite(fd, data[: max(files.BLOCK, len(data) // 3 // 512 * 512)], offset)
        return count if count == files.BLOCK else count - 100

    with mock.patch.object(os, "pwrite", stingy):
        handles = disk.write(arrays, tmp_path, NAMES)
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)


def test_buffered_files_are_on_disk_before_memory_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "probe", lambda _: files.Mode(False, 1, "because"))
    arrays, synced, fdatasync = sample(), [], os.fdatasync
    with mock.patch.object(os, "fdatasync", lambda fd: synced.append(fdatasync(fd))):
        handles = disk.write(arrays, tmp_path, NAMES)
    assert len(synced) == len(file_names())
    assert handles[0].describe() == "buffered: because"
    for new, old in zip(disk.read(handles), arrays, strict=True):
        assert_same(new, old)

    def failing(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        mock.patch.object(os, "fdatasync", failing),
        pytest.raises(PlacementError, match="Input/output"),
    ):
        disk.write(arrays, tmp_path, NAMES)
    assert sorted(os.listdir(handles[0].directory.parent)) == ["000000", "owner.json"]


def test_a_file_system_without_direct_requests(tmp_path, monkeypatch):
    """Found by trying; said in words."""
    if not files._DIRECT:
        pytest.skip("no O_DIRECT on this operating system")
    opened = os.open

    def refusing(path, flags, *mode):
        if flags & files._DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *mode)

    with mock.patch.object(os, "open", refusing):
        handles = disk.write(sample(), tmp_path, NAMES)
        disk.read(handles)
    assert handles[0].describe().startswith("buffered: no O_DIRECT for blocks of 4096 bytes")


def test_the_manifest_cannot_be_written(tmp_path):
    (kept,) = disk.write([jnp.arange(7.0)], tmp_path, ["kept"])
    rename = os.rename

    def failing(source, to):
        if str(to).endswith("manifest.json"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        rename(source, to)

    with (
        mock.patch.object(os, "rename", failing),
        pytest.raises(PlacementError, match=r"(?s)manifest\.json.*The disk is full"),
    ):
        disk.write(sample(), tmp_path, NAMES)
    assert sorted(os.listdir(kept.directory.parent)) == ["000000", "owner.json"]


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_is_noticed_before_writing(mounted):
    assert re.search(r"8,\d{3},\d{3} bytes to write, [\d,]+ bytes free", mounted["announced"])
    assert "the largest is `w` (float32[2000000])" in mounted["announced"]
    assert UNCHANGED in mounted["announced"]


def test_a_disk_that_fills_up_while_writing(mounted):
    assert "No space left on device" in mounted["full"]
    assert "The disk is full: free space there, or pass another `path`" in mounted["full"]
    assert UNCHANGED in mounted["full"]
    assert mounted["left"] == []
    assert mounted["equal_after"]


def test_a_read_only_disk(mounted):
    assert re.search(r"cannot write in .*: Read-only file system", mounted["read_only"])
    assert "Pass a `path` that this process may write to" in mounted["read_only"]
    assert UNCHANGED in mounted["read_only"]


def test_a_limit_on_the_size_of_files(tmp_path):
    """`ulimit -f`, in a process of its own."""
    done = subprocess.run([sys.executable, CHILD, "limit", tmp_path], capture_output=True,
                          text=True, timeout=120, check=True)  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    assert "File too large" in said["error"]
    assert "raise the limit (ulimit -f)" in said["error"]
    assert said["left"] == []
    assert said["equal_after"]
    # What the process still had on disk went with it, except what a fork of it pretended to own.
    assert said["after_fork"] == ["000001", "owner.json"]
    assert os.listdir(tmp_path) == []


def test_errors_are_errors_of_fzero():
    assert fz.PlacementError is PlacementError
