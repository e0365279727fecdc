"""The test suite on the GPU: what passes, what needs more devices, and what differs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from on_gpu.child import Row


ROOT = Path(__file__).parents[2]
# Folders and files of tests, each a row, so that a cut run keeps those that ended. Not among them:
# tests of commands and processes, which start CPU devices of their own.
GROUPS = {
    "steps": (
        "tests/test_precision.py", "tests/test_step.py", "tests/test_accumulate.py",
        "tests/test_optimizers.py", "tests/test_compute_copy.py", "tests/test_float8.py",
        "tests/test_flax.py", "tests/test_keys.py", "tests/test_buffers.py", "tests/test_losses.py",
        "tests/test_model.py", "tests/test_compose.py", "tests/test_averages.py",
        "tests/test_state.py", "tests/test_hand_edits.py", "tests/test_check_finite.py",
        "tests/optimizers", "tests/zero", "tests/offload",
    ),
    "bridge": ("tests/torch_bridge",),
}  # fmt: skip
TINY = {"tree": ("tests/test_tree.py",)}
# What a test says that has too few devices.
MORE_DEVICES = (
    "devices", "jax_num_cpu_devices", "out of range", "array of size 1", "divide data=1",
)  # fmt: skip
# A group that takes longer is cut: what has ended by then is kept.
SECONDS = 230
# A program for a GPU takes seconds of one core to compile, and next to nothing to run.
WORKERS = max(1, (os.cpu_count() or 1) * 3 // 4)


def tests(tiny: bool) -> dict[str, Row]:
    """A row for each group."""
    groups = TINY if tiny else GROUPS
    return {name: functools.partial(_group, paths) for name, paths in groups.items()}


def _group(paths: tuple[str, ...]) -> dict[str, Any]:
    several = ["-n", str(WORKERS)] if find_spec("xdist") else []
    hanging = ["--timeout", "150"] if find_spec("pytest_timeout") else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tests.jsonl")
        # A worker of pytest's that runs this is none of the run that it begins.
        own = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
        environment = {
            **own, "FZERO_TESTS_REPORT": str(out), "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu"),
            # As the CPU multiplies, which most of these tests compare with.
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            # Trying out kernels takes longer than all that these tests compute.
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", *paths, "-q", "-p", "on_gpu.suite_plugin",
            "-p", "no:cacheprovider", "-m", "not nightly and not multiprocess",
            *several, *hanging,
        ]  # fmt: skip
        try:
            subprocess.run(command, env=environment, cwd=ROOT, check=False, timeout=SECONDS)
            cut = False
        except subprocess.TimeoutExpired:
            cut = True
        lines = out.read_text().splitlines() if out.exists() else []
    seen: dict[str, str] = {}
    for line in lines:
        test, why = json.loads(line)
        seen[test] = seen.get(test) or why
    few = {n: why for n, why in seen.items() if why and any(w in why for w in MORE_DEVICES)}
    failed = {n: why[-400:] for n, why in seen.items() if why and n not in few}
    return {
        "passed": sum(not why for why in seen.values()), "need_more_devices": len(few),
        "cut": cut, "differ": failed, "right": bool(seen),
    }  # fmt: skip
