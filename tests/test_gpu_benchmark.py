"""`benchmarks/gpu.py` on a CPU: it keeps what it had, resumes, and says what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]


def gpu(out, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--tiny", "--json", str(out), *args]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.nightly
def test_it_resumes_keeps_rows_and_says_what_is_left(tmp_path):
    out = tmp_path / "new" / "gpu.json"
    late = gpu(out, "--only", "encode", "--minutes", "0")
    assert late.returncode == 3, late.stderr
    assert "call again for: encode" in late.stdout
    # One row is there already, another was begun twice and never ended: neither runs again.
    kept = {"rows": {"float32": {"right": True, "kept": 1}}, "begun": {"float32": 1}, "done": False}
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"parts": {"encode": kept}}))
    done = gpu(out, "--only", "encode")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["parts"]["encode"]
    assert found["done"]
    assert found["rows"]["float32"] == {"right": True, "kept": 1}
    assert found["rows"]["bfloat16"]["bytes_that_differ"] == 0
    again = gpu(out, "--only", "encode")
    assert (again.returncode, "all done" in again.stdout) == (0, True)
    assert "bfloat16:" not in again.stdout


def test_a_row_that_is_wrong_is_the_exit_status(tmp_path):
    out = tmp_path / "gpu.json"
    rows = {"float32": {"right": False}, "bfloat16": {"error": "OSError: no"}}
    out.write_text(json.dumps({"parts": {"encode": {"rows": rows, "begun": {}, "done": True}}}))
    said = gpu(out, "--only", "encode")
    assert said.returncode == 1
    assert "2 rows, 1 wrong, 1 failed" in said.stdout


def test_a_row_that_never_ended_is_no_success(tmp_path):
    out = tmp_path / "gpu.json"
    part = {"rows": {"float32": {"right": True}}, "begun": {"bfloat16": 2}, "done": True}
    out.write_text(json.dumps({"parts": {"encode": part}}))
    said = gpu(out, "--only", "encode")
    assert said.returncode == 1
    assert "1 begun twice and never ended (encode bfloat16)" in said.stdout


@pytest.mark.nightly
def test_parts_that_were_wrong_once_run_at_tiny_sizes(tmp_path):
    out = tmp_path / "gpu.json"
    said = gpu(out, "--minutes", "9", "--only", "tiers", "processes", "calibrate", "tests")
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-3000:]
    assert set(json.loads(out.read_text())["parts"]) == {"tiers", "processes", "calibrate", "tests"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # a quarter of an hour on a quiet machine
def test_the_whole_order_runs_at_tiny_sizes(tmp_path):
    out = tmp_path / "gpu.json"
    said = gpu(out, "--minutes", "30")
    parts = json.loads(out.read_text())["parts"]
    listed = gpu(out, "--list").stdout.splitlines()
    assert set(parts) == {line.split()[1] for line in listed}
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-3000:]
