"""Reports: what `describe` says is what states and compiled steps turn out to be."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.preflight import hlo
from fzero.tree import device_bytes, named_leaves


VOCAB, WIDTH, DEPTH, SEQ = 83, 16, 3, 4  # 83 is odd: the table must be padded


def chain():
    """An embedding that is read twice, a stack, a small leaf and buffers."""

    def block(p, x, ctx):
        return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]

    def block_init(key):
        up = jax.random.normal(key, (WIDTH, 3 * WIDTH))
        return {"up": up, "down": up.T, "bias": jnp.zeros(3 * WIDTH)}

    def head(p, x, ctx):
        logits = x @ p["table"].T * p["gain"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ctx.batch["ids"])
        out = fz.Mean(jnp.sum(losses), jnp.float32(losses.size))
        return out, {"seen": ctx.buffers["seen"] + 1}

    return fz.Sequential(
        [
            fz.Layer(
                "embed",
                lambda key: {"table": jax.random.normal(key, (VOCAB, WIDTH - 1))},
                lambda p, b, ctx: jnp.pad(p["table"][b["ids"]], ((0, 0), (0, 0), (0, 1))),
            ),
            fz.Stack("blocks", DEPTH, block_init, block),
            fz.Layer("cut", None, lambda p, x, ctx: x[..., :-1]),
            fz.Layer(
                "head",
                lambda key: ({"gain": jnp.ones(())}, {"seen": jnp.zeros((), jnp.int32)}),
                head,
                reads={"table": "embed/table"},
                stateful=True,
            ),
        ]
    )


MODEL, TX = chain(), optax.adamw(1e-3)
NUM_ELEMENTS = VOCAB * (WIDTH - 1) + DEPTH * (2 * 3 * WIDTH**2 + 3 * WIDTH) + 1
SPLIT_BYTES = 128  # gain stays whole (and bias in bf16), everything else is split


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 8), (2, 4), (1, 1)], ids=str)
def test_described_bytes_are_those_of_the_state(zero, precision, sizes):
    replica, data = sizes
    plan = fz.Plan(
        zero=zero, precision=precision, replica=replica, data=data, min_shard_bytes=SPLIT_BYTES
    )
    about = fz.describe(plan, MODEL, TX)
    where = fz.placement(fz.abstract_state(MODEL, TX, plan))
    assert about.num_devices == where.num_devices == replica * data
    assert about.num_elements == NUM_ELEMENTS
    classes = ("params", "compute", "opt_state", "buffers", "total")
    assert about.bytes_per_device == {name: where.bytes_per_device[name] for name in classes}
    placed = {(leaf.state_class, leaf.path): leaf for leaf in where.leaves}
    assert placed.keys() == {(leaf.state_class, leaf.path) for leaf in about.leaves}
    for leaf in about.leaves:
        found = placed[leaf.state_class, leaf.path]
        assert leaf.bytes_per_device == found.bytes_per_device, leaf
        assert (leaf.dim is None) == (found.spec == "whole"), leaf
        assert leaf.dtype == found.dtype
        grown = list(leaf.shape)
        if leaf.dim is not None:
            grown[leaf.dim] += leaf.pad_rows
        assert tuple(grown) == found.shape


@pytest.mark.parametrize(
    ("zero", "microbatches", "reduce"),
    [
        (0, 1, "microbatch"),
        (1, 2, "step"),
        (2, 2, "microbatch"),
        (3, 1, "microbatch"),
        (3, 2, "microbatch"),
    ],
)
def test_described_communication_is_that_of_the_compiled_step(zero, microbatches, reduce):
    plan = fz.Plan(
        zero=zero,
        data=8,
        microbatches=microbatches,
        reduce=reduce,
        min_shard_bytes=SPLIT_BYTES,
        clip_norm=1.0,
    )
    batch = {"ids": jax.ShapeDtypeStruct((16, SEQ), jnp.int32)}
    step = fz.train_step(MODEL, TX, plan)
    text = step.lower(fz.abstract_state(MODEL, TX, plan), batch).compile().as_text()
    found = hlo.collectives(text)
    moved = hlo.total(found).wire_elements
    about = fz.describe(plan, MODEL)
    num_scalars = 2 * 8 * (1 + microbatches)  # loss, count, norm: a few elements each
    # Parameters do not change within a step, so the compiler may lift gathers for the forward
    # pass of later microbatches out of the loop: at most all of them but the first's.
    lifted = 0 if zero < 3 else about.elements_gathered * (microbatches - 1) / (2 * microbatches)
    assert moved <= about.elements_communicated + num_scalars
    assert moved >= about.elements_communicated - lifted
    gathered = hlo.total(found, "all-gather").wire_elements
    assert about.elements_gathered - lifted <= gathered <= about.elements_gathered


@pytest.mark.parametrize(
    ("kwargs", "passes"),
    [
        ({"zero": 0}, 2),
        ({"zero": 1, "microbatches": 4}, 5),
        ({"zero": 1, "microbatches": 4, "reduce": "step"}, 2),
        ({"zero": 2}, 2),
        ({"zero": 3}, 3),
        ({"zero": 3, "microbatches": 4}, 12),
    ],
)
def test_communication_follows_the_zero_paper_at_any_size(kwargs, passes):
    num_devices, rows = 64, 6400
    model = fz.Model(lambda rng: ({"w": jnp.zeros((rows, 1000))}, {}), lambda *_: None)
    about = fz.describe(fz.Plan(**kwargs), model, num_devices=num_devices)
    assert len(jax.devices()) < num_devices
    assert about.num_devices == num_devices
    assert about.elements_communicated == passes * rows * 1000 * (num_devices - 1) // num_devices


def test_a_backward_pass_in_halves_gathers_for_both():
    def gathered(schedule):
        plan = tiny.plan(zero=3, pipe=2, data=4, microbatches=2, schedule=schedule)
        return fz.describe(plan, tiny.chain()).elements_gathered

    assert gathered("zb_h1") * 2 == gathered("1f1b") * 3 > 0


def test_hybrid_sharding_communicates_shards_between_groups():
    model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 1000))}, {}), lambda *_: None)
    plan = fz.Plan(zero=2, replica=2, data=4, min_shard_bytes=0)
    about = fz.describe(plan, model)
    assert about.elements_gathered == 8000 * 3 // 4
    assert about.elements_reduced == 8000 * 3 // 4 + 2 * (8000 // 4) // 2


def test_over_further_axes_a_device_communicates_its_part_of_a_leaf():
    model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 1000))}, {}), lambda *_: None)
    about = fz.describe(fz.Plan(zero=2, data=4, context=2, min_shard_bytes=0), model)
    assert about.elements_reduced == 8000 // 2 * 3 // 4


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"microbatches": 4}, "one reduction per microbatch, 4 per step"),
        ({"microbatches": 4, "reduce": "step", "zero": 1}, "one reduction per step, of 4 micro"),
        ({}, "one reduction per step"),
    ],
)
def test_description_states_when_gradients_are_reduced(kwargs, words):
    about = fz.describe(fz.Plan(**kwargs), MODEL, num_devices=8)
    assert about.reduction.startswith(words)
    assert f"gradients: {words}" in str(about)


SAID = {
    "gathers send int8: 1.016 bytes an element": {"zero": 3, "gather_dtype": "int8"},
    "gathers of what only products in 8 bits read send float8": {"zero": 3, "precision": "fp8"},
    "reductions send and add float32": {"precision": "bf16", "reduce_dtype": "fp32"},
    "kept for the backward pass (secondary)": {"zero": 3, "data": 4, "secondary": 2},
    "deterministic: on GPUs": {"deterministic": True},
    "used and sent in float32: 1 leaves, 1 elements": {"precision": "bf16", "keep_fp32": "gain"},
}


def test_description_says_what_a_plan_changes_and_nothing_else():
    for kwargs in SAID.values():
        plan = fz.Plan(**kwargs, min_shard_bytes=SPLIT_BYTES)
        about = str(fz.describe(plan, MODEL, num_devices=8))
        assert [line for line in SAID if f"\n{line}" in about] == [
            line for line, others in SAID.items() if others == kwargs
        ]
    alone = fz.describe(fz.Plan(zero=3, precision="fp8", data=1), MODEL, num_devices=1)
    assert "send float8" not in str(alone)


def test_description_prints_every_leaf_and_why():
    plan = fz.Plan(zero=1, precision="bf16", min_shard_bytes=SPLIT_BYTES)
    about = fz.describe(plan, MODEL, num_devices=8)
    lines = {line.split()[0]: line for line in str(about).splitlines() if line}
    assert lines["params/embed/table"].split()[1:8] == [
        "[83,",
        "15]",
        "float32",
        "dim",
        "0",
        "/",
        "8",
    ]
    assert lines["params/embed/table"].endswith("no dim divides by 8: dim 0 padded by 5 to 88")
    assert "dim 1 (16) divides by 8" in lines["params/blocks/up"]
    assert "96 bytes: below min_shard_bytes=128" in lines["params/blocks/bias"]
    assert lines["compute/blocks/up"].endswith("zero=1 keeps compute whole")
    assert lines["opt_state"].endswith("unknown: pass tx to count it")
    assert lines["buffers/head/seen"].endswith("buffers stay whole")
    assert "opt_state" not in about.bytes_per_device
    assert f"Ψ = {NUM_ELEMENTS:,} parameters" in str(about)
    sent = about.elements_communicated
    assert f"per step and device: {sent / NUM_ELEMENTS:.3f} Ψ = {sent:,} elements" in str(about)
    assert "opt_state/0/mu/embed/table" in str(fz.describe(plan, MODEL, TX, num_devices=8))


def test_description_of_arguments_in_another_order_is_refused():
    model, tx, plan = tiny.regression(), optax.sgd(0.1), tiny.plan(data=2)
    with pytest.raises(fz.PlanError, match="the plan, the model and its optimizer, in this"):
        fz.describe(model, tx, plan)


def test_description_takes_devices_and_names_what_is_wrong():
    assert fz.describe(fz.Plan(), MODEL, devices=jax.devices()[:2]).num_data == 2
    assert fz.describe(fz.Plan(), MODEL).num_data == len(jax.devices())
    assert fz.describe(fz.Plan(data=512, replica=2), MODEL).num_devices == 1024
    with pytest.raises(fz.PlanError, match="needs 16 devices, but there are 4"):
        fz.describe(fz.Plan(data=16), MODEL, num_devices=4)


def test_reports_are_json():
    plan = fz.Plan(zero=2, data=8)
    about = fz.describe(plan, MODEL, TX).to_json()
    read = json.loads(json.dumps(about))
    assert fz.Plan.from_json(read["plan"]) == plan
    assert read["elements_communicated"] == read["elements_gathered"] + read["elements_reduced"]
    assert read["bytes_per_device"]["total"] == about["bytes_per_device"]["total"]
    where = fz.placement(fz.abstract_state(MODEL, TX, plan))
    read = json.loads(json.dumps(where.to_json()))
    assert read["bytes_per_device"] == where.bytes_per_device
    assert read["tiers"]["params"] == ["device"]
    assert len(read["leaves"]) == len(where.leaves)
    assert fz.describe(plan, MODEL, TX) == fz.describe(plan, MODEL, TX)


def small():
    def loss(params, buffers, batch, rng, train):
        return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2), buffers, {}

    def init(rng):
        return {"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, {"calls": jnp.zeros(3, jnp.int32)}

    return fz.Model(init, loss)


def test_placement_counts_the_arrays_themselves(tmp_path):
    model, plan = small(), fz.Plan(zero=3, data=8, min_shard_bytes=64)
    batch = {"x": np.ones((8, 16), np.float32)}
    state = fz.init(model, TX, plan)
    pending = fz.accumulate_step(model, TX, plan, donate=False)(state, batch)[0]
    for one in (state, pending):
        where = fz.placement(one)
        for name in ("params", "opt_state", "buffers", "grads"):
            arrays = jax.tree.leaves(getattr(one, name))
            held = sum(s.data.nbytes for leaf in arrays for s in leaf.addressable_shards)
            first = sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)
            assert where.bytes_all_devices[name] == held, name
            assert where.bytes_per_device[name] == first, name
        assert where.bytes_per_device["params"] == 16 * 8 * 4 // 8 + 8 * 4
        assert where.bytes_all_devices["buffers"] == 8 * 3 * 4
        assert where.bytes_per_device["compute"] == 0
    assert fz.placement(state).bytes_per_device["grads"] == 0
    assert fz.placement(pending).bytes_per_device["grads"] == 16 * 8 * 4 // 8 + 8 * 4 + 3 * 4
    rows = str(fz.placement(pending)).splitlines()
    assert re.split("  +", rows[0]) == [
        "state class",
        "bytes/device",
        "bytes in 8 devices",
        "tier",
    ]
    assert rows[2].split() == ["params", "96", "768", "device"]
    leaf = {leaf.path: leaf for leaf in where.leaves if leaf.state_class == "params"}["w"]
    assert (leaf.shape, leaf.spec, leaf.bytes_per_device) == ((16, 8), "data", 64)
    # On disk what all devices hold is there once.
    parked = fz.placement(fz.offload(pending, "params", to="disk", path=tmp_path))
    assert parked.disk_bytes["params"] == 16 * 8 * 4 + 8 * 4


def test_what_is_required_of_a_class_is_not_of_its_counters():
    """Steps keep them at hand, wherever the plan parks the moments."""
    model, tx = tiny.chain(), optax.adam(1e-2)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"})
    found = fz.placement(plan, model, tx).require(params="device", opt_state="host")
    assert found.tiers["opt_state"] == ("device", "host")
    with pytest.raises(fz.PlacementError, match=r"5 leaves .* params/blocks/b in device"):
        found.require(params="host")


def test_placement_of_a_consumed_state_names_the_step():
    model, plan = small(), fz.Plan(data=8)
    state = fz.init(model, TX, plan)
    after, _ = fz.train_step(model, TX, plan)(state, {"x": np.ones((8, 16), np.float32)})
    with pytest.raises(fz.StateConsumedError, match=r"placement: .*step 1"):
        fz.placement(state)
    assert fz.placement(after).bytes_per_device["params"] == 16 * 8 * 4 + 8 * 4


def test_placement_finds_the_fullest_device_and_other_memory():
    cpus = jax.devices()
    one = jax.sharding.SingleDeviceSharding(cpus[0])
    other = jax.sharding.SingleDeviceSharding(cpus[1], memory_kind="pinned_host")
    leaves = {
        "params": {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=one)},
        "opt_state": {"m": jax.ShapeDtypeStruct((6,), jnp.float32, sharding=other)},
    }
    empty = dict.fromkeys(("step", "rng", "compute", "ema", "buffers", "grads"))
    where = fz.placement(SimpleNamespace(**leaves, **empty))
    assert where.bytes_per_device["total"] == where.bytes_all_devices["total"] == 16
    assert where.host_bytes_per_device["total"] == where.host_bytes["opt_state"] == 24
    assert where.tiers["opt_state"] == ("host",)
    assert str(where).splitlines()[0].split("  ")[-1].strip() == "tier"
    assert str(where).splitlines()[4].split() == ["opt_state", "0", "0", "24", "24", "host"]
    assert where.num_devices == 2

    mesh = jax.make_mesh((2,), ("data",), devices=cpus[:2])
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    leaves["params"]["b"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=both)
    where = fz.placement(SimpleNamespace(**leaves, **empty))
    assert where.bytes_per_device["total"] == 16 + 8, "of two leaves, on the first device"


def test_described_and_placed_are_the_states_own_shapes():
    """With an optimizer that is told of stacks, and for devices that there are not."""
    model, tx = tiny.chain(3), fz.per_layer(optax.lamb(1e-2))
    plan = tiny.plan(zero=1, data=4)
    kept = dict(named_leaves(fz.abstract_state(model, tx, plan).opt_state))
    about = fz.describe(plan, model, tx, num_devices=4)
    rows = {leaf.path: leaf for leaf in about.leaves if leaf.state_class == "opt_state"}
    assert {path: leaf.shape for path, leaf in kept.items()}.keys() == rows.keys()
    assert about.bytes_per_device["opt_state"] == sum(map(device_bytes, kept.values()))
    where = fz.placement(plan, model, tx, num_devices=4)
    assert where.bytes_per_device["opt_state"] == about.bytes_per_device["opt_state"]
    assert where.leaves == about.leaves
