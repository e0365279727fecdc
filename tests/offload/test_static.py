"""Static offload: a plan's parked leaves visit the device in turn, and the numbers stay."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from disk_cases import files_in
from support import tiny
from support.sample import some

import fzero as fz
from fzero.batch import Inputs
from fzero.offload.slabs import is_rowwise
from fzero.sharding.blueprint import blueprint
from fzero.storage.tiers import Slabs, slabs_of
from fzero.tree import named_leaves


MODEL, BATCH = tiny.chain(4), tiny.tokens(16)
STEPS = 3


def run(plan, tx, model=MODEL, steps=STEPS, batch=BATCH):
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    trace = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        trace.append({name: float(value) for name, value in metrics.items()})
    return state, trace, step


def on_device(state, tx, plan, model=MODEL):
    return fz.replan(state, model, tx, plan, plan.replace(tiers={}))


def parked(plan, **tiers):
    return plan.replace(tiers=tiers or {"opt_state": "host"}, stream_bytes=300)


CASES = [
    (0, "fp32", "host"),
    (1, "fp32", "disk"),
    (2, "fp32", "host"),
    (3, "fp32", "disk"),
    (0, "bf16", "disk"),
    (1, "bf16", "host"),
    (3, "bf16", "host"),
]


def same_but_for_roundings(found, expected):
    """Updates in pieces are other machine code: a product and a sum round once or twice there.

    The first step has the same forward and backward passes, to the bit. Its norm is a sum in two
    programs, which round alike on some CPUs alone.
    """
    assert {**found[0], "grad_norm": 0} == {**expected[0], "grad_norm": 0}
    for name in expected[0]:
        values = ([float(m[name]) for m in run] for run in (found, expected))
        np.testing.assert_allclose(*values, rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("zero", "precision", "tier"),
    some(CASES, (1, "fp32", "disk"), (2, "fp32", "host"), (0, "bf16", "disk"), (3, "bf16", "host")),
)
def test_the_numbers_of_the_plan_without_tiers(zero, precision, tier, tmp_path):
    plan = tiny.plan(zero=zero, data=4, precision=precision, microbatches=2, clip_norm=0.5)
    tx = optax.sgd(0.1, momentum=0.9)
    expected, trace, _ = run(plan, tx)
    tiers = {"opt_state": tier}
    if plan.keeps_compute_copy:
        tiers["master"] = tier
    tiered = plan.replace(tiers=tiers, stream_bytes=300, disk_path=str(tmp_path))
    state, found, step = run(tiered, tx)
    same_but_for_roundings(found, trace)
    assert len(step.stream.visits) > len(step.stream.sections) > 1
    fz.placement(state).require(opt_state=tier)
    assert any(isinstance(leaf, Slabs) for leaf in jax.tree.leaves(state.opt_state))
    back = on_device(state, tx, tiered)
    for name in ("params", "opt_state"):
        tiny.close(getattr(back, name), getattr(expected, name), rtol=0, atol=4e-7)
    assert bool(files_in(tmp_path)) == (tier == "disk")
    del state
    assert not files_in(tmp_path)


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "slow" if "table" in str(path) else "fast", params
    )


def wide(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@optax.stateless
def centred(updates, _):
    """Needs matrices whole, vectors element by element: leaves of a stack visit in other slabs."""
    return jax.tree.map(
        lambda x: x - jnp.max(x, axis=-1, keepdims=True) if x.ndim > 1 else x, updates
    )


def counted():
    """A number for each leaf, as many dims as it: nothing to cut, unlike the leaf that owns it."""

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros((1,) * p.ndim), params)

    def update(updates, counts, params=None):
        counts = jax.tree.map(lambda n: n + 1, counts)
        return jax.tree.map(lambda u, n: -0.1 * u / n, updates, counts), counts

    return optax.chain(optax.trace(0.9), optax.GradientTransformation(init, update))


def history():
    """Each leaf's last three gradients, one after the other: a leaf of more dims than its own."""

    def update(updates, kept, params=None):
        kept = jax.tree.map(lambda u, h: jnp.concatenate([u[None], h[:-1]]), updates, kept)
        return jax.tree.map(lambda h: -0.1 * jnp.mean(h, 0), kept), kept

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), params), update
    )


def flat():
    """Moments without the leaves' dims."""

    def update(updates, kept, params=None):
        kept = jax.tree.map(lambda u, h: 0.9 * h + u.reshape(-1), updates, kept)
        return jax.tree.map(lambda u, h: -0.1 * h.reshape(u.shape), updates, kept), kept

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.size), params), update
    )


OPTIMIZERS = {
    "history": lambda: fz.per_layer(history()),
    "flat": lambda: fz.per_layer(flat()),
    "finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 3),
    "every second": lambda: optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "counted": lambda: fz.per_layer(counted()),
    "adamw": lambda: optax.adamw(1e-2),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(
        optax.linear_schedule(1e-2, 1e-3, 5))),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: fz.per_layer(optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "lamb": lambda: fz.per_layer(optax.lamb(1e-2)),
    "multi": lambda: optax.multi_transform(
        {"slow": optax.sgd(1e-3, momentum=0.9), "fast": optax.adam(1e-2)}, labels),
    "masked": lambda: fz.per_layer(optax.masked(optax.adamw(1e-2), wide)),
    "sized": lambda: fz.per_layer(optax.chain(optax.trace(0.9), optax.stateless(
        lambda updates, _: jax.tree.map(lambda x: -x / x.size, updates)))),
    "centred": lambda: fz.per_layer(optax.chain(optax.trace(0.9), centred, optax.scale(-0.1))),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", some(OPTIMIZERS, "adamw", "lion", "lamb", "masked", "flat", "finite", "sized")
)
def test_any_optimizer(name):
    """Within a few roundings: long chains of operations are compiled otherwise for pieces."""
    check(name)


def check(name, model=MODEL, batch=BATCH):
    plan, tx = tiny.plan(zero=3, data=4), OPTIMIZERS[name]()
    expected, trace, _ = run(plan, tx, model, batch=batch)
    tiered = parked(plan)
    state, found, step = run(tiered, tx, model, batch=batch)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in trace], rtol=2e-6)
    there = on_device(state, tx, tiered, model)
    tiny.close(there.params, expected.params, rtol=0, atol=4e-6)
    fz.placement(state)
    return step


@pytest.mark.parametrize("name", some(["every second", "finite"], "finite"))
def test_what_decides_for_all_leaves_has_them_all_at_once(name, monkeypatch):
    """One `lax.cond` over all of the state: no bucket is updated without the others, once."""
    monkeypatch.setattr("fzero.programs.sites.SMALL", 16)  # as if the leaves were large

    def weight(key):
        return jax.random.normal(key, (16, 16)) * 0.3

    first = fz.Layer("first", weight, lambda w, batch, ctx: jnp.tanh(batch["x"] @ w))
    second = fz.Layer("second", weight, lambda w, x, ctx: x @ w)  # as large: none is the largest
    model = fz.Sequential([first, second], loss=lambda x, batch: jnp.mean(x**2))
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    step = check(name, model, {"x": x})
    equations = [x.equation for section in step.stream.sections for x in section.ops]
    conds = [one for one in equations if one is not None and one.primitive.name == "cond"]
    assert len(conds) == len(set(map(id, conds))) > 0


@pytest.mark.parametrize("guarded", [False, True])
def test_pipelines(guarded):
    """Guarded, small leaves of both ranks come to one place, where it is decided for all."""
    plan = tiny.plan(zero=1, pipe=2, data=2, microbatches=2, schedule="zb_h1", clip_norm=1.0)
    tx = optax.sgd(0.1, momentum=0.9)
    tx = optax.apply_if_finite(tx, 3) if guarded else tx
    expected, trace, _ = run(plan, tx)
    tiered = parked(plan)
    state, found, step = run(tiered, tx)
    same_but_for_roundings(found, trace)
    assert step.stream is not None
    fz.placement(state).require(opt_state="host")
    tiny.close(on_device(state, tx, tiered).params, expected.params, rtol=0, atol=1e-6)


def test_never_more_than_two_buckets_on_the_device(monkeypatch):
    """Arrays that have come and not left yet, counted at every event of the stream."""
    model, tx = tiny.chain(16), optax.adam(1e-2)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=512)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    state, _ = step(state, BATCH)
    # By the shards' memory, once: arrays that came, and those that go.
    here, held, put = {}, [], jax.device_put
    large, alive = state.params["blocks"]["w"].shape, []

    def device_put(values, to, **options):
        moved = put(values, to, **options)
        for old, new in zip(jax.tree.leaves(values), jax.tree.leaves(moved), strict=True):
            kinds = [getattr(getattr(x, "sharding", None), "memory_kind", "") for x in (old, new)]
            if kinds == ["pinned_host", "device"]:
                here[id(new)] = new
            if kinds == ["device", "pinned_host"]:
                here[id(old)] = old
        return moved

    def size_of(array):
        return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize

    def observe(event, visit):
        # Arrays that came are given to the program, which makes those that go of them.
        held.append(sum(size_of(x) for x in here.values() if not x.is_deleted()))
        alive.append(sum(x.shape == large for x in jax.live_arrays() if not x.is_deleted()))

    monkeypatch.setattr(jax, "device_put", device_put)
    step.stream.observer = observe
    state, _ = step(state, BATCH)
    assert len(step.stream.visits) >= 16
    assert plan.stream_bytes < max(held) <= 2 * plan.stream_bytes
    assert 2 * plan.stream_bytes < fz.placement(state).host_bytes_per_device["opt_state"] / 4
    assert len(held) == 4 * len(step.stream.visits)
    # A gradient's memory goes with the last slab that reads it.
    assert (alive[0], alive[-1]) == (2, 1)


def test_slabs_are_those_of_the_plan_and_all_there():
    """A plan with other buckets cuts them again; one that was given away is the leaf given away."""
    model, tx = tiny.chain(16), optax.adam(1e-2)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=512)
    other = plan.replace(stream_bytes=1024)

    def slabs(state):
        leaves = named_leaves(state.opt_state)
        return {path: len(leaf.slabs) for path, leaf in leaves if isinstance(leaf, Slabs)}

    state = fz.init(model, tx, plan)
    again = slabs(fz.replan(state, model, tx, plan, other))
    assert again == slabs(fz.init(model, tx, other)) != slabs(state)
    one = next(leaf for _, leaf in named_leaves(state.opt_state) if isinstance(leaf, Slabs))
    one.slabs[0].delete()
    with pytest.raises(fz.StateConsumedError):
        fz.train_step(model, tx, plan)(state, BATCH)


def test_of_a_pipeline_only_what_ranks_share_is_not_cut_along_its_rows():
    plan = tiny.plan(pipe=2, data=1, tiers={"opt_state": "host"}, stream_bytes=512)
    found = blueprint(MODEL, optax.adam(1e-2), plan).buckets.cuts
    dims = {path: dim for path, (dim, _) in found.items()}
    assert dims["embed/table"] == 0
    assert dims["blocks/w"] == 1


def test_what_has_a_copy_visits_beside_it():
    plan, tx = tiny.plan(zero=0, data=1, precision="bf16"), optax.sgd(1e-2, momentum=0.9)
    _, expected, _ = run(plan, tx, steps=2)
    state, found, _ = run(plan.replace(tiers={"opt_state": "host"}), tx, steps=2)
    fz.placement(state).require(opt_state="host", params="device")
    same_but_for_roundings(found, expected)


def test_memory_of_a_parameter_that_goes_slab_by_slab_is_that_of_the_new_one():
    model, tx = tiny.chain(16), optax.adam(1e-2)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=512)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    state, _ = step(state, BATCH)
    large, alive = state.params["blocks"]["w"].shape, []

    def observe(event, visit):
        alive.append(sum(x.shape == large for x in jax.live_arrays() if not x.is_deleted()))

    step.stream.observer = observe
    step(state, BATCH)
    assert max(alive) == 2  # with the gradient


def test_frozen_leaves_take_no_room_in_buckets():
    def init(rng):
        return {name: jnp.ones((8, 16)) for name in ("base", "own", "two")}, {}

    def loss(p, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ (p["base"] + p["own"] + p["two"])), buffers, {}

    tiers = {"params": "host", "opt_state": "host"}
    plan = tiny.plan(zero=3, data=4, tiers=tiers, stream_bytes=512)
    model = fz.Model(init, loss, frozen="base")
    assert blueprint(model, optax.adam(1e-2), plan).buckets.labels == {
        "base": "", "own": "bucket 1", "two": "bucket 2"
    }  # fmt: skip


def test_placement_is_predicted():
    tx = optax.adamw(1e-2)
    for options in (
        {"zero": 3, "tiers": {"opt_state": "host"}},
        {"zero": 1, "precision": "bf16", "tiers": {"opt_state": "disk", "master": 0.5}},
        {"zero": 2, "tiers": {"opt_state": ("host", 0.4)}},
        {"zero": 3, "pipe": 2, "data": 2, "microbatches": 2, "tiers": {"opt_state": "host"}},
    ):
        plan = tiny.plan(**{"data": 4, **options})
        found = fz.placement(fz.init(MODEL, tx, plan, rng=0))
        expected = fz.placement(plan, MODEL, tx)
        for field in ("bytes_per_device", "bytes_all_devices", "host_bytes", "disk_bytes", "tiers"):
            assert getattr(found, field) == getattr(expected, field), (options, field)
        about = fz.describe(plan, MODEL, tx)
        assert about.bytes_per_device["total"] == found.bytes_per_device["total"]
        assert "host" in str(about) or "disk" in str(about)


def test_moved_by_hand_it_still_streams(tmp_path):
    plan = tiny.plan(zero=3, data=4, disk_path=str(tmp_path))
    tx = optax.sgd(0.1, momentum=0.9)
    tiered = parked(plan)
    expected, trace, _ = run(plan, tx)
    state, step = fz.init(MODEL, tx, tiered, rng=0), fz.train_step(MODEL, tx, tiered)
    found = []
    for number in range(STEPS):
        if number == 1:
            state = fz.reload(state)
        if number == 2:
            state = fz.offload(fz.reload(state), "opt_state", to="disk", path=str(tmp_path))
        state, metrics = step(state, BATCH)
        found.append({name: float(value) for name, value in metrics.items()})
        fz.placement(state).require(opt_state="host")
    same_but_for_roundings(found, trace)
    tiny.close(on_device(state, tx, tiered).params, expected.params, rtol=0, atol=4e-7)


def test_evaluation_accumulation_and_replanning_leave_parked_leaves_alone():
    tx = optax.sgd(0.1, momentum=0.9)
    plan = tiny.plan(zero=2, data=4)
    tiered = parked(plan)
    results = []
    for each in (plan, tiered):
        state = fz.init(MODEL, tx, each, rng=0)
        train, add = fz.train_step(MODEL, tx, each), fz.accumulate_step(MODEL, tx, each)
        state, _ = train(state, BATCH)
        before = jax.tree.leaves(state.opt_state)
        loss = fz.eval_step(MODEL, each)(state, BATCH)["loss"]
        state, _ = add(state, tiny.tokens(16, seed=1))
        again = fz.replan(state.replace(grads=None), MODEL, tx, each, each)
        for leaves in map(jax.tree.leaves, (state.opt_state, again.opt_state)):
            assert all(a is b for a, b in zip(before, leaves, strict=True))
        state, metrics = train(state, BATCH)
        results.append((float(loss), float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*results, rtol=1e-6)  # a rounding or two, as above


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 1, "precision": "bf16"}], ids=str)
def test_without_donation_the_old_state_stays(options):
    tx = optax.adam(1e-2)
    plan = parked(tiny.plan(data=4, **options))
    state = fz.init(MODEL, tx, plan, rng=0)
    before = tiny.host(on_device(state, tx, plan))
    step = fz.train_step(MODEL, tx, plan, donate=False)
    losses = []
    for given in (state, fz.reload(state, donate=False)):  # whose slabs are whole
        losses += [float(step(given, BATCH)[1]["loss"]) for _ in range(2)]
        after = tiny.host(on_device(given, tx, plan))
        assert all(before[path].tobytes() == after[path].tobytes() for path in before)
    assert len(set(losses)) == 1


def test_a_skipped_step_changes_nothing():
    tx = optax.adam(1e-2)
    plan = parked(tiny.plan(zero=3, data=4, skip_nonfinite=True))
    state, step = fz.init(MODEL, tx, plan, rng=0), fz.train_step(MODEL, tx, plan)
    state, _ = step(state, BATCH)
    before = tiny.host(on_device(state, tx, plan))
    broken = state.params["head"]["gain"] * jnp.nan
    state, metrics = step(
        state.replace(params={**state.params, "head": {**state.params["head"], "gain": broken}}),
        BATCH,
    )
    assert float(metrics["skipped"]) == 1
    after = tiny.host(on_device(state, tx, plan))
    assert all(
        before[path].tobytes() == after[path].tobytes()
        for path in before if path.startswith("opt_state")
    )  # fmt: skip


def test_what_goes_row_by_row():
    def steps(function, *shapes):
        from fzero.programs.jaxprs import Program

        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        closed = jax.make_jaxpr(function)(*args)
        return Program(closed.jaxpr, closed.consts).ops

    def rowwise(function, *shapes):
        return all(is_rowwise(step, 0, 6) for step in steps(function, *shapes))

    a, b = (6, 4), (6, 4)
    assert rowwise(lambda x, y: jnp.sqrt(x) * 2 + y / 3, a, b)
    assert rowwise(lambda x: jnp.where(x > 0, x, 0.0), a)
    assert rowwise(lambda x: jnp.pad(x, ((0, 0), (0, 2)))[:, 1:5], a)
    assert not rowwise(lambda x: x / jnp.sum(x), a)
    assert not rowwise(lambda x: x - jnp.mean(x, 0), a)
    assert not rowwise(lambda x: x[::-1], a)
    assert not rowwise(lambda x: jnp.pad(x, ((1, 1), (0, 0))), a)
    assert not rowwise(lambda x: x[1:], a)
    assert not rowwise(lambda x, y: x @ y.T, a, b)
    assert not rowwise(lambda x: x * jnp.arange(6.0)[:, None], a)
    assert not rowwise(lambda x: jnp.cumsum(x, 0), a)


def test_leaves_are_cut_into_pieces_of_a_chunk():
    tx = optax.adam(1e-2)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=300)
    state = fz.init(MODEL, tx, plan, rng=0)
    for path, leaf in named_leaves(state.opt_state):
        for slab in slabs_of(leaf):
            assert slab.sharding.memory_kind == "pinned_host" or leaf.ndim == 0
            own = math.prod(slab.sharding.shard_shape(slab.shape)) * 4
            assert own * 2 <= plan.stream_bytes, path  # both moments visit together


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"opt": "host"}, "expected one of"),
        ({"opt_state": "nvme"}, "expected one of"),
        ({"opt_state": 1.5}, "a share from 0 to 1"),
        ({"opt_state": ("host", -1)}, "a share from 0 to 1"),
    ],
)
def test_refusals(tiers, message):
    with pytest.raises(fz.PlanError, match=message):
        fz.Plan(tiers=tiers)


def test_plans_with_tiers_are_values():
    plan = fz.Plan(tiers={"opt_state": "disk", "master": 0.25}, precision="bf16", zero=1)
    assert fz.Plan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(plan.replace(tiers={"master": 0.25, "opt_state": ("disk", 1)}))
    assert fz.Plan(tiers={"opt_state": "device"}) == fz.Plan()


PARAMS = [
    ({"params": "host"}, "fp32", False),
    ({"params": "host"}, "fp32", True),
    ({"params": "host", "opt_state": "host"}, "bf16", True),
    ({"params": "host", "opt_state": "host"}, "bf16", False),
    ({"params": 0.5}, "fp32", False),
    ({"params": 0.5}, "fp32", True),
]


@pytest.mark.parametrize(
    ("tiers", "precision", "prefetch"), some(PARAMS, PARAMS[1], PARAMS[3], PARAMS[5]), ids=str
)
def test_parameters_on_the_host(tiers, precision, prefetch):
    """Layers visit the device one by one, forward and backward; evaluation too."""
    plan = tiny.plan(zero=3, data=4, precision=precision, prefetch=prefetch, microbatches=2)
    tx = optax.sgd(0.1, momentum=0.9)
    expected, trace, _ = run(plan, tx)
    tiered = plan.replace(tiers=tiers, stream_bytes=300)
    state, found, _ = run(tiered, tx)
    same_but_for_roundings(found, trace)
    evaluate = fz.eval_step(MODEL, tiered)(state, BATCH)
    plain = fz.eval_step(MODEL, plan)(on_device(state, tx, tiered), BATCH)
    assert float(evaluate["loss"]) == float(plain["loss"])
    tiny.close(on_device(state, tx, tiered).params, expected.params, rtol=0, atol=4e-7)
    if tiers["params"] == "host":
        fz.placement(state).require(params="host")
        assert fz.placement(state).bytes_per_device["params"] <= 4  # a scalar


def test_parameters_on_the_host_of_a_model_that_is_no_chain():
    model, batch, tx = tiny.regression(), tiny.points(16), optax.sgd(0.1, momentum=0.9)
    plan = tiny.plan(zero=3, data=4)
    expected, trace, _ = run(plan, tx, model, batch=batch)
    tiered = plan.replace(tiers={"params": "host"})
    state, found, _ = run(tiered, tx, model, batch=batch)
    same_but_for_roundings(found, trace)
    tiny.close(on_device(state, tx, tiered, model).params, expected.params, rtol=0, atol=4e-7)


def moves_in_loops(jaxpr, inside=False):
    """Transfers between memories in a program: (in loops, outside of them)."""
    found = [0, 0]
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            found[0 if inside else 1] += len(equation.invars)
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    within = moves_in_loops(inner, inside or equation.primitive.name == "scan")
                    found = [a + b for a, b in zip(found, within, strict=True)]
    return found


def test_layers_come_from_the_host_inside_the_loops():
    """Once per leaf and layer in the forward pass and once in the backward pass."""
    plan = tiny.plan(zero=3, data=4, tiers={"params": "host"})
    tx = optax.sgd(0.1)
    state, step = fz.init(MODEL, tx, plan, rng=0), fz.train_step(MODEL, tx, plan)
    fields = {"params": state.params, "buffers": state.buffers, "loss_scale": None}
    inputs = Inputs.of(BATCH).at(jnp.int32(0))
    gradients = jax.make_jaxpr(step.passes.gradients)(fields, inputs, jax.random.key(0))
    inside, _ = moves_in_loops(gradients.jaxpr)
    assert inside == 2 * len(jax.tree.leaves(state.params["blocks"]))


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("zero", [0, 3])
def test_saved_activations_on_the_host(zero, prefetch):
    """The same bits as with `layer`; what loops keep is in host memory."""
    tx = optax.sgd(0.1, momentum=0.9)
    plan = tiny.plan(zero=zero, data=4, prefetch=prefetch)
    expected, trace, _ = run(plan, tx)
    state, found, step = run(plan.replace(remat="offload"), tx)
    assert found == trace
    tiny.same_bits(state, expected)
    names = ("params", "buffers", "loss_scale", "grads", "opt_state", "ema", "compute")
    fields = {name: getattr(state, name) for name in names}
    inputs = Inputs.of(BATCH)
    traced = jax.make_jaxpr(step.runner.step)(fields, (state.step, state.rng), inputs)
    inside, outside = moves_in_loops(traced.jaxpr)
    # Each layer's input away, and back; looking ahead, the first one after the loop.
    assert (inside, outside) == (2, int(prefetch))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": {"params": "host"}, "zero": 2}, r"with zero=3 \(or gather='lazy'\) and pipe=1"),
        ({"tiers": {"params": "disk"}}, "layer by layer from the host"),
        ({"tiers": {"master": "host"}}, "the only parameters are those"),
        ({"remat": "offload", "pipe": 2, "microbatches": 2}, "use remat='layer'"),
    ],
)
def test_plans_that_cannot_be(options, message):
    with pytest.raises(fz.PlanError, match=message):
        fz.Plan(**options)


def towards_initial_values():
    """SGD with momentum that keeps the initial parameters, and one tree twice over."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, params, params

    def update(grads, state, params):
        moved = jax.tree.map(lambda m, g: 0.9 * m + g, state[0], grads)
        updates = jax.tree.map(lambda m, p, to: -0.1 * (m + p - to), moved, params, state[2])
        return updates, (moved, moved, state[2], state[2])

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_optimizer_that_keeps_one_value_twice_has_two_parked_leaves(tier, tmp_path):
    plan, tx = tiny.plan(zero=3, data=4), towards_initial_values()
    expected, trace, _ = run(plan, tx)
    tiered = plan.replace(tiers={"opt_state": tier}, stream_bytes=300, disk_path=str(tmp_path))
    state, found, _ = run(tiered, tx)
    same_but_for_roundings(found, trace)
    found_params, params = (fz.logical(MODEL, s) for s in (on_device(state, tx, tiered), expected))
    for name, leaf in named_leaves(params):
        np.testing.assert_allclose(
            dict(named_leaves(found_params))[name], leaf, atol=4e-7, rtol=0, err_msg=name
        )
