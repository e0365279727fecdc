"""What a step gives an optimizer, keeps for it, and refuses when it is built."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizer_cases
import pytest
from optimizer_cases import (
    ALL,
    batch,
    by_hand,
    loss_of,
    plan,
    stacked,
    trained,
    values,
    written_out,
)
from support import tiny
from support.sample import some

import fzero as fz
from fzero.optimizer.terms import OWN, Terms
from fzero.optimizer.zeros import Zeros


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (optax.lbfgs(), "TypeError: .*'value'.*'value_fn'|TypeError.*(grad|value_fn)"),
        (optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)), "value_fn"),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn"),
        (optax.contrib.sophia(1e-2), "obj_fn"),
        (optax.contrib.dpsgd(0.1, 1.0, 0.1, 0), "expects `grads` to have a batch dimension"),
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), r"fast.*fz\.lookahead"),
    ],
    ids=["lbfgs", "linesearch", "opaque-sam", "sophia", "dpsgd", "lookahead"],
)
def test_what_no_step_can_give_is_refused_when_it_is_built(tx, match):
    match = "the optimizer cannot be used in a step; its update raised.*(" + match + ")"
    with pytest.raises(fz.PlanError, match=match):
        fz.train_step(stacked(), tx, plan(data=1))
    with pytest.raises(fz.PlanError, match=match):
        fz.init(stacked(), tx, plan(data=1))


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (optax.masked(optax.sgd(0.1), {"blocks": True, "last": True}), "ValueError.*masks and lab"),
        (optax.contrib.galore(0.1, rank=2), "'NoneType' .*with None in place of frozen ones"),
    ],
    ids=["mask without the frozen", "galore"],
)
def test_an_init_that_fails_is_told_what_it_was_given(tx, match):
    with pytest.raises(fz.PlanError, match=f"(?s)init: the optimizer cannot be used: .*{match}"):
        fz.init(stacked(frozenset({"first"})), tx, plan(data=1))


def by_depth(layers, in_init=False):
    """Rates for each layer of the stack, as an optimizer has them that knows how many there are."""
    rates = 0.8 ** np.arange(layers, dtype=np.float32)

    def of(tree):
        def scaled(leaf):
            return leaf * rates.reshape(-1, *[1] * (leaf.ndim - 1))

        return {**tree, "blocks": jax.tree.map(scaled, tree["blocks"])}

    if in_init:
        return optax.GradientTransformation(
            of, lambda updates, state, params=None: (updates, state)
        )
    return optax.stateless(lambda updates, params: of(updates))


@pytest.mark.parametrize("in_init", [False, True], ids=["update", "init"])
def test_numbers_for_each_layer_where_a_pipeline_fills_up_rows_name_per_layer(in_init):
    """Three layers on two ranks are four rows."""
    cut = plan(pipe=2, microbatches=2)
    match = r"'blocks' has 3 layers in 4 rows \(.*\(4, .*\)\. Say fz\.per_layer\(tx\)"
    with pytest.raises(fz.PlanError, match=match):
        fz.init(stacked(), fz.as_stacked(by_depth(3, in_init)), cut)
    with pytest.raises(fz.PlanError, match=r"cannot be used(?!.*per_layer)"):
        fz.init(stacked(), fz.as_stacked(by_depth(5, in_init)), cut)


@pytest.mark.parametrize("leaf", [0, 1.5, True, "sgd"], ids=repr)
def test_a_state_has_arrays_only(leaf):
    tx = optax.GradientTransformation(lambda _: {"kept": [None, leaf]}, optax.identity().update)
    match = f"^init: opt_state/kept/1 is a {type(leaf).__name__}: expected"
    with pytest.raises(fz.PlanError, match=match):
        fz.init(stacked(), tx, plan(data=1))


def test_every_parameter_gets_an_update():
    def update(updates, state, params=None):
        del params
        return updates | {"first": jax.tree.map(lambda _: None, updates["first"])}, state

    tx = optax.GradientTransformation(optax.identity().init, update)
    with pytest.raises(fz.PlanError, match=r"^train_step: .* gives nothing for first: expected"):
        fz.train_step(stacked(), tx, plan(data=1))


@pytest.mark.parametrize("module", [optax, optax.contrib], ids=lambda module: module.__name__)
def test_every_optimizer_is_tried(module):
    """Whatever takes a rate: it is one of `optimizer_cases`, or refused here."""
    tried = "".join(Path(file).read_text() for file in (__file__, optimizer_cases.__file__))
    takes_rate = {
        name for name, made in vars(module).items()
        if isinstance(made, (FunctionType, partial)) and name[0] != "_"
        and "learning_rate" in inspect.signature(made).parameters
    }  # fmt: skip
    assert takes_rate >= ({"adamw", "lamb"} if module is optax else {"muon", "sophia"})
    optimizers = {name for name in takes_rate if not name.startswith("scale_by")}
    assert {name for name in optimizers if not re.search(rf"\.{name}\b", tried)} == set()


def test_sam_steps_out_and_back():
    """Its documented meaning: every second step undoes the step out, with the gradient from there.

    It takes no `value`, though transformations with extra arguments usually do.
    """
    start = written_out(values())
    ours, _ = trained(ALL["sam"](), plan(zero=3), steps=2)
    data = batch(0)
    grads = jax.grad(loss_of)(jax.tree.map(jnp.asarray, start), data)
    norm = optax.tree.norm(grads)
    out = jax.tree.map(lambda p, g: p + 0.05 * g / norm, start, grads)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, start, jax.grad(loss_of)(out, batch(1)))
    tiny.close(ours, want, rtol=0, atol=5e-6)


def lookahead_by_hand(steps):
    tx = optax.lookahead(optax.adam(1e-2), 2, 0.5)
    params = optax.LookaheadParams.init_synced(jax.tree.map(jnp.asarray, written_out(values())))
    state = tx.init(params)
    for seed in range(steps):
        grads = jax.grad(loss_of)(params.fast, batch(seed))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_lookahead_is_that_of_optax():
    tx, cut = fz.lookahead(optax.adam(1e-2), 2, 0.5), plan(zero=3, data=4)
    ours, state = trained(tx, cut, steps=3)
    want = lookahead_by_hand(3)
    tiny.close(ours, want.fast, rtol=0, atol=5e-6)
    slow = fz.eval_params(state, stacked(), tx, cut, lambda opt_state, params: opt_state.slow)
    slow = written_out(jax.device_get(fz.logical(stacked(), slow)))
    tiny.close(slow, want.slow, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "options",
    [{"tiers": {"opt_state": "host"}}, {"tiers": {"opt_state": "disk"}},
     {"pipe": 2, "microbatches": 2}],
    ids=["host", "disk", "pipeline"],
)  # fmt: skip
def test_arrays_that_an_optimizer_does_not_compute_lie_as_all_do(options):
    """Those that `init` and `update` only hand on, which devices share out."""
    first, later = (scale * np.arange(8, dtype=np.float32) for scale in (1, 2))

    def init(params):
        return {"mu": params, "given": first, "set": first}

    def update(grads, state, params=None):
        scale = -0.1 * state["given"][1] * state["set"][1]
        return jax.tree.map(lambda x: scale * x, grads), {**state, "set": later}

    tx, cut = optax.GradientTransformation(init, update), plan(zero=1, data=2, **options)
    params, state = trained(tx, cut)
    state = fz.reload(state)
    for name, value in (("given", first), ("set", later)):
        np.testing.assert_array_equal(state.opt_state[name], value)
        assert state.opt_state[name].addressable_shards[0].data.shape == (4,)
    tiny.close(params, trained(tx, plan(zero=1, data=2))[0], rtol=2e-6, atol=2e-6)


# Random keys in the optimizer's state


def noisy():
    return fz.per_layer(optax.noisy_sgd(0.1, key=jax.random.key(1, impl="rbg")))


@pytest.mark.parametrize("zero", some([0, 1, 3], 0))
def test_keys_go_through_checkpoints_and_other_plans(zero, tmp_path):
    model, cut = stacked(), plan(zero=zero, data=4)
    _, state = trained(noisy(), cut, steps=2)
    fz.save(str(tmp_path / "noisy"), state, cut)
    fz.wait(str(tmp_path / "noisy"))
    other = plan(zero=3 - zero, data=2)
    step = fz.train_step(model, noisy(), cut)
    moved = fz.replan(state, model, noisy(), cut, other)
    read = fz.restore(str(tmp_path / "noisy"), model, noisy(), other)
    tiny.same_bits(read.opt_state, moved.opt_state)
    there = fz.train_step(model, noisy(), other)
    one, _ = step(state, batch(2))
    two, _ = there(read, batch(2))
    one, two = (fz.logical(model, x) for x in (one, two))
    tiny.close(one, two, rtol=0, atol=5e-6)
    noise = np.abs(tiny.host(one)["first"] - by_hand("sgd")["first"]).max()
    assert noise > 1e-3


def test_two_draws_are_not_the_same():
    """The key in the state moves on."""
    tx = fz.per_layer(optax.noisy_sgd(0.1, key=jax.random.key(1)))
    model, cut = stacked(), plan(data=1)
    state = fz.init(model, tx, cut)
    step = fz.train_step(model, tx, cut, donate=False)
    first, _ = step(state, batch(0))
    second, _ = step(first.replace(params=state.params), batch(0))
    assert np.any(np.asarray(first.params["first"]) != np.asarray(second.params["first"]))


@pytest.mark.parametrize(
    ("name", "commutes"),
    [("mul", True), ("add", True), ("max", True), ("sub", False), ("div", False), ("pow", False)],
)
def test_operands_may_change_places_where_that_changes_nothing(name, commutes):
    terms = Terms({})
    one, other = ((terms.of(("input", n), (4,)), None) for n in range(2))
    found = {terms.operation(name, (), 0, pair, (4,)) for pair in ((one, other), (other, one))}
    assert len(found) == (1 if commutes else 2)


def test_a_stack_of_one_layer_is_read_as_a_whole():
    terms = Terms({"one": 1, "more": 3}, {"one"})
    assert (terms.own("one"), terms.every("one")) == (None, None)
    assert terms.own("more") == OWN
    assert terms.every("more") == ("more", "all")


def test_a_sum_over_layers_is_what_each_of_them_is_added_up_in():
    """Once all are in it; what one of them is in more often stays its own."""
    terms = Terms({"s": 3})
    leaf = terms.of(("input", 0), ())
    layers = [(leaf, ("s", n)) for n in range(3)]
    every = terms.bag("reduce_sum", [(leaf, terms.every("s"))], ())
    assert terms.bag("reduce_sum", layers, ()) == every
    assert terms.bag("reduce_sum", layers[:2], ()) != every
    twice = terms.bag("reduce_sum", [*layers, layers[0]], ())
    assert twice == terms.bag("reduce_sum", [every, layers[0]], ()) != every


def test_rows_that_are_no_layers_are_harmless_where_their_zeros_are():
    terms = Terms({})
    leaf = terms.of(("input", 0), (4,)), None
    positive = terms.operation("gt", (), 0, (leaf, (terms.of(("literal", 0.0), ()), None)), (4,))
    finite = terms.operation("is_finite", (), 0, (leaf,), (4,))
    grown = terms.operation("exp", (), 0, (leaf,), (4,))
    more = terms.operation("is_finite", (), 0, (grown,), (4,))
    of_all = terms.operation("abs", (), 0, ((leaf[0], ("s", "all")),), (4,))
    zeros = Zeros(terms, [])
    kinds = "reduce_sum", "reduce_and", "reduce_max"
    assert [zeros.harmless(kind, leaf[0]) for kind in kinds] == [True, False, False]
    assert not zeros.harmless("reduce_sum", of_all[0])  # of other rows
    assert zeros.harmless("reduce_and", finite[0])
    for other in (positive, more):  # false of zeros; of what is no zero
        assert not zeros.harmless("reduce_and", other[0])


def test_lookahead_hands_on_what_an_update_is_given():
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1))
    tx, params = fz.lookahead(plateau, 2, 0.5), {"w": jnp.zeros(1)}
    state = tx.init(params)
    for _ in range(4):
        _, state = tx.update({"w": jnp.ones(1)}, state, params, value=jnp.float32(1))
    assert optax.tree_utils.tree_get(state, "scale") < 1


def test_an_optimizer_is_looked_at_in_the_dtype_that_it_is_given():
    """Gradients and parameters of 16 bits come to it in 32."""
    seen = set()

    def init(params):
        seen.update(leaf.dtype.name for leaf in jax.tree.leaves(params))
        return optax.EmptyState()

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    fz.train_step(tiny.regression(jnp.bfloat16), tx, tiny.plan(zero=1, data=2))
    assert seen == {"float32"}
