"""The test suite on the GPU: what passes, what needs more devices, and what differs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from on_gpu.child import Row


ROOT = Path(__file__).parents[2]
# Folders and files of tests, each a row, so that a cut run keeps those that ended. Not among them:
# tests of commands and processes, which start CPU devices of their own.
GROUPS = (
    "tests/test_precision.py", "tests/test_step.py", "tests/test_accumulate.py",
    "tests/test_optimizers.py", "tests/test_compute_copy.py", "tests/optimizers", "tests/zero",
    "tests/offload", "tests/torch_bridge",
)  # fmt: skip
# What a test says that has too few devices.
MORE_DEVICES = ("devices", "jax_num_cpu_devices", "out of range")


def tests(tiny: bool) -> dict[str, Row]:
    """A row for each group."""
    groups = ("tests/test_tree.py",) if tiny else GROUPS
    return {group: functools.partial(_group, group) for group in groups}


def _group(group: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tests.json")
        environment = {
            **os.environ, "FZERO_TESTS_REPORT": str(out), "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cuda,cpu"),
        }  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "pytest", group, "-q", "-p", "on_gpu.suite_plugin",
             "-p", "no:cacheprovider", "-m", "not nightly and not multiprocess"],
            env=environment, cwd=ROOT, check=False,
        )  # fmt: skip
        seen = json.loads(out.read_text()) if out.exists() else {}
    few = {n: why for n, why in seen.items() if why and any(w in why for w in MORE_DEVICES)}
    failed = {n: why[:300] for n, why in seen.items() if why and n not in few}
    return {
        "passed": sum(not why for why in seen.values()), "need_more_devices": len(few),
        "differ": failed, "right": bool(seen),
    }  # fmt: skip
