"""What goes into a step besides rows: shared values, the step number, padding, global arrays."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import tiny

import fzero as fz


TX = optax.sgd(0.0)
X = np.arange(8 * tiny.D, dtype=np.float32).reshape(8, tiny.D) / 64
PLANS = {
    "one": {"data": 1, "zero": 0},
    "zero 3": {"data": 2, "microbatches": 2},
    "lazy": {"data": 2, "microbatches": 2, "zero": 1, "gather": "lazy"},
    "tiers": {"data": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 1024},
    "pipeline": {"data": 2, "pipe": 2, "microbatches": 2},
    "pipeline, split": {"data": 1, "pipe": 2, "microbatches": 2, "schedule": "zb_h1"},
}


def square(key):
    """Parameters of one layer."""
    return {"w": jnp.eye(tiny.D)}


def first(p, x, ctx):
    """Scales by what is shared; the batch itself is the same in `x` and `ctx.batch`."""
    assert x["extra"]["by"].shape == ()
    return x["x"] @ p["w"] * ctx.batch["extra"]["by"]


def block(p, x, ctx):
    """Adds the step number and a shared vector."""
    return x @ p["w"] + ctx.step + ctx.batch["bias"]


def loss(y, batch, step):
    """The mean, which the step number multiplies."""
    total = jnp.sum(y) * (1 + step)
    return fz.Mean(total, jnp.float32(y.shape[0])), {"by": batch["extra"]["by"]}


MODEL = fz.Sequential(
    [fz.Layer("one", square, first), fz.Stack("two", 2, square, block)], loss=loss
)


def batch(by):
    """Rows, a scalar that is shared twice, in a dict, and a shared vector as long as some rows."""
    bias = np.ones(tiny.D, np.float32)
    return {"x": X, "extra": fz.Shared({"by": fz.Shared(by)}), "bias": fz.Shared(bias)}


@pytest.mark.parametrize("name", PLANS)
def test_shared_values_and_the_step_number_reach_the_model(name):
    plan = tiny.plan(**PLANS[name])
    state, step = fz.init(MODEL, TX, plan), fz.train_step(MODEL, TX, plan)
    evaluate = fz.eval_step(MODEL, plan)

    def expected(by, step):
        return (by * X.sum() + 2 * (step + 1) * X.size) * (1 + step) / len(X)

    for number, by in enumerate((2.0, np.float32(0.5))):
        found = evaluate(state, batch(by))
        np.testing.assert_allclose(found["loss"], expected(by, number), rtol=1e-5)
        state, metrics = step(state, batch(by))
        np.testing.assert_allclose(metrics["loss"], expected(by, number), rtol=1e-5)
        np.testing.assert_allclose(metrics["by"], by)
    assert step.num_traces > 0


def test_the_step_number_of_a_plain_loss_and_of_a_scan():
    def plain(p, buffers, batch, rng, train, *, step):
        return jnp.sum(p["w"]) * step, buffers, {"step": step.astype(jnp.float32)}

    model = fz.Model(lambda key: (square(key), {}), plain)
    plan = tiny.plan(data=2)
    state, step = fz.init(model, TX, plan), fz.train_step(model, TX, plan, donate=False)
    _, metrics = jax.lax.scan(step, state, {"x": np.stack([X] * 3)})
    np.testing.assert_array_equal(metrics["step"], [0, 1, 2])
    shared = {"x": X, "by": fz.Shared(jnp.float32(1))}
    assert jax.jit(step)(state, shared)[1]["loss"] == 0


def test_what_is_no_rows_and_is_not_wrapped_is_refused_with_the_remedy():
    plan = tiny.plan(data=2)
    step, state = fz.train_step(MODEL, TX, plan), fz.init(MODEL, TX, plan)
    for value in (np.float32(1), np.ones(3, np.float32)):
        with pytest.raises(fz.BatchError, match=r"fz\.Shared\(value\)"):
            step(state, {"x": X, "by": value})
    with pytest.raises(fz.BatchError, match="without leaves"):
        step(state, {"by": fz.Shared(value)})


@pytest.mark.parametrize("size", [1, 5, 8])
def test_a_padded_batch_has_the_exact_mean(size):
    def masked(p, buffers, batch, rng, train):
        error = jnp.sum((batch["x"] @ p["w"] - 1) ** 2, -1)
        return fz.Mean(jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])), buffers, {}

    model = fz.Model(lambda key: (square(key), {}), masked)
    tx = optax.sgd(1e-2)
    one, four = tiny.plan(data=1, zero=0), tiny.plan(data=4, microbatches=2)
    short = {"x": X[:size], "by": fz.Shared(1.0)}
    padded, mask = fz.pad_batch(short, 8)
    assert padded["x"].shape == (8, tiny.D)
    assert mask.tolist() == [True] * size + [False] * (8 - size)
    runs = [
        fz.train_step(model, tx, plan)(fz.init(model, tx, plan), rows)
        for plan, rows in ((one, {**short, "mask": np.ones(size, bool)}),
                           (four, {**padded, "mask": mask}))
    ]  # fmt: skip
    assert float(runs[1][1]["count"]) == size
    np.testing.assert_allclose(runs[0][1]["loss"], runs[1][1]["loss"], rtol=1e-6)
    tiny.close(fz.logical(model, runs[1][0]), runs[0][0].params, rtol=0, atol=1e-6)


def test_a_metric_that_is_no_scalar_is_refused_by_name():
    def wide(p, buffers, batch, rng, train):
        y = batch["x"] @ p["w"]
        return jnp.sum(y), buffers, {"rows": y.sum(-1)}

    model = fz.Model(lambda key: (square(key), {}), wide)
    plan = tiny.plan(data=2)
    state = fz.init(model, TX, plan)
    for step in (fz.eval_step(model, plan), fz.train_step(model, TX, plan, donate=False)):
        with pytest.raises(fz.StateError, match=r"metric 'rows' has shape \[4\].*predict_step"):
            step(state, {"x": X})


def test_a_global_array_is_taken_as_it_is_or_moved():
    plan = tiny.plan(data=4)
    model = tiny.regression()
    evaluate, state = fz.eval_step(model, plan), fz.init(model, None, plan)
    expected = float(evaluate(state, tiny.points(8))["loss"])
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("rows",))
    layouts = [NamedSharding(mesh, PartitionSpec("rows")), NamedSharding(mesh, PartitionSpec()),
               NamedSharding(mesh, PartitionSpec(None, "rows"))]  # fmt: skip
    for sharding in layouts[:2]:
        rows = jax.device_put(tiny.points(8), sharding)
        assert float(evaluate(state, rows)["loss"]) == expected
    x = jax.device_put(tiny.points(8)["x"], layouts[2])
    assert float(evaluate(state, {**tiny.points(8), "x": x})["loss"]) == expected


@pytest.mark.parametrize("name", ["zero 3", "pipeline"])
def test_the_layout_is_public(name):
    plan = tiny.plan(**PLANS[name])
    found = fz.layout(MODEL, TX, plan)
    state = fz.init(MODEL, TX, plan)
    assert found.shardings.params == jax.tree.map(lambda x: x.sharding, state.params)
    assert jax.tree.map(jnp.shape, found.state) == jax.tree.map(jnp.shape, state)
    assert found.batch_multiple == 4
    placed = {"x": jax.make_array_from_process_local_data(found.batch_sharding, X)}
    shared = jax.device_put(np.float32(2), found.shared_sharding)
    whole = {**batch(2.0), "x": placed["x"], "extra": fz.Shared({"by": shared})}
    evaluate = fz.eval_step(MODEL, plan)
    assert float(evaluate(state, whole)["loss"]) == float(evaluate(state, batch(2.0))["loss"])
    with pytest.raises(fz.PlanError, match="16 devices"):
        fz.layout(MODEL, TX, plan.replace(data=16 // plan.pipe))


def test_rows_divide_over_all_groups_of_replicas():
    plan = tiny.plan(data=2, replica=2, microbatches=3)
    assert fz.layout(MODEL, TX, plan).batch_multiple == 12


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 1, "precision": "bf16"}, {"zero": 0}])
@pytest.mark.parametrize("rows", [8, 5])
def test_outputs_for_each_example(options, rows):
    chain = fz.Sequential([fz.Layer("one", square, lambda p, x, ctx: {"y": x["x"] @ p["w"]})],
                          loss=lambda out, batch: jnp.mean(out["y"]))  # fmt: skip
    plain = fz.Model(lambda key: (square(key), {}), MODEL.loss,
                     predict=lambda p, b, batch, rng: {"y": batch["x"] @ p["w"]})  # fmt: skip
    plan = tiny.plan(data=4, **options)
    for model in (chain, plain):
        state, predict = fz.init(model, None, plan), fz.predict_step(model, plan)
        found = predict(state, {"x": X[:rows]})["y"]
        assert found.shape == (rows, tiny.D)
        np.testing.assert_allclose(np.asarray(found, np.float32), X[:rows], rtol=1e-2)
        if rows == 8:
            assert found.sharding.is_equivalent_to(fz.layout(model, None, plan).batch_sharding, 2)
            inside = jax.jit(predict)(state, {"x": X})["y"]
            np.testing.assert_array_equal(inside, found)


@pytest.mark.parametrize("name", PLANS)
def test_outputs_of_any_plan(name):
    """With shared values and the step number; rows in the batch's order, spread as it is."""
    plan = tiny.plan(**PLANS[name])
    links = [*MODEL.layers[:1], fz.Stack("two", 2, square, lambda p, x, ctx: 2 * block(p, x, ctx))]
    other = fz.Sequential(MODEL.layers[:2], loss, predict=links)
    for model, expected in ((MODEL, 2 * X + 2), (other, 8 * X + 6)):
        state, predict = fz.init(model, TX, plan), fz.predict_step(model, plan)
        found = predict(state, batch(2.0))
        assert found.sharding.is_equivalent_to(fz.layout(model, TX, plan).batch_sharding, 2)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        short = predict(state, {**batch(2.0), "x": X[:3]})
        np.testing.assert_array_equal(short, found[:3])


def test_outputs_that_nobody_named_or_that_are_no_rows_are_refused():
    plan = tiny.plan(data=4)
    with pytest.raises(fz.PlanError, match="predict="):
        fz.predict_step(tiny.regression(), plan)
    model = fz.Sequential(MODEL.layers[:2], loss, predict=lambda p, b, batch, rng: batch["x"])
    with pytest.raises(fz.PlanError, match=r"one function.*pipe=1"):
        fz.predict_step(model, tiny.plan(**PLANS["pipeline"]))
    with pytest.raises(fz.PlanError, match=r"predict has the links \['one'\]"):
        fz.Sequential(MODEL.layers[:2], loss, predict=MODEL.layers[:1])
    model = fz.Model(lambda key: (square(key), {}), MODEL.loss,
                     predict=lambda p, b, batch, rng: jnp.sum(batch["x"]))  # fmt: skip
    with pytest.raises(fz.StateError, match="2 examples"):
        fz.predict_step(model, plan)(fz.init(model, None, plan), {"x": X})


OF_THE_STATE = {
    "its parameters": ({"zero": 0}, lambda state: state.params),
    "its average": ({"zero": 0, "ema": 0.9}, lambda state: state.ema),
    "its buffers": ({"zero": 3}, lambda state: {"w": state.buffers["w"]}),
    "its optimizer": ({"zero": 0}, lambda state: state.opt_state[0].trace),
    "in a pipeline": ({"zero": 0, "pipe": 2}, lambda state: {"w": state.params["a"]["w"]}),
}


def near(p, x, ctx):
    """A distance from what is shared."""
    return x @ p["w"] + jnp.sum(jnp.square(p["w"] - ctx.batch["old"]["w"]))


NEAR = fz.Model(
    ({"w": np.eye(tiny.D, dtype="f")}, {"w": np.ones((tiny.D, tiny.D), "f")}),
    lambda p, b, batch, rng, train: (
        jnp.mean(near(p, batch["x"], SimpleNamespace(batch=batch))),
        b,
        {},
    ),
)
NEAR_IN_STAGES = fz.Sequential(
    [
        fz.Layer("a", square, lambda p, x, ctx: near(p, x["x"], ctx)),
        fz.Layer("b", square, lambda p, x, ctx: x @ p["w"]),
    ],
    loss=lambda x, batch: jnp.mean(x),
)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("what", OF_THE_STATE)
def test_what_a_step_gives_away_may_be_shared_with_its_rows(what, data):
    """As a teacher, or what to stay near to: with donation as without."""
    options, part = OF_THE_STATE[what]
    plan, tx = fz.Plan(data=data, min_shard_bytes=0, **options), optax.sgd(0.1, momentum=0.9)
    model, found = NEAR_IN_STAGES if plan.pipe > 1 else NEAR, []
    for donate in (False, True):
        state = fz.init(model, tx, plan)
        step = fz.train_step(model, tx, plan, donate=donate)
        for _ in range(2):
            state, metrics = step(state, {"x": X, "old": fz.Shared(part(state))})
        found.append((jax.device_get(state.params), metrics["loss"]))
    tiny.same_bits(*found)
