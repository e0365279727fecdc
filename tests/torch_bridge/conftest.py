"""Shared conversions: exporting is the slow part, so each module is converted once a session."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import pytest
import torch
import torch._dynamo.config
from bridge_cases import make_gpt2
from transformers import GPT2LMHeadModel

import torch_bridge as tb


# PyTorch keeps what each operator gave, by sizes that are symbols: for modules as small as those of
# tests that takes a fifth of a conversion's time and saves less. (Documentation, command line and
# `make operators` convert with it, as users do.)
torch._dynamo.config.fake_tensor_cache_enabled = False


@pytest.fixture(autouse=True)
def _strict_promotion() -> Iterator[None]:
    """Every cast in a lowering has to be explicit: JAX refuses implicit ones here."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of operators have forwards that depend on their arguments alone: no second trace, which
    shows what depends on the call and takes a fifth of their time."""
    if request.node.get_closest_marker("traced_once"):
        module = sys.modules[tb.convert.__module__]
        export = module.export_program
        once = lambda *about: export(*about[:5], check=False)  # noqa: E731
        monkeypatch.setattr(module, "export_program", once)


@pytest.fixture(scope="session")
def gpt2() -> GPT2LMHeadModel:
    """Without dropout, so that both modes have exact references."""
    return make_gpt2(0.0)


@pytest.fixture(scope="session")
def gpt2_converted(gpt2: GPT2LMHeadModel) -> tb.Converted:
    return tb.convert(gpt2, torch.zeros(2, 8, dtype=torch.long))
