"""8-bit reductions: what is sent, what is owed, and that nothing owed gets lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.preflight import hlo
from fzero.tree import named_leaves
from tests.support import tiny
from tests.support.zeropp import BLOCK, image


pytestmark = pytest.mark.quick

SGD = optax.sgd(1.0)
# "even" is cut into shards of two blocks, "odd" is padded (dim 1 from 27 to 32 for 8 devices, to 28
# for 4), "gain" stays whole.
SHAPES = {"even": (40, 100), "odd": (13, 27), "gain": ()}
DIMS = {"even": 0, "odd": 1}


def linear():
    """A model whose gradient is its batch: with one row a device, that row is its local sum."""

    def loss(p, buffers, batch, rng, train):
        total = sum(jnp.sum(batch[name] * p[name]) for name in SHAPES)
        return fz.Mean(total, jnp.float32(batch["gain"].shape[0])), buffers, {}

    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return fz.Model(lambda key: (jax.tree.map(jnp.asarray, zeros), {}), loss)


MODEL = linear()


def rows(seed=0, count=8):
    """Rows of very different sizes, so that blocks have very different scales."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal((count, *shape)) * 10 ** rng.uniform(-3, 3, (count, *shape)))
        .astype(np.float32)
        for name, shape in SHAPES.items()
    }  # fmt: skip


def plan_of(**options):
    return tiny.plan(**{"zero": 1, "reduce": "step", "reduce_dtype": "int8", **options})


@functools.cache
def program(plan, apply=False):
    build = fz.train_step if apply else fz.accumulate_step
    return build(MODEL, SGD, plan, donate=False)


def step(plan, state, batch, apply=False):
    return program(plan, apply)(state, batch)[0]


@functools.cache
def owing(plan):
    """A state that owes something, not to be given away."""
    return step(plan, fz.init(MODEL, SGD, plan), rows(7))


def padded(values, name, data):
    pad = [(0, 0)] * values.ndim
    pad[1 + DIMS[name]] = (0, -SHAPES[name][DIMS[name]] % data)
    return np.pad(values, pad)


def as_sent(values, dim, data):
    """A device's gradient as it arrives: each destination's shard in blocks of its own."""
    shards = [
        image(shard, summed=True).reshape(shard.shape) for shard in np.split(values, data, dim)
    ]
    return np.concatenate(shards, dim)


def quanta(values, dim, data):
    """Each element's block's largest magnitude over 127."""

    def of(shard):
        flat = np.abs(shard.reshape(-1))
        peaks = [flat[at : at + BLOCK].max() for at in range(0, flat.size, BLOCK)]
        return np.repeat(peaks, BLOCK)[: flat.size].reshape(shard.shape) / 127

    return np.concatenate([of(shard) for shard in np.split(values, data, dim)], dim)


@pytest.mark.parametrize(("replica", "data"), [(1, 8), (2, 4)])
def test_what_is_sent_and_what_is_owed_are_the_gradient(replica, data):
    plan = plan_of(replica=replica, data=data)
    state = fz.init(MODEL, SGD, plan)
    assert state.error["gain"] is None
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.error))
    for call in range(2):
        before, batch = state, rows(call)
        state = step(plan, state.replace(grads=None), batch)
        tiny.same_bits(state.params, before.params)
        for name, dim in DIMS.items():
            error = np.asarray(before.error[name]).astype(np.float32)
            assert error.shape == (8, *padded(batch[name], name, data).shape[1:])
            assert error.any() == bool(call)
            wanted = padded(batch[name], name, data) + error
            sent = np.stack([as_sent(own, dim, data) for own in wanted])
            groups = [functools.reduce(np.add, sent[at : at + data]) for at in range(0, 8, data)]
            np.testing.assert_array_equal(state.grads.sums[name], functools.reduce(np.add, groups))
            owed = np.asarray(state.error[name]).astype(np.float32)
            # bfloat16 has 8 digits: half a unit in the last place.
            lost = (wanted - sent).astype(np.float64)
            assert (np.abs(owed - lost) <= np.abs(lost) * 2.0**-8).all()
            np.testing.assert_array_equal(state.error[name], (wanted - sent).astype(jnp.bfloat16))
            # At most half a quantum is lost, which is little, and not nothing.
            most = np.stack([quanta(own, dim, data) for own in wanted]) / 2
            assert (np.abs(owed) <= most * 1.01).all()
        np.testing.assert_allclose(state.grads.sums["gain"], batch["gain"].sum(), rtol=1e-6)


def test_stages_0_and_1_are_the_same_bits():
    model, batch = tiny.regression(), tiny.points(32)
    tx, runs = optax.adamw(1e-2), []
    for zero in (0, 1):
        plan = plan_of(zero=zero, data=8, precision="bf16", microbatches=2, clip_norm=1.0)
        state, train = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        for _ in range(2):
            state, metrics = train(state, batch)
        runs.append((fz.logical(model, state), state.error, metrics))
    tiny.same_bits(*runs)


def test_alone_nothing_is_reduced_and_nothing_owed():
    plan = plan_of(data=1)
    state = step(plan, fz.init(MODEL, SGD, plan), rows(count=1), apply=True)
    assert jax.tree.leaves(state.error) == []
    exact = plan.replace(reduce_dtype=None)
    tiny.same_bits(
        state.params, step(exact, fz.init(MODEL, SGD, exact), rows(count=1), True).params
    )


def without_feedback(state):
    """The state as if what was lost were forgotten."""
    return state.replace(error=jax.tree.map(jnp.zeros_like, state.error))


def test_what_is_too_small_to_be_sent_is_sent_later():
    """Components below half a quantum never move without feedback, and on time with it."""
    plan, small, count = plan_of(data=8), np.float32(1e-3), 30
    batch = {name: np.full((8, *shape), small, np.float32) for name, shape in SHAPES.items()}
    for name in DIMS:  # one element of every block of every shard is large
        flat = np.full((8, *padded(batch[name], name, 8).shape[1:]), small)
        shards = np.split(flat, 8, 1 + DIMS[name])
        for shard in shards:
            view = shard.reshape(8, -1)
            view[:, ::BLOCK] = 1
            shard[:] = view.reshape(shard.shape)
        whole = np.concatenate(shards, 1 + DIMS[name]).astype(np.float32)
        batch[name] = whole[(slice(None), *map(slice, SHAPES[name]))]
    moved = {}
    for forget in (False, True):
        state = fz.init(MODEL, SGD, plan)
        for _ in range(count):
            state = step(plan, without_feedback(state) if forget else state, batch, apply=True)
        moved[forget] = tiny.host(state.params)
    for name in DIMS:
        is_small = batch[name][0] == small
        assert is_small.sum() > is_small.size / 2
        assert (moved[True][name][is_small] == 0).all()
        # What is not there yet is half a quantum, but for bfloat16's roundings on the way.
        wanted = -count * small
        assert (np.abs(moved[False][name][is_small] - wanted) <= 0.51 / 127).all()
        np.testing.assert_allclose(moved[False][name][~is_small], -count, rtol=1e-6)


def test_training_follows_exact_reductions_closer_than_without_feedback():
    model, tx = tiny.regression(), optax.sgd(0.2, momentum=0.9)
    exact = tiny.plan(zero=1, reduce="step", data=8)
    runs = {}
    for name, plan in {"exact": exact, "int8": plan_of(data=8), "dropped": plan_of(data=8)}.items():
        state, train = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        losses = []
        for number in range(30):
            state = without_feedback(state) if name == "dropped" else state
            state, metrics = train(state, tiny.points(16, number % 2))
            losses.append(float(metrics["loss"]))
        runs[name] = np.array(losses), tiny.host(fz.logical(model, state))
    losses = runs["exact"][0]
    # 8 bits of each term, and what they lose a step later: 8e-6 when this was written.
    np.testing.assert_allclose(runs["int8"][0], losses, rtol=5e-5)
    assert losses[-1] < 0.7 * losses[0]

    def far(name):
        params, wanted = runs[name][1], runs["exact"][1]
        return np.sqrt(sum(np.sum((params[k] - wanted[k]) ** 2) for k in wanted))

    # 34 times closer when this was written.
    assert far("int8") < far("dropped") / 8


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"skip_nonfinite": True}], ids=str)
def test_a_skipped_step_owes_what_it_owed(options):
    plan = plan_of(data=8, **options)
    small = jax.tree.map(lambda x: np.clip(x, -1, 1), rows(1))
    state = step(plan, fz.init(MODEL, SGD, plan), small, apply=True)
    bad = rows(2)
    bad["even"][3, 2, 1] = np.inf
    after = step(plan, state, bad, apply=True)
    assert int(after.loss_scale.skipped) == 1
    tiny.same_bits((after.error, after.params), (state.error, state.params))
    good = step(plan, state, small, apply=True)
    assert (np.asarray(good.error["even"]) != np.asarray(state.error["even"])).any()


def test_what_is_not_finite_is_seen_and_owes_nothing():
    plan, batch = plan_of(data=8), rows()
    batch["even"][3, 2, 1] = np.inf
    state = step(plan, owing(plan).replace(grads=None), batch)
    total, owed = np.asarray(state.grads.sums["even"]), np.asarray(state.error["even"])
    # Device 0's shard is rows 0 to 4; the bad element is in its first block.
    in_block = np.arange(total.size).reshape(total.shape) < BLOCK
    assert np.isnan(total[in_block]).all()
    assert np.isfinite(total[~in_block]).all()
    assert (owed[3][in_block] == 0).all()
    assert np.isfinite(owed.astype(np.float32)).all()
    assert owed[3][~in_block].any()


def sums(error):
    """What all devices owe together of each leaf, without padding."""
    return {
        name: rows.astype(np.float64).sum(0)[tuple(map(slice, SHAPES[name]))]
        for name, rows in tiny.host(error).items()
    }


def same_debt(error, before, devices):
    """All owe the same, in sum what was owed, but for one rounding to bfloat16."""
    for name, rows in tiny.host(error).items():
        assert rows.shape[0] == devices
        assert all(row.tobytes() == rows[0].tobytes() for row in rows)
        want, got = sums(before)[name], sums(error)[name]
        # float32 adds what it adds with an error of its largest term's.
        slack = np.abs(tiny.host(before)[name].astype(np.float64)).max() * 2.0**-20
        assert (np.abs(got - want) <= np.abs(want) * 2.0**-8 + slack).all()


def test_replan_keeps_divides_and_drops():
    plan = plan_of(data=8)
    state = owing(plan).replace(grads=None)
    four, hybrid, exact = plan_of(data=4), plan_of(replica=2, data=4), tiny.plan(zero=3)
    zero = fz.replan(state, MODEL, SGD, plan, plan.replace(zero=0))
    assert all(
        a is b for a, b in zip(*map(jax.tree.leaves, (zero.error, state.error)), strict=True)
    )
    fewer = fz.replan(state, MODEL, SGD, plan, four)
    same_debt(fewer.error, state.error, 4)
    same_debt(fz.replan(fewer, MODEL, SGD, four, plan).error, fewer.error, 8)
    # The same devices with other padding.
    other = fz.replan(state, MODEL, SGD, plan, hybrid).error
    for name, kept in tiny.host(state.error).items():
        own = (slice(None), *map(slice, SHAPES[name]))
        tiny.same_bits({"x": np.asarray(other[name])[own]}, {"x": kept[own]})
    assert other["odd"].shape == (8, 13, 28)
    dropped = fz.replan(state, MODEL, SGD, plan, exact)
    assert dropped.error is None
    fresh = fz.replan(dropped, MODEL, SGD, exact, plan)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(fresh.error))
    for to, made in ((four, fewer), (hybrid, fz.replan(state, MODEL, SGD, plan, hybrid))):
        step(to, made, rows(3, 4 if to is four else 8))


def test_checkpoints_have_what_is_owed(tmp_path):
    plan, four = plan_of(data=8), plan_of(data=4)
    state = owing(plan)
    fz.save(tmp_path, state, plan)
    tiny.same_bits(fz.restore(tmp_path, MODEL, SGD, plan), state)
    fewer = fz.restore(tmp_path, MODEL, SGD, four)
    same_debt(fewer.error, state.error, 4)
    tiny.same_bits(fewer.error, fz.replan(state.replace(grads=None), MODEL, SGD, plan, four).error)
    exact = tiny.plan(zero=1)
    bare = fz.restore(tmp_path, MODEL, SGD, exact)
    assert bare.error is None
    fz.save(tmp_path, bare, exact)
    assert not any("error" in path for path in fz.checkpoint(tmp_path).leaves)
    back = fz.restore(tmp_path, MODEL, SGD, plan)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(back.error))
    tiny.same_shards(jax.tree.map(jnp.zeros_like, state.error), back.error)


def test_what_is_owed_moves_like_the_rest(tmp_path):
    plan = plan_of(data=8)
    state = tiny.copied(owing(plan))
    want = tiny.host(state)
    parked = fz.offload(state, "error")
    where = fz.placement(parked)
    assert where.bytes_per_device["error"] == 0
    assert where.host_bytes_per_device["error"] == 2 * (40 * 100 + 13 * 32)
    with pytest.raises(fz.StateConsumedError):
        fz.placement(state)
    with pytest.raises(fz.PlacementError, match="error/even"):
        program(plan)(parked, rows())
    fz.eval_step(MODEL, plan)(parked, rows())
    everything = fz.offload(parked, to="disk", path=tmp_path)
    assert fz.placement(everything).disk_bytes["error"] == 8 * 2 * (40 * 100 + 13 * 32)
    tiny.same_bits(fz.reload(everything), want)
    assert fz.Phases().generate["error"] == fz.Phases().idle["error"] == "host"


def test_evaluation_needs_no_error():
    plan = plan_of(data=8)
    state = owing(plan).replace(grads=None)
    evaluate = fz.eval_step(MODEL, plan)
    tiny.same_bits(evaluate(state, rows()), evaluate(state.replace(error=None), rows()))
    with pytest.raises(fz.StateError, match=r"error/even: expected, but missing"):
        program(plan)(state.replace(error=None), rows())


def test_a_step_gives_the_error_away():
    plan = plan_of(data=8)
    state = tiny.copied(owing(plan))
    fz.accumulate_step(MODEL, SGD, plan)(state, rows())
    assert state.error["even"].is_deleted()
    alone = owing(plan).replace(error=state.error)
    with pytest.raises(fz.StateConsumedError):
        fz.placement(alone)


def test_with_the_optimizer_state_parked():
    tx = optax.adamw(1e-2)
    plan = plan_of(data=8, precision="bf16", skip_nonfinite=True)
    runs = []
    for own in (plan, plan.replace(tiers={"opt_state": "host"})):
        state, train = fz.init(MODEL, tx, own), fz.train_step(MODEL, tx, own)
        for number in range(2):
            state, _ = train(state, rows(number))
        runs.append(fz.reload(state))
    tiny.same_bits(runs[0].error, runs[1].error)
    tiny.close(runs[0].params, runs[1].params, rtol=1e-6, atol=1e-6)


def test_a_byte_an_element_and_a_scale_a_block_are_sent():
    plan = plan_of(replica=2, data=4)
    text = program(plan).lower(fz.abstract_state(MODEL, SGD, plan), rows()).compile().as_text()
    found = hlo.collectives(text, mesh_axes={"replica": 2, "data": 4})
    sent = [c for c in found if c.kind == "all-to-all"]
    assert {(c.dtype, c.axes) for c in sent} == {("s8", ("data",))}
    # 1000 and 91 elements a shard: four blocks and one.
    assert sorted(c.bytes for c in sent) == [4 * (91 + 4), 4 * (1000 + 4 * 4)]
    rest = [c for c in found if c.kind != "all-to-all" and "data" in c.axes]
    assert all(c.elements <= 4 for c in rest)
    assert not any(c.kind == "reduce-scatter" for c in found)


def test_reports_count_it():
    plan = plan_of(replica=2, data=4)
    about, state = fz.describe(plan, MODEL, SGD), fz.abstract_state(MODEL, SGD, plan)
    size = 2 * (40 * 100 + 13 * 28)
    where = fz.placement(state)
    assert about.bytes_per_device["error"] == where.bytes_per_device["error"] == size
    assert "reductions over the data axis send int8: 1.016 bytes an element" in str(about)
    planned = fz.placement(plan, MODEL, SGD)
    assert [x for x in planned.leaves if x.state_class == "error"] == [
        x for x in where.leaves if x.state_class == "error"
    ]
    assert planned.bytes_all_devices == where.bytes_all_devices
    found = fz.preflight(MODEL, SGD, plan, rows(), "cpu:8")
    assert found.memory.state["error"] == size
    assert ("all-to-all", "s8") in {(c.kind, c.dtype) for c in found.collectives}
    exact = plan.replace(reduce_dtype=None)
    bare = fz.describe(exact, MODEL, SGD)
    assert "error" not in bare.bytes_per_device
    assert "reductions over" not in str(bare)
    assert fz.init(MODEL, SGD, exact).error is None
    names = [path for path, _ in named_leaves(fz.abstract_state(MODEL, SGD, exact))]
    assert not any("error" in name for name in names)


REFUSED = [
    ({"reduce_dtype": "int4"}, r"reduce_dtype='int4': expected one of \['int8'\]"),
    ({"zero": 2}, r"zero=2 and reduce='step'.*whole local gradient.*never to hold"),
    ({"zero": 3, "reduce": "microbatch"}, r"zero=3 and reduce='microbatch'.*with zero=0 or 1"),
    ({"reduce": "microbatch"}, r"zero=1 and reduce='microbatch'"),
    ({"pipe": 2, "microbatches": 2}, r"use reduce='microbatch'"),
    ({"update_on": "host", "tiers": {"opt_state": "host"}}, r"use update_on='device'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: str(x))
def test_plans_that_exclude_themselves_are_refused(options, words):
    with pytest.raises(fz.PlanError, match=words):
        plan_of(**options)


def test_plans_come_back_from_json():
    plan = plan_of()
    assert fz.Plan.from_json(plan.to_json()) == plan
    old = {k: v for k, v in fz.Plan().to_json().items() if k != "reduce_dtype"}
    assert fz.Plan.from_json(old) == fz.Plan()
