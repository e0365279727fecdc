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
# Of each dtype every STEPth entry, of each its first sample: the whole is `make operators`.
PARTS, STEP = 6, {"float32": 6, "int64": 18, "bfloat16": 18}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", list(STEP))
def test_no_entry_turned_worse(dtype: str, part: int) -> None:
    stored = json.loads(TABLE.read_text())[dtype]
    right = sorted(name for name, (verdict, _) in stored.items() if verdict == "right")
    chosen = set(right[:: STEP[dtype]][part::PARTS])
    found = {
        name: beside.verdict(name, run, operators.SECONDS)
        for name, run in operators.entries(dtype, 1)
        if name in chosen
    }
    assert set(found) == chosen, "PyTorch's databases have other names: make operators"
    worse = {name: row.why for name, row in found.items() if row.verdict != "right"}
    assert not worse


def test_nothing_in_the_table_is_wrong() -> None:
    tables = json.loads(TABLE.read_text())
    assert set(tables) == set(STEP)
    rows = {(dtype, name): row for dtype, table in tables.items() for name, row in table.items()}
    assert rows
    assert {row[0] for row in rows.values()} <= {"right", "refused"}
    refused = {name for (_, name), row in rows.items() if row[0] == "refused"}
    assert len(refused) <= 40
    assert all(row[1] for row in rows.values() if row[0] == "refused")
