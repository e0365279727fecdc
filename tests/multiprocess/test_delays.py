"""Processes that sleep at random actions of a pipeline: the same bits, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.nightly]

WORKER = Path(__file__).with_name("delays_worker.py")
STEPS = 300
# Of a machine that does other things: a hang is a hang.
TIMEOUT_S = 1800


def ends(folder: Path, processes: int, seed: int) -> list[str]:
    """What the processes of a run had in the end."""
    done = subprocess.run(
        [sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
         folder / f"logs-{seed}", "--", WORKER, folder, str(STEPS), str(seed)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // processes)},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [(folder / f"end-{seed}-{process}").read_text() for process in range(processes)]


@pytest.mark.parametrize("processes", [2, 4])
def test_random_delays_in_every_process_change_no_bit(tmp_path, processes):
    straight, *delayed = (ends(tmp_path, processes, seed) for seed in (0, 1, 2))
    assert delayed == [straight, straight]
