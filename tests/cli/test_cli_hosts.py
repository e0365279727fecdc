"""`fzero launch -- train`: several processes, one run; SIGTERM saves, and fewer go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.extended]


def start(processes: int, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
        str(out.with_name(f"logs-{processes}")), "--", "train", "--out", str(out), *arguments,
    ]  # fmt: skip
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(2 // processes)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def test_sigterm_saves_in_all_processes_and_one_goes_on(tmp_path, config_file, texts):
    out = tmp_path / "out"
    arguments = [
        "--model", f"hf:{config_file}", "--data", str(texts[0]), str(texts[1]), "--steps", "2000",
        "--batch", "4", "--seq", "16", "--eval-every", "0", "--eval-sequences", "4",
        "--zero", "3", "--seed", "3",
    ]  # fmt: skip
    process, metrics = start(2, out, *arguments), out / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 200
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, shown
    summary = json.loads((out / "summary.json").read_text())
    reached = summary["steps"]
    assert 4 <= reached < 2000
    assert summary["devices"]["count"] == 2
    assert f"SIGTERM: stopped after step {reached};" in shown
    assert "the same command with --resume goes on" in shown
    assert (out / "summary.json").exists()
    # One process with both devices has all that two had: the run goes on where it was.
    process = start(1, out, "--resume", *arguments)
    try:
        deadline = time.monotonic() + 200
        while metrics.read_text().count("\n") < reached + 6:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        shown, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, shown
    assert f"resumed after step {reached} of 2000" in shown
    losses = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [e["step"] for e in losses if "loss" in e][: reached + 5] == list(range(1, reached + 6))
