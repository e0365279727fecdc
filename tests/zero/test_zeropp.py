"""8-bit gathers and secondary shards: the same step but for what is sent, and what is sent."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.preflight import hlo
from fzero.preflight.page import page
from fzero.sharding.blueprint import blueprint
from fzero.sharding.group import secondary_size
from fzero.sharding.split import flat_splits
from tests.support import tiny
from tests.support.zeropp import sent


TX = optax.adamw(1e-2)
MESH = {"replica": 1, "data": 8}


def model_of(name):
    """A chain with a stack, a tied and a padded leaf; or one loss, which is no chain."""
    if name == "chain":
        return tiny.chain(), tiny.tokens()
    return tiny.regression(), tiny.points()


def accumulated(model, plan, state, batch):
    """Loss and summed gradients of a batch, nothing updated."""
    step = fz.accumulate_step(model, TX, plan, donate=False)
    return step(state, batch)


def compiled_text(model, plan, batch):
    step = fz.accumulate_step(model, TX, plan)
    return step.lower(fz.abstract_state(model, TX, plan), batch).compile().as_text()


def with_sent_weights(model, plan, state):
    """The state with weights as int8 gathers show them."""
    blue = blueprint(model, TX, plan)
    splits = flat_splits(blue.params)
    leaves, treedef = jax.tree.flatten(state.params)
    seen = [
        jax.device_put(sent(split, np.asarray(leaf), blue.group.data), leaf.sharding)
        for split, leaf in zip(splits, leaves, strict=True)
    ]
    return state.replace(params=jax.tree.unflatten(treedef, seen))


EXACT = [
    ("chain", {"prefetch": False}),
    ("chain", {"prefetch": True, "precision": "bf16", "min_shard_bytes": 200}),
    ("regression", {"precision": "fp16", "replica": 2, "data": 4}),
]


@pytest.mark.parametrize(("name", "options"), EXACT, ids=["fp32", "bf16-ahead", "fp16-hybrid"])
def test_int8_gathers_are_the_step_of_quantised_weights(name, options):
    model, batch = model_of(name)
    plan = tiny.plan(zero=3, **options)
    quick = plan.replace(gather_dtype="int8")
    state = fz.init(model, TX, plan, rng=0)
    if name == "chain":  # padding, biases that are zero, and layers of other sizes
        grown = jax.tree.map(lambda x: x + np.float32(0.01), state.params)
        state = state.replace(params=jax.tree.map(lambda x, y: x if y.ndim else y, grown, grown))
    reference = with_sent_weights(model, plan, state)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(*map(jax.tree.leaves, (state.params, reference.params)), strict=True)
    )
    got, metrics = accumulated(model, quick, state, batch)
    want, expected = accumulated(model, plan, reference, batch)
    tiny.same_bits(metrics, expected)
    tiny.same_bits(got.grads, want.grads)
    tiny.same_bits(got.params, state.params)


SECONDARY = [
    ("chain", {"prefetch": False, "gather_dtype": "int8", "remat": "offload"}, 4),
    ("chain", {"prefetch": True, "precision": "bf16", "remat": "dots", "microbatches": 2}, 2),
    ("regression", {"replica": 2, "data": 4}, 2),
]


@pytest.mark.parametrize(("name", "options", "size"), SECONDARY, ids=["int8", "ahead", "hybrid"])
def test_secondary_shards_change_no_bit(name, options, size):
    model, batch = model_of(name)
    plan = tiny.plan(zero=3, clip_norm=1.0, **options)
    runs = []
    for own in (plan, plan.replace(secondary=size)):
        state, step = fz.init(model, TX, own, rng=0), fz.train_step(model, TX, own)
        for _ in range(2):
            state, metrics = step(state, batch)
        runs.append((state, metrics))
    tiny.same_bits(*runs)


def gathers(model, plan, batch, axes=MESH):
    found = hlo.collectives(compiled_text(model, plan, batch), mesh_axes=axes)
    return [c for c in found if c.kind == "all-gather"]


def sent_by(found, groups_of):
    return sum(c.wire_bytes * c.times for c in found if len(c.replica_groups[0]) == groups_of)


@pytest.mark.parametrize("prefetch", [False, True], ids=["plain", "ahead"])
def test_backward_gathers_stay_within_secondary_groups(prefetch):
    model, batch = model_of("chain")
    plan = tiny.plan(zero=3, precision="bf16", prefetch=prefetch, secondary=4)
    found = gathers(model, plan, batch)
    within = [c for c in found if len(c.replica_groups[0]) == 4]
    assert {tuple(map(tuple, c.replica_groups)) for c in within} == {((0, 1, 2, 3), (4, 5, 6, 7))}
    assert {len(c.replica_groups[0]) for c in found} == {4, 8}
    # Each weight once over all devices, and once within a group: the table is read by two layers.
    stored = sum(
        np.prod(split.stored_shape)
        for split in flat_splits(blueprint(model, TX, plan).params)
        if split.dim is not None
    )
    assert sent_by(found, 8) == pytest.approx(2 * stored * 7 / 8)
    assert sent_by(found, 4) == pytest.approx(2 * stored * 3 / 4)
    about = fz.describe(plan, model)
    assert about.secondary_bytes == 2 * stored / 4
    assert about.elements_gathered == round(stored * (7 / 8 + 3 / 4))
    assert f"(secondary): {about.secondary_bytes:,} bytes" in str(about)


def test_int8_gathers_send_a_byte_an_element_and_a_scale_a_block():
    model, batch = model_of("regression")
    plan = tiny.plan(zero=3, gather_dtype="int8")
    found = gathers(model, plan, batch)
    assert {c.dtype for c in found} == {"s8"}
    # Shards of 26 and 52 elements: a block each.
    assert {c.bytes for c in found} == {8 * (26 + 4), 8 * (52 + 4)}
    assert "1.016 bytes an element" in str(fz.describe(plan, model))


def test_preflight_counts_what_secondary_shards_take():
    model, batch = model_of("chain")
    plan = tiny.plan(zero=3, secondary=2, prefetch=True)
    found = fz.preflight(model, TX, plan, batch, "cpu:8")
    bare = fz.preflight(model, TX, plan.replace(secondary=None), batch, "cpu:8")
    assert found.memory.secondary == fz.describe(plan, model).secondary_bytes > 0
    assert bare.memory.secondary == 0
    assert found.memory.saved_activations == bare.memory.saved_activations
    axes = {c.axes for c in found.collectives if c.kind == "all-gather"}
    assert axes == {"data", "data / 4"}
    assert "secondary shards" in str(found)
    assert f"secondary shards: {found.memory.secondary / 1024:.1f} KiB" in page(found)
    assert "secondary shards" not in str(bare)


def test_evaluation_is_of_the_exact_weights():
    model, batch = model_of("chain")
    plan = tiny.plan(zero=3)
    state = fz.init(model, TX, plan, rng=0)
    exact = fz.eval_step(model, plan)(state, batch)
    sparing = fz.eval_step(model, plan.replace(gather_dtype="int8", secondary=2))(state, batch)
    tiny.same_bits(exact, sparing)


def test_a_weight_that_is_not_finite_shows_in_the_loss():
    model, batch = model_of("regression")
    plan = tiny.plan(zero=3, gather_dtype="int8", skip_nonfinite=True)
    state = fz.init(model, TX, plan, rng=0)
    bad = np.array(state.params["w"])
    bad[3, 2] = np.inf
    bad = {**state.params, "w": jax.device_put(bad, state.params["w"].sharding)}
    _, metrics = fz.train_step(model, TX, plan)(state.replace(params=bad), batch)
    assert not np.isfinite(float(metrics["loss"]))
    assert int(metrics["nonfinite"]) == 1


@pytest.mark.nightly
def test_a_pipeline_gathers_likewise():
    model, batch = model_of("chain")
    options = {"zero": 3, "data": 4, "microbatches": 2, "gather_dtype": "int8"}
    alone = tiny.plan(**options, replica=1)
    piped = tiny.plan(**options, pipe=2, schedule="zb_h1")
    losses, states = [], []
    for plan in (alone, piped, piped.replace(secondary=2)):
        state = fz.init(model, TX, plan, rng=0)
        state, metrics = fz.train_step(model, TX, plan)(state, batch)
        losses.append(metrics["loss"])
        states.append(state)
    tiny.same_bits(losses[0], losses[1])
    tiny.same_bits((losses[1], states[1]), (losses[2], states[2]))


def machine(*hosts):
    return [SimpleNamespace(process_index=host) for host in hosts]


def test_host_groups_are_the_neighbours_of_a_host():
    plan = fz.Plan(secondary="host")
    assert secondary_size(plan, 8, machine(0, 0, 0, 0, 1, 1, 1, 1)) == 4
    assert secondary_size(plan, 8, machine(0, 0, 1, 1, 2, 2, 3, 3)) == 2
    assert secondary_size(plan, 4, machine(0, 0, 0, 0)) == 0  # all on one host: nothing to spare
    assert secondary_size(plan.replace(replica=2), 4, machine(*[0] * 4, *[1] * 4)) == 0
    assert secondary_size(fz.Plan(secondary=4), 4, None) == 0
    for hosts, words in [
        ((0, 0, 0, 1), "equally many neighbours"),
        ((0, 0, 1, 2), "equally many neighbours"),
        ((0, 1, 0, 1), "neighbours on the data axis are on different hosts"),
    ]:
        with pytest.raises(fz.PlanError, match=words):
            secondary_size(plan, 4, machine(*hosts))
    with pytest.raises(fz.PlanError, match="equally many neighbours"):
        secondary_size(plan.replace(replica=2), 4, machine(0, 0, 1, 1, 2, 3, 3, 2))


REFUSED = [
    ({"gather_dtype": "int4"}, r"gather_dtype='int4': expected one of \['int8'\]"),
    ({"gather_dtype": "int8", "zero": 2}, r"gather_dtype='int8' with zero=2.*use zero=3"),
    ({"secondary": 2, "zero": 1}, r"secondary=2 with zero=1"),
    ({"secondary": 1}, r"secondary=1: expected a whole number of at least 2"),
    ({"secondary": True}, r"secondary=True"),
    ({"secondary": "rack"}, r"secondary='rack': expected a number of devices, 'host' or None"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda x: str(x))
def test_plans_that_exclude_themselves_are_refused(options, words):
    with pytest.raises(fz.PlanError, match=words):
        fz.Plan(**options)


def test_a_group_that_does_not_divide_is_refused_before_devices_are_asked():
    with pytest.raises(fz.PlanError, match=r"secondary=3 does not divide data=8"):
        fz.Plan(secondary=3).sizes(8)
    with pytest.raises(fz.PlanError, match=r"secondary=3 does not divide data=4"):
        fz.Plan(secondary=3, data=4).sizes(8)


def test_plans_come_back_from_json():
    for plan in (fz.Plan(gather_dtype="int8", secondary="host"), fz.Plan(secondary=4)):
        assert fz.Plan.from_json(plan.to_json()) == plan
    old = {k: v for k, v in fz.Plan().to_json().items() if k not in ("gather_dtype", "secondary")}
    assert fz.Plan.from_json(old) == fz.Plan()
    assert dataclasses.replace(fz.Plan(), zero=1).secondary is None
