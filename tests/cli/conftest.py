"""Shared by the tests of the commands: a tiny model, a little text, one training run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import pytest
from cli_cases import FACTORY_SOURCE, TINY_CONFIG, Command, Run, fzero, training

from fzero import cli


# Starts jax with the session's devices: no command in this process can ask for others afterwards.
jax.devices()


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `fzero` in this process, where torch and transformers are imported already."""

    def run(*args: object) -> Run:
        capsys.readouterr()
        before, sys.argv = sys.argv, ["fzero", *map(str, args)]
        precision = jax.config.jax_default_matmul_precision
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            sys.argv = before
            # A command owns its process and sets this for good; here others come after it.
            jax.config.update("jax_default_matmul_precision", precision)
        code = ended.value.code
        assert isinstance(code, int | None)
        return Run(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(json.dumps(TINY_CONFIG))
    return path


@pytest.fixture(scope="session")
def factory_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("factory") / "bigram.py"
    path.write_text(FACTORY_SOURCE)
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three text files; which of them validates depends on their names alone."""
    folder = tmp_path_factory.mktemp("texts")
    paths = []
    for number, word in enumerate(("tensor", "scatter", "gather")):
        path = folder / f"{word}.txt"
        path.write_text("".join(f"{word} {i} of {number + 40}\n" for i in range(400)))
        paths.append(path)
    return paths


@pytest.fixture(scope="session")
def trained(
    tmp_path_factory: pytest.TempPathFactory, config_file: Path, texts: list[Path]
) -> tuple[Path, Run]:
    """A directory that `fzero train` wrote and verified, and what the process printed."""
    out = tmp_path_factory.mktemp("trained") / "out"
    done = fzero(*training(config_file, texts, out), "--save-every", 4, "--verify")
    assert done.status == 0, done.stderr
    return out, done
