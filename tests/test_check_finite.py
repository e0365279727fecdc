"""`step.check_finite` names the first value of a step that is not finite, and where it came up."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support import tiny


SGD = optax.sgd(0.1)
NAN_OUTPUT, NAN_GRADIENT = 1, 2


def block(p, x, ctx):
    """Layer 2 gives NaN for rows that say so; for others layer 3 has a slope without end, and with
    it all before."""
    here = jnp.any((ctx.batch["spoils"] == NAN_OUTPUT) & (p["number"] == 2))
    there = jnp.any((ctx.batch["spoils"] == NAN_GRADIENT) & (p["number"] == 3))
    one = p["one"] * (1 + 0 * x[..., :1])
    zero = jnp.sqrt(jnp.where(there, 0.0, 1.0) * one) - jnp.where(there, 0.0, 1.0)
    return x + jnp.tanh(x @ p["w"]) + jnp.where(here, jnp.nan, zero)


def model(block=block) -> fz.Sequential:
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = {
        "w": jax.random.normal(keys[0], (4, tiny.D, tiny.D)) * 0.3,
        "number": jnp.arange(4.0),
        "one": jnp.ones(4),
    }
    params = {"embed": tiny.embed_init(keys[1]), "blocks": blocks, "head": tiny.head_init(keys[2])}
    return fz.Sequential(
        [
            fz.Layer("embed", tiny.embed_init, tiny.embed),
            fz.Stack("blocks", 4, tiny.block_init, block),
            fz.Layer("head", tiny.head_init, tiny.head, reads={"table": "embed/table"}),
        ],
        loss=tiny.token_loss,
        init=(params, {}),
    )


def batch(row: int, spoils: int) -> dict[str, np.ndarray]:
    marks = np.zeros(16, np.int32)
    marks[row] = spoils
    return {**tiny.tokens(16), "spoils": marks}


# Rows 8 to 15 are of the second device; the plan, the row's microbatch, the stage of layers 2, 3.
PLANS = {
    "lazy": ({"data": 2, "zero": 2, "microbatches": 4, "gather": "lazy"}, 2, ""),
    "zb_h1": (
        {"data": 2, "zero": 2, "pipe": 2, "microbatches": 4, "schedule": "zb_h1"},
        2, " on stage 1 (rank 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_layer_leaf_microbatch_stage_and_device_are_named(name):
    options, microbatch, stage = PLANS[name]
    plan, made = tiny.plan(skip_nonfinite=True, **options), model()
    state, step = fz.init(made, SGD, plan), fz.train_step(made, SGD, plan)
    step.check_finite(state, batch(13, 0))
    if name == "lazy":  # as users come to it: what a skipped step gives back is the state before
        state, metrics = step(state, batch(13, NAN_OUTPUT))
        assert metrics["nonfinite"] == 1
    with pytest.raises(fz.NonFiniteError) as found:
        step.check_finite(state, batch(13, NAN_OUTPUT))
    device = 3 if "pipe" in options else 1
    assert str(found.value) == (
        f"check_finite: microbatch {microbatch}: the output of blocks, layer 2{stage} is not"
        f" finite, while all before it is; on cpu:{device} of process 0"
    )
    with pytest.raises(fz.NonFiniteError) as found:
        step.check_finite(state, batch(13, NAN_GRADIENT))
    assert str(found.value).startswith(
        f"check_finite: microbatch {microbatch}: the gradient of params/blocks/one, layer"
        f" 3,{stage} is not finite"
    )


@pytest.mark.parametrize("options", [{"data": 4}, {"data": 2, "pipe": 2, "schedule": "1f1b"}])
def test_it_draws_what_the_step_draws(options):
    """A layer that gives NaN for some draws does so here just when the step does."""

    def unlucky(p, x, ctx):
        return jnp.where(jax.random.uniform(ctx.rng) < 0.03, jnp.nan, tiny.block(p, x, ctx))

    links = [
        fz.Layer("embed", tiny.embed_init, tiny.embed),
        fz.Stack("blocks", 4, tiny.block_init, unlucky),
        fz.Layer("head", tiny.head_init, tiny.head, reads={"table": "embed/table"}),
    ]
    made = fz.Sequential(links, loss=tiny.token_loss)
    plan = tiny.plan(skip_nonfinite=True, microbatches=2, **options)
    state, step = fz.init(made, SGD, plan), fz.train_step(made, SGD, plan)
    rows, stepped, found = tiny.tokens(16), [], []
    for number in range(6):  # a skipped step counts as none, and would draw the same again
        state = state.replace(step=state.step * 0 + number)
        try:
            step.check_finite(state, rows)
            found.append("")
        except fz.NonFiniteError as error:
            found.append(str(error))
        state, metrics = step(state, rows)
        stepped.append(int(metrics["nonfinite"]))
    assert [bool(said) for said in found] == stepped
    assert all("the output of blocks" in said for said in found if said)
    assert 0 < sum(stepped) < 6


def test_a_plain_model_draws_what_its_step_draws():
    def loss(p, buffers, batch, rng, train):
        unlucky = jax.random.uniform(rng) < 0.15
        return jnp.mean(p["w"] * batch) + jnp.where(unlucky, jnp.nan, 0.0), buffers, {}

    made, plan = fz.Model(({"w": jnp.ones(())}, {}), loss), tiny.plan(data=2, microbatches=2)
    state, rows = fz.init(made, SGD, plan), np.ones((8, 1), np.float32)
    step, stepped, found = fz.train_step(made, SGD, plan, donate=False), [], []
    for number in range(8):
        begun = state.replace(step=state.step * 0 + number)
        stepped.append(bool(np.isnan(step(begun, rows)[1]["loss"])))
        try:
            step.check_finite(begun, rows)
            found.append(False)
        except fz.NonFiniteError:
            found.append(True)
    assert found == stepped
    assert 0 < sum(stepped) < 8


def test_batches_and_states_come_first():
    plan, plain = tiny.plan(data=2, microbatches=2), tiny.regression()
    step, points = fz.accumulate_step(plain, SGD, plan), tiny.points()
    state = fz.init(plain, SGD, plan)
    spoilt = {**points, "y": np.where(np.arange(16)[:, None] == 9, np.inf, points["y"])}
    spoilt["y"] = spoilt["y"].astype(np.float32)
    said = "check_finite: batch y has values that are not finite, first in row 9"
    with pytest.raises(fz.NonFiniteError, match=re.escape(said)):
        step.check_finite(state, spoilt)
    placed = jax.device_put(spoilt, fz.layout(plain, SGD, plan).batch_sharding)
    with pytest.raises(fz.NonFiniteError, match=re.escape(said)):
        step.check_finite(state, placed)
    with pytest.raises(fz.NonFiniteError, match="microbatch 0: the loss is not finite"):
        step.check_finite(state, {**points, "y": points["y"] + np.float32(1e30)})
    bad = state.replace(params={**state.params, "gain": state.params["gain"] * jnp.inf})
    with pytest.raises(fz.NonFiniteError, match="params/gain"):
        step.check_finite(bad, points)


def test_a_row_is_counted_from_the_first_of_the_whole_leaf():
    plan = fz.Plan(zero=3, data=4, min_shard_bytes=0)
    made = fz.Model(lambda rng: ({"w": np.ones((16, 3), np.float32)}, {}), lambda *_: None)
    state = fz.init(made, SGD, plan)
    fz.check_finite(state)
    w = state.params["w"]
    spoilt = np.ones((16, 3), np.float32)
    spoilt[[9, 11, 14], 1] = np.nan  # rows 8 to 11 are of the third device
    state = state.replace(params={"w": jax.device_put(spoilt, w.sharding)})
    said = r"params/w float32\[16, 3\] has values .* first in row 9; on cpu:2 of process 0$"
    with pytest.raises(fz.NonFiniteError, match=said):
        fz.check_finite(state)


def spoilt_by_number(p, x, ctx):
    """Gives NaN in the layer that a row says."""
    here = jnp.any(ctx.batch["spoils"] == p["number"])
    return x + jnp.tanh(x @ p["w"]) + jnp.where(here, jnp.nan, 0.0)


def test_the_first_layer_is_named_where_devices_differ():
    plan, made = tiny.plan(data=2, skip_nonfinite=True), model(spoilt_by_number)
    marks = np.full(16, -1.0, np.float32)
    marks[[1, 9]] = 3, 2  # rows of one device and of the other
    with pytest.raises(fz.NonFiniteError, match=r"blocks, layer 2 is not finite.*cpu:1 "):
        fz.train_step(made, SGD, plan).check_finite(
            fz.init(made, SGD, plan), {**tiny.tokens(16), "spoils": marks}
        )
