"""Edits of a state's parameters reach evaluation and training, whatever else the state keeps."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


TX = optax.sgd(0.0)  # steps keep the parameters: a loss is that of the parameters given
BATCH = tiny.points(4)


def square(key):
    """A matrix that two devices split, and a row that is padded."""
    return {"w": jax.random.normal(key, (tiny.D, tiny.D)) * 0.3, "b": jnp.ones((tiny.WIDTH,))}


def layer(p, x, ctx):
    """One link of the chain."""
    return jnp.tanh((x["x"] if isinstance(x, dict) else x) @ p["w"]) * p["b"].sum()


MODEL = fz.Sequential(
    [fz.Layer("one", square, layer), fz.Layer("two", square, layer)],
    loss=lambda y, batch: fz.Mean(jnp.sum(jnp.square(y.astype(jnp.float32))), jnp.float32(y.size)),
)

PLANS = {
    f"zero {zero}, {precision}": {"zero": zero, "data": 2, "precision": precision}
    for zero in range(4)
    for precision in ("fp32", "bf16", "fp16")
}
PLANS |= {
    "lazy": {"zero": 1, "data": 2, "precision": "bf16", "gather": "lazy"},
    "master on the host": {
        "zero": 1, "data": 2, "precision": "bf16", "tiers": {"master": "host"},
        "stream_bytes": 1024,
    },
    "master on disk": {
        "zero": 2, "data": 2, "precision": "bf16", "tiers": {"master": "disk"},
        "stream_bytes": 1024,
    },
    "pipeline": {"zero": 1, "data": 2, "precision": "bf16", "pipe": 2, "microbatches": 2},
}  # fmt: skip


def edited(params):
    """Other parameters in the same places: what is parked comes back for it."""
    return jax.tree.map(lambda x: x * 0.5, params)


def by_replace(state):
    """As users write it."""
    return state.replace(params=edited(state.params))


def by_dataclass(state):
    """Behind `replace`'s back."""
    return dataclasses.replace(state, params=edited(state.params))


def by_tree(state):
    """As tree surgery does it: leaves out, leaves in."""
    leaves, treedef = jax.tree.flatten(state)
    own = {id(leaf) for leaf in jax.tree.leaves(state.params)}
    return jax.tree.unflatten(treedef, [x * 0.5 if id(x) in own else x for x in leaves])


@functools.cache
def steps(plan):
    """A plan's evaluation and training."""
    return fz.eval_step(MODEL, plan), fz.train_step(MODEL, TX, plan, donate=False)


def losses(plan, state):
    """The loss in evaluation, and of two training steps."""
    evaluate, step = steps(plan)
    one, first = step(state, BATCH)
    _, second = step(one, BATCH)
    return [float(found["loss"]) for found in (evaluate(state, BATCH), first, second)]


@pytest.fixture(scope="module")
def expected():
    """Losses before and after the edit, by precision, without ZeRO."""
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        plan = tiny.plan(zero=3, data=1, precision=precision)
        state, evaluate = fz.init(MODEL, TX, plan), fz.eval_step(MODEL, plan)
        other = state.replace(params=edited(state.params))
        found[precision] = [float(evaluate(s, BATCH)["loss"]) for s in (state, other)]
    return found


@pytest.mark.parametrize("name", PLANS)
def test_an_edit_reaches_evaluation_and_training(name, expected):
    plan = tiny.plan(**PLANS[name])
    state = fz.init(MODEL, TX, plan)
    before, after = expected[plan.precision]
    assert abs(before - after) > 0.05
    np.testing.assert_allclose(losses(plan, state), before, rtol=2e-2 if plan.mixed else 1e-5)
    if plan.tiers:
        # What is parked is edited on the device and parked again, or left there.
        state = fz.reload(state, donate=False)
    edits = [by_replace, by_dataclass, by_tree]
    for edit in edits if plan.keeps_compute_copy else edits[:1]:
        other = edit(state)
        found = losses(plan, other)
        np.testing.assert_allclose(found, after, rtol=2e-2 if plan.mixed else 1e-5)
        if plan.tiers:
            parked = fz.offload(other, "master", to="host", donate=False)
            assert losses(plan, parked) == found


def test_a_stale_copy_is_not_believed_twice():
    """The same state again, and after steps that know it."""
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    stale = by_dataclass(state)
    evaluate, _ = steps(plan)
    assert float(evaluate(stale, BATCH)["loss"]) == float(evaluate(stale, BATCH)["loss"])
    assert float(evaluate(stale, BATCH)["loss"]) != float(evaluate(state, BATCH)["loss"])


@pytest.mark.parametrize("name", ["zero 1, bf16", "zero 3, fp32", "pipeline"])
def test_an_edit_in_a_state_s_own_dicts_is_seen(name):
    """A step does not take a state that it knows for what it was."""
    plan = tiny.plan(**PLANS[name])
    evaluate, step = steps(plan)
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    want = losses(plan, by_replace(state))
    state, _ = step(state, BATCH)  # the step's own state, which it looks at no more
    evaluate(state, BATCH)
    for link in state.params.values():
        link.update(edited(link))
    assert float(step(state, BATCH)[1]["loss"]) == want[1]
    assert float(evaluate(state, BATCH)["loss"]) == want[0]
    state.params["one"]["w"] = np.zeros((tiny.D, tiny.D), np.float32)
    for run in (step, evaluate):
        with pytest.raises(fz.StateError, match=r"params/one/w: expected a jax.Array"):
            run(state, BATCH)


def test_an_edit_is_replanned_saved_and_accumulated(tmp_path):
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    stale, right = by_dataclass(state), by_replace(state)
    want = losses(plan, right)
    assert losses(plan, fz.replan(stale, MODEL, TX, plan, plan)) == want
    fz.save(tmp_path, stale, plan, asynchronous=False)
    assert losses(plan, fz.restore(tmp_path, MODEL, TX, plan)) == want
    add = fz.accumulate_step(MODEL, TX, plan, donate=False)
    one, two = add(stale, BATCH)[0], add(right, BATCH)[0]
    tiny.same_bits(one.grads, two.grads)
    tiny.same_bits(one.compute, two.compute)


def test_replace_keeps_what_it_is_given_and_what_is_not_there():
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    other = edited(state.params)
    assert state.replace(params=other, compute=state.compute).compute is state.compute
    assert state.replace(params=state.params).compute is state.compute
    shapes = fz.abstract_state(MODEL, TX, plan)
    assert shapes.replace(params=shapes.params).compute is shapes.compute
    whole = fz.init(MODEL, TX, plan.replace(precision="fp32"))
    assert whole.replace(params=edited(whole.params)).compute is None


@pytest.mark.parametrize("pipe", [1, 2])
def test_an_edit_of_the_copy_alone_is_refused(pipe):
    """No step would read it."""
    plan = tiny.plan(zero=1, data=1, precision="bf16", pipe=pipe, microbatches=pipe)
    state = fz.init(MODEL, TX, plan)

    def edit(state):
        return state.replace(compute=edited(state.compute))

    for run in (edit, jax.jit(edit)):
        with pytest.raises(fz.StateError, match=r"compute/\S+ is edited by itself.*params=\.\.\."):
            run(state)
    assert state.replace(compute=jax.tree.map(lambda x: x, state.compute)).compute is not None
    again = fz.init(MODEL, TX, plan)
    assert again.replace(params=state.params).replace(compute=state.compute).step == 0


def test_a_known_copy_is_not_made_again():
    """Moves and steps hand the copy on; only strangers' edits cost a cast."""
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    step = fz.train_step(MODEL, TX, plan)
    evaluate = fz.eval_step(MODEL, plan)
    state, _ = step(state, BATCH)
    evaluate(state, BATCH)
    with tiny.counted_compiles() as compiles:
        state = fz.reload(fz.offload(state, "master"))
        state, _ = step(jax.tree.map(lambda x: x, state), BATCH)
        evaluate(state, BATCH)
    assert not compiles


@pytest.mark.parametrize("zero", [1, 2])
def test_an_edit_inside_jit_comes_back_in_any_sharding(zero):
    """jax chooses one for the copy; the plan keeps that whole, and parameters split."""
    plan = tiny.plan(zero=zero, data=2, precision="bf16")
    evaluate, step = steps(plan)
    edit = jax.jit(lambda state: state.replace(params=edited(state.params)))
    state = fz.init(MODEL, TX, plan)
    strayed = edit(state)
    at = strayed.compute["one"]["w"].sharding
    assert at != state.compute["one"]["w"].sharding, "the case is gone"
    wanted = evaluate(by_replace(state), BATCH)["loss"]
    assert float(evaluate(strayed, BATCH)["loss"]) == float(wanted)
    assert float(step(strayed, BATCH)[1]["loss"]) == float(wanted)


@pytest.mark.parametrize("edit", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_copy_that_is_parked_is_not_fetched(zero, edit):
    """Nor is one of other parameters: what is parked by hand comes back by hand."""
    plan = tiny.plan(zero=zero, data=2, precision="bf16")
    state = fz.offload(fz.init(MODEL, TX, plan), "compute", to="host")
    state = by_replace(state) if edit else state
    for call in steps(plan):
        with pytest.raises(fz.PlacementError, match="compute/one/b"):
            call(state, BATCH)


OTHERS = {
    "another name": lambda p: {"one": p["one"], "three": p["two"]},
    "one more": lambda p: {**p, "three": p["two"]},
    "one less": lambda p: {"one": p["one"]},
    "a list": lambda p: [p["one"], p["two"]],
    "a level more": lambda p: {"params": p},
    "none": lambda p: None,
    "another shape": lambda p: {**p, "two": {**p["two"], "b": p["two"]["b"][:1]}},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_parameters_of_another_model_are_refused_by_name(change):
    """The copy beside them is of no use in a comparison then."""
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    state = state.replace(params=change(state.params))
    for call in steps(plan):
        with pytest.raises(fz.StateError, match="not one of this model, optimizer and plan"):
            call(state, BATCH)


def test_under_jit_the_copy_is_always_that_of_the_parameters():
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state = fz.init(MODEL, TX, plan)
    evaluate, _ = steps(plan)

    def scaled(state, by):
        params = jax.tree.map(lambda x: x * by, state.params)
        return evaluate(state.replace(params=params), BATCH)["loss"]

    found = jax.jit(scaled)(state, jnp.float32(0.5))
    assert float(found) == float(evaluate(by_replace(state), BATCH)["loss"])
