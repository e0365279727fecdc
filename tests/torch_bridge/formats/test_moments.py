"""Adam's moments by name: out of any optax state, and back into it; training goes on either way."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import accelerate
import format_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import torch
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError
from fzero.tree import named_leaves
from torch_bridge.formats.adam import groups_of, read_optimizer, step_of
from torch_bridge.formats.content import Optimizer
from torch_bridge.module.lazy_tensor import in_memory
from torch_bridge.module.moments import Moments
from torch_bridge.moments import moments_of, with_moments


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: optax trains, and leaves promotion to JAX."""


RAMP = optax.linear_schedule(1e-3, 0.0, 100)
TRANSFORMATIONS = {
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(RAMP, weight_decay=0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale(-1e-3)),
    "inject": optax.inject_hyperparams(optax.adamw)(learning_rate=RAMP, weight_decay=0.1),
    "masked": optax.masked(
        optax.adam(1e-3), lambda params: {n: v.ndim > 1 for n, v in params.items()}
    ),
    "groups": optax.multi_transform(
        {"decay": optax.adamw(RAMP, weight_decay=0.1), "rest": optax.adam(RAMP)},
        lambda params: {n: "decay" if v.ndim > 1 else "rest" for n, v in params.items()},
    ),
    "skipping": optax.apply_if_finite(optax.adam(RAMP), 3),
}


@pytest.fixture(scope="module")
def module() -> cases.Net:
    return cases.net()


@pytest.fixture(scope="module")
def converted(module: cases.Net) -> tb.Converted:
    return tb.convert(module, torch.zeros(4, cases.FEATURES))


def numbers(converted: tb.Converted, names: Any, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {n: random.standard_normal(converted.params[n].shape, np.float32) for n in names}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_moments_go_into_any_optimizer_and_come_out_again(
    converted: tb.Converted, name: str
) -> None:
    state = TRANSFORMATIONS[name].init(converted.params)
    empty = moments_of(converted, state)
    learned = set(converted.params) - converted.frozen
    if name == "masked":
        learned = {n for n in learned if converted.params[n].ndim > 1}
    assert set(empty.exp_avg) == set(empty.exp_avg_sq) == learned
    assert empty.step == 0
    given = Moments(7, numbers(converted, learned), numbers(converted, learned, 1))
    new = with_moments(converted, state, given)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    back = moments_of(converted, new)
    assert back.step == 7
    for key in learned:
        np.testing.assert_array_equal(back.exp_avg[key], given.exp_avg[key])
        np.testing.assert_array_equal(back.exp_avg_sq[key], given.exp_avg_sq[key])
    counts = {p: int(x) for p, x in named_leaves(new) if p.split("/")[-1].endswith("count")}
    failures = {"notfinite_count", "total_notfinite"}
    assert counts
    assert all(n == (0 if p.split("/")[-1] in failures else 7) for p, n in counts.items()), counts
    # What was given stays as it was.
    assert moments_of(converted, state).step == 0
    assert not np.any(moments_of(converted, state).exp_avg["again.weight"])


def test_schedules_go_on_where_they_were(converted: tb.Converted) -> None:
    tx = TRANSFORMATIONS["inject"]
    names = set(converted.params) - converted.frozen
    state = with_moments(
        converted, tx.init(converted.params), Moments(40, *([numbers(converted, names)] * 2))
    )
    zeros = jax.tree.map(np.zeros_like, converted.params)
    _, state = jax.jit(tx.update)(zeros, state, converted.params)
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(float(RAMP(40)))


@pytest.mark.parametrize("zero", [0, 3])
def test_shardings_and_padding_stay(converted: tb.Converted, zero: int) -> None:
    model = converted.model(cases.mean_square)
    tx, plan = cases.optax_adamw(), fz.Plan(zero=zero, min_shard_bytes=0)
    state = fz.init(model, tx, plan)
    names = set(converted.params) - converted.frozen
    given = Moments(3, numbers(converted, names), numbers(converted, names, 1))
    new = with_moments(converted, state.opt_state, given)
    for (path, old), (_, leaf) in zip(
        named_leaves(state.opt_state), named_leaves(new), strict=True
    ):
        assert leaf.sharding == old.sharding, path
        assert (leaf.shape, leaf.dtype) == (old.shape, old.dtype), path
    if zero:
        padded = [x for p, x in named_leaves(new) if p.endswith("mu/inner.weight")]
        assert padded[0].shape == (16, 5)
        assert not np.any(np.asarray(padded[0])[13:])
    back = moments_of(converted, new)
    for name in names:
        np.testing.assert_array_equal(back.exp_avg[name], given.exp_avg[name])
    fz.train_step(model, tx, plan)(state.replace(opt_state=new), next(cases.batches()))
    with pytest.raises(fz.StateConsumedError, match="consumed by a step"):
        moments_of(converted, new)


def test_a_chain_of_modules_has_moments_by_the_same_names() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    chain = tb.sequential(module, torch.zeros(4, 4))
    state = optax.adam(1e-3).init(chain.params)
    given = {n: np.full(tuple(p.shape), i, np.float32) for i, (n, p) in
             enumerate(module.named_parameters())}  # fmt: skip
    new = with_moments(chain, state, Moments(2, given, given))
    back = moments_of(chain, new)
    assert list(back.exp_avg) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    for name, value in given.items():
        np.testing.assert_array_equal(back.exp_avg[name], value)


def test_each_layer_of_a_rolled_module_has_its_own_moments() -> None:
    layers = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(3))
    module = torch.nn.Sequential(*layers)
    converted = tb.convert(module, torch.zeros(4, 4))
    assert converted.blocks.stacks
    given = {n: np.full(tuple(p.shape), i, np.float32) for i, (n, p) in
             enumerate(module.named_parameters())}  # fmt: skip
    squares = {name: value**2 for name, value in given.items()}
    state = optax.adam(1e-3).init(converted.params)
    back = moments_of(converted, with_moments(converted, state, Moments(2, given, squares)))
    for name, value in given.items():
        np.testing.assert_array_equal(back.exp_avg[name], value)
        np.testing.assert_array_equal(back.exp_avg_sq[name], value**2)


def test_more_steps_than_an_optimizer_counts_are_refused(converted: tb.Converted) -> None:
    state = optax.adam(1e-3).init(converted.params)
    values = numbers(converted, set(converted.params) - converted.frozen)
    for step in (10**10, 2.5, float("nan"), True):
        with pytest.raises(CheckpointError, match=rf"less than 2\*\*31, got {step}"):
            with_moments(converted, state, Moments(step, values, values))
    with pytest.raises(CheckpointError, match=r"moments_of: expected what tb\.convert .* returned"):
        moments_of(state, converted)


def test_what_does_not_fit_is_listed(converted: tb.Converted) -> None:
    state = optax.adam(1e-3).init(converted.params)
    names = set(converted.params) - converted.frozen
    one, two = numbers(converted, names), numbers(converted, names)
    del one["again.bias"], two["again.bias"]
    one["other"] = two["other"] = np.zeros(3)
    one["norm.weight"] = np.zeros(4, np.float32)
    one["outer.weight"] = two["outer.weight"] = one["inner.weight"]
    del two["norm.bias"]
    with pytest.raises(CheckpointError) as caught:
        with_moments(converted, state, Moments(-1, one, two))
    for part in (
        "step: expected at least 0 and less than 2**31, got -1",
        "`again.bias`: missing",
        "`other`: not a parameter that Adam updates here",
        "`norm.weight`: expected (13,), got (4,)",
        "`outer.weight` and `inner.weight` are one parameter",
        "`norm.bias`: exp_avg and exp_avg_sq must both be given",
    ):
        assert part in str(caught.value)


def test_states_without_one_adam_are_refused(converted: tb.Converted) -> None:
    params = converted.params
    with pytest.raises(CheckpointError, match="with Adam in it"):
        moments_of(converted, optax.sgd(0.1, momentum=0.9).init(params))
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(params)
    with pytest.raises(CheckpointError, match="once for each parameter"):
        moments_of(converted, twice)
    other = optax.adam(1e-3).init({"w": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="no parameter of the converted module"):
        moments_of(converted, other)
    groups = TRANSFORMATIONS["groups"].init(params)
    apart = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1 if "decay" in str(path) and x.ndim == 0 else x, groups
    )
    with pytest.raises(CheckpointError, match="counts different steps"):
        moments_of(converted, apart)


@pytest.fixture(scope="module")
def compiled(converted: tb.Converted) -> tuple[Any, Any, Any, Any]:
    model, tx, plan = (
        converted.model(cases.mean_square),
        cases.optax_adamw(),
        fz.Plan(zero=3, min_shard_bytes=0),
    )
    return model, tx, plan, fz.train_step(model, tx, plan)


def test_a_training_goes_on_in_fzero_as_in_pytorch(
    converted: tb.Converted, compiled: tuple[Any, Any, Any, Any]
) -> None:
    model, tx, plan, step = compiled
    module, data = cases.net(), cases.batches()
    optimizer = cases.adamw(module)
    cases.torch_steps(module, optimizer, data, 7)
    ahead, data = itertools.tee(data)
    params, buffers = tb.load_state_dict(converted, module.state_dict())
    state = fz.init(fz.Model((params, buffers), model.loss, model.frozen), tx, plan)
    moments = cases.torch_moments(module, optimizer)
    state = state.replace(opt_state=with_moments(converted, state.opt_state, moments))
    wanted = cases.torch_steps(module, optimizer, ahead, 20)
    losses = []
    for _ in range(20):
        state, metrics = step(state, next(data))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert moments_of(converted, state.opt_state).step == 27


def test_a_training_goes_on_in_pytorch_as_in_fzero(
    converted: tb.Converted, compiled: tuple[Any, Any, Any, Any]
) -> None:
    model, tx, plan, step = compiled
    state, data = fz.init(model, tx, plan), cases.batches()
    for _ in range(7):
        state, _ = step(state, next(data))
    ahead, data = itertools.tee(data)
    module = cases.net(seed=5)
    module.load_state_dict(tb.state_dict(converted, state))
    optimizer, moments = cases.adamw(module), moments_of(converted, state.opt_state)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(moments.step)),
                "exp_avg": torch.from_numpy(moments.exp_avg[name]),
                "exp_avg_sq": torch.from_numpy(moments.exp_avg_sq[name]),
            }
    wanted = []
    for _ in range(20):
        state, metrics = step(state, next(ahead))
        wanted.append(float(metrics["loss"]))
    losses = cases.torch_steps(module, optimizer, data, 20)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_hyperparameters_of_several_groups_are_nobodys_where_one_group_is_written():
    groups = ({"lr": 0.5, "params": ["a"]}, {"lr": 0.25, "params": ["b"]})
    one, both = (Optimizer(1, {}, {}, part, named=True) for part in (groups[:1], groups))
    assert groups_of(one, [0])[0]["lr"] == 0.5
    assert groups_of(both, [0, 1])[0]["lr"] == 1e-3  # torch's default, not the first group's


def test_moments_by_number_are_written_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Which is not that of their texts: "10" is before "2"."""
    tensors = {f"w{i}": in_memory(f"w{i}", torch.full((2,), float(i))) for i in range(12)}
    own = {str(i): tensors[f"w{i}"] for i in range(12)}
    found = tb.Checkpoint("x", "x", tensors, optimizer=Optimizer(3, own, own, named=False))
    tb.write(found, tmp_path / "last.ckpt")
    back = tb.checkpoint(tmp_path / "last.ckpt").optimizer
    assert [float(back.exp_avg[str(i)].tensor()[0]) for i in range(12)] == list(range(12))


def test_moments_of_a_name_that_comes_twice_are_equal_or_refused() -> None:
    one, other = (in_memory("w", torch.full((2,), value)) for value in (1.0, 2.0))
    tied = Optimizer(3, {"0": one, "1": one}, {"0": other, "1": other}, named=False)
    assert list(tied.moments(["w", "w"]).exp_avg) == ["w"]
    apart = Optimizer(3, {"0": one, "1": one}, {"0": one, "1": other}, named=False)
    assert set(apart.moments(["w", "v"]).exp_avg_sq) == {"w", "v"}
    with pytest.raises(CheckpointError, match=r"`w` was named twice, .* parameter 1 are others"):
        apart.moments(["w", "w"])


@pytest.mark.parametrize(
    "value", [1.5, True, "3", torch.tensor(0.5), torch.ones(2), float("nan"), torch.tensor(np.inf)]
)
def test_a_number_of_steps_that_is_none_is_refused(value):
    with pytest.raises(CheckpointError, match="expected a number of steps"):
        step_of(value, "file")


def test_moments_of_what_is_in_no_group_are_told() -> None:
    ones = torch.ones(2)
    entry = {"step": torch.tensor(1.0), "exp_avg": ones, "exp_avg_sq": ones}
    state = {"state": {0: entry, 5: entry}, "param_groups": [{"params": [0], "lr": 0.1}]}
    said = read_optimizer(state, "last.ckpt")
    assert said == "last.ckpt: has state for parameters [5], which are in no group"


def _numbered(state: dict[int, Any], params: list[int]) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"params": params, "lr": 0.1}]}


def _entry(value: float) -> dict[str, Any]:
    return {"step": 1, "exp_avg": torch.full((2,), value), "exp_avg_sq": torch.ones(2)}


def test_a_parameter_is_its_place_in_the_groups_whatever_its_number() -> None:
    """As torch's `load_state_dict` has it."""
    content = _numbered({7: _entry(1.0), 3: _entry(2.0), 9: _entry(3.0)}, [9, 3, 7])
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    optimizer.load_state_dict(content)
    wanted = [optimizer.state[one]["exp_avg"] for one in params]
    found = read_optimizer(content, "last.ckpt")
    moments = found.moments(["a", "b", "c"])
    np.testing.assert_array_equal([moments.exp_avg[n].tensor() for n in "abc"], wanted)
    for names in ("ab", "abcd"):
        with pytest.raises(CheckpointError, match=rf"it has 3: {len(names)} names were given"):
            found.moments([*names])
    assert found.groups[0]["params"] == [0, 1, 2]
    assert float(wanted[0][0]) == 3
    said = read_optimizer(_numbered({0: _entry(1.0)}, [0, 1, 0]), "last.ckpt")
    assert said == "last.ckpt: expected every number once in its groups, got [0, 1, 0]"


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_moments_are_floats(dtype: torch.dtype) -> None:
    entry = {**_entry(1.5), "exp_avg": torch.ones(2, dtype=dtype)}
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 is not a .* of floats"):
        read_optimizer(_numbered({0: entry}, [0]), "last.ckpt")


NOT_ADAM = {"adamax": optax.adamax, "yogi": optax.yogi}


@pytest.mark.parametrize("name", [*NOT_ADAM, "adamw", "chain", "inject", "groups"])
def test_an_optimizer_that_keeps_others_in_adams_state_takes_none(name, tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    compiled = torch.compile(module)  # which puts `_orig_mod.` before names
    optimizer = torch.optim.Adam(compiled.named_parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    file, plan = tmp_path / "last.pt", fz.Plan(data=1)
    torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, file)
    converted = tb.convert(module, torch.ones(4, 3))
    if name in TRANSFORMATIONS:
        state = tb.restore(file, converted, TRANSFORMATIONS[name], plan, key="model")
        assert int(state.step) == 1
        return
    with pytest.raises(CheckpointError, match=r"as optax\.adamax does\. Pass optimizer=False"):
        tb.restore(file, converted, NOT_ADAM[name](1e-3), plan, key="model")


def test_a_file_whose_adam_is_at_several_steps_gives_its_weights_alone(tmp_path: Path) -> None:
    """As one has whose parameters were frozen for a while."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    content = optimizer.state_dict()
    content["state"][1]["step"] += 1
    file = tmp_path / "last.ckpt"
    torch.save(
        {"state_dict": module.state_dict(), "optimizer_states": [content], "global_step": 2,
         "pytorch-lightning_version": "2.5.0"},
        file,
    )  # fmt: skip
    converted, plan = tb.convert(module, torch.ones(4, 3)), fz.Plan(data=1)
    with pytest.raises(
        CheckpointError, match=r"at different steps \[1, 2\]\. Pass optimizer=False"
    ):
        tb.restore(file, converted, optax.adam(1e-3), plan)
    state = tb.restore(file, converted, optax.adam(1e-3), plan, optimizer=False)
    np.testing.assert_array_equal(state.params["weight"], module.weight.detach())


def test_moments_by_number_of_several_groups_want_names(tmp_path: Path) -> None:
    """Which are in the groups' order, whatever that of the module is."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    groups = [{"params": [module[i].weight]} for i in (1, 0)]
    optimizer = torch.optim.Adam(groups)
    module(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    file = tmp_path / "last.ckpt"
    torch.save(
        {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()],
         "global_step": 1, "pytorch-lightning_version": "2.5.0"},
        file,
    )  # fmt: skip
    converted, args = tb.convert(module, torch.ones(4, 2)), (optax.adam(1e-3), fz.Plan(data=1))
    with pytest.raises(CheckpointError, match=r"it has 2: no names were given; pass names="):
        tb.restore(file, converted, *args)
    state = tb.restore(file, converted, *args, names=["1.weight", "0.weight"])
    for i in range(2):
        mean = optimizer.state[module[i].weight]["exp_avg"]
        np.testing.assert_array_equal(state.opt_state[0].mu[f"{i}.weight"], mean)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam])
def test_decay_is_decoupled_where_the_class_that_loads_it_does(tmp_path: Path, kind: Any) -> None:
    module = torch.nn.Linear(3, 2)
    found = tb.convert(module, torch.zeros(4, 3), roll=False)
    state = fz.init(found.model(cases.mean_square), optax.adam(1e-3), fz.Plan(data=1))
    tb.save(tmp_path / "last.ckpt", found, state, hyper={"weight_decay": 0.5})
    fresh, loaded = kind(module.parameters()), kind(module.parameters())
    loaded.load_state_dict(torch.load(tmp_path / "last.ckpt")["optimizer_states"][0])
    keys = ("weight_decay", "decoupled_weight_decay")
    own = {"weight_decay": 0.5, keys[1]: fresh.param_groups[0][keys[1]]}
    assert {key: loaded.param_groups[0][key] for key in keys} == own


def test_a_scheduler_of_an_optimizer_without_state_does_not_begin_anew(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    converted = tb.convert(module, torch.zeros(4, 3))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    content = {"model": module.state_dict(), "optimizer": sgd.state_dict()}
    torch.save(content, tmp_path / "constant.pt")
    assert tb.checkpoint(tmp_path / "constant.pt", "model").unread is None
    halved = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    torch.save({**content, "optimizer": sgd.state_dict()}, tmp_path / "last.pt")
    tx = tb.optimizer(sgd, converted, halved)
    with pytest.raises(CheckpointError, match=r"SGD without momentum keeps no .*optimizer=False"):
        tb.restore(tmp_path / "last.pt", converted, tx, fz.Plan(data=1), key="model")


def test_an_optimizers_state_is_found_wherever_training_loops_put_it(tmp_path: Path) -> None:
    """transformers' Trainer beside the weights; a list; one of several by name."""
    module = torch.nn.Linear(3, 2)
    converted, plan = tb.convert(module, torch.zeros(4, 3)), fz.Plan(data=1)
    adam = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    adam.step()
    own, weights, tx = adam.state_dict(), module.state_dict(), optax.adamw(0.1)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    torch.save(own, tmp_path / "optimizer.pt")
    torch.save({"model": weights, "optimizers": [own]}, tmp_path / "list.pt")
    torch.save({"model": weights, "optimizer": {"adam": own}}, tmp_path / "by_name.pt")
    for path, key in (
        (tmp_path, None),
        (tmp_path / "list.pt", "model"),
        (tmp_path / "by_name.pt", "model"),
    ):
        state = tb.restore(path, converted, tx, plan, key=key)
        assert state.step == 1
        mean = adam.state[module.weight]["exp_avg"]
        np.testing.assert_array_equal(state.opt_state[0].mu["weight"], mean)
    several = torch.optim.AdamW([{"params": [p]} for p in module.parameters()])
    wrong: dict[str, Any] = {
        "expected state and param_groups": {"state": own["state"]},
        "one optimizer, got 2": [own, own],
        r"names=\[": own | {"param_groups": several.state_dict()["param_groups"]},
    }
    for said, written in wrong.items():
        torch.save({"model": weights, "optimizer": written}, tmp_path / "wrong.pt")
        with pytest.raises(CheckpointError, match=said):
            tb.restore(tmp_path / "wrong.pt", converted, tx, plan, key="model")
    path = tmp_path / "wrong.pt"
    assert tb.restore(path, converted, tx, plan, key="model", names=several).step == 1
    wrapped = accelerate.Accelerator(cpu=True).prepare(several)
    assert tb.restore(path, converted, tx, plan, key="model", names=wrapped).step == 1
    with pytest.raises(fz.ConversionError, match=r"AcceleratedOptimizer .* its `\.optimizer`"):
        tb.optimizer(wrapped, converted)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    (tmp_path / "optimizer.pt").write_bytes(b"cut off")
    with pytest.raises(
        CheckpointError, match=r"taken over in full: optimizer.pt: .*optimizer=False"
    ):
        tb.restore(tmp_path, converted, tx, plan)
    assert tb.restore(tmp_path, converted, tx, plan, optimizer=False).step == 0
    torch.save({"model": weights, "optimizer_options": {"lr": 0.1}}, tmp_path / "wrong.pt")
    assert tb.restore(tmp_path / "wrong.pt", converted, tx, plan, key="model").step == 0


def test_state_beside_adams_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    """Muon and AdamW, momentum alone, AMSGrad: formats have Adam's moments and nothing else."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    converted = tb.convert(module, torch.ones(2, 4))
    plan, (weights, biases) = fz.Plan(data=1), ([], [])
    for name, parameter in module.named_parameters():
        (weights if name.endswith("weight") else biases).append(parameter)
    both = [torch.optim.Muon(weights, lr=0.01), torch.optim.AdamW(biases, lr=0.01)]
    tx = tb.optimizer(both, converted, [None, None])
    state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), tx, plan)
    for optimizer in (None, True):
        with pytest.raises(CheckpointError, match=r"save: opt_state/.*0.weight and others: not"):
            tb.save(tmp_path / "both", converted, state, to="dcp", optimizer=optimizer)
    assert not (tmp_path / "both").exists()
    tb.save(tmp_path / "weights", converted, state, to="dcp", optimizer=False)
    adam = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), optax.adamw(0.01), plan)
    tb.save(tmp_path / "adam", converted, adam, to="dcp")
    with pytest.raises(CheckpointError, match=r"restore: .*adam has moments.*, but not opt_state/"):
        tb.restore(tmp_path / "adam", converted, tx, plan)
    slowly = fz.lookahead(optax.adamw(0.1), sync_period=2, slow_step_size=0.5)
    for slow in (slowly, optax.chain(optax.adamw(0.1), optax.trace(0.9))):
        state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), slow, plan)
        with pytest.raises(CheckpointError, match=r"save: opt_state/.*(slow|trace)/"):
            tb.save(tmp_path / "slow", converted, state, to="dcp")
    waits = fz.init(
        converted.model(lambda f, b: jnp.mean(f(b))), optax.MultiSteps(optax.adamw(0.1), 2), plan
    )
    with warnings.catch_warnings(action="error"):
        tb.save(tmp_path / "waits", converted, waits, to="dcp")
    several = waits.opt_state._replace(mini_step=waits.opt_state.mini_step + 1)
    with pytest.warns(UserWarning, match="gradients wait in optax.MultiSteps"):
        tb.save(tmp_path / "waits2", converted, waits.replace(opt_state=several), to="dcp")
    for name, other in (
        ("momentum", torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)),
        ("radam", torch.optim.RAdam(module.parameters())),  # its moments are no AdamW's
    ):
        own = tb.optimizer(other, converted)
        state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), own, plan)
        with pytest.warns(UserWarning, match="not of Adam, so that the file has the weights alone"):
            tb.save(tmp_path / name, converted, state, to="dcp")


def test_a_schedule_that_a_trainer_would_begin_anew_is_named(tmp_path: Path) -> None:
    converted = tb.convert(nn.Linear(4, 2), torch.ones(2, 4))
    plan, model = fz.Plan(data=1), converted.model(lambda f, b: jnp.mean(f(b)))
    falling = fz.init(model, optax.adamw(optax.linear_schedule(0.1, 0.0, 10)), plan)
    with pytest.warns(UserWarning, match="no scheduler's state"):
        tb.save(tmp_path / "falling.ckpt", converted, falling)
    with warnings.catch_warnings(action="error"):
        tb.save(tmp_path / "falling", converted, falling, to="dcp")
        tb.save(tmp_path / "same.ckpt", converted, fz.init(model, optax.adamw(0.1), plan))


def test_what_schedulers_keep_in_a_group_is_written_where_it_is_given(tmp_path: Path) -> None:
    module = nn.Linear(4, 2)
    converted = tb.convert(module, torch.ones(2, 4))
    state = fz.init(converted.model(lambda f, b: jnp.mean(f(b))), optax.adamw(0.1), fz.Plan(data=1))

    def cycle() -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)

    own = {k: v for k, v in cycle()[0].param_groups[0].items() if k.endswith(("_lr", "_momentum"))}
    tb.save(tmp_path / "cycle.ckpt", converted, state, hyper={"lr": 0.004, **own})
    found = torch.load(tmp_path / "cycle.ckpt", weights_only=True)["optimizer_states"][0]
    (first, scheduler), (other, beside) = cycle(), cycle()
    first.load_state_dict(found)
    scheduler.step()
    beside.step()
    assert first.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize("widths", [(6, 6), (6, 5)], ids=["equal", "distinct"])
def test_numbers_that_two_orders_fit_are_asked_for(widths: tuple[int, int], tmp_path: Path) -> None:
    """The module that wrote the file may have registered its layers the other way round."""
    inner, outer = widths
    layers = {"a": nn.Linear(6, inner), "b": nn.Linear(inner, outer)}

    class Ordered(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, layers[name])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    writer, reader = Ordered("ab"), Ordered("ba")
    optimizer = torch.optim.Adam(writer.parameters())
    writer(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": writer.state_dict(), "optimizer_states": [optimizer.state_dict()],
                "pytorch-lightning_version": "2.0.0", "global_step": 1}, path)  # fmt: skip
    converted, plan = tb.convert(reader, torch.zeros(2, 6)), fz.Plan(data=1)
    names: list[str] | None = None
    if inner == outer:
        with pytest.raises(CheckpointError, match=r"another order .* \(a.weight where it has b"):
            tb.restore(path, converted, optax.adam(1e-3), plan)
        names = [name for name, _ in writer.named_parameters()]
    state = tb.restore(path, converted, optax.adam(1e-3), plan, names=names)
    found = moments_of(converted, state.opt_state).exp_avg
    for name, parameter in writer.named_parameters():
        np.testing.assert_array_equal(found[name], optimizer.state[parameter]["exp_avg"])
