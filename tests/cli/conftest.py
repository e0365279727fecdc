"""Shared by the tests of the commands: a tiny model, a little text, one training run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import jax
import pytest
import transformers
from cli_cases import FACTORY_SOURCE, TINY_CONFIG, Command, Run, fzero, training


# Starts jax with the session's devices: no command in this process can ask for others afterwards.
jax.devices()
# What these say when they are imported is not what a command says.
transformers.AutoModelForCausalLM  # noqa: B018
importlib.import_module("torch_bridge.cli.train")


@pytest.fixture
def here() -> Command:
    """Runs `fzero` in this process."""
    return fzero


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
    """A directory that `fzero train` wrote and verified, and what it printed."""
    out = tmp_path_factory.mktemp("trained") / "out"
    done = fzero(*training(config_file, texts, out), "--save-every", 4, "--verify")
    assert done.status == 0, done.stderr
    return out, done
