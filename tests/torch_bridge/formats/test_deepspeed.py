"""DeepSpeed's directories: what it wrote itself, and what it writes for any number of ranks."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import format_cases as cases
import numpy as np
import pytest
import torch
import zero_files

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats.write import write
from torch_bridge.moments import moments_of


pytestmark = pytest.mark.quick
DATA = Path(__file__).parents[2] / "data" / "checkpoints"
KINDS = ("fp32", "exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: optax leaves promotion to JAX."""


def pieces(found: tb.Checkpoint) -> dict[str, Any]:
    assert found.optimizer is not None
    moments = found.optimizer.exp_avg, found.optimizer.exp_avg_sq
    return dict(zip(KINDS, (found.tensors, *moments), strict=True))


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_deepspeeds_own_files_agree_with_its_own_values(name: str) -> None:
    want = torch.load(DATA / name / "want.pt", weights_only=True)
    found = tb.checkpoint(DATA / name)
    assert found.format == ("DeepSpeed ZeRO-3" if name == "zero3" else "DeepSpeed ZeRO-1/2")
    assert found.version == "0.19.8"
    assert found.ties == {"outer.weight": "inner.weight"}
    assert found.optimizer is not None
    assert found.optimizer.step == 3
    assert found.optimizer.groups[0]["betas"] == (0.9, 0.99)
    assert set(found.tensors) == {*want, "scale", "seen", "low"}
    for parameter, values in want.items():
        for kind in KINDS:
            lazy = pieces(found)[kind][parameter]
            assert torch.equal(lazy.tensor(), values[kind]), (parameter, kind)
            piece = (slice(2, 4), *(slice(1, n - 1) for n in lazy.shape[1:]))
            assert torch.equal(lazy.tensor(piece), values[kind][piece])
    assert found.tensors["scale"].tensor().tolist() == [0.5] * 13
    assert found.tensors["seen"].tensor().tolist() == [3, 2**20]


def test_a_partitioned_run_goes_straight_into_another_partition() -> None:
    converted = tb.convert(cases.net(), torch.zeros(4, cases.FEATURES))
    plan = fz.Plan(zero=3, min_shard_bytes=0)
    state = tb.restore(DATA / "zero3", converted, cases.optax_adamw(), plan, cast=True)
    want = torch.load(DATA / "zero3" / "want.pt", weights_only=True)
    moments = moments_of(converted, state.opt_state)
    assert int(state.step) == moments.step == 3
    for name, values in want.items():
        have = (
            tb.state_dict(converted, state)[name],
            moments.exp_avg[name],
            moments.exp_avg_sq[name],
        )
        for kind, value in zip(KINDS, have, strict=True):
            np.testing.assert_array_equal(value, values[kind].numpy(), err_msg=f"{name} {kind}")
    model = converted.model(cases.mean_square)
    step = fz.train_step(model, cases.optax_adamw(), plan)
    _, metrics = step(state, next(cases.batches()))
    assert np.isfinite(float(metrics["loss"]))


def random_state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(seed)
    shapes = {"a.weight": (5, 7), "a.bias": (5,), "b": (1,), "scalar": (), "c": (3, 2, 4)}
    return {k: {n: torch.randn(s) for n, s in shapes.items()} for k in KINDS}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 16])
def test_any_number_of_ranks(tmp_path: Path, stage: int, ranks: int) -> None:
    state = random_state()
    groups = [["a.weight", "c"], ["a.bias", "scalar", "b"]]
    zero_files.write_zero(tmp_path, state, groups, ranks, stage, 5, {"n": torch.arange(3)})
    found = tb.checkpoint(tmp_path)
    assert found.optimizer is not None
    assert found.optimizer.step == 5
    assert [group["params"] for group in found.optimizer.groups] == groups
    assert set(found.tensors) == {*state["fp32"], "n"}
    for kind in KINDS:
        for name, want in state[kind].items():
            assert torch.equal(pieces(found)[kind][name].tensor(), want), (kind, name)
    # The same through a universal checkpoint, where every parameter is whole.
    write(found, tmp_path / "uni", "universal")
    again = tb.checkpoint(tmp_path / "uni")
    assert again.format == "DeepSpeed universal"
    assert again.optimizer is not None
    assert again.optimizer.step == 5
    for kind in KINDS:
        for name, want in state[kind].items():
            assert torch.equal(pieces(again)[kind][name].tensor(), want), (kind, name)


def test_universal_has_what_stage_3_asks_for(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 continued from such files with stages 1, 2 and 3 on two ranks, to 1e-7."""
    state = random_state()
    zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 2, 1, 5, {"n": torch.arange(3)})
    write(tb.checkpoint(tmp_path), tmp_path / "uni", "universal")
    (folder,) = (path for path in (tmp_path / "uni").iterdir() if path.is_dir())
    model = torch.load(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=True)
    assert {name: value.numel() for name, value in model["module"].items()} == {
        **dict.fromkeys(state["fp32"], 0),
        "n": 3,
    }
    common = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert common["optimizer_state_dict"]["state"][0]["step"] == 5
    assert common["optimizer_state_dict"]["param_groups"] == common["param_groups"]


def test_universal_files_of_stage_3_are_flat(tmp_path: Path) -> None:
    """ds_to_universal leaves them so, with the step in the common file."""
    state = random_state()
    folder = zero_files.write_zero(tmp_path / "z", state, [list(state["fp32"])], 2, 3, 5, {})
    target = tmp_path / "u" / "global_step5_universal"
    for name in state["fp32"]:
        (target / "zero" / name).mkdir(parents=True)
        for kind in KINDS:
            torch.save(state[kind][name].reshape(-1).clone(), target / "zero" / name / f"{kind}.pt")
    inner = {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": []}
    torch.save({"optimizer_state_dict": inner}, target / "zero" / "optimizer_state.pt")
    for path in folder.glob("*model_states.pt"):
        shutil.copy(path, target)
    (tmp_path / "u" / "latest_universal").write_text(target.name)
    found = tb.checkpoint(tmp_path / "u")
    assert found.optimizer is not None
    assert found.optimizer.step == 5
    for kind in KINDS:
        for name, want in state[kind].items():
            assert torch.equal(pieces(found)[kind][name].tensor(), want)


def test_tied_layers_of_a_pipeline_are_found() -> None:
    found = tb.checkpoint(DATA / "pipe")
    assert found.ties == {"0.weight": "tied_modules.emb.weight"}
    assert set(found.tensors) == {"tied_modules.emb.weight", "2.weight", "2.bias"}
    layer = torch.load(DATA / "pipe/global_step2/layer_02-model_states.pt", weights_only=True)
    assert torch.equal(found.tensors["2.weight"].tensor(), layer["weight"])
    assert found.optimizer is not None
    assert set(found.optimizer.exp_avg) == set(found.tensors)


def test_layer_files_are_the_layers_of_a_sequential(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    for number, layer in enumerate(module):
        torch.save(
            OrderedDict(layer.state_dict()),
            tmp_path / f"layer_{number:02}-model_00-model_states.pt",
        )
    chain = tb.sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)),
        torch.zeros(4, 4),
    )
    state = tb.restore(tmp_path, chain, None, fz.Plan(data=1))
    back = tb.state_dict(chain, state)
    assert all(torch.equal(back[name], want) for name, want in module.state_dict().items())


def test_what_cannot_be_put_together_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero1", tmp_path / "a")
    (tmp_path / "a" / "latest").write_text("../zero1/global_step3")
    with pytest.raises(CheckpointError, match="the name of a folder beside it"):
        tb.checkpoint(tmp_path / "a")
    step = tmp_path / "a" / "global_step3"
    model = torch.load(step / "mp_rank_00_model_states.pt", weights_only=True)
    model["checkpoint_parallel_dimensions"]["tp_degree"] = 2
    torch.save(model, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallelism"):
        tb.checkpoint(step)
    model["checkpoint_parallel_dimensions"]["tp_degree"] = 1
    model["param_shapes"][0]["more"] = torch.Size([400])
    torch.save(model, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="`more` has 400 elements"):
        tb.checkpoint(step)
    del model["param_shapes"][0]["more"], model["param_shapes"][0]["inner.weight"]
    torch.save(model, step / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="expected less than 4 of padding"):
        tb.checkpoint(step)
    (step / "layer_00-model_01-model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="a slice of a layer"):
        tb.checkpoint(step)


def test_objects_of_unknown_classes_are_refused_by_name(tmp_path: Path) -> None:
    with zero_files.foreign_class("deepspeed.moe.Surprise") as surprise:
        torch.save({"module": {"w": torch.ones(2)}, "x": surprise()},
                   tmp_path / "mp_rank_00_model_states.pt")  # fmt: skip
    with pytest.raises(CheckpointError, match=r"objects of deepspeed\.moe\.Surprise"):
        tb.checkpoint(tmp_path)
