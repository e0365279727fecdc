"""Random keys of any kind: a state keeps the one it was given, and every operation takes it."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from support import tiny
from support.sample import some

import fzero as fz
from fzero import compat
from fzero.keys import seed_key


MODEL, TX = tiny.chain(2, tiny.dropped_block), optax.sgd(0.1)
PLAN = tiny.plan(zero=3, data=2)


@pytest.mark.parametrize("impl", some(["rbg", "unsafe_rbg"], "unsafe_rbg"))
def test_a_key_of_another_kind_is_kept(impl, tmp_path):
    state = fz.init(MODEL, TX, PLAN, rng=jax.random.key(3, impl=impl))
    step = fz.train_step(MODEL, TX, PLAN)
    state, _ = step(state, tiny.tokens(8))
    fz.save(tmp_path, state, PLAN, asynchronous=False)
    one = tiny.plan(zero=0, data=1)
    for found in (fz.restore(tmp_path, MODEL, TX, one), fz.replan(state, MODEL, TX, PLAN, one)):
        assert str(jax.random.key_impl(found.rng)) == impl
        fz.eval_step(MODEL, one)(found, tiny.tokens(8))
    plan = PLAN.replace(pipe=2, microbatches=2)
    moved = fz.replan(state, MODEL, TX, PLAN, plan)
    moved, metrics = fz.train_step(MODEL, TX, plan, donate=False)(moved, tiny.tokens(8))
    assert np.isfinite(float(metrics["loss"]))


def test_an_optimizer_is_given_its_key_of_another_kind():
    model, plan = tiny.regression(), tiny.plan(zero=1, data=2)
    tx = optax.noisy_sgd(0.1, key=jax.random.key(3, impl="rbg"))
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    params = jax.tree.map(np.asarray, state.params)
    by_hand = tx.init(params)
    for _ in range(2):
        state, _ = step(state, tiny.points())
        _, by_hand = tx.update(params, by_hand, params)
    (key,) = (x for x in jax.tree.leaves(by_hand) if compat.is_key(x))
    found = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == np.uint32]
    np.testing.assert_array_equal(found, [jax.random.key_data(key)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: jax.random.key_data(jax.random.key(3, impl="rbg")),
        lambda: jax.random.split(jax.random.key(0)),
        lambda: np.ones(()),
    ],
    ids=["bits of another kind", "two keys", "a float"],
)
def test_what_is_no_key_is_refused(make):
    with pytest.raises(fz.StateError, match=r"init: rng: expected a seed .*wrap_key_data"):
        fz.init(MODEL, TX, PLAN, rng=make())


def test_seeds_of_64_bits_differ_in_all_of_them():
    seeds = [0, 1, -1, 2**32 - 2, 2**32, 2**32 + 1, 2**33, -(2**32), 2**63, 2**64 - 2]
    keys = {seed: tuple(jax.random.key_data(seed_key(seed)).tolist()) for seed in seeds}
    assert len(set(keys.values())) == len(seeds)
    for seed in (0, 1, -1, 2**32 - 2):
        assert jax.random.key(seed) == seed_key(seed)
    assert fz.init(MODEL, TX, PLAN, rng=2**32 + 1).rng == seed_key(2**32 + 1)
    with pytest.raises(fz.StateError, match=r"init: rng: a seed of at most 64 bits .* got 1844"):
        fz.init(MODEL, TX, PLAN, rng=2**64)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_bits_of_a_default_key_are_that_key(impl):
    """What `jax.random.PRNGKey` gives."""
    with jax.default_prng_impl(impl):
        key = jax.random.key(3)
        for bits in (jax.random.PRNGKey(3), np.asarray(jax.random.key_data(key))):
            tiny.same_bits(fz.init(MODEL, TX, PLAN, rng=bits), fz.init(MODEL, TX, PLAN, rng=key))


def test_the_bits_of_a_key_are_one_in_an_edited_state(tmp_path):
    state = fz.init(MODEL, TX, PLAN)
    bits = state.replace(rng=jax.random.PRNGKey(7))
    step, evaluate = fz.train_step(MODEL, TX, PLAN, donate=False), fz.eval_step(MODEL, PLAN)
    want, metrics = step(state.replace(rng=7), tiny.tokens(8))
    for rng in (bits.rng, np.asarray(bits.rng), jax.device_put(bits.rng, state.rng.sharding)):
        found, same = step(state.replace(rng=rng), tiny.tokens(8))
        assert jax.random.key_data(found.rng).tolist() == [0, 7] == bits.rng.tolist()
        assert float(same["loss"]) == float(metrics["loss"])
        evaluate(state.replace(rng=rng), tiny.tokens(8))
    fz.save(tmp_path, bits, PLAN, asynchronous=False)
    assert fz.restore(tmp_path, MODEL, TX, PLAN).rng == want.rng


def test_a_state_without_one_key_is_not_saved(tmp_path):
    state = fz.init(MODEL, TX, PLAN)
    for rng in (jax.random.split(state.rng), np.ones(3, np.uint32), None):
        with pytest.raises(fz.StateError, match="save: rng: expected a seed or one key"):
            fz.save(tmp_path, state.replace(rng=rng), PLAN)
    assert not any(tmp_path.iterdir())
