"""Processes are killed while they write. Nothing is torn, and only their own things are removed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import pytest
from disk_cases import bits
from disk_child import contents

from fzero import PlacementError
from fzero.offload import disk, files, owners


CHILD = Path(__file__).with_name("disk_child.py")
KILLS = 20


def snapshot(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() if file.is_file() else b"directory"
        for file in sorted(path.rglob("*"))
    }


def strangers(path: Path) -> dict[str, bytes]:
    """What is not provably left behind by a crash here, though it looks as if.

    No process has a number above 2 ** 22.
    """
    mine = owners.identity()
    token = "0123456789abcdef"

    def owner(name: str, **different: object) -> Path:
        directory = path / f"fzero-offload-{name}-{token}"
        (directory / "000000").mkdir(parents=True)
        (directory / "000000" / "00000-000.shard").write_bytes(b"values")
        text = {"format": "fzero-offload", "version": 1, "host": mine.host, "boot": mine.boot,
                "pid": 2**22 + 1, "start": 1, "token": token, **different}  # fmt: skip
        (directory / "owner.json").write_text(json.dumps(text))
        return directory

    (path / "notes.txt").write_text("mine")
    (path / "fzero-offload").mkdir()
    (path / f"fzero-offload-{mine.host}-77").mkdir()
    owner("elsewhere-77", host="elsewhere", pid=77)
    owner(f"{mine.host}-{2**22}")  # not the name that it says
    owner(f"{mine.host}-{mine.pid}", pid=mine.pid, start=mine.start)  # lives
    owner(f"{mine.host}-{2**22 + 2}", pid=2**22 + 2, version=2)
    owner(f"{mine.host}-{2**22 + 3}", pid=2**22 + 3, format="another program")
    owner(f"{mine.host}-{2**22 + 4}", pid=2**22 + 4, boot="")
    (owner(f"{mine.host}-{2**22 + 5}") / "owner.json").unlink()
    (owner(f"{mine.host}-{2**22 + 6}") / "owner.json").write_text("{")
    unborn = path / f"fzero-offload-{mine.host}-{mine.pid}-{token[::-1]}"
    unborn.mkdir()  # of a living process: it is just making it
    (path / f"fzero-offload-elsewhere-{2**22 + 1}-{token}").mkdir()  # making it, elsewhere
    # All is right, but it is not here.
    link = owner(f"{mine.host}-{2**22 + 7}", pid=2**22 + 7)
    link.symlink_to(link.rename(path.parent / "outside"))
    return snapshot(path)


def test_a_sweep_leaves_what_is_not_provably_ours(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    before = strangers(path)
    assert disk.sweep(path) == []
    (handle,) = disk.write([jnp.arange(3.0)], path, ["w"])  # sweeps, too
    handle.delete()
    assert snapshot(path) == before
    assert (tmp_path / "outside/000000/00000-000.shard").read_bytes() == b"values"
    assert disk.sweep(tmp_path / "nowhere") == []


def crashed(path: Path, number: int, **different: object) -> Path:
    """A directory as a crash leaves it."""
    mine, token = owners.identity(), f"{number:016x}"
    text = {"format": "fzero-offload", "version": 1, "host": mine.host, "boot": mine.boot,
            "pid": 2**22 + 1, "start": 1, "token": token, **different}  # fmt: skip
    directory = path / f"fzero-offload-{mine.host}-{text['pid']}-{token}"
    (directory / "000000").mkdir(parents=True)
    (directory / "owner.json").write_text(json.dumps(text))
    for name in ("00000-000.shard", "00001-000.shard.tmp", "manifest.json"):
        (directory / "000000" / name).write_bytes(b"values")
    return directory


def test_a_sweep_removes_what_is(tmp_path, monkeypatch):
    mine = owners.identity()
    dead = [
        crashed(tmp_path, 1),
        crashed(tmp_path, 2, pid=mine.pid, start=mine.start + 1),  # the number was used again
    ]
    (dead[0] / "probe.tmp").write_text("")
    for number in (3, 4):  # killed while it made its directory
        directory = tmp_path / f"fzero-offload-{mine.host}-{2**22 + 1}-{number:016x}"
        directory.mkdir()
        dead.append(directory)
    (dead[-1] / "owner.json.tmp").write_text("{")
    assert sorted(disk.sweep(tmp_path)) == sorted(dead)
    assert os.listdir(tmp_path) == []
    # Killed by a crash of the machine: on a disk of its own that is as good.
    rebooted = crashed(tmp_path, 5, boot="another", pid=mine.pid, start=mine.start)
    monkeypatch.setattr(owners, "_file_system", lambda _: "nfs4")
    assert disk.sweep(tmp_path) == []
    monkeypatch.undo()
    if owners._file_system(tmp_path) not in owners._LOCAL:
        pytest.skip(f"temporary files are on {owners._file_system(tmp_path)}")
    assert disk.sweep(tmp_path) == [rebooted]


def test_a_process_sweeps_where_it_first_writes(tmp_path):
    before = crashed(tmp_path, 1)
    (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    assert not before.exists()
    later = crashed(tmp_path, 2)  # it may take long: not every time
    disk.write([jnp.arange(3.0)], tmp_path, ["v"])
    assert later.exists()
    disk.read([handle])


def test_a_sweep_keeps_unknown_files_in_our_own_directories(tmp_path):
    one, two = crashed(tmp_path, 1), crashed(tmp_path, 2)
    (one / "notes.txt").write_text("mine")
    (two / "000000" / "results.shard").write_text("mine")
    assert disk.sweep(tmp_path) == []
    assert sorted(snapshot(one)) == ["notes.txt", "owner.json"]
    assert sorted(snapshot(two)) == ["000000", "000000/results.shard", "owner.json"]


def test_where_a_file_system_is_told_apart(tmp_path):
    assert owners._file_system(Path("/proc/self")) == "proc"
    assert owners._file_system(tmp_path) not in ("", "proc")


def check_whole(process: Path) -> Counter[str]:
    """Every file with a final name is what should be in it; counts what was seen."""
    seen: Counter[str] = Counter()
    for directory in process.glob("*/"):
        manifest = directory / "manifest.json"
        listed = {}
        if manifest.exists():
            seen["manifests"] += 1
            for leaf in json.loads(manifest.read_text())["leaves"]:
                listed |= {shard["file"]: shard for shard in leaf["shards"]}
            assert len(listed) == 8
        for file in directory.iterdir():
            if file.suffix == ".tmp":
                seen["unfinished"] += 1
            elif match := re.fullmatch(r"(\d{5})-000\.shard", file.name):
                seen["whole"] += 1
                expected = contents(int(match[1])).tobytes()
                size = files.padded(len(expected))
                whole = file.read_bytes() == expected.ljust(size, b"\0")
                assert whole, f"{file} is torn"
                assert not listed or listed[file.name]["file_bytes"] == size
            else:
                assert file == manifest
    return seen


def test_killed_while_writing(tmp_path):
    """At random moments, by SIGKILL, next to a process that lives and has state on disk."""
    path = tmp_path / "shared"
    path.mkdir()
    before = strangers(path)
    kept = jnp.arange(100_000.0)
    (handle,) = disk.write([kept], path, ["kept"])
    seen: Counter[str] = Counter()
    moments = random.Random(0)
    with subprocess.Popen([sys.executable, CHILD, "victims", path], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:  # fmt: skip
        for _ in range(KILLS):
            parent.stdin.write("\n")
            parent.stdin.flush()
            victim = int(parent.stdout.readline())
            while not (tmp_path / "writing").exists():
                time.sleep(0.005)
            time.sleep(moments.uniform(0, 0.1))
            os.kill(victim, signal.SIGKILL)
            while Path(f"/proc/{victim}/stat").exists():
                time.sleep(0.002)
            (tmp_path / "writing").unlink()
            left = list(path.glob(f"*-{victim}-*"))
            for process in left:
                seen += check_whole(process)
            removed = disk.sweep(path)
            assert removed == left
            seen["swept"] += len(removed)
        parent.stdin.close()
        assert parent.wait(timeout=60) == 0
    assert bits(disk.read([handle])[0]) == bits(kept)
    handle.delete()
    assert snapshot(path) == before
    # Otherwise this proved nothing.
    assert seen["swept"] > KILLS // 2, seen
    assert seen["whole"] > KILLS, seen
    assert seen["unfinished"] > 2, seen
    assert seen["manifests"] > 2, seen


def test_a_living_process_is_never_swept(tmp_path):
    """Not by another process, even while the first one does nothing but live."""
    (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    code = "import sys; from fzero.offload import disk; print(disk.sweep(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True,
                          cwd=CHILD.parents[2], check=True)  # fmt: skip
    assert done.stdout.strip() == "[]"
    disk.read([handle])
    # The lock alone protects it: were it another's, with a number that nobody has.
    owner = handle.directory.parent / "owner.json"
    text = json.loads(owner.read_text())
    with owner.open("r+") as file:
        file.write(json.dumps({**text, "start": 1}).ljust(owner.stat().st_size))
    assert disk.sweep(tmp_path) == []
    disk.read([handle])


def test_a_directory_that_is_swept_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    opened, lost = os.open, []

    def losing(path, flags, *mode):
        if str(path).endswith("owner.json.tmp") and len(lost) < 2:
            os.rmdir(os.path.dirname(path))
            lost.append(path)
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", losing)
    (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    assert len(lost) == 2
    assert len(os.listdir(tmp_path)) == 1
    handle.delete()
    lost.clear()
    # Not for ever.
    monkeypatch.setattr(owners, "_lock", mock.Mock(side_effect=BlockingIOError))
    with pytest.raises(PlacementError, match="cannot write in"):
        disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    assert os.listdir(tmp_path) == []
