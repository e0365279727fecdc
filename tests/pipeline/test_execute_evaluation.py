"""Evaluation through a pipeline: other batches than training, in any order with it."""

from __future__ import annotations

import math

import jax
import numpy as np
import optax
import pytest
from execute_cases import counting, given, tied
from support import tiny
from support.sample import some

import fzero as fz


PLANS = {
    "1f1b": tiny.plan(pipe=4, data=2, microbatches=4),
    "zb_v": tiny.plan(pipe=2, data=2, microbatches=4, schedule="zb_v", zero=1, precision="bf16"),
}


@pytest.fixture(scope="module", params=some(PLANS, "zb_v"))
def plan(request):
    return PLANS[request.param]


@pytest.fixture(scope="module")
def steps(plan):
    model, tx = tied(4, tiny.dropped_block), optax.adam(1e-2)
    return model, tx, fz.train_step(model, tx, plan), fz.eval_step(model, plan)


# Rows for 2 devices: 1, 2, 3 and 4 microbatches; as large as training's, smaller, larger.
ROWS = [16, 2, 4, 6, 40, 10]


def test_other_sizes_between_training_steps(plan, steps):
    model, tx, train, evaluate = steps

    def run(watch):
        state, seen = fz.init(model, tx, plan), []
        for seed in range(3):
            for rows in ROWS if watch else ():
                before = tiny.host(state)
                metrics = evaluate(state, counting(rows, 7))
                seen.append(tuple(float(metrics[name]) for name in ("loss", "count", "accuracy")))
                tiny.same_bits(state, before)
            state, metrics = train(state, counting(16, seed))
        return tiny.host(state), {name: float(v) for name, v in metrics.items()}, seen

    watched, alone = run(True), run(False)
    tiny.same_bits(watched[0], alone[0])
    assert watched[1] == alone[1]
    assert [count for _, count, _ in watched[2][: len(ROWS)]] == [
        counting(rows, 7)["mask"].sum() for rows in ROWS
    ]


@pytest.mark.parametrize("rows", [2, 16, 10])
def test_losses_are_those_without_a_pipeline(plan, steps, rows):
    model, _, _, evaluate = steps
    whole = plan.replace(pipe=1, schedule=None)
    found = evaluate(fz.init(model, None, plan), counting(rows, 3))
    expected = fz.eval_step(model, whole)(fz.init(model, None, whole), counting(rows, 3))
    assert set(found) == set(expected)
    for name in found:
        rel = 1e-6 if plan.precision == "fp32" else 1e-2
        assert float(found[name]) == pytest.approx(float(expected[name]), rel=rel), name
        assert found[name].sharding.num_devices == 2 * plan.pipe


@pytest.mark.parametrize("rows", [16, 5])
def test_outputs_are_those_without_a_pipeline(plan, steps, rows):
    whole = plan.replace(pipe=1, schedule=None)
    batch = counting(rows, 3)
    found, expected = (
        fz.predict_step(steps[0], one)(fz.init(steps[0], None, one), batch) for one in (plan, whole)
    )
    tiny.same_bits(tiny.host(found), tiny.host(expected))
    assert len(jax.tree.leaves(found)[0].sharding.device_set) == 2 * plan.pipe


def test_as_many_microbatches_as_divide(plan, steps):
    """The largest divisor of training's number that fills every device."""
    evaluate = fz.eval_step(steps[0], plan)
    state = fz.init(steps[0], None, plan)
    for rows in ROWS:
        seen = []
        run = evaluate.executor.evaluate
        evaluate.executor.evaluate = lambda *args, run=run, seen=seen: (
            seen.append(args[-1]) or run(*args)
        )
        evaluate(state, counting(rows))
        evaluate.executor.evaluate = run
        assert seen == [math.gcd(rows // 2, 4)]


def test_dropout_is_off_and_buffers_are_read_only(plan, steps):
    model, tx, train, evaluate = steps
    state = fz.init(model, tx, plan)
    one, two = (float(evaluate(state, counting(16))["loss"]) for _ in range(2))
    assert one == two
    assert float(train(state, counting(16))[1]["loss"]) != one


def test_the_same_shapes_are_traced_once(steps):
    _, tx, train, evaluate = steps
    model = steps[0]
    state = fz.init(model, tx, train.plan)

    def each(state, seed):
        state, _ = train(state, counting(16, seed))
        for rows in ROWS:
            evaluate(state, counting(rows, seed))
        return state

    spent, state = state, each(state, 0)
    for call in (train, evaluate):
        with pytest.raises(fz.StateConsumedError, match=rf"{call.name}: .* by step 1 "):
            call(spent, counting(16))
    traces = train.num_traces, evaluate.num_traces
    with tiny.counted_compiles() as compiled:
        for seed in (1, 2):
            state = each(state, seed)
    assert (train.num_traces, evaluate.num_traces) == traces
    assert compiled == []


def test_batches_that_devices_cannot_share(plan, steps):
    evaluate = steps[3]
    state = fz.init(steps[0], None, plan)
    with pytest.raises(fz.BatchError, match=r"5.*2"):
        evaluate(state, counting(5))
    with pytest.raises(fz.PlanError, match=r"lower.*a step is many programs"):
        evaluate.lower(state, counting(16))


def test_a_state_with_an_accumulation_is_evaluated_as_it_is(plan, steps):
    model, tx, _, evaluate = steps
    state = fz.init(model, tx, plan)
    loss = float(evaluate(state, counting(16))["loss"])
    state, _ = fz.accumulate_step(model, tx, plan)(state, counting(16))
    assert float(evaluate(state, counting(16))["loss"]) == loss
    assert state.grads is not None


def test_the_batch_may_be_refilled_while_the_step_runs(plan, steps):
    model, tx, _, evaluate = steps
    batch = counting(16)
    expected = float(evaluate(fz.init(model, tx, plan), batch)["loss"])
    state = fz.init(model, tx, plan)
    metrics = evaluate(state, batch)
    for leaf in batch.values():
        leaf[...] = 0
    assert float(metrics["loss"]) == expected


def test_scalar_losses_and_metrics_are_means_over_rows():
    def loss(x, batch):
        return jax.numpy.mean(x), {"mean": jax.numpy.mean(x)}

    chain = [
        fz.Layer("in", lambda key: np.zeros((2, 4), np.float32), lambda w, b, ctx: b["x"] @ w),
        fz.Layer("out", lambda key: np.zeros((4, 4), np.float32), lambda w, x, ctx: x @ w),
    ]
    model = given(fz.Sequential(chain, loss))
    x = np.random.default_rng(0).standard_normal((24, 2)).astype(np.float32)
    w = [np.asarray(leaf) for leaf in (model.init[0]["in"], model.init[0]["out"])]
    plan = tiny.plan(pipe=2, data=2, microbatches=4)
    metrics = fz.eval_step(model, plan)(fz.init(model, None, plan), {"x": x})
    expected = (x @ w[0] @ w[1]).mean()
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["mean"]) == pytest.approx(expected, rel=1e-5)


def test_rows_are_shared_among_replicas_before_microbatches():
    """A row for each of two groups is one microbatch, however many a training step has."""
    plan = tiny.plan(pipe=2, replica=2, data=1, microbatches=2)
    model, batch = tied(4), counting(2)
    metrics = fz.eval_step(model, plan)(fz.init(model, None, plan), batch)
    assert float(metrics["count"]) == batch["mask"].sum()
