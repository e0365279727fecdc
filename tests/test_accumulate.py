"""Gradient accumulation over calls (`accumulate_step`) and over microbatches (`Plan.reduce`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.preflight import hlo


SGD, MOMENTUM = optax.sgd(1.0), optax.sgd(0.1, momentum=0.9)
MODEL = tiny.chain()
# Three batches with different numbers of tokens; together one of 24 rows.
PARTS = [tiny.tokens(8, seed=k) for k in range(3)]
WHOLE = {name: np.concatenate([part[name] for part in PARTS]) for name in PARTS[0]}
# Gradients are read off parameters of size 0.5 (one rounding of 3e-8), and are sums over tokens in
# another order: a few 1e-7 of each leaf's largest of about 0.1.
GRADIENT = {"rtol": 0, "atol": 4e-6}


@cache
def plan(zero):
    """A plan that splits every leaf."""
    return tiny.plan(zero=zero)


@cache
def start(zero):
    """A new state; shared, so it is copied before a step that consumes it."""
    return fz.init(MODEL, SGD, plan(zero))


def copied(state):
    """A state with memory of its own."""
    return jax.tree.map(lambda leaf: leaf.copy(), state)


@cache
def steps(zero):
    """(accumulate, train, evaluate); those of stage 0 consume their input."""
    return (
        fz.accumulate_step(MODEL, SGD, plan(zero), donate=zero == 0),
        fz.train_step(MODEL, SGD, plan(zero), donate=zero == 0),
        fz.eval_step(MODEL, plan(zero)),
    )


@cache
def accumulated(zero):
    """The state after two batches, and what the second call reported."""
    accumulate = steps(zero)[0]
    state, _ = accumulate(copied(start(zero)), PARTS[0])
    return accumulate(state, PARTS[1])


@cache
def expected():
    """Loss and gradient of the 24 rows at once, on one device."""
    loss, grads = tiny.reference(MODEL, fz.logical(MODEL, start(3)), WHOLE)
    return loss, tiny.host(grads)


@pytest.mark.parametrize("zero", [0, 3])
def test_calls_add_up_to_one_big_batch(zero):
    """Batches of different counts weigh by their counts, in loss and gradient."""
    counts = [int(part["mask"].sum()) for part in PARTS]
    assert len(set(counts)) == 3
    state, _ = accumulated(zero)
    new, metrics = steps(zero)[1](copied(state), PARTS[2])
    loss, grads = expected()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-7)
    assert float(metrics["count"]) == sum(counts)
    before = tiny.host(fz.logical(MODEL, start(zero)))
    after = tiny.host(fz.logical(MODEL, new))
    tiny.close({path: before[path] - after[path] for path in before}, grads, **GRADIENT)
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=2e-6)
    assert int(new.step) == 1
    assert new.grads is None


@pytest.mark.parametrize("zero", [0, 3])
def test_the_pending_gradient_is_part_of_the_state(zero):
    """float32 sums of totals, cut like the parameters in every stage; nothing else moves."""
    state, metrics = accumulated(zero)
    first = start(zero)
    tiny.same_bits(state.replace(grads=None), first)
    pending = state.grads
    assert int(pending.calls) == 2
    counts = [int(part["mask"].sum()) for part in PARTS]
    assert float(pending.count) == sum(counts[:2]) == float(metrics["count"])
    np.testing.assert_allclose(metrics["loss"], pending.total / pending.count, rtol=1e-7)
    assert jax.tree.structure(pending.sums) == jax.tree.structure(state.params)
    shards = {
        path: piece.sharding.shard_shape(piece.shape)
        for path, piece in zip(tiny.host(pending.sums), jax.tree.leaves(pending.sums), strict=True)
    }
    assert shards == {
        "blocks/b": (3, 2), "blocks/w": (3, 2, 16), "embed/table": (4, 13), "embed/up": (13, 2),
        "head/down": (2, 13), "head/gain": (),
    }  # fmt: skip
    assert {leaf.dtype for leaf in jax.tree.leaves(pending.sums)} == {np.dtype("float32")}


def test_sums_are_gradients_of_totals():
    """Not of means: dividing happens once, in the step."""
    state, _ = steps(3)[0](start(3), PARTS[0])
    params = fz.logical(MODEL, start(3))
    _, grads = tiny.reference(MODEL, params, PARTS[0])
    count = PARTS[0]["mask"].sum()
    sums = jax.tree.map(
        lambda leaf, like: np.asarray(leaf)[tuple(map(slice, like.shape))], state.grads.sums, params
    )
    # No parameter in between: fp32 sums of tokens in another order only.
    tiny.close(sums, jax.tree.map(lambda g: g * count, grads), rtol=0, atol=1e-6)


def test_evaluation_in_between_changes_nothing():
    _, train, evaluate = steps(3)
    state, _ = accumulated(3)
    quiet, _ = train(state, PARTS[2])
    before = tiny.host(state)
    metrics = evaluate(state, WHOLE)
    tiny.same_bits(state, before)
    # The parameters have not moved, so neither has the loss.
    assert float(metrics["loss"]) == float(evaluate(start(3), WHOLE)["loss"])
    again, _ = train(state, PARTS[2])
    tiny.same_bits(again, quiet)


def test_cycles_compile_once():
    """One program for a first batch, one for the following, one for the step."""
    accumulate, train, _ = steps(0)
    state = copied(start(0))
    for _ in range(2):
        for part in PARTS[:2]:
            state, _ = accumulate(state, part)
        state, _ = train(state, PARTS[2])
    assert int(state.step) == 2
    assert (accumulate.num_traces, train.num_traces) == (2, 1)


def test_accumulation_consumes_its_input():
    accumulate = steps(0)[0]
    state = copied(start(0))
    accumulate(state, PARTS[0])
    with pytest.raises(fz.StateConsumedError, match=r"accumulate_step: .*step 1"):
        accumulate(state, PARTS[0])


def test_replan_refuses_an_accumulation_in_progress():
    state, _ = accumulated(3)
    before = tiny.host(state)
    with pytest.raises(fz.StateError, match=r"state.grads.*finish.*replace\(grads=None\)"):
        fz.replan(state, MODEL, SGD, plan(3), plan(0))
    tiny.same_bits(state, before)
    fz.replan(state.replace(grads=None), MODEL, SGD, plan(3), plan(0))


def test_every_call_draws_its_own_masks():
    """The same rows again give another loss with dropout."""

    def loss(p, buffers, batch, rng, train):
        keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
        return jnp.sum(jnp.where(keep, batch["x"], 0.0)) * p["w"], buffers, {}

    model = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss)
    accumulate = fz.accumulate_step(model, SGD, plan(1))
    state, totals = fz.init(model, SGD, plan(1)), [0.0]
    for _ in range(3):
        state, _ = accumulate(state, {"x": tiny.points()["x"]})
        totals.append(float(state.grads.total))
    assert len({round(float(gap), 3) for gap in np.diff(totals)}) == 3


def test_a_nonfinite_accumulation_is_dropped_by_a_plan_that_skips():
    model, one = tiny.regression(), tiny.plan(zero=3, skip_nonfinite=True)
    tx = optax.adam(1e-2)
    first = fz.init(model, tx, one)
    before = tiny.host(first.replace(loss_scale=None))
    bad = tiny.points()
    bad["x"][0, 0] = np.inf
    state, _ = fz.accumulate_step(model, tx, one)(first, bad)
    state, metrics = fz.train_step(model, tx, one)(state, tiny.points())
    assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (1, 1)
    tiny.same_bits(state.replace(loss_scale=None), before)


def test_a_nonfinite_accumulation_spoils_no_statistics_of_a_plan_that_skips():
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        out = batch["x"] @ p["w"]
        return jnp.mean(out), {"mean": 0.5 * buffers["mean"] + jnp.mean(out)}, {}

    model = fz.Model(({"w": np.ones((16, 1), np.float32)}, {"mean": np.float32(0)}), loss)
    one = tiny.plan(zero=3, skip_nonfinite=True)
    accumulate = fz.accumulate_step(model, SGD, one)
    good, bad = {"x": np.ones((8, 16), np.float32)}, {"x": np.full((8, 16), np.inf, np.float32)}
    state, seen = fz.init(model, SGD, one), []
    for batch in (good, bad):
        state, _ = accumulate(state, batch)
        seen.append(float(state.buffers["mean"]))
    assert seen == [16.0, 16.0]


class TestReduce:
    """One reduction per microbatch, or one per step from whole local sums."""

    @staticmethod
    @cache
    def run(zero, reduce):
        one = tiny.plan(zero=zero, reduce=reduce, microbatches=2)
        state = fz.replan(start(3), MODEL, SGD, plan(3), one)
        step = fz.train_step(MODEL, SGD, one, donate=False)
        new, metrics = step(state, tiny.tokens(16))
        lowered = step.lower(state, tiny.tokens(16))
        return fz.logical(MODEL, new), metrics, hlo.collectives(lowered.compile().as_text())

    def test_both_give_the_same_gradient(self):
        early, one, _ = self.run(1, "microbatch")
        late, two, _ = self.run(1, "step")
        assert float(one["loss"]) == float(two["loss"])
        # Sums over microbatches and devices change places: fp32 rounding of the gradient.
        tiny.close(early, late, rtol=0, atol=1e-6)

    def test_stages_agree_bit_for_bit_on_one_reduction_per_step(self):
        tiny.same_bits(self.run(0, "step")[0], self.run(1, "step")[0])

    def test_bytes_reduced_are_those_of_one_microbatch(self):
        per = {
            reduce: hlo.total(self.run(1, reduce)[2], "reduce-scatter").wire_bytes
            for reduce in ("microbatch", "step")
        }
        assert per["microbatch"] == 2 * per["step"] > 0

    @pytest.mark.parametrize("zero", [2, 3])
    def test_stages_that_never_hold_whole_gradients_refuse(self, zero):
        with pytest.raises(fz.PlanError, match=f"zero={zero}.*reduce='microbatch'"):
            tiny.plan(zero=zero, reduce="step")


def test_a_parked_update_takes_sums_of_several_calls_and_then_of_one():
    """Those are float32, these bfloat16: another program each."""
    losses = []
    for tiers in ({}, {"opt_state": "host"}):
        one = tiny.plan(zero=3, precision="bf16", tiers=tiers)
        add, step = fz.accumulate_step(MODEL, MOMENTUM, one), fz.train_step(MODEL, MOMENTUM, one)
        state, _ = add(fz.init(MODEL, MOMENTUM, one, rng=0), PARTS[0])
        for part in PARTS[1:]:
            state, metrics = step(state, part)
        losses.append(float(metrics["loss"]))
    # An update in slabs may round once more; so may a weight that is cast from it.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_sums_are_used_up_without_a_warning_of_jaxs(recwarn):
    """On one device it tells of what is donated and becomes nothing; they are gone all the same."""
    model, plan, tx = tiny.regression(), tiny.plan(data=1), optax.adam(1e-2)
    one = {"devices": jax.devices()[:1]}
    state, _ = fz.accumulate_step(model, tx, plan, **one)(
        fz.init(model, tx, plan, **one), tiny.points()
    )
    fz.train_step(model, tx, plan, **one)(state, tiny.points())
    assert not [str(w.message) for w in recwarn if "donated" in str(w.message)]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.grads))
