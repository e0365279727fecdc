"""The examples in the docstrings run, and the facade exports what it says."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

import pytest

import fzero.pipeline


# Added to the package by other work; their examples may need devices.
MODULES = [
    "actions", "builders", "check", "cli", "deadlock", "draw", "grid", "instructions",
    "liveness", "names", "order", "plot", "serialize", "simulate", "zero_bubble",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(f"fzero.pipeline.{name}")
    result = doctest.testmod(module)
    assert result.failed == 0
    found = {info.name for info in pkgutil.iter_modules(fzero.pipeline.__path__)}
    assert name in found


def test_facade():
    names = fzero.pipeline.__all__
    assert len(set(names)) == len(names)
    for name in names:
        value = getattr(fzero.pipeline, name)
        assert inspect.getdoc(value), name
