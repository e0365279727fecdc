"""Processes for the tests of the disk tier, which are limited, given disks of their own, or killed.

python disk_child.py mounts DIRECTORY | limit DIRECTORY | victim DIRECTORY
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
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
from fzero.storage import disk


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

    # Others may take the space while we write, and not every file system can reserve it.
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    real = os.fstatvfs

    def hopeful(fd: int) -> object:
        found = real(fd)
        return mock.Mock(f_bavail=1 << 30, f_frsize=found.f_frsize)

    with (
        mock.patch.object(os, "fstatvfs", hopeful),
        mock.patch.object(os, "posix_fallocate", unsupported),
    ):
        out["full"] = error_of([w], small)
        out["full_small_shards"] = error_of([jnp.arange(900_000.0), w], small)
    with mock.patch.object(os, "fstatvfs", hopeful):
        out["reserved"] = error_of([w], small)
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

    kept = disk.write([w], directory, ["kept"])
    warnings.simplefilter("ignore")  # forking a process with threads; the child runs no jax
    if (pid := os.fork()) == 0:
        kept[0].delete()
        os._exit(0)
    os.waitpid(pid, 0)
    out["kept_after_fork"] = bool((disk.read(kept)[0] == w).all())
    return out


def victim(directory: Path) -> None:
    """Holds values on disk, says so, and writes more until it is killed."""
    jax.config.update("jax_num_cpu_devices", 1)
    arrays = [jax.device_put(np.arange(size, dtype=np.int32)) for size in (900_000, 5000, 40)]
    held = disk.write(arrays, directory, ["a", "b", "c"])
    print(sum(handle.nbytes for handle in held), flush=True)
    while True:
        disk.write(arrays, directory, ["d", "e", "f"])


if __name__ == "__main__":
    task, where = sys.argv[1], Path(sys.argv[2])
    result = {"mounts": mounts, "limit": limit, "victim": victim}[task](where)
    print(json.dumps(result))
