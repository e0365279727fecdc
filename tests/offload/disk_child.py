"""Processes for the tests of the disk tier, which are limited, given disks of their own, or killed.

python disk_child.py mounts DIRECTORY | limit DIRECTORY | victims DIRECTORY
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock


os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from fzero import PlacementError
from fzero.offload import disk, files


def error_of(arrays: list[jax.Array], path: Path) -> str:
    """What `write` says when it fails."""
    try:
        disk.write(arrays, path, ["w", "v"][: len(arrays)])
    except PlacementError as error:
        return str(error)
    raise AssertionError("nothing failed")


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        sys.exit(77)


def mounts(directory: Path) -> dict[str, Any]:
    """A small disk, and one that is read-only."""
    small, fixed = directory / "small", directory / "fixed"
    small.mkdir()
    fixed.mkdir()
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small))
    mount("-t", "tmpfs", "-o", "size=4m,ro", "tmpfs", str(fixed))
    w = jnp.arange(2_000_000.0)
    out: dict[str, Any] = {"announced": error_of([w], small)}
    # Others may take the space while we write.
    with mock.patch.object(files, "free_bytes", return_value=1 << 40):
        out["full"] = error_of([w], small)
        out["full_small_files"] = error_of([jnp.arange(900_000.0), w], small)
    out["left"] = os.listdir(small)
    out["equal_after"] = bool((np.asarray(w) == np.arange(2_000_000, dtype=np.float32)).all())
    handles = disk.write([w[:1000]], small, ["w"])  # there is room for that
    assert (disk.read(handles)[0] == w[:1000]).all()
    out["read_only"] = error_of([w], fixed)
    return out


def limit(directory: Path) -> dict[str, Any]:
    """No file may be larger than a megabyte. Then: a fork that has copies of our handles."""
    w = jnp.arange(2_000_000.0)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    out: dict[str, Any] = {"error": error_of([w], directory), "left": os.listdir(directory)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    out["equal_after"] = bool((np.asarray(w) == np.arange(2_000_000, dtype=np.float32)).all())

    short = disk.write([jnp.arange(4.0)], directory, ["short"])
    kept = disk.write([w], directory, ["kept"])  # until the process ends
    warnings.simplefilter("ignore")  # forking a process with threads; the child runs no jax
    if (pid := os.fork()) == 0:
        kept[0].delete()
        os._exit(0)
    os.waitpid(pid, 0)
    short[0].delete()
    assert (disk.read(kept)[0] == w).all()
    out["after_fork"] = sorted(os.listdir(kept[0].directory.parent))
    globals()["kept"] = kept
    return out


def contents(number: int) -> np.ndarray[Any, Any]:
    """Of the victims' leaves: every byte says where it belongs."""
    size = (900_000, 5000, 40, 300_000)[number % 4]
    return np.arange(size, dtype=np.int32) * (number + 1)


def victims(directory: Path) -> None:
    """For each line on standard input: a process that writes until it is killed.

    They are forks of this one, which has imported everything and started nothing.
    """
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            write_forever(directory)
        print(pid, flush=True)
        os.waitpid(pid, 0)


def write_forever(directory: Path) -> None:
    """Writes and deletes, so that a moment taken at random is within all parts of it."""
    jax.config.update("jax_num_cpu_devices", 1)
    files.CHUNK = 64 * files.BLOCK
    arrays = [jax.device_put(contents(number)) for number in range(8)]
    jax.block_until_ready(arrays)
    names = [f"leaf/{number}" for number in range(8)]
    threading.Timer(60, os.kill, (os.getpid(), signal.SIGKILL)).start()  # if nobody else does
    (directory.parent / "writing").write_text("")
    while True:
        handles = [disk.write(arrays, directory, names) for _ in range(2)]
        disk.read(handles[0])
        del handles


if __name__ == "__main__":
    task, where = sys.argv[1], Path(sys.argv[2])
    result = {"mounts": mounts, "limit": limit, "victims": victims}[task](where)
    print(json.dumps(result))
