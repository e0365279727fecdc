"""Programs and files do not hang on the order of a set: processes must run the same ones.

Python's hashes of strings differ from process to process, and with them the order of a set.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


TESTS = Path(__file__).parent


def texts(folder: Path) -> Counter[str]:
    """Texts of the programs that were dumped; a thread's turn gives them their numbers."""
    return Counter(path.read_text() for path in folder.glob("*.mlir"))


def described(folder: Path) -> dict[str, str]:
    """What a checkpoint says about itself, without times and random names."""
    found = {
        str(path.relative_to(folder)): re.sub(r'_timestamp_nsecs": \d+', "", path.read_text())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (path.suffix == ".json" or path.name.startswith("_"))
    }
    return {name: re.sub(r"[0-9a-f]{32}", "", text) for name, text in found.items()}


@pytest.mark.parametrize("kind", ["native", pytest.param("converted", marks=pytest.mark.nightly)])
def test_processes_with_other_hashes_compile_the_same(kind, tmp_path):
    children = {}
    for seed in "12":
        place = tmp_path / seed
        environment = {
            **os.environ, "PYTHONHASHSEED": seed, "JAX_DUMP_IR_TO": str(place / "ir"),
            "JAX_DUMP_IR_MODES": "stablehlo", "JAX_NUM_CPU_DEVICES": "4",
            "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
        }  # fmt: skip
        children[place] = subprocess.Popen(
            [sys.executable, TESTS / "support" / "one_run.py", kind, place / "saved"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    for child in children.values():
        said, _ = child.communicate()
        assert child.returncode == 0, said
    one, two = children
    assert texts(one / "ir") == texts(two / "ir")
    assert sum(texts(one / "ir").values()) >= 3
    assert described(one / "saved") == described(two / "saved")
    assert described(one / "saved")
