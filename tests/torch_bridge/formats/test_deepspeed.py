"""DeepSpeed's directories: what it wrote itself, and what it writes for any number of ranks."""

from __future__ import annotations

import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import format_cases as cases
import numpy as np
import optax
import pytest
import torch
import zero_files

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from torch_bridge.formats.write import write
from torch_bridge.moments import moments_of


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
    assert common["clip_grad"] == 0  # DeepSpeed clips to what it finds


def test_universal_files_of_stage_3_are_flat(tmp_path: Path) -> None:
    """ds_to_universal leaves them so, with the step in the common file."""
    state = random_state()
    folder = zero_files.write_zero(tmp_path / "z", state, [list(state["fp32"])], 2, 3, 5, {})
    target = tmp_path / "u" / "global_step5_universal"
    for name in state["fp32"]:
        (target / "zero" / name).mkdir(parents=True)
        for kind in KINDS:
            torch.save(state[kind][name].reshape(-1).clone(), target / "zero" / name / f"{kind}.pt")
    inner = {"state": {0: {"step": torch.tensor(5.0)}, 1: {}}, "param_groups": []}
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
    del inner["state"][0]
    torch.save({"optimizer_state_dict": inner}, target / "zero" / "optimizer_state.pt")
    with pytest.raises(CheckpointError, match="does not say at which step its moments are"):
        tb.checkpoint(tmp_path / "u")


def test_tied_layers_of_a_pipeline_are_found() -> None:
    found = tb.checkpoint(DATA / "pipe")
    assert found.ties == {"0.weight": "tied_modules.emb.weight"}
    assert set(found.tensors) == {"tied_modules.emb.weight", "2.weight", "2.bias"}
    layer = torch.load(DATA / "pipe/global_step2/layer_02-model_states.pt", weights_only=True)
    assert torch.equal(found.tensors["2.weight"].tensor(), layer["weight"])
    assert found.optimizer is not None
    assert set(found.optimizer.exp_avg) == set(found.tensors)


def test_what_tied_layers_do_not_share_is_told_apart(tmp_path: Path) -> None:
    """`TiedLayerSpec` ties the weight; the bias has one name in both stages, and two values."""
    found = tb.checkpoint(DATA / "pipe_bias")
    assert found.optimizer is not None
    want = torch.load(DATA / "pipe_bias/want.pt", weights_only=True)
    assert set(want) == set(found.tensors) == set(found.optimizer.exp_avg)
    assert found.ties == dict.fromkeys(["0.weight", "3.weight"], "tied_modules.t.weight")
    listed = [name for group in found.optimizer.groups for name in group["params"]]
    assert set(listed) == set(want)
    for name, values in want.items():
        assert torch.equal(found.tensors[name].tensor(), values["p"])
        assert torch.equal(found.optimizer.exp_avg[name].tensor(), values["m"])
        assert torch.equal(found.optimizer.exp_avg_sq[name].tensor(), values["v"])
    shutil.copytree(DATA / "pipe_bias", tmp_path / "lost")
    (tmp_path / "lost/global_step3/layer_03-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no layer.s file has those of one"):
        tb.checkpoint(tmp_path / "lost")


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
    with pytest.raises(CheckpointError, match=r"paddings: expected a number for each of \[8\]"):
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


def change(path: Path, how: Any) -> None:
    """Changes a file of `torch.save`."""
    with zero_files.foreign_class("deepspeed.runtime.fp16.loss_scaler.LossScaler"):
        content = torch.load(path, weights_only=False)
        how(content)
        torch.save(content, path)


def test_flat_tensors_are_used_up(tmp_path: Path) -> None:
    state = random_state()
    step = zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 2, 1, 5, {})
    model = step / "mp_rank_00_model_states.pt"
    change(model, lambda content: content["param_shapes"][0].update(more=torch.Size([400])))
    with pytest.raises(CheckpointError, match="`more` has 400 elements"):
        tb.checkpoint(step)
    change(model, lambda content: [content["param_shapes"][0].pop(n) for n in ("more", "c")])
    with pytest.raises(CheckpointError, match="expected less than 4 of padding"):
        tb.checkpoint(step)


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_paddings_inside_a_group(tmp_path: Path, ranks: int) -> None:
    """`parameter_alignment` leaves room behind parameters, so that the next one is aligned."""
    state = random_state()
    groups = [["a.weight", "c"], ["a.bias", "scalar", "b"]]
    zero_files.write_zero(tmp_path, state, groups, ranks, 1, 5, {}, align=8)
    found = tb.checkpoint(tmp_path)
    for kind in KINDS:
        for name, want in state[kind].items():
            assert torch.equal(pieces(found)[kind][name].tensor(), want), (kind, name)


def stages(step: Path, modules: Any, make: Any = torch.optim.AdamW) -> list[torch.Tensor]:
    """A pipeline's files without ZeRO: a file for each layer, an optimizer for each stage.

    As `PipelineEngine` writes them: no `param_shapes`, and each stage numbers its own parameters.
    """
    step.mkdir()
    number = 0
    moments: list[torch.Tensor] = []
    for rank, layers in enumerate(modules):
        for layer in layers:
            path = step / f"layer_{number:02}-model_states.pt"
            torch.save(OrderedDict(layer.state_dict()), path)
            number += 1
        optimizer = make(layers.parameters(), lr=1e-3)
        for _ in range(3):
            for p in layers.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        key = "exp_avg" if type(optimizer) is torch.optim.AdamW else "momentum_buffer"
        moments += [optimizer.state[p][key].clone() for p in layers.parameters()]
        torch.save(
            {"module": None, "buffer_names": [], "optimizer": optimizer.state_dict(),
             "param_shapes": None, "global_steps": 3, "mp_world_size": len(modules),
             "ds_version": "0.19.8"},
            step / f"mp_rank_{rank:02}_model_states.pt",
        )  # fmt: skip
    return moments


def two_stages() -> Any:
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8)),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)),
    ]


def test_moments_of_all_stages_of_a_pipeline_without_zero(tmp_path: Path) -> None:
    modules = two_stages()
    want = stages(tmp_path / "step", modules)
    found = tb.checkpoint(tmp_path / "step")
    assert found.optimizer is not None
    assert (found.optimizer.step, len(found.optimizer.exp_avg)) == (3, 10)
    whole = torch.nn.Sequential(*(layer for stage in two_stages() for layer in stage))
    chain = tb.sequential(whole, torch.zeros(4, 4))
    state = tb.restore(tmp_path / "step", chain, optax.adamw(1e-3), fz.Plan(data=1), cast=True)
    have = moments_of(chain, state.opt_state)
    assert have.step == 3
    for (name, _), value in zip(whole.named_parameters(), want, strict=True):
        np.testing.assert_array_equal(have.exp_avg[name], value.numpy())


def test_groups_of_a_pipelines_stages_are_those_of_the_whole_module(tmp_path: Path) -> None:
    """All parameters are of one shape, and both groups have one rate: numbers alone tell."""

    def make(params: Any, lr: float) -> Any:
        params = list(params)
        return torch.optim.AdamW([{"params": params[1::2]}, {"params": params[::2]}], lr)

    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(4)]
    modules = [torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:])]
    want = stages(tmp_path / "step", modules, make)
    whole = torch.nn.Sequential(*layers)
    chain = tb.sequential(whole, torch.zeros(4, 4))
    given: Any = chain, optax.adamw(1e-3), fz.Plan(data=1)
    with pytest.raises(CheckpointError, match=r"numbers its parameters, .*pass names="):
        tb.restore(tmp_path / "step", *given)
    state = tb.restore(tmp_path / "step", *given, names=make(whole.parameters(), 1e-3))
    have = moments_of(chain, state.opt_state).exp_avg
    for number, value in enumerate(want):
        np.testing.assert_array_equal(have[f"{number}.weight"], value.numpy())
    last = tmp_path / "step/mp_rank_01_model_states.pt"
    change(last, lambda content: content["optimizer"]["param_groups"][0].update(lr=1.0))
    assert "the same parameter groups in each stage" in str(tb.checkpoint(last.parent).unread)


def test_a_pipeline_is_whole_and_of_one_step(tmp_path: Path) -> None:
    stages(tmp_path / "lost", two_stages())
    (tmp_path / "lost/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"model states of model ranks \[0, 1\], got .*\[0\]"):
        tb.checkpoint(tmp_path / "lost")
    stages(tmp_path / "mixed", two_stages())
    change(tmp_path / "mixed/mp_rank_01_model_states.pt", lambda c: c.update(global_steps=4))
    with pytest.raises(CheckpointError, match=r"different steps \[3, 4\]: a save was cut short"):
        tb.checkpoint(tmp_path / "mixed")
    shutil.copytree(DATA / "pipe", tmp_path / "zero")
    (tmp_path / "zero/global_step2/zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer states of model ranks \[0, 1\], got"):
        tb.checkpoint(tmp_path / "zero")


@pytest.mark.parametrize("lost", [0, 4])
def test_a_layers_file_that_a_pipeline_has_lost_is_missed(tmp_path: Path, lost: int) -> None:
    stages(tmp_path / "step", two_stages())
    (tmp_path / f"step/layer_{lost:02}-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"moments of 2 parameters that no layer_XX-model"):
        tb.checkpoint(tmp_path / "step")
    for layer in ("layer_02", "layer_*"):  # with ZeRO, names tell
        shutil.copytree(DATA / "pipe", tmp_path / layer)
        for file in (tmp_path / layer / "global_step2").glob(f"{layer}-model_states.pt"):
            file.unlink()
        with pytest.raises(CheckpointError, match=r"expected layer_02-.*: layers \[2\] learn, and"):
            tb.checkpoint(tmp_path / layer)


def test_a_layer_without_a_file_may_be_a_function(tmp_path: Path) -> None:
    stages(tmp_path / "step", two_stages())
    last = tmp_path / "step/layer_04-model_states.pt"
    last.rename(tmp_path / "step/layer_05-model_states.pt")
    with pytest.warns(UserWarning, match=r"no files of layers \[4\].* right if they are functions"):
        assert "5.weight" in tb.checkpoint(tmp_path / "step").tensors


def test_a_tied_layer_of_a_pipeline_has_the_modules_own_name() -> None:
    whole = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    whole[3].weight = whole[0].weight
    chain = tb.sequential(whole, torch.zeros(4, 4))
    state = tb.restore(DATA / "pipe_bias", chain, optax.adamw(1e-3), fz.Plan(data=1), cast=True)
    want = torch.load(DATA / "pipe_bias/want.pt", weights_only=True)
    have, weights = moments_of(chain, state.opt_state), tb.state_dict(chain, state)
    for name, _ in whole.named_parameters():
        values = want.get(name, want["tied_modules.t.weight"])
        assert torch.equal(weights[name], values["p"]), name
        np.testing.assert_array_equal(have.exp_avg[name], values["m"].numpy())
        np.testing.assert_array_equal(have.exp_avg_sq[name], values["v"].numpy())


def test_what_is_not_all_of_adam_is_not_taken_for_it(tmp_path: Path) -> None:
    """A reader that cannot account for all of an optimizer's state says so, and takes none."""
    stages(tmp_path / "sgd", two_stages(), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))
    stages(tmp_path / "amsgrad", two_stages(), lambda p, lr: AMSGrad(p, lr, amsgrad=True))
    stages(tmp_path / "missing", two_stages())
    change(tmp_path / "missing/mp_rank_01_model_states.pt", lambda c: c.update(optimizer=None))
    whole = torch.nn.Sequential(*(layer for stage in two_stages() for layer in stage))
    chain = tb.sequential(whole, torch.zeros(4, 4))
    for name, why in {
        "sgd": "that of parameter 0 has no exp_avg, exp_avg_sq, step, but momentum_buffer",
        "amsgrad": "that of parameter 0 has max_exp_avg_sq as well",
        "missing": r"model ranks \[1\] have no optimizer state",
    }.items():
        found = tb.checkpoint(tmp_path / name)
        assert found.optimizer is None
        assert found.unread is not None
        with pytest.raises(CheckpointError, match=f"in full: .*{why}.*optimizer=False"):
            tb.restore(tmp_path / name, chain, optax.adam(1e-3), fz.Plan(data=1))
        tb.restore(tmp_path / name, chain, optax.adam(1e-3), fz.Plan(data=1), optimizer=False)


def test_moments_of_different_steps_are_refused(tmp_path: Path) -> None:
    """One of them would be corrected for a bias that it does not have."""
    stages(tmp_path / "step", two_stages())

    def step_more(content: Any) -> None:
        content["optimizer"]["state"][1]["step"] += 1

    change(tmp_path / "step/mp_rank_01_model_states.pt", step_more)
    found = tb.checkpoint(tmp_path / "step")
    assert found.optimizer is None
    # With which `tb.restore` refuses them, and takes the weights alone with optimizer=False.
    assert "parameters are at different steps [3, 4]" in found.unread


class AMSGrad(torch.optim.AdamW):
    """Another class, so that `stages` looks at another key."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for entry in self.state.values():
            entry["momentum_buffer"] = entry["exp_avg"]

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {**found, "state": {
            n: {k: v for k, v in entry.items() if k != "momentum_buffer"}
            for n, entry in found["state"].items()
        }}  # fmt: skip


# What DeepSpeed's loader looks for: names and values in deepspeed/checkpoint/constants.py and
# universal_checkpoint.py, github.com/deepspeedai/DeepSpeed at 051a0f5 (0.19.8).
PARAM, CAT_DIM, FP32_WEIGHT_KEY = "param", "cat_dim", "fp32"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
# "Reserve version 0.1 for the hardcoded logic used in BLOOM-176B training"; 0.4 is the newest.
OLDEST, NEWEST = 0.2, 0.4
OPTIMIZER_STATE_DICT, PARAM_GROUPS = "optimizer_state_dict", "param_groups"
DS_VERSION = "ds_version"
BUFFER_NAMES, PARAM_SHAPES = "buffer_names", "param_shapes"
MODEL_FILE, LATEST = "mp_rank_00_model_states.pt", "latest_universal"


def test_universal_files_are_what_deepspeeds_loader_looks_for(tmp_path: Path) -> None:
    state = random_state()
    zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 2, 1, 5, {"n": torch.arange(3)})
    write(tb.checkpoint(tmp_path), tmp_path / "uni", "universal")
    folder = tmp_path / "uni" / (tmp_path / "uni" / LATEST).read_text()
    model = torch.load(folder / MODEL_FILE, weights_only=True)
    version = model[UNIVERSAL_CHECKPOINT_INFO][UNIVERSAL_CHECKPOINT_VERSION_KEY]
    assert OLDEST <= version <= NEWEST
    assert {*model[BUFFER_NAMES], *model[PARAM_SHAPES][0]} == {*state["fp32"], "n"}
    assert tuple(map(int, model[DS_VERSION].split("."))) >= (0, 14, 0)
    common = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=True)
    assert common[OPTIMIZER_STATE_DICT][PARAM_GROUPS]
    assert common[DS_VERSION] == model[DS_VERSION]
    for name, shape in model[PARAM_SHAPES][0].items():
        # `load_hp_checkpoint_state` takes every file for a state, and loads it by its key.
        files = {path.stem: torch.load(path, weights_only=True)
                 for path in (folder / "zero" / name).iterdir()}  # fmt: skip
        assert float(files.pop("step")) == 5
        assert set(files) == {FP32_WEIGHT_KEY, "exp_avg", "exp_avg_sq"}
        for key, content in files.items():
            # Slices of tensor parallelism are cut along this dim: the one of a Linear's outputs.
            assert content[CAT_DIM] == 0
            assert content[PARAM].shape == shape
            assert torch.equal(content[PARAM], state[key][name])
    # A run in 16 bits has its module in them there, beside the weights that learn.
    model["module"] = {name: tensor.half() for name, tensor in model["module"].items()}
    torch.save(model, folder / MODEL_FILE)
    found = tb.checkpoint(tmp_path / "uni").tensors
    assert all(torch.equal(found[name].tensor(), want) for name, want in state["fp32"].items())


def test_a_universal_folder_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    state = random_state()
    zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 1, 1, 5, {})
    write(tb.checkpoint(tmp_path), tmp_path / "uni", "universal")
    zero = next((tmp_path / "uni").glob("*/zero"))
    torch.save(torch.tensor(6.0), zero / "c" / "step.pt")
    assert "different steps [5, 6]" in tb.checkpoint(tmp_path / "uni").unread
    (zero / "c" / "exp_avg.pt").unlink()
    with pytest.raises(CheckpointError, match="`c` has only one of"):
        tb.checkpoint(tmp_path / "uni")
    for key in ("exp_avg_sq", "step"):
        (zero / "c" / f"{key}.pt").unlink()
    found = tb.checkpoint(tmp_path / "uni")
    assert found.optimizer is None
    assert found.unread is not None
    assert "['c'] learn, but have no moments" in found.unread
    shutil.rmtree(zero / "c")
    with pytest.raises(CheckpointError, match=r"\['c'\] learn, but have no folders"):
        tb.checkpoint(tmp_path / "uni")


def test_a_universal_folder_of_another_optimizer_gives_its_weights_alone(tmp_path: Path) -> None:
    """AMSGrad's largest variance, of which Adam would take the last."""
    state = random_state()
    zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 1, 1, 5, {})
    write(tb.checkpoint(tmp_path), tmp_path / "uni", "universal")
    own = next((tmp_path / "uni").glob("*/zero")) / "c"
    shutil.copy(own / "exp_avg_sq.pt", own / "max_exp_avg_sq.pt")
    found = tb.checkpoint(tmp_path / "uni")
    assert found.optimizer is None
    assert "'max_exp_avg_sq', 'step'], expected Adam's alone" in found.unread


def test_masters_in_the_files_of_two_model_ranks_are_refused(tmp_path: Path) -> None:
    """Slices of tensor parallelism; the layers of a pipeline are each on one rank."""
    state = random_state()
    step = zero_files.write_zero(tmp_path, state, [list(state["fp32"])], 1, 1, 5, {})
    change(step / "mp_rank_00_model_states.pt", lambda content: content.update(module=None))
    for path in list(step.iterdir()):
        shutil.copy(path, step / path.name.replace("mp_rank_00", "mp_rank_01"))
    with pytest.raises(CheckpointError, match="is in the files of several model ranks"):
        tb.checkpoint(step)


def _with_frozen(folder: Path, ranks: Any) -> Path:
    """Stage 3 of four ranks, with five numbers that do not learn in parts of two; padded."""
    state = {key: {"a": torch.randn(5, 3)} for key in ("fp32", "exp_avg", "exp_avg_sq")}
    step = zero_files.write_zero(folder, state, [["a"]], 4, 3, 3, {})
    padded = torch.tensor([1.0, 2, 3, 4, 5, 0, 0, 0])
    for rank in range(4):
        path = step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        zero_files.save(
            {
                "module": {"a": torch.empty(0), "fixed": torch.empty(0)},
                "buffer_names": [], "shared_params": {}, "global_steps": 3,
                "param_shapes": [OrderedDict(a=torch.Size((5, 3)))],
                "frozen_param_shapes": {"fixed": torch.Size((5,))},
                "frozen_param_fragments": {"fixed": padded[2 * rank : 2 * rank + 2].clone()},
                "dp_world_size": 4,
            },
            path,
        )  # fmt: skip
        if rank not in ranks:
            path.unlink()
    return folder


@pytest.mark.parametrize("ranks", [(0, 2, 3), (0, 1, 3), (0, 1, 2)])
def test_a_rank_without_its_part_of_frozen_weights_is_missed(tmp_path: Path, ranks: Any) -> None:
    whole = tb.checkpoint(_with_frozen(tmp_path / "whole", range(4)))
    assert whole.tensors["fixed"].tensor().tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"ranks 0 to 3, got those of \[0, .*do not learn"):
        tb.checkpoint(_with_frozen(tmp_path / "part", ranks))


def test_optimizer_files_that_are_missing_or_of_two_runs_are_named(tmp_path: Path) -> None:
    state = {key: {"a": torch.randn(5, 3)} for key in ("fp32", "exp_avg", "exp_avg_sq")}
    step = zero_files.write_zero(tmp_path, state, [["a"]], 2, 2, 3, {})
    files = sorted(step.glob("*optim_states.pt"))
    other = files[0].with_name(f"fp16_{files[0].name.removeprefix('bf16_')}")
    other.write_bytes(files[0].read_bytes())
    with pytest.raises(CheckpointError, match="are of one rank: two runs wrote here"):
        tb.checkpoint(tmp_path)
    for file in (*files, other):
        file.unlink()
    found = tb.checkpoint(tmp_path)
    assert found.optimizer is None
    assert "optim_states.pt" in str(found.unread)


@pytest.mark.parametrize("to", ["universal", "dcp"])
def test_parameters_of_a_flat_partition_are_stored_alone(tmp_path: Path, to: str) -> None:
    """Each is a view of it, which `torch.save` would write as a whole."""
    shapes = {f"w{number}": (64, 64) for number in range(16)}
    state = {
        kind: {name: torch.randn(shape) for name, shape in shapes.items()}
        for kind in ("fp32", "exp_avg", "exp_avg_sq")
    }
    zero_files.write_zero(tmp_path / "zero", state, [list(shapes)], 1, 1, 3, {})
    write(tb.checkpoint(tmp_path / "zero"), tmp_path / "out", to)
    size = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert size < 1.6 * 16 * 3 * 64 * 64 * 4 + 100_000


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0b"])
def test_a_name_that_no_folder_has_is_named(tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.ones(2), name: torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=f"no folder .* for `{re.escape(name)}`"):
        write(tb.checkpoint(tmp_path / "model.pt"), tmp_path / "uni", "universal")
    assert not (tmp_path / "uni").exists()
