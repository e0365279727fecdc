"""Another optimizer on a trained state, edited hyperparameters, parameters to evaluate at."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_cases import batch, plan, stacked, trained
from support import tiny
from support.sample import some

import fzero as fz


PLANS = {
    "plain": {"zero": 1, "data": 4},
    "bf16": {"zero": 1, "data": 2, "precision": "bf16"},
    "host": {"zero": 3, "data": 2, "tiers": {"opt_state": "host"}},
    "parked": {"zero": 3, "data": 2, "tiers": {"opt_state": "host", "params": "host"}},
    "pipeline": {"zero": 1, "data": 2, "pipe": 2, "microbatches": 2},
}


@pytest.mark.parametrize("kind", some(PLANS, "parked"))
def test_another_optimizer_goes_on_from_the_same_parameters(kind):
    """As if training had begun with it from these parameters, but at that step."""
    model, cut, old, new = stacked(), plan(**PLANS[kind]), optax.sgd(0.1), optax.adam(1e-2)
    _, state = trained(old, cut, steps=1)
    before = tiny.host(fz.logical(model, fz.reload(state, donate=False), cut))
    state = fz.with_optimizer(state, model, old, new, cut)
    expected = fz.abstract_state(model, new, cut)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected.opt_state)
    values = {
        name: jnp.asarray(before[name]) for name in ("first", "last")
    } | {"blocks": {name: jnp.asarray(before[f"blocks/{name}"]) for name in "wb"}}  # fmt: skip
    again = fz.init(model.with_init((values, {})), new, cut)
    step = fz.train_step(model, new, cut)
    state, _ = step(state, batch(5))
    again, _ = step(again, batch(5))
    assert int(state.step) == int(again.step) + 1
    for name in ("params", "opt_state"):
        one, other = (fz.reload(s, donate=False) for s in (state, again))
        tiny.same_bits(getattr(one, name), getattr(other, name))


def test_a_state_of_another_optimizer_is_refused():
    _, state = trained(optax.sgd(0.1), plan(data=2), steps=1)
    with pytest.raises(fz.StateError, match="with_optimizer: the state is not one of"):
        fz.with_optimizer(state, stacked(), optax.adam(0.1), optax.sgd(0.1), plan(data=2))
    with pytest.raises(fz.PlanError, match=r"with_optimizer: .*per_layer"):
        fz.with_optimizer(state, stacked(), optax.sgd(0.1), optax.lamb(0.1), plan(data=2))


@pytest.mark.parametrize("new", [None, optax.adam(0.1)], ids=["none", "adam"])
def test_a_new_optimizer_has_its_own_state_and_none_has_nothing(new):
    model, cut, old = tiny.regression(), plan(data=2), optax.sgd(0.1, momentum=0.9)
    found = fz.with_optimizer(fz.init(model, old, cut), model, old, new, cut)
    expected = fz.abstract_state(model, new, cut)
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(expected.opt_state)


def edited(state, value, inside):
    if inside:  # as optax's own documentation has it
        state.opt_state.hyperparams["learning_rate"] = value
        return state
    hyperparams = {**state.opt_state.hyperparams, "learning_rate": value}
    return state.replace(opt_state=state.opt_state._replace(hyperparams=hyperparams))


@pytest.mark.parametrize(
    "value", [0.0, 0, np.float64(0.0), jnp.float32(0.0)], ids=["float", "int", "numpy", "jax"]
)
@pytest.mark.parametrize("inside", [False, True], ids=["replaced", "in place"])
def test_a_hyperparameter_may_be_set_to_a_number(value, inside):
    """A rate of nothing changes nothing, and no program is compiled for it."""
    tx, cut = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), plan(zero=1, data=2)
    model = stacked()
    step, state = fz.train_step(model, tx, cut), fz.init(model, tx, cut)
    state, _ = step(state, batch(0))
    before, traces = tiny.host(state.params), step.num_traces
    state, _ = step(edited(state, value, inside), batch(1))
    tiny.same_bits(state.params, before)
    assert step.num_traces == traces
    state, _ = step(edited(state, 0.1, inside), batch(1))
    assert np.any(np.asarray(state.params["first"]) != before["first"])


def test_what_moves_a_state_wants_an_array(tmp_path):
    tx, cut = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), plan(zero=1, data=2)
    state = edited(fz.init(stacked(), tx, cut), 0.5, False)
    calls = [fz.offload, fz.reload, fz.placement, lambda state: fz.save(tmp_path, state, cut)]
    for call in calls:
        with pytest.raises(fz.StateError, match="learning_rate is a float; steps take a number"):
            call(state)
        with pytest.raises(fz.StateError, match="rng is a int; steps take a number"):
            call(fz.init(stacked(), tx, cut).replace(rng=7))


@pytest.mark.parametrize("key", [7, jax.random.key(7)], ids=["seed", "key"])
def test_a_state_may_be_given_another_key_and_step(key):
    """What they were changed to is what a state has that began so."""
    tx, cut = optax.sgd(0.1), plan(zero=1, data=2)
    model = stacked()
    step, state = fz.train_step(model, tx, cut, donate=False), fz.init(model, tx, cut, rng=7)
    there = jax.device_put(np.int32(3), state.step.sharding)
    expected, _ = step(state.replace(step=there), batch(0))
    found, _ = step(fz.init(model, tx, cut).replace(params=state.params, rng=key, step=3), batch(0))
    tiny.same_bits(found, expected)
    assert step.num_traces == 1
    fz.eval_step(model, cut)(state.replace(rng=key), batch(0))


@pytest.mark.parametrize("number", [2**40, 2**70, np.int64(2**40), 1.5])
def test_a_step_that_is_no_int32_is_refused(number):
    tx, cut = optax.sgd(0.1), plan(zero=1, data=2)
    state = fz.init(stacked(), tx, cut).replace(step=number)
    with pytest.raises(fz.StateError, match=r"step is .*; expected a number of dtype int32"):
        fz.train_step(stacked(), tx, cut)(state, batch(0))


def test_a_hyperparameter_of_another_kind_is_refused():
    tx, cut = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), plan(zero=1, data=2)
    state = fz.init(stacked(), tx, cut)
    step = fz.train_step(stacked(), tx, cut)
    with pytest.raises(fz.StateError, match=r"opt_state/count is 0\.5; expected a number"):
        step(state.replace(opt_state=state.opt_state._replace(count=0.5)), batch(0))


@pytest.mark.parametrize("kind", some(PLANS, "host", "parked"))
def test_schedule_free_is_evaluated_at_the_average(kind):
    model, cut = stacked(), plan(**PLANS[kind])
    tx = optax.contrib.schedule_free_sgd(0.1)
    _, state = trained(tx, cut, steps=2)
    whole = fz.reload(state, donate=False)
    averaged = fz.eval_params(state, model, tx, cut)
    y, x = (
        tiny.host(fz.logical(model, fz.reload(one, donate=False), cut)) for one in (whole, averaged)
    )
    z = tiny.host(fz.logical(model, whole.replace(params=whole.opt_state.z), cut))
    b1 = float(whole.opt_state.b1)
    for path, value in x.items():
        np.testing.assert_allclose(value, (y[path] - (1 - b1) * z[path]) / b1, 1e-5, 1e-6)
    there = fz.eval_step(model, cut)(fz.reload(averaged, donate=False), batch(0))["loss"]
    here = fz.eval_step(model, cut)(whole, batch(0))["loss"]
    assert float(there) != float(here)
    if kind == "plain":
        assert float(there) == pytest.approx(float(model_loss(x)), rel=1e-5)


def model_loss(params):
    x = batch(0)["x"] @ params["first"]
    for w, b in zip(params["blocks/w"], params["blocks/b"], strict=True):
        x = x + np.tanh(x @ w + b)
    return np.mean(np.square(x @ params["last"] - batch(0)["y"]))


def test_frozen_parameters_have_no_average():
    model, cut = stacked(frozenset({"first"})), plan(zero=3, data=2)
    tx = optax.contrib.schedule_free_sgd(0.1)
    state, _ = fz.train_step(model, tx, cut)(fz.init(model, tx, cut), batch(0))
    found = fz.eval_params(state, model, tx, cut)
    tiny.same_bits({"first": found.params["first"]}, {"first": state.params["first"]})
    assert np.any(np.asarray(found.params["last"]) != np.asarray(state.params["last"]))


def test_what_gives_other_shapes_is_refused():
    tx, cut = optax.sgd(0.1), plan(data=2)
    _, state = trained(tx, cut, steps=1)
    with pytest.raises(fz.StateError, match="eval_params: expected parameters of the model"):
        fz.eval_params(state, stacked(), tx, cut, lambda opt_state, params: params["first"])


@pytest.mark.parametrize("kind", ["plain", "pipe"])
def test_each_call_gives_what_its_own_function_finds(kind):
    tx, model = fz.lookahead(optax.sgd(0.1), 5, 0.5), stacked()
    cut = plan(pipe=2, microbatches=2) if kind == "pipe" else plan(data=2)
    _, state = trained(tx, cut, steps=1)
    slow = fz.eval_params(state, model, tx, cut, lambda opt_state, params: opt_state.slow)
    fast = fz.eval_params(state, model, tx, cut, lambda opt_state, params: params)
    tiny.same_bits(fast.params, state.params)
    tiny.same_bits(slow.params, state.opt_state.slow)
    tiny.same_bits(fz.eval_params(state, model, tx, cut).params, slow.params)


def test_an_optimizer_without_an_average_is_asked_where_it_is():
    tx, cut = optax.chain(optax.contrib.schedule_free_sgd(0.1), optax.identity()), plan(data=2)
    _, state = trained(tx, cut, steps=1)
    with pytest.raises(fz.StateError, match=r"got tuple; say where the parameters are: of="):
        fz.eval_params(state, stacked(), tx, cut)
