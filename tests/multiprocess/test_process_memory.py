"""States over processes come from checkpoints, go to PyTorch's, and change plans, leaf by leaf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.nightly]

WORKER = Path(__file__).with_name("memory_worker.py")
# What threads, programs and allocators take beside it; a whole state would be 64 or 128 MiB more.
BESIDE_MIB = 32


def test_restore_replan_and_exports_hold_a_leaf_beside_the_state(tmp_path):
    """Resident bytes of each process at their peak, beyond what it had and what it now keeps."""
    done = subprocess.run(
        [sys.executable, "-m", "fzero.cli", "launch", "--processes", "2", "--logs",
         tmp_path / "logs", "--", WORKER, tmp_path],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for process in range(2):
        found = json.loads((tmp_path / f"memory-{process}.json").read_text())
        own, leaf = found.pop("own"), found.pop("leaf")
        assert own == 64
        assert len(found) == 8
        for what, beside in found.items():
            assert beside <= leaf + BESIDE_MIB, (what, found)
