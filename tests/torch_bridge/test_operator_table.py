"""The stored table of PyTorch's own operators and modules: what was right stays right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import beside  # noqa: E402
import operators  # noqa: E402


TABLE = ROOT / "benchmarks" / "results" / "operators.json"
# Every sixth entry, of each its first sample: the whole table takes half an hour.
PARTS, STEP = 6, 6


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_no_entry_turned_worse(part: int) -> None:
    stored = json.loads(TABLE.read_text())["float32"]
    right = sorted(name for name, (verdict, _) in stored.items() if verdict == "right")
    chosen = set(right[::STEP][part::PARTS])
    assert chosen
    found = {
        name: beside.verdict(name, run, operators.SECONDS)
        for name, run in operators.entries("float32", 1)
        if name in chosen
    }
    assert set(found) == chosen, "PyTorch's databases have other names: make operators"
    worse = {name: row.why for name, row in found.items() if row.verdict != "right"}
    assert not worse
