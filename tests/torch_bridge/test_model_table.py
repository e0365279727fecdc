"""The stored table of architectures (`make models`): what was right stays right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import model_list  # noqa: E402
import models  # noqa: E402


TABLE = ROOT / "benchmarks" / "results" / "models.json"


def test_nothing_in_the_table_is_wrong() -> None:
    rows = json.loads(TABLE.read_text())
    assert rows
    # What takes more than five minutes has no answer: the only way to fail.
    late = [row for row in rows.values() if row["why"].startswith("Late: took more than")]
    assert [row for row in rows.values() if row["verdict"] == "failed"] == late
    assert {row["verdict"] for row in rows.values()} <= {"right", "refused", "none", "failed"}
    assert all(row["why"] for row in rows.values() if row["verdict"] != "right")


def test_in_float64_what_pytorch_rounds_is_no_difference() -> None:
    """A slope of hardsigmoid (a sixth in float32), and one that only rounding keeps from 0."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Hardsigmoid(), nn.Linear(4, 4))
    with torch.no_grad():
        module[3].weight.mul_(1e4)

    def call(rows: int) -> dict[str, torch.Tensor]:
        return {"input": model_list.floats(16 * rows, 4)}

    models.check_wide(module, call, True)
    module[2] = nn.Hardtanh(-3, 3)
    right = models.theirs

    def other(*args: Any) -> models.Side:
        made = right(*args)
        made.gradients["0.weight"] *= 1 + 1e-8
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "theirs", other)
        with pytest.raises(models.Wrong, match=r"float64: gradient of 0\.weight"):
            models.check_wide(module, call, True)


def test_a_check_fails_where_a_row_turned_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole, in the environment that has the libraries: make nightly-models."""
    kept = tmp_path / "models.json"
    kept.write_text(json.dumps({name: {"verdict": "right", "why": ""} for name in ("a", "b")}))
    now = {"a": "right", "b": "refused"}
    monkeypatch.setattr(model_list, "entries", lambda: [(name, None) for name in now])
    monkeypatch.setattr(models.Worker, "check", lambda _, n: {"verdict": now[n], "why": "so"})
    monkeypatch.setattr(sys, "argv", ["models.py", "--check", "1", "--json", str(kept)])
    with pytest.raises(SystemExit, match=r"turned worse: b$"):
        models.main()
    assert "refused  b: so" in capsys.readouterr().out
    now["b"] = "right"
    models.main()
