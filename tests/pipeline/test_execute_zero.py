"""Pipelines with every ZeRO stage, replicas, mixed precision, clipping and accumulation."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from execute_cases import counting, given, same, tied, train
from support import tiny
from support.sample import some

import fzero as fz
from fzero.programs.sites import PlacedFunction
from fzero.step import placed_update


# All four ZeRO stages

CASES = {
    "4x2-clip": {"pipe": 4, "microbatches": 4, "schedule": "zb_h1", "clip_norm": 1.0},
    "2x2-bf16": {"pipe": 2, "microbatches": 2, "schedule": "zb_v", "precision": "bf16"},
    "2x2x2-fp16": {"pipe": 2, "replica": 2, "precision": "fp16", "remat": "none"},
}


@pytest.mark.as_users
@pytest.mark.parametrize("case", some(CASES, "2x2-bf16", "2x2x2-fp16"))
def test_stages_agree_to_the_bit(case):
    runs = [
        train(tied(2), tiny.plan(zero=zero, data=2, **CASES[case]), 3, tx=optax.adamw(1e-2))
        for zero in (0, 1, 2, 3)
    ]
    for zero in (0, 1, 2):
        same(runs[zero], runs[3])
    assert runs[3].trace[-1]["loss"] < runs[3].trace[0]["loss"]


@pytest.mark.parametrize("precision", some(["bf16", "fp16"], "fp16"))
def test_low_precision_is_as_near_as_without_a_pipeline(precision):
    runs = {
        (pipe, kind): train(
            tied(), tiny.plan(pipe=pipe, data=1, microbatches=2, precision=kind), 4, rows=4
        )
        for pipe, kind in [(1, "fp32"), (1, precision), (4, precision)]
    }
    losses = {key: np.array([m["loss"] for m in run.trace]) for key, run in runs.items()}
    exact, plain, cut = losses.values()
    assert 0 < abs(plain[0] - exact[0]) < 0.01  # (fp16 finds its loss scale first)
    # Roundings fall otherwise where the backward pass is compiled in halves.
    np.testing.assert_allclose(cut, plain, atol=0.01)
    assert runs[4, precision].state.params["embed"]["up"].dtype == jnp.float32
    if precision == "bf16":
        assert runs[4, precision].state.compute is None  # ZeRO-3 casts as it gathers


# Clipping by the norm over all stages


@pytest.mark.parametrize(("pipe", "zero"), some([(1, 0), (2, 0), (4, 0), (4, 3)], (1, 0), (4, 0)))
def test_the_norm_counts_every_stage_once(pipe, zero):
    """DeepSpeed's pipeline with ZeRO-0 clipped by the first stage's norm: 0.42 for 0.354."""
    clip = 0.25
    model, start = tied(), tiny.host(tied().init[0])
    options = {"data": 2, "microbatches": 4, "zero": zero}
    plan = tiny.plan(pipe=pipe, clip_norm=clip, **options)
    run = train(model, plan, 1, tx=optax.sgd(1.0))
    moved = {path: start[path] - value for path, value in run.params.items()}
    free = train(model, tiny.plan(**options), 1, tx=optax.sgd(1.0))
    grads = {path: start[path] - value for path, value in free.params.items()}

    def norm(tree, *names):
        return np.sqrt(sum(np.sum(v**2) for k, v in tree.items() if k.startswith(names or "")))

    factor = clip / norm(grads)
    assert factor < 0.5
    assert run.trace[0]["grad_norm"] == pytest.approx(norm(grads), rel=1e-5)  # before clipping
    assert norm(moved) == pytest.approx(clip, rel=1e-5)
    for path, grad in grads.items():
        np.testing.assert_allclose(moved[path], factor * grad, rtol=0, atol=2e-6, err_msg=path)
    # The norm of one stage, or a tied table counted twice, would have given another factor.
    for wrong in (norm(grads, "embed"), norm(grads, "head"), norm(grads, "blocks")):
        assert clip / wrong > 1.1 * factor
    twice = np.hypot(norm(grads), norm(grads, "embed/table"))
    assert clip / twice < 0.97 * factor


def test_no_sum_of_an_update_is_left_to_the_partitioner(monkeypatch):
    """Its collective adds in another order between processes than within one."""
    made = []

    def place(*args, **more):
        made.append(PlacedFunction(*args, **more))
        return made[-1]

    monkeypatch.setattr(placed_update, "PlacedFunction", place)
    plan = tiny.plan(pipe=2, data=2, zero=1, microbatches=2, clip_norm=0.25)
    train(tied(2), plan, 1, tx=optax.sgd(1.0))
    (update,) = made
    texts = [lowered.compile().as_text() for _, lowered in update.lowered()]
    sums = [line for text in texts for line in text.splitlines() if " all-reduce(" in line]
    assert sums  # of the squares of shards
    assert [line for line in sums if "shard_map/psum" not in line] == []


# Steps that are skipped


def spots():
    """Four layers, the second and the third with a leaf whose gradient a batch can spoil."""

    def spot(name):
        def apply(p, x, ctx):
            return jnp.tanh(x @ p["w"]) + p["z"] * ctx.batch[name][:, None]

        return fz.Layer(name, lambda key: {"w": jnp.eye(8), "z": jnp.zeros(8)}, apply)

    def loss(x, batch):
        return fz.Mean(jnp.sum(jnp.square(x - batch["y"]).astype(jnp.float32)), jnp.float32(x.size))

    first = fz.Layer("in", lambda key: jnp.zeros((4, 8)), lambda w, batch, ctx: batch["x"] @ w)
    last = fz.Layer("out", lambda key: jnp.zeros((8, 8)), lambda w, x, ctx: x @ w)
    model = given(fz.Sequential([first, spot("one"), spot("two"), last], loss))
    params = model.init[0]
    for name in ("one", "two"):
        params[name]["z"] *= 0
    return model


def spoilt(name=None, rows=8, seed=0):
    """A batch for `spots` that makes the gradient of one leaf overflow."""
    rng = np.random.default_rng(seed)
    batch = {"x": rng.standard_normal((rows, 4)), "y": rng.standard_normal((rows, 8))}
    batch |= {key: np.full(rows, 3e38 if key == name else 0.0) for key in ("one", "two")}
    return {key: value.astype(np.float32) for key, value in batch.items()}


@pytest.mark.parametrize("name", ["one", "two"])
def test_one_stage_that_overflows_stops_them_all(name):
    plan = tiny.plan(pipe=4, data=2, microbatches=2, skip_nonfinite=True)
    model, tx = spots(), optax.adam(1e-2)
    step = fz.train_step(model, tx, plan)
    state, metrics = step(fz.init(model, tx, plan), spoilt())
    assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 0)
    before = tiny.host(state)
    state, metrics = step(state, spoilt(name))
    assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (1, 1)
    after = tiny.host(state)
    assert {path for path in before if (before[path] != after[path]).any()} == {
        "loss_scale/skipped"
    }
    state, metrics = step(state, spoilt(seed=1))
    assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 1)
    assert int(state.step) == 2
    moved = tiny.host(state.params)
    still = {path for path in moved if (moved[path] == before[f"params/{path}"]).all()}
    assert still == {"one/z", "two/z"}


@pytest.mark.parametrize("zero", some([1, 3], 1))
def test_fp16_overflow_changes_nothing_but_the_scale(zero):
    plan = tiny.plan(pipe=2, data=2, microbatches=2, precision="fp16", zero=zero)
    model, tx = tied(), optax.adam(1e-2)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)

    def scaled(state, scale):
        scale = jax.device_put(np.float32(scale), state.loss_scale.scale.sharding)
        return state.replace(loss_scale=dataclasses.replace(state.loss_scale, scale=scale))

    state, metrics = step(scaled(state, 2.0**8), counting(8))
    assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 0)
    state = scaled(state, 2.0**40)
    before = tiny.host(state)
    for skipped, scale in [(1, 2.0**40), (2, 2.0**39)]:  # one overflow is forgiven
        state, metrics = step(state, counting(8))
        assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (1, skipped)
        assert float(state.loss_scale.scale) == scale
    after = tiny.host(state)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {f"loss_scale/{name}" for name in ("scale", "skipped", "good_steps",
                                                         "hysteresis")}  # fmt: skip
    assert np.isfinite(float(metrics["loss"]))


# Exact means and accumulation


@pytest.mark.parametrize("zero", some([0, 3], 0))
def test_accumulating_and_then_stepping(zero):
    def run(pipe):
        plan = tiny.plan(pipe=pipe, data=2, microbatches=2, zero=zero, clip_norm=0.5)
        model, tx = tied(), optax.adam(1e-2)
        add, step = fz.accumulate_step(model, tx, plan), fz.train_step(model, tx, plan)
        evaluate = fz.eval_step(model, plan)
        state, seen = fz.init(model, tx, plan), []
        for seed in (0, 3):
            for offset in (0, 1):
                state, metrics = add(state, counting(8, seed + offset))
                seen.append(float(evaluate(state, counting(8, 9))["loss"]))
            assert int(state.grads.calls) == 2
            state, metrics = step(state, counting(8, seed + 2))
            assert state.grads is None
            seen += [float(metrics[name]) for name in ("loss", "count", "grad_norm")]
        return seen, fz.logical(model, state, plan)

    (cut, params), (whole, expected) = run(4), run(1)
    np.testing.assert_allclose(cut, whole, rtol=2e-6)
    tiny.close(params, expected, rtol=0, atol=5e-6)
    counts = [counting(8, seed)["mask"].sum() for seed in range(6)]
    assert [cut[3], cut[8]] == [sum(counts[:3]), sum(counts[3:])]


@cache
def one_batch():
    return tiny.reference(tied(), tied().init[0], counting(16))


@pytest.mark.parametrize(
    ("pipe", "data", "microbatches"),
    some([(2, 4, 2), (4, 1, 8), (2, 1, 16)], (2, 1, 16)),
)
def test_ragged_tokens_give_the_loss_and_gradient_of_one_big_batch(pipe, data, microbatches):
    loss, grads = one_batch()
    plan = tiny.plan(pipe=pipe, data=data, microbatches=microbatches)
    run = train(tied(), plan, 1, rows=16, tx=optax.sgd(1.0))
    assert run.trace[0]["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert run.trace[0]["count"] == counting(16)["mask"].sum()
    start = tiny.host(tied().init[0])
    moved = {path: start[path] - value for path, value in run.params.items()}
    tiny.close(moved, tiny.host(grads), rtol=0, atol=2e-6)
