"""The stored table of PyTorch's own operators and modules: what was right stays right.

All of it, of three dtypes and with three samples each: `make nightly-operators`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_bridge as tb
from torch_bridge.lower import registry


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import beside  # noqa: E402
import operators  # noqa: E402


TABLE = ROOT / "benchmarks" / "results" / "operators.json"
BY_DAY = [
    line
    for line in (ROOT / "tests/data/operators_by_day.txt").read_text().splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize("part", range(4))
def test_entries_that_no_other_test_of_the_day_runs(part: int) -> None:
    stored = json.loads(TABLE.read_text())["float32"]
    assert {stored[name][0] for name in BY_DAY} == {"right"}
    require_as_before("float32", stored, set(BY_DAY[part::4]))


def require_as_before(dtype: str, stored: dict[str, list[str]], chosen: set[str]) -> None:
    found = {
        name: beside.verdict(name, run, operators.SECONDS)
        for name, run in operators.entries(dtype, 1)
        if name in chosen
    }
    assert set(found) == chosen, "PyTorch's databases have other names: make operators"
    worse = [row for name, row in found.items() if beside.worse(row.verdict, stored[name][0])]
    assert not worse


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "nn.PReLU"),
        ("float32", "linalg.eig"),
        ("float32", "linalg.eigvals"),
        ("float32", "max_pool2d_with_indices_backward"),
        ("bfloat16", "matrix_exp"),
        ("bfloat16", "native_layer_norm"),
    ],
)
def test_entries_that_were_not_right_are(dtype: str, name: str) -> None:
    entry = dict(operators.entries(dtype, 3))[name]
    assert beside.verdict(name, entry, operators.SECONDS) == beside.Row(name, "right")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("equal", r"torch\.isclose"),
        ("resize_", r"reshape"),
        ("to_sparse", r"index_add"),
        ("geqrf", r"torch\.linalg\.qr"),
        ("hash_tensor", r"outside of the model"),
        ("unique", r"neighbours"),
        ("nonzero", r"torch\.where"),
        ("jiterator_unary", r"torch's operators"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, remedy: str) -> None:
    row = beside.verdict(name, dict(operators.entries("float32", 1))[name], operators.SECONDS)
    assert row.verdict == "refused"
    assert re.search(remedy, row.why), row.why


def test_what_takes_too_long_has_failed_and_is_not_refused() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while True:
                x = x + 1

    row = beside.verdict("slow", lambda: tb.convert(Slow(), torch.ones(2)), 1)
    assert (row.verdict, row.why) == ("failed", "Late: took more than 1 s of CPU time")


def test_a_check_fails_where_a_row_turned_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "operators.json"
    kept.write_text(json.dumps({"int64": {"abs": ["right", "", 1], "neg": ["right", "", 1]}}))
    arguments = ["--check", "--dtype", "int64", "--samples", "1", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["operators.py", *arguments, "--only", "^(abs|neg)$"])
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    operators.main()
    lowering = registry._TABLE["aten.neg.default"]
    monkeypatch.setitem(registry._TABLE, "aten.neg.default", replace(lowering, fn=lambda x: x))
    with pytest.raises(SystemExit, match=r"turned worse: neg$"):
        operators.main()
    assert json.loads(kept.read_text())["int64"]["neg"][0] == "right"


def test_nothing_in_the_table_is_wrong() -> None:
    tables = json.loads(TABLE.read_text())
    assert set(tables) == set(operators.DTYPES)
    rows = {(dtype, name): row for dtype, table in tables.items() for name, row in table.items()}
    assert rows
    assert {row[0] for row in rows.values()} <= {"right", "refused"}
    refused = {name for (_, name), row in rows.items() if row[0] == "refused"}
    assert len(refused) <= 40
    assert all(row[1] for row in rows.values() if row[0] == "refused")
    told = (
        r"[Uu]se |[Cc]all |[Cc]ompute |[Gg]ive |[Kk]eep|[Ss]ort|[Ww]rite|convert |is torch\.where"
    )
    told += r"|has |counts|Say |Compare |Make |make |gives|detach|take it|float32|factorised by"
    assert all(re.search(told, row[1]) for row in rows.values() if row[0] == "refused")
    # A verdict, a reason, and how many samples were run.
    assert all(len(row) == 3 for row in rows.values())
