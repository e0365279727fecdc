"""Parameters frozen and unfrozen in the middle of a run, as fine-tuning in stages does."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from optimizer_cases import batch, loss_of, plan, stacked, values
from support import tiny
from support.sample import some

import fzero as fz


DECAY, TX = 0.9, optax.adam(1e-2)
PLANS = {
    "zero 1": {"zero": 1, "data": 4, "ema": DECAY},
    "parked": {"zero": 3, "data": 2, "ema": DECAY, "tiers": {"opt_state": "host", "ema": "host"}},
    "pipeline": {"zero": 1, "data": 2, "pipe": 2, "microbatches": 2, "ema": DECAY},
}
STAGES = (frozenset({"first", "last"}), frozenset({"last"}), frozenset({"first"}))


def by_hand():
    """Parameters and averages of a plain loop that gives each stage a new optimizer."""
    params, averages, number = values(), {}, 0
    for frozen in STAGES:
        train = {name: leaf for name, leaf in params.items() if name not in frozen}
        averages = {name: averages.get(name, leaf) for name, leaf in train.items()}
        opt_state = TX.init(train)
        for _ in range(2):
            rest = {name: params[name] for name in frozen}
            grads = jax.grad(lambda own, rest, data: loss_of({**own, **rest}, data))(
                train, rest, batch(number)
            )
            updates, opt_state = TX.update(grads, opt_state, train)
            train = optax.apply_updates(train, updates)
            averages = jax.tree.map(lambda a, p: DECAY * a + (1 - DECAY) * p, averages, train)
            number += 1
        params = {**params, **train}
    return params, averages


@pytest.mark.parametrize("kind", some(PLANS, "parked", "pipeline"))
def test_each_stage_is_that_of_a_plain_loop(kind):
    cut, model, state = plan(**PLANS[kind]), None, None
    for number, frozen in enumerate(STAGES):
        old, model = model, stacked().with_frozen(frozen)
        state = (
            fz.init(model, TX, cut) if state is None
            else fz.with_optimizer(state, model, TX, TX, cut, old_model=old)
        )  # fmt: skip
        step = fz.train_step(model, TX, cut)
        for seed in (2 * number, 2 * number + 1):
            state, _ = step(state, batch(seed))
    params, averages = by_hand()
    assert int(state.step) == 2 * len(STAGES)
    tiny.close(tiny.host(fz.logical(model, state, cut)), tiny.host(params), 1e-5, 1e-6)
    averaged = tiny.host(fz.logical(model, fz.averaged(state, model, cut), cut))
    wanted = {**tiny.host(params), **tiny.host(averages)}  # what is frozen has none
    tiny.close(averaged, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_is_laid_out_as_a_new_one_of_the_other_model(precision):
    """A frozen leaf is whole where passes read it so, and has no compute copy."""
    tx, cut = optax.sgd(0.1), plan(zero=1, data=4, precision=precision)
    models = [stacked().with_frozen(frozen) for frozen in ([], ["first", "blocks/w"])]
    for old, new in (models, models[::-1]):
        state = fz.init(old, tx, cut)
        found = fz.with_optimizer(state, new, tx, tx, cut, old_model=old)
        wanted = fz.init(new, tx, cut)
        tiny.same_shards(found, wanted)
        fz.train_step(new, tx, cut)(found, batch(0))


def test_what_is_filled_up_is_that_of_the_other_model():
    cut = tiny.plan(zero=1, data=3, precision="bf16")
    old, model = (stacked().with_frozen({name}) for name in ("first", "last"))
    state = fz.with_optimizer(fz.init(old, TX, cut), model, TX, TX, cut, old_model=old)
    assert state.padded == fz.init(model, TX, cut).padded != fz.init(old, TX, cut).padded


def test_averages_are_parked_slab_by_slab_as_the_plan_says():
    cut = tiny.plan(zero=1, data=2, ema=DECAY, tiers={"ema": "host"}, stream_bytes=64)
    old, model = (stacked().with_frozen(frozen) for frozen in ([], ["first"]))
    state = fz.with_optimizer(fz.init(old, TX, cut), model, TX, TX, cut, old_model=old)
    slabs = [
        [type(leaf) for leaf in jax.tree.leaves(x.ema)] for x in (state, fz.init(model, TX, cut))
    ]
    assert slabs[0] == slabs[1]
    fz.train_step(model, TX, cut)(state, batch(0))


def test_the_refusal_names_what_unfreezes():
    model, cut = stacked(), plan(zero=1, data=2, ema=DECAY)
    frozen = model.with_frozen(["first"])
    for old, new in ((frozen, model), (model, frozen)):
        state = fz.init(old, TX, cut)
        with pytest.raises(fz.StateError, match=r"freezes others .* plan, old_model=old_model\)"):
            fz.train_step(new, TX, cut)(state, batch(0))
        with pytest.raises(fz.StateError, match=r"with_optimizer\(state, model, old_tx, tx, plan"):
            fz.replan(state, new, TX, cut, cut)


def test_another_model_and_an_accumulation_are_refused():
    model, cut = stacked(), plan(zero=1, data=2)
    frozen = model.with_frozen(["first"])
    other = fz.Model(
        lambda key: ({"first": np.zeros(3, np.float32)}, {}),
        lambda p, buffers, batch, rng, train: (p["first"].sum(), buffers, {}),
    )
    state = fz.init(frozen, TX, cut)
    with pytest.raises(fz.StateError, match=r"of the same parameters .* params/first: float32"):
        fz.with_optimizer(state, other, TX, TX, cut, old_model=frozen)
    state, _ = fz.accumulate_step(frozen, TX, cut)(state, batch(0))
    with pytest.raises(fz.StateError, match="an accumulation is in progress"):
        fz.with_optimizer(state, model, TX, TX, cut, old_model=frozen)
