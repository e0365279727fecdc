"""Processes are killed while they write: nothing of theirs is left, and others lose nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
from disk_cases import bits, files_in

from fzero.storage import disk


CHILD = Path(__file__).with_name("disk_child.py")


def test_killed_while_writing(tmp_path):
    """By SIGKILL, next to a process that lives and has state on the same disk."""
    kept = jnp.arange(100_000.0)
    (handle,) = disk.write([kept], tmp_path, ["kept"])
    with subprocess.Popen(
        [sys.executable, CHILD, "victim", tmp_path], text=True, stdout=subprocess.PIPE
    ) as victim:
        assert int(victim.stdout.readline()) == 4 * (900_000 + 5000 + 40)
        # Its file is there, has bytes, and no name.
        links = []
        for file in Path(f"/proc/{victim.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread's, closed meanwhile
                links.append(os.readlink(file))
        (name,) = [link for link in links if link.startswith(f"{tmp_path}/")]
        assert name.endswith("(deleted)")
        assert os.listdir(tmp_path) == []
        os.kill(victim.pid, signal.SIGKILL)
        assert victim.wait(timeout=600) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
    assert len(files_in(tmp_path)) == 1
    assert bits(disk.read([handle])[0]) == bits(kept)


def test_directories_are_shared(tmp_path):
    """Two processes with state in one directory do not see each other's."""
    (handle,) = disk.write([jnp.arange(3.0)], tmp_path, ["w"])
    code = (
        "import sys, jax.numpy as jnp; from fzero.storage import disk;"
        "h = disk.write([jnp.arange(5.0)], sys.argv[1], ['w']); print(float(disk.read(h)[0].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True,
                          cwd=CHILD.parents[2], check=True)  # fmt: skip
    assert done.stdout.strip() == "10.0"
    assert bits(disk.read([handle])[0]) == bits(jnp.arange(3.0))
    assert os.listdir(tmp_path) == []
