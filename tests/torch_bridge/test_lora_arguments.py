"""Adapters: what makes none is refused, what a state holds beside one goes along, dtypes."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch

import fzero as fz
import torch_bridge as tb
from torch_bridge.adapters.layer import LowRank, Settings


BATCH = {"x": np.ones((8, 4), np.float32)}


def squares(forward, batch):
    return jnp.mean(forward(batch["x"]) ** 2)


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    return tb.convert(net, torch.zeros(2, 4))


@pytest.fixture(scope="module")
def adapted(base):
    return tb.lora(base, rank=2)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"seed": -1}, "seed=-1: expected a whole number"),
        ({"seed": None}, "seed=None: expected a whole number"),
        ({"targets": None}, r"targets=None: expected the last parts .*'0', '2'"),
        ({"alpha": float("nan")}, "alpha=nan: expected a number"),
        ({"alpha": 10**400}, "alpha=1000.*: expected a number"),
        ({"alpha": 0}, "alpha=0: .* learns nothing"),
        ({"rank": True}, "rank=True: expected a whole number"),
        ({"dropout": float("nan")}, "dropout=nan: expected a number"),
        ({"rslora": "no"}, "rslora='no': expected True or False"),
        ({"adapter": ["0"]}, r"adapter=\['0'\]: expected a folder .* go by name"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_an_argument_that_makes_no_adapter_is_named(base, given, told):
    with pytest.raises(fz.ConversionError, match=f"^lora: {told}"):
        tb.lora(base, **given)


@pytest.mark.parametrize("function", [tb.lora, tb.quantize, tb.generate])
def test_a_module_that_is_not_converted_is_named(function):
    told = f"^{function.__name__}: expected what tb.convert gave, got a Linear"
    given = ({}, [[0]]) if function is tb.generate else ()
    options = {"max_new_tokens": 1} if function is tb.generate else {}
    with pytest.raises(fz.ConversionError, match=told):
        function(torch.nn.Linear(4, 4), *given, **options)


def test_numbers_of_numpy_are_numbers(base, tmp_path):
    own = tb.lora(
        base, rank=np.int64(2), targets=iter(["0"]), alpha=np.float32(3), dropout=np.float64(0.5)
    )
    tb.save(tmp_path, own, own.params, to="peft")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert [config[name] for name in ("r", "lora_alpha", "lora_dropout")] == [2, 3, 0.5]


def test_averages_begin_anew_at_another_adapter(adapted):
    plan, tx = fz.Plan(zero=1, ema=0.5, min_shard_bytes=0), optax.sgd(1e-2)
    model = adapted.model(squares)
    state = fz.init(model, tx, plan)
    given = {name: value + 1 for name, value in tb.adapter(adapted, state).items()}
    other = tb.with_adapter(adapted, state, given)
    found = tb.adapter(adapted, fz.averaged(other, model, plan))
    assert all(torch.equal(found[name], value) for name, value in given.items())


def test_gradients_of_an_adapter_do_not_go_to_another(adapted):
    plan, tx, model = fz.Plan(zero=0), optax.sgd(1e-2), adapted.model(squares)
    state, _ = fz.accumulate_step(model, tx, plan)(fz.init(model, tx, plan), BATCH)
    with pytest.raises(fz.StateError, match=r"with_adapter: an accumulation is in progress"):
        tb.with_adapter(adapted, state, tb.adapter(adapted, state))


def test_a_sum_beyond_float16_is_not_merged(tmp_path):
    half = torch.nn.Sequential(torch.nn.Linear(4, 4)).half()
    adapted = tb.lora(tb.convert(half, torch.zeros(2, 4).half()), rank=1)
    params = {name: x + 300 if "lora" in name else x for name, x in adapted.params.items()}
    with pytest.raises(
        fz.CheckpointError, match=r"^merge: `0.weight` has .* infinite in torch.float16"
    ):
        tb.save(tmp_path / "merged.safetensors", adapted, params, merge=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("m.safetensors", {"hyper": {"lr": 0.1}}, "hyper= stands beside Adam's moments"),
        ("m.ckpt", {"hyper": {"lr": 0.1}}, "hyper= stands beside Adam's moments"),
        ("m", {"hyper": {"lr": 0.1}, "to": "peft"}, "the adapter alone, and hyper= asks for more"),
        ("m.pt", {"hyper": {"lr": 0.1}, "merge": True}, "no optimizer"),
        ("m.safetensors", {"adapter": "default"}, "adapter='default' says which one merge=True"),
    ],
)
def test_an_option_that_says_nothing_of_what_is_written_is_refused(
    adapted, tmp_path, name, options, message
):
    with pytest.raises(fz.CheckpointError, match=message):
        tb.save(tmp_path / name, adapted, adapted.params, **options)
    assert not list(tmp_path.iterdir())


class Falcon(torch.nn.Linear):
    """Linear, in words of its own, as Falcon's are."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def normed():
    return torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))


@pytest.mark.parametrize("layer", [lambda: Doubled(4, 4), normed], ids=["doubled", "normed"])
def test_an_update_goes_into_no_weight_that_is_not_simply_multiplied_by(layer):
    net = torch.nn.Sequential(layer())
    adapted = tb.lora(tb.convert(net, torch.zeros(2, 4), train=False), rank=1)
    with pytest.raises(fz.CheckpointError, match=r"merge: .* updates \['0'\].* Keep the adapter"):
        tb.merge(adapted, adapted.params)
    net = torch.nn.Sequential(Falcon(4, 4))
    adapted = tb.lora(tb.convert(net, torch.zeros(2, 4), train=False), rank=1)
    assert torch.equal(tb.merge(adapted, adapted.params)["0.weight"], net[0].weight)


def test_a_layer_whose_name_is_pefts_own_is_named():
    net = torch.nn.Sequential()
    net.base_layer = torch.nn.Linear(4, 4)
    with pytest.raises(fz.ConversionError, match=r"`base_layer.weight`: .* expected another name"):
        tb.lora(tb.convert(net, torch.zeros(2, 4), train=False), rank=1)


@pytest.mark.parametrize("more", [{"merge": True}, {"optimizer": True}], ids=str)
def test_an_adapters_folder_holds_no_more_than_the_adapter(adapted, tmp_path, more):
    with pytest.raises(fz.CheckpointError, match=f'to="peft" .* {next(iter(more))}=True asks for'):
        tb.save(tmp_path / "out", adapted, adapted.params, to="peft", **more)
    assert not list(tmp_path.iterdir())


def test_factors_are_floats(adapted):
    state = fz.init(adapted.model(squares), None, fz.Plan(zero=0))
    given = tb.adapter(adapted, state)
    for change in (lambda x: x * 1j, lambda x: x.int(), lambda x: "x"):
        with pytest.raises(fz.CheckpointError, match=r"in 4 place(.|\n)*dtype: .* expected floats"):
            tb.with_adapter(adapted, state, {name: change(x) for name, x in given.items()})
    with pytest.raises(fz.CheckpointError, match="source=None: expected a folder, or tensors"):
        tb.with_adapter(adapted, state, None)


def test_averages_are_those_of_the_adapter_that_comes(adapted):
    plan = fz.Plan(zero=0, ema=0.5)
    state = fz.init(adapted.model(squares), None, plan)
    given = {name: np.asarray(x) + 1 for name, x in tb.adapter(adapted, state).items()}
    found = fz.averaged(tb.with_adapter(adapted, state, given, plan), adapted.model(squares), plan)
    for name, value in tb.adapter(adapted, found).items():
        np.testing.assert_array_equal(value, given[name])


def test_a_wide_update_of_a_narrow_layer_gives_what_pefts_gives():
    """In the layer's dtype: what follows it has no other."""
    wanted = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8)).bfloat16()
    theirs = peft.get_peft_model(net, wanted).base_model.model[0]
    settings = Settings(rank=2, alpha=6, dropout=0.0, rslora=False, dtype=torch.float32)
    own = LowRank(torch.nn.Linear(8, 8).bfloat16(), settings)
    own.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8).bfloat16()
    torch.testing.assert_close(own(x), theirs(x), rtol=0, atol=0)
