"""README's code runs as it stands, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
GUARANTEES = (ROOT / "docs/guarantees.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        assert len([line for line in block.splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_code_runs(number, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8",
             "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    if "tb.save" in BLOCKS[number]:
        assert (tmp_path / "model.safetensors").stat().st_size > 100_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [
        link for link in links
        if "://" not in link and not (page.parent / link).exists()
    ]  # fmt: skip
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page):
    named = re.findall(r"`(tests/[\w/.]+)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_guarantee_names_tests_by_their_paths():
    rows = re.findall(r"^\| (?!guarantee|report|---)(.+) \| (.+) \|$", GUARANTEES, re.MULTILINE)
    assert len(rows) > 50
    for what, shown in rows:
        named = [name for name in shown.split("`")[1::2] if not name.startswith("make ")]
        assert named, what
        for name in named:
            place = ROOT / name
            assert name.startswith(("tests/", "examples/")), f"{what}: {name}"
            assert place.exists(), f"{what}: {name}"
            files = [place] if place.is_file() else list(place.rglob("test_*.py"))
            code = "".join(file.read_text() for file in files)
            assert name.startswith("examples/") or re.search(r"def test_|\.TestCase", code), name
