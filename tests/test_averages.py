"""`Plan(ema=)`: moving averages of parameters as a state class, under every kind of plan."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import fzero as fz
import torch_bridge as tb
from tests.support import tiny
from tests.support.sample import some


DECAY, STEPS = 0.9, 3
MODEL, TX = tiny.chain(4), optax.adam(3e-2)
BATCHES = [tiny.tokens(16, seed) for seed in range(STEPS)]


def trained(plan, model=MODEL, tx=TX, batches=BATCHES):
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def averages(state, model=MODEL, plan=None):
    """In the parameters' own shapes, on the host."""
    return tiny.host(fz.logical(model, fz.averaged(state, model, plan), plan))


def by_hand(params_of_steps):
    """What a loop beside the training keeps."""
    found, *rest = params_of_steps
    for params in rest:
        found = jax.tree.map(lambda a, p: np.float32(DECAY) * a + np.float32(1 - DECAY) * p,
                             found, params)  # fmt: skip
    return found


@cache
def expected():
    """Averages of a run without them, kept by hand."""
    plan = tiny.plan(zero=0, data=1)
    state, step = fz.init(MODEL, TX, plan, rng=0), fz.train_step(MODEL, TX, plan)
    seen = [tiny.host(fz.logical(MODEL, state))]
    for batch in BATCHES:
        state, _ = step(state, batch)
        seen.append(tiny.host(fz.logical(MODEL, state)))
    return by_hand(seen), seen[-1]


def close(found, wanted, rtol=2e-5):
    # Adam turns roundings of small gradients (sums over other devices) into larger ones.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-5), found, wanted)


PLANS = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2, microbatches": {"zero": 2, "microbatches": 2},
    "zero3": {"zero": 3},
    "zero3, replicas": {"zero": 3, "replica": 2},
    "lazy": {"zero": 1, "gather": "lazy"},
    "tensor": {"zero": 2, "data": 4, "tensor": 2},
    "parked": {"zero": 2, "tiers": {"opt_state": "host", "ema": "host"}, "stream_bytes": 300},
    "on disk": {"zero": 3, "tiers": {"ema": "disk"}, "stream_bytes": 300},
    "on the host": {"zero": 2, "tiers": {"opt_state": "host"}, "update_on": "host"},
    "pipeline": {"zero": 1, "pipe": 2, "microbatches": 2},
    "pipeline of halves": {"zero": 3, "pipe": 2, "data": 2, "microbatches": 2, "schedule": "zb_v"},
}


@pytest.mark.parametrize(
    "name",
    some(
        PLANS,
        "zero2, microbatches",
        "zero3",
        "zero3, replicas",
        "lazy",
        "tensor",
        "on disk",
        "on the host",
        "pipeline",
        "pipeline of halves",
    ),
)
def test_averages_are_those_of_a_loop_by_hand(name, tmp_path):
    plan = tiny.plan(**PLANS[name], ema=DECAY)
    plan = plan.replace(disk_path=str(tmp_path)) if name == "on disk" else plan
    state = trained(plan)
    wanted, params = expected()
    close(averages(state, plan=plan), wanted)
    close(tiny.host(fz.logical(MODEL, state, plan)), params)
    where = fz.placement(state)
    planned = fz.placement(plan, MODEL, TX)
    for bytes_of in ("bytes_per_device", "host_bytes_per_device", "disk_bytes"):
        assert getattr(where, bytes_of)["ema"] == getattr(planned, bytes_of)["ema"]
    tier = plan.tier("ema")[0]
    if tier != "device":
        where.require(ema=tier)
    # As one expects of a plan without averages, whose parameters are the averages.
    bare = plan.replace(ema=None, tiers={}, update_on="device")
    other = fz.replan(fz.averaged(state, MODEL, plan), MODEL, TX, plan, bare)
    found = fz.eval_step(MODEL, plan, which="ema")(state, BATCHES[0])
    alike = fz.eval_step(MODEL, bare)(other, BATCHES[0])
    np.testing.assert_allclose(found["loss"], alike["loss"], rtol=1e-6)
    assert found["loss"] != fz.eval_step(MODEL, plan)(state, BATCHES[0])["loss"]


SMALL, POINTS = tiny.regression(), [tiny.points(16, seed) for seed in range(2)]


@pytest.mark.bits
def test_stages_have_the_same_bits():
    found = []
    for zero in range(4):
        plan = tiny.plan(zero=zero, ema=DECAY)
        found.append(averages(trained(plan, SMALL, TX, POINTS), SMALL, plan))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


@pytest.mark.parametrize(
    "options",
    some(["1-bf16", "2-fp16", "3-bf16", "0-fp16"], "0-fp16", "3-bf16"),
)
def test_in_16_bits_they_are_those_of_the_masters(options):
    zero, precision = options.split("-")
    # Another optimizer than where bits are compared: what is compiled quickly is not met there.
    tx, mild = optax.adam(1e-2), fz.LossScaling(initial=2.0**6)
    plan = tiny.plan(zero=int(zero), precision=precision, ema=DECAY, loss_scale=mild)
    state, step = fz.init(SMALL, tx, plan), fz.train_step(SMALL, tx, plan)
    seen = [tiny.host(fz.logical(SMALL, state))]
    for batch in POINTS:
        state, metrics = step(state, batch)
        seen.append(tiny.host(fz.logical(SMALL, state)))
    assert float(metrics["nonfinite"]) == 0
    assert any((a != b).any() for a, b in zip(seen[1].values(), seen[2].values(), strict=True))
    # Two products and a sum in float32.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-7),
                 averages(state, SMALL, plan), by_hand(seen))  # fmt: skip


@pytest.mark.bits
@pytest.mark.parametrize(
    ("zero", "precision"),
    some([*((zero, "fp32") for zero in range(4)), (2, "bf16"), (3, "bf16")],
         (0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "bf16")),
)  # fmt: skip
def test_training_itself_has_the_same_bits(zero, precision):
    plan = tiny.plan(zero=zero, precision=precision)
    own = plan.replace(ema=DECAY)
    state, without = (trained(p, SMALL, TX, POINTS) for p in (own, plan))
    tiny.same_bits(state.params, without.params)
    assert {x.dtype for x in jax.tree.leaves(state.ema)} == {jnp.dtype("float32")}
    loss = fz.eval_step(SMALL, own, which="ema")(state, POINTS[0])["loss"]
    alike = fz.averaged(state, SMALL, own).replace(ema=None)
    assert loss == fz.eval_step(SMALL, plan)(alike, POINTS[0])["loss"]


def test_averages_are_read_and_moved_to_another_plan_as_they_were_kept():
    plan = tiny.plan(zero=1, data=2, precision="bf16", ema=DECAY)
    state = trained(plan, SMALL, TX, POINTS)
    found = fz.eval_step(SMALL, plan, which="ema")(state, POINTS[0])["loss"]
    alike = fz.averaged(state, SMALL, plan)
    assert found == fz.eval_step(SMALL, plan)(alike, POINTS[0])["loss"]
    assert found != fz.eval_step(SMALL, plan)(state, POINTS[0])["loss"]
    other = plan.replace(zero=3)
    tiny.same_bits(averages(fz.replan(state, SMALL, TX, plan, other), SMALL, other),
                   averages(state, SMALL, plan))  # fmt: skip


def test_bytes_are_a_shard_of_float32_and_counted_before():
    plan = tiny.plan(zero=1, ema=DECAY)
    where = fz.placement(plan, MODEL, TX)
    moments = where.bytes_per_device["opt_state"] - 4  # of which one is a count
    assert where.bytes_per_device["ema"] == moments // 2
    assert fz.placement(fz.init(MODEL, TX, plan)).bytes_per_device == where.bytes_per_device
    about = fz.describe(plan, MODEL, TX)
    assert about.bytes_per_device["ema"] == where.bytes_per_device["ema"]
    assert "ema" in str(about)
    bare = fz.placement(plan.replace(ema=None), MODEL, TX)
    assert where.bytes_per_device["total"] == bare.bytes_per_device["total"] + moments // 2


def test_skipped_and_accumulating_steps_move_nothing():
    plan = tiny.plan(zero=2, ema=DECAY, skip_nonfinite=True)
    model = tiny.regression()
    step, add = (
        make(model, TX, plan, donate=False) for make in (fz.train_step, fz.accumulate_step)
    )
    first, _ = step(fz.init(model, TX, plan), tiny.points())
    bad = tiny.points()
    bad["x"][0, 0] = np.nan
    skipped, metrics = step(first, bad)
    assert metrics["skipped"] == 1
    added, _ = add(first, tiny.points(seed=1))
    for state in (skipped, added):
        jax.tree.map(np.testing.assert_array_equal, tiny.host(state.ema), tiny.host(first.ema))
    last, _ = step(added, tiny.points(seed=2))
    whole = [tiny.host(fz.logical(model, s)) for s in (first, last)]
    before = averages(first, model, plan)
    moved = jax.tree.map(
        lambda a, p: np.float32(DECAY) * a + np.float32(1 - DECAY) * p, before, whole[1]
    )
    close(averages(last, model, plan), moved, 1e-6)


def test_frozen_leaves_have_no_average():
    whole = tiny.chain(2)
    model = fz.Sequential(whole.layers[:-1], tiny.token_loss, frozen=re.compile("embed/"))
    plan = tiny.plan(zero=2, precision="bf16", ema=DECAY)
    state = trained(plan, model)
    assert state.ema["embed"] == {"table": None, "up": None}
    shown = fz.averaged(state, model, plan)
    assert shown.params["embed"]["up"] is state.params["embed"]["up"]
    evaluate = fz.eval_step(model, plan, which="ema")
    evaluate(state, BATCHES[0])
    with pytest.raises(fz.PlacementError, match="params/embed"):
        evaluate(fz.offload(state, ("params",), donate=False), BATCHES[0])


def test_averages_in_float32_stand_for_parameters_of_16_bits_in_those():
    model, plan = tiny.regression(jnp.bfloat16), tiny.plan(zero=2, ema=DECAY)
    state = fz.init(model, optax.sgd(1.0), plan)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.ema)} == {"float32"}
    shown = fz.averaged(state, model, plan)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shown.params)} == {"bfloat16"}


def test_predictions_and_programs_of_ones_own():
    model = fz.Sequential(
        [fz.Layer("out", lambda key: {"w": jnp.ones((8, 3))}, lambda p, b, ctx: b["x"] @ p["w"])],
        loss=lambda y, batch: jnp.mean(y),
    )
    plan, tx = tiny.plan(zero=2, ema=0.5), optax.sgd(8.0)
    batch = {"x": np.ones((8, 8), np.float32)}
    state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), batch)
    weight = float(state.params["out"]["w"][0, 0])
    predict = fz.predict_step(model, plan, which="ema")
    expected = np.full((8, 3), 8 * (1 + weight) / 2)
    np.testing.assert_allclose(predict(state, batch), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(predict)(state, batch), expected, rtol=1e-6)
    evaluate = fz.eval_step(model, plan, which="ema")
    found = jax.jit(evaluate)(state, batch)["loss"]
    np.testing.assert_allclose(found, evaluate(state, batch)["loss"], rtol=1e-6)


@pytest.mark.parametrize("moved", some(["replan", "restore"], "replan"))
def test_another_plan_takes_them_over_and_a_run_without_begins_some(moved, tmp_path):
    plan = tiny.plan(zero=3, ema=DECAY)
    other = tiny.plan(zero=1, pipe=2, microbatches=2, precision="bf16", ema=DECAY)
    bare = tiny.plan(zero=2)
    state = trained(plan, batches=BATCHES[:1])
    wanted = averages(state, plan=plan)

    def go(state, old, new):
        if moved == "replan":
            return fz.replan(state, MODEL, TX, old, new)
        path = tmp_path / f"{old.zero}{new.zero}"
        fz.save(path, state, old)
        return fz.restore(path, MODEL, TX, new)

    there = go(state, plan, other)
    if moved == "restore":  # beside what stays new
        part = fz.restore(tmp_path / "31", MODEL, TX, plan, fresh=("head",))
        for path, value in averages(part, plan=plan).items():
            assert path.startswith("head") or np.array_equal(value, wanted[path]), path
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)  # noqa: E731
    same(averages(there, plan=other), wanted)
    same(averages(go(there, other, plan), plan=plan), wanted)
    without = go(there, other, bare)
    assert without.ema is None
    begun = go(without, bare, plan)
    same(averages(begun, plan=plan), tiny.host(fz.logical(MODEL, begun)))
    begun, _ = fz.train_step(MODEL, TX, plan)(begun, BATCHES[1])  # shares no memory
    same(jax.tree.structure(begun), jax.tree.structure(state))


def test_new_parameters_by_hand_leave_averages_until_they_are_begun_again():
    plan = tiny.plan(zero=2, ema=DECAY)
    state = trained(plan, batches=BATCHES[:1])
    before = averages(state, plan=plan)
    edited = state.replace(params=jax.tree.map(jnp.zeros_like, state.params))
    jax.tree.map(np.testing.assert_array_equal, averages(edited, plan=plan), before)
    again = fz.replan(edited.replace(ema=None), MODEL, TX, plan.replace(ema=None), plan)
    assert not any(x.any() for x in jax.tree.leaves(averages(again, plan=plan)))


def test_moves_by_hand_and_steps_that_need_them():
    plan = tiny.plan(zero=1, ema=DECAY)
    state = fz.offload(trained(plan, batches=BATCHES[:1]), "ema")
    fz.placement(state).require(ema="host", params="device", opt_state="device")
    with pytest.raises(fz.PlacementError, match="ema/"):
        fz.eval_step(MODEL, plan, which="ema")(state, BATCHES[0])
    with pytest.raises(fz.PlacementError, match="ema/"):
        fz.train_step(MODEL, TX, plan)(state, BATCHES[0])
    fz.eval_step(MODEL, plan)(state, BATCHES[0])
    fz.train_step(MODEL, TX, plan)(fz.reload(state), BATCHES[0])
    fresh = fz.enter(fz.init(MODEL, TX, plan), fz.Phases().generate)
    fz.placement(fresh).require(ema="host", params="device")


def test_what_is_refused():
    plan = tiny.plan(zero=1)
    for decay in (0, 1, 1.5, True, "0.9"):
        with pytest.raises(fz.PlanError, match="expected a decay between 0 and 1"):
            fz.Plan(ema=decay)
    with pytest.raises(fz.PlanError, match="keeps no averages"):
        fz.Plan(tiers={"ema": "host"})
    with pytest.raises(fz.PlanError, match="keeps no averages"):
        fz.eval_step(MODEL, plan, which="ema")
    with pytest.raises(fz.PlanError, match="expected one of"):
        fz.predict_step(MODEL, plan, which="mean")
    state = fz.init(MODEL, TX, plan)
    with pytest.raises(fz.StateError, match="ema/embed/table: expected, but missing"):
        fz.train_step(MODEL, TX, plan.replace(ema=DECAY))(state, BATCHES[0])
    assert fz.Plan.from_json(fz.Plan(ema=DECAY).to_json()).ema == DECAY


def test_exports_to_pytorch(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.Linear(7, 3))
    converted = tb.convert(module, torch.zeros(4, 13))
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch["x"]) ** 2))
    plan, tx = tiny.plan(zero=1, ema=0.5), optax.sgd(0.5)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    batch = {"x": np.ones((8, 13), np.float32)}
    state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), batch)
    last = tb.state_dict(converted, state)
    expected = {name: (start[name] + last[name]) / 2 for name in start}
    tb.save(tmp_path / "ema.safetensors", converted, state, which="ema")
    tb.load_into(module, state, which="ema")
    found = (
        tb.state_dict(converted, state, which="ema"), tb.load(tmp_path / "ema.safetensors"),
        module.state_dict(), dict(tb.stream(converted, fz.averaged(state, model, plan))),
    )  # fmt: skip
    for tensors in found:
        assert sorted(tensors) == sorted(expected)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name])
    with pytest.raises(fz.StateError, match="has no averages"):
        tb.state_dict(converted, fz.init(model, tx, plan.replace(ema=None)), which="ema")


def test_a_state_whose_averages_alone_were_given_away_is_consumed():
    state = fz.init(MODEL, TX, tiny.plan(zero=1, ema=DECAY))
    shares = jax.tree.map(jnp.copy, state).replace(ema=state.ema)
    for leaf in jax.tree.leaves(state.ema):
        leaf.delete()
    with pytest.raises(fz.StateConsumedError, match="shares its arrays"):
        fz.logical(MODEL, shares)
