"""The outputs that a page of the site shows from the compiler for GPUs are those of today."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_committed_outputs_are_those_of_a_new_run(tmp_path):
    ran = subprocess.run(
        [sys.executable, ROOT / "docs/_ext/kept.py", tmp_path],
        capture_output=True, text=True, timeout=1800, cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    page = "will_it_fit.outputs.json"
    committed = json.loads((ROOT / "docs/tutorials" / page).read_text())
    assert json.loads((tmp_path / page).read_text()) == committed, "run make docs-outputs"
