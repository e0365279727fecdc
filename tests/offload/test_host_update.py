"""`update_on="host"`: the optimizer runs where its state is, and the numbers stay."""

import jax
import numpy as np
import optax
import pytest
from support import tiny
from support.sample import some

import fzero as fz
from fzero.step import host_update
from fzero.storage.tiers import tier_of
from fzero.tree import named_leaves


MODEL, BATCH, TX = tiny.chain(3), tiny.tokens(16), optax.adamw(1e-2)
FROZEN = fz.Sequential(MODEL.layers[:-1], tiny.token_loss, frozen={"embed/up", "blocks/w"})
ON_HOST = {"tiers": {"opt_state": "host"}, "update_on": "host"}


def run(plan, steps=3, donate=True, tx=TX, model=MODEL):
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan, donate=donate)
    trace = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        trace.append({name: float(value) for name, value in metrics.items()})
    return state, trace, step


@pytest.fixture
def apart(monkeypatch):
    """The devices' hosts are other devices: what is not carried there and back fails."""
    twins = dict(zip(jax.devices()[:4], jax.devices()[4:], strict=True))
    monkeypatch.setattr(host_update, "host_devices", lambda found: [twins[d] for d in found])
    return set(twins), set(twins.values())


CASES = {
    "zero 1, reduced once": {"zero": 1, "reduce": "step", "microbatches": 2},
    "zero 2, clipped": {"zero": 2, "clip_norm": 0.5, "microbatches": 2},
    "zero 3": {"zero": 3},
    "zero 2, bf16, master too": {"zero": 2, "precision": "bf16", "more": {"master": "host"}},
    "zero 3, fp16": {"zero": 3, "precision": "fp16"},
    "params too": {"zero": 3, "more": {"params": "host"}},
    "two groups": {"zero": 3, "data": 2, "replica": 2},
}


@pytest.mark.parametrize("case", some(CASES, "zero 3", "zero 3, fp16", "params too"))
def test_the_numbers_of_an_update_on_the_device(case, apart):
    devices, _ = apart
    options = dict(CASES[case])
    more = options.pop("more", {})
    plan = tiny.plan(**{"data": 4, **options})
    expected, trace, _ = run(plan)
    hosted = plan.replace(tiers={"opt_state": "host", **more}, update_on="host")
    state, found, _ = run(hosted)
    # One program instead of half of one: a product and a sum may round once more, or less.
    for name in trace[0]:
        values = ([metrics[name] for metrics in one] for one in (found, trace))
        np.testing.assert_allclose(*values, rtol=2e-6, err_msg=name)
    fz.placement(state).require(opt_state="host", params="host" if more else "device")
    for path, leaf in named_leaves(state):
        assert leaf.sharding.device_set <= devices, path
    back = fz.replan(state, MODEL, TX, hosted, plan)
    for name in ("params", "compute"):
        tiny.close(getattr(back, name), getattr(expected, name), rtol=0, atol=1e-6)


def test_the_hosts_devices_compute(apart, monkeypatch):
    _, hosts = apart
    plan = tiny.plan(zero=3, data=4, **ON_HOST)
    state, step = fz.init(MODEL, TX, plan, rng=0), fz.train_step(MODEL, TX, plan)
    update, seen = step.runner.update._program, []
    before = state
    old = [leaf for leaf in jax.tree.leaves(before.opt_state) if leaf.ndim]

    def watched(*args):
        seen.append({d for leaf in jax.tree.leaves(args) for d in leaf.sharding.device_set})
        # The host has no room for the old, its copy and the new.
        assert all(leaf.is_deleted() for leaf in old)
        return update(*args)

    monkeypatch.setattr(step.runner.update, "_program", watched)
    state, _ = step(state, BATCH)
    assert seen == [hosts]
    with pytest.raises(fz.StateConsumedError, match="train_step"):
        fz.eval_step(MODEL, plan)(before, BATCH)
    assert all(tier_of(x) == "host" for x in jax.tree.leaves(state.opt_state) if x.ndim)


def test_not_donated_is_not_touched(apart):
    """And the compute copy is one of the new parameters."""
    plan = tiny.plan(zero=2, data=4, precision="bf16", **ON_HOST)
    state, step = fz.init(MODEL, TX, plan, rng=0), fz.train_step(MODEL, TX, plan, donate=False)
    before = tiny.host(state)
    first, _ = step(state, BATCH)
    second, _ = step(state, BATCH)
    tiny.same_bits(first, second)
    after = tiny.host(state)
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)
    params = tiny.host(first.params)
    for path, leaf in tiny.host(first.compute).items():
        alone = params[path][tuple(map(slice, leaf.shape))]  # without filling
        np.testing.assert_array_equal(leaf, alone.astype(leaf.dtype), path)


def test_on_cpus_the_host_is_the_device_and_what_is_frozen_stays():
    plan = tiny.plan(zero=1, data=4, **ON_HOST)
    expected, trace, _ = run(plan.replace(tiers={}, update_on="device"), model=FROZEN)
    state, found, _ = run(plan, model=FROZEN)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in trace], rtol=2e-6)
    tiny.close(state.params, expected.params, rtol=0, atol=1e-6)


def test_an_accumulation_is_in_the_update(apart):
    plan = tiny.plan(zero=2, data=4, **ON_HOST)
    plain = plan.replace(tiers={}, update_on="device")
    results = []
    for one in (plan, plain):
        add, step = fz.accumulate_step(MODEL, TX, one), fz.train_step(MODEL, TX, one)
        state, _ = add(fz.init(MODEL, TX, one, rng=0), tiny.tokens(16, seed=1))
        state, metrics = step(state, BATCH)
        assert state.grads is None
        results.append((state.params, float(metrics["loss"])))
    assert results[0][1] == results[1][1]
    tiny.close(results[0][0], results[1][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": {}}, r"say tiers=\{'opt_state': 'host'\}"),
        ({"tiers": {"opt_state": ("host", 0.5)}}, "computes where the optimizer state is"),
        ({"tiers": {"opt_state": "disk"}}, "with nothing on disk"),
        ({"zero": 0}, "expected zero of 1 to 3"),
        ({"pipe": 2}, "and pipe=1"),
        ({"update_on": "cpu"}, r"expected one of \['device', 'host'\]"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(fz.PlanError, match=message):
        tiny.plan(**{"zero": 3, "data": 4, **ON_HOST, **options})


def test_too_few_cpu_devices_are_said():
    class Accelerator:
        platform, process_index = "gpu", 0

    with pytest.raises(fz.PlanError, match=r"one CPU device for each of 9 devices, .* has 8"):
        host_update.host_devices([Accelerator()] * 9)
    assert host_update.host_devices([Accelerator()] * 2) == jax.devices()[:2]


@pytest.mark.parametrize("chosen", [{"fields": ("params",)}, {"fresh": ("embed/up",)}], ids=str)
def test_what_a_checkpoint_does_not_give_begins_anew(chosen, tmp_path):
    plan = tiny.plan(data=4, zero=2)
    hosted = plan.replace(**ON_HOST)
    fz.save(tmp_path, fz.init(MODEL, TX, plan, rng=0), plan, asynchronous=False)
    found, expected = (fz.restore(tmp_path, MODEL, TX, p, rng=1, **chosen) for p in (hosted, plan))
    begun = fz.init(MODEL, TX, hosted)
    assert jax.tree.map(tier_of, found) == jax.tree.map(tier_of, begun)
    for name in ("params", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(x, name) for x in (found, expected)))
