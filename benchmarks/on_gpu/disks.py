"""A model of 4.3B parameters parked and brought back, and the disk with and without GPUDirect."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from on_gpu.child import Row


ROOT = Path(__file__).parents[2]
MIB = 2**20


def table_4b(tiny: bool) -> dict[str, Row]:
    """The table that DeepSpeed's `offload_states` was announced with, by `examples/offload_4b.py`.

    DeepSpeed's, 4.3B parameters on 4 A100s: 18.2 GB a GPU down to 17.7 MB, 2.45 GB/s out and 11.05
    GB/s back.
    """
    return {"table": functools.partial(_example, tiny)}


def _example(tiny: bool) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "examples/offload_4b.py"), *(["--tiny"] if tiny else [])]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True, env=os.environ)
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    return {"right": lines[-1].startswith("and on: loss"), "said": lines}


def disk(tiny: bool) -> dict[str, Row]:
    """The disk tier beside raw direct I/O, and KvikIO where it is installed."""
    return {
        "beside raw I/O": functools.partial(_beside_raw, tiny),
        "gpudirect": functools.partial(_gpudirect, 4 * MIB if tiny else 1024 * MIB),
    }


def _beside_raw(tiny: bool) -> dict[str, Any]:
    missing = [name for name in ("tensorstore", "xxhash") if find_spec(name) is None]
    if missing:
        return {"skipped": f"{', '.join(missing)} not installed here"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "disk.json")
        sizes = ["--gib", "2", "--rounds", "3"]
        if tiny:
            sizes = ["--gib", "0.02", "--rounds", "1", "--files", "16"]
        command = [sys.executable, str(ROOT / "benchmarks/offload_disk.py"), "--path", folder]
        subprocess.run([*command, *sizes, "--json", str(out)], check=True)
        rows = json.loads(out.read_text())["cases"]
    return {"rows": rows, "goal": "0.9 of raw I/O"}


def _gpudirect(size: int) -> dict[str, Any]:
    """Bytes per second between the device and a file without host memory between, and the bits."""
    try:
        import kvikio
        import kvikio.defaults
    except ImportError:
        return {"right": True, "kvikio": False, "why": "KvikIO is not installed"}
    values = jnp.asarray(np.random.default_rng(0).integers(0, 2**31, size // 4, dtype=np.int32))
    back = jnp.zeros_like(values)
    jax.block_until_ready((values, back))
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "values"))
        started = time.perf_counter()
        with kvikio.CuFile(file, "w") as f:
            f.write(values)
        written = time.perf_counter() - started
        started = time.perf_counter()
        with kvikio.CuFile(file, "r") as f:
            f.read(back)  # into the array's own memory, which nothing else knows yet
        read = time.perf_counter() - started
        direct = Path(file).read_bytes() == np.asarray(values).tobytes()
    alike = bool((np.asarray(back) == np.asarray(values)).all())
    return {
        "right": direct and alike, "kvikio": kvikio.__version__,
        "bypasses_the_host": not kvikio.defaults.compat_mode_preferred()
        if hasattr(kvikio.defaults, "compat_mode_preferred") else None,
        "write_bytes_per_s": size / written, "read_bytes_per_s": size / read,
    }  # fmt: skip
