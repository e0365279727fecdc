"""Every example in a docstring runs. `make docs` calls this, with the pages' code."""

import doctest
import importlib
import pathlib

import pytest


pytestmark = pytest.mark.docs
ROOT = pathlib.Path(__file__).parents[1]
PATHS = [p for package in ("fzero", "torch_bridge") for p in sorted((ROOT / package).rglob("*.py"))]
# A script that is run by its path, and plugins of the command line, have no examples.
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PATHS
    if ">>>" in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(module, optionflags=flags)
    assert result.attempted
    assert not result.failed
