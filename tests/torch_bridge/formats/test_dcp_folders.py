"""Folders of `torch.distributed.checkpoint` with other optimizers, or with several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats.dcp import _divide
from torch_bridge.moments import moments_of


def test_names_within_a_child_called_state_are_whole() -> None:
    entries: Any = {("optim.state.net.state.w.exp_avg",): 1, ("optim.state.net.state.w.step",): 2}
    assert _divide(entries) == ({("optim",): {"net.state.w": {"exp_avg": 1, "step": 2}}}, {})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("key", ["optim", "opt", "optimizer_state_dict"])
def test_another_optimizers_state_is_seen_under_any_name(
    key: str, nested: bool, tmp_path: Path
) -> None:
    module = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(2, 4)).sum().backward()
    sgd.step()
    model, state = get_state_dict(module, sgd)
    saved = {"model": model, key: state}
    dcp.save({"run": saved} if nested else saved, checkpoint_id=tmp_path / "dcp")
    own = tb.convert(torch.nn.Linear(4, 3), torch.ones(2, 4))
    with pytest.raises(CheckpointError, match=r"cannot be taken over in full.*momentum_buffer"):
        tb.restore(tmp_path / "dcp", own, optax.sgd(0.1, momentum=0.9), fz.Plan())
    weights = {"optimizer": False}
    restored = tb.restore(tmp_path / "dcp", own, optax.sgd(0.1), fz.Plan(), **weights)
    np.testing.assert_array_equal(restored.params["weight"], module.weight.detach().numpy())


def trained_linear(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, and the state of an AdamW that took a step."""
    torch.manual_seed(seed)
    module = torch.nn.Linear(4, 3)
    adam = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).pow(2).sum().backward()
    adam.step()
    return get_state_dict(module, adam)


def test_of_several_models_in_a_folder_one_is_read_with_its_own_moments(tmp_path: Path) -> None:
    (first, its), (other, others) = trained_linear(1), trained_linear(2)
    own = tb.convert(torch.nn.Linear(4, 3), torch.ones(2, 4))

    def read(tree: Any, key: str | None, want: Any, moments: Any) -> None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        dcp.save(tree, checkpoint_id=folder)
        state = tb.restore(folder, own, optax.adamw(0.1), fz.Plan(), key=key)
        np.testing.assert_array_equal(state.params["weight"], want["weight"])
        found = moments_of(own, state.opt_state).exp_avg["weight"]
        np.testing.assert_array_equal(found, moments["state"]["weight"]["exp_avg"])

    both = {"gen": {"model": first, "optim": its}, "disc": {"model": other, "optim": others}}
    with pytest.raises(CheckpointError, match=r"'disc.model', 'gen.model'\]: say which with key="):
        read(both, None, first, its)
    read(both, "gen", first, its)
    read(both, "disc.model", other, others)
    averaged = {"ema": {"model": other}, "model": first, "optim": its}
    read(averaged, None, first, its)
    read(averaged, "model", first, its)
    two = {"model": first, "optim": its, "second": others}
    with pytest.raises(CheckpointError, match=r"in full.*several optimizers.*'optim', 'second'"):
        read(two, None, first, its)
    with pytest.raises(CheckpointError, match=r"no such entry; there are \['model', 'optim'"):
        read(two, "nix", first, its)


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizers_own_state_dict_numbers_its_parameters(named: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    given: Any = module.named_parameters() if named else module.parameters()
    adam = torch.optim.AdamW(list(reversed(list(given))), lr=0.1)
    module(torch.ones(2, 4)).pow(2).sum().backward()
    adam.step()
    dcp.save({"model": module.state_dict(), "optimizer": adam.state_dict()}, checkpoint_id=tmp_path)
    own = tb.convert(module, torch.ones(2, 4))
    reversed_names = ["1.bias", "1.weight", "0.bias", "0.weight"]
    for names in (adam, reversed_names, *([None] if named else [])):
        state = tb.restore(tmp_path, own, optax.adamw(0.1), fz.Plan(), names=names)
        found = moments_of(own, state.opt_state)
        assert found.step == 1
        for name, param in module.named_parameters():
            np.testing.assert_array_equal(found.exp_avg[name], adam.state[param]["exp_avg"])
    if not named:
        with pytest.raises(CheckpointError, match="numbers its parameters, of which it has 4: 3"):
            tb.restore(tmp_path, own, optax.adamw(0.1), fz.Plan(), names=reversed_names[1:])
