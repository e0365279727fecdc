"""The stored table of architectures (`make models`): what was right stays right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "models.json"


def test_nothing_in_the_table_is_wrong() -> None:
    rows = json.loads(TABLE.read_text())
    assert rows
    assert {row["verdict"] for row in rows.values()} <= {"right", "refused", "none"}
    assert all(row["why"] for row in rows.values() if row["verdict"] != "right")


@pytest.mark.nightly
@pytest.mark.slow
def test_no_architecture_turned_worse() -> None:
    """Every eighth of those whose library is installed."""
    script = ROOT / "benchmarks" / "models.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check", "8"],
        capture_output=True,
        text=True,
        timeout=3600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "'right'" in done.stdout
