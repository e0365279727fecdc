"""The stored table of architectures (`make models`): what was right stays right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import model_list  # noqa: E402
import models  # noqa: E402


TABLE = ROOT / "benchmarks" / "results" / "models.json"


def test_nothing_in_the_table_is_wrong() -> None:
    rows = json.loads(TABLE.read_text())
    assert rows
    # What takes more than a minute has no answer: the only way to fail.
    late = [row for row in rows.values() if row["why"].startswith("Late: took more than")]
    assert [row for row in rows.values() if row["verdict"] == "failed"] == late
    assert {row["verdict"] for row in rows.values()} <= {"right", "refused", "none", "failed"}
    assert all(row["why"] for row in rows.values() if row["verdict"] != "right")


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
