"""The package as others get it: built, installed beside no repository, and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest


pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[1]
# What takes seconds to import: help does without, and so is quick.
SLOW = {"fzero", "torch_bridge", "jax", "numpy", "optax", "torch", "transformers", "matplotlib"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: Path, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "FZERO_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600,
        env=kept | environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, of a copy: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    copy.mkdir()
    for name in ("fzero", "torch_bridge", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=leave)
    for name in ("fzero_command.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=copy)
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel of the source distribution; other packages are ours."""
    folder = tmp_path_factory.mktemp("installed")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("fzero-*")
    code = f"import setuptools.build_meta as b; b.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (wheel,) = folder.glob("*.whl")
    home = folder / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(python, "-c", purelib, cwd=folder).strip())
    # A path alone: an editable installation over there stays out.
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index",
        "--quiet", wheel, cwd=folder)  # fmt: skip
    return python


def test_the_wheel_is_whole(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib.resources as r, importlib.metadata as m, fzero, torch_bridge, fzero_command
print(fzero.__file__); print(torch_bridge.__file__); print(fzero_command.__file__)
print(m.version("fzero"))
pages = ("runs/page.html.jinja", "preflight/page.html.jinja", "report/base.html.jinja")
for name in ("preflight/topologies/h200.txtpb", *pages, "py.typed"):
    assert r.files("fzero").joinpath(name).read_text() is not None
"""
    said = run(installed, "-c", code, cwd=tmp_path).split()
    own = installed.parents[1]
    assert all(Path(path).is_relative_to(own) for path in said[:3]), said
    assert said[3] == PROJECT["version"]


def test_quickstart_runs_without_the_repository(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "quickstart.py", tmp_path / "quickstart.py")
    assert run(installed, "quickstart.py", cwd=tmp_path)


def test_the_command_is_there_and_quick(installed: Path, tmp_path: Path) -> None:
    script = str(installed.with_name("fzero"))
    code = f"""
import atexit, runpy, sys
atexit.register(lambda: print({SLOW} & set(sys.modules)))
sys.argv = [{script!r}, "--help"]
runpy.run_path({script!r}, run_name="__main__")
"""
    said = run(installed, "-c", code, cwd=tmp_path)
    assert said.splitlines()[-1] == "set()"
    for name in ("train", "eval", "report", "doctor", "schedule", "preflight"):
        assert f"  {name} " in said
    assert "not importable" not in said
    assert "bubble" in run(installed.with_name("fzero"), "schedule", "compare", "--stages", 2,
                           "--microbatches", 4, cwd=tmp_path)  # fmt: skip


def test_extras_are_small() -> None:
    """An extra brings what its name says; `dev` and `docs` are for those who work on fzero."""
    extras = PROJECT["optional-dependencies"]
    names = {re.split(r"[^\w-]", one)[0] for one in PROJECT["dependencies"]}
    assert len(names - {"numpy", "scipy", "ml_dtypes"}) <= 8  # those come with jax
    for name, wanted in extras.items():
        assert name in ("dev", "docs") or len(wanted) <= 3, name
    base = " ".join(PROJECT["dependencies"])
    assert not any(name in base for name in ("torch", "transformers", "matplotlib", "jinja2"))
