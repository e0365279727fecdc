"""A wrong batch is refused before anything compiles, and nothing is spoiled by the refusal."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from support import tiny

import fzero as fz
from fzero.batch import batch_sharding, check_batch, place_batch
from fzero.compat import why_no_empty
from fzero.sharding.local_batch import _moved


TX = optax.sgd(0.1)
PLAN = tiny.plan(zero=1, data=4, microbatches=2)


@pytest.fixture(scope="module")
def model():
    """One plain model for the whole file."""
    return tiny.regression()


@pytest.fixture(scope="module")
def state(model):
    """A state that no step here consumes."""
    return fz.init(model, TX, PLAN)


@pytest.fixture(scope="module")
def step(model, state):
    """A compiled step that has seen one good batch."""
    step = fz.train_step(model, TX, PLAN, donate=False)
    step(state, tiny.points())
    return step


def changed(**leaves):
    """A good batch with some leaves changed, or left out when `None`."""
    batch = {**tiny.points(), **leaves}
    return {key: value for key, value in batch.items() if value is not None}


POINTS = tiny.points()
LATER = {
    "ragged": (changed(y=POINTS["y"][:8]), ["different numbers", "'x': 16", "'y': 8"]),
    "odd": (tiny.points(12), ["12 examples", "4 devices x 2 microbatches", "multiple of 8"]),
    "none": (tiny.points(0), ["0 examples", "positive multiple of 8"]),
    "scalar": (changed(y=np.float32(1)), ["y is a scalar", "leading dim"]),
    "list": (changed(x=[1, 2]), ["x/0 is a int", "np.asarray"]),
    "text": (changed(x="abc"), ["x is a str", "np.asarray"]),
    "empty": ({}, ["without leaves"]),
    "structs": (jax.eval_shape(lambda: POINTS), ["x is a shape", "step.lower"]),
    "wanted": (
        changed(x=torch.zeros(16, 3, requires_grad=True)),
        ["x is a torch.Tensor", "detach"],
    ),
    "sparse": (changed(x=torch.eye(16).to_sparse()), ["x is a torch.Tensor", "torch_bridge.batch"]),
    "nowhere": (changed(x=torch.ones(16, device="meta")), ["x is a torch.Tensor", "numpy or jax"]),
    "masked": (changed(y=np.ma.masked_less(POINTS["y"], 0)), ["y is a masked array", "filled"]),
    "words": (changed(word=np.array(["a"] * 16)), ["word has dtype <U1", "encode"]),
    "objects": (changed(any=np.array([None] * 16)), ["any has dtype object"]),
    "long": (changed(y=POINTS["y"].astype(np.longdouble)), ["y has dtype float128"]),
    "records": (
        changed(of=np.zeros(16, [("a", "f4")]).view(np.recarray)),
        ["of has dtype (numpy.record, [('a', '<f4')])", "encode"],
    ),
    "days": (changed(day=np.zeros(16, "datetime64[D]")), ["day has dtype datetime64"]),
    "big-endian": (changed(x=POINTS["x"].astype(">f4")), ["x has dtype >f4", "astype"]),
}
# What jax would wrap, or make infinite, without a word.
NARROWED = {
    "int64": np.full(16, -(2**40)),
    "uint64": np.full(16, 2**40, np.uint64),
    "float64": np.full(16, 1e300),
}


@pytest.mark.parametrize("name", NARROWED)
def test_values_that_32_bits_do_not_hold_are_refused(model, state, step, name):
    for wrap in (lambda x: x, fz.Shared):
        for run in (step, fz.eval_step(model, PLAN)):
            with pytest.raises(fz.BatchError, match=r"id has .*does not hold.*jax_enable_x64"):
                run(state, changed(id=wrap(NARROWED[name])))
    given = changed(id=NARROWED[name])
    with pytest.raises(fz.BatchError, match=r"local_batch: batch: id has .*does not hold"):
        fz.local_batch(given, fz.layout(model, TX, PLAN))
    fits = changed(id=np.array([np.inf, *range(15)]) if name == "float64" else np.arange(16))
    assert np.isfinite(step(state, fits)[1]["loss"])


@pytest.mark.parametrize("name", LATER)
def test_refused_before_compilation_and_the_state_stays_usable(model, state, step, name):
    batch, said = LATER[name]
    before = tiny.host(state)
    traces = step.num_traces
    with tiny.counted_compiles() as compiles, pytest.raises(fz.BatchError) as caught:
        step(state, batch)
    for words in said:
        assert words in str(caught.value)
    assert step.num_traces == traces
    assert not compiles
    tiny.same_bits(state, before)
    new, _ = step(state, tiny.points())
    assert int(new.step) == 1
    assert step.num_traces == traces


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.ma.masked_less(np.arange(3.0), 1), "of is a masked array"),
        (np.array(["a"]), "dtype <U1"),
    ],
)
def test_what_is_shared_is_looked_at_like_rows(state, step, value, said):
    with pytest.raises(fz.BatchError, match=said):
        step(state, changed(of=fz.Shared(value)))


def test_what_was_given_away_is_no_batch(model, state, step):
    x = jnp.asarray(POINTS["x"])
    x.delete()
    with pytest.raises(fz.BatchError, match="x was deleted"):
        step(state, changed(x=x))


def test_what_is_no_state_is_refused_by_name(state, step):
    for wrong in (None, state.params, POINTS):
        with pytest.raises(fz.StateError, match=r"train_step: expected a state.* got"):
            step(wrong, POINTS)
    with pytest.raises(fz.StateError, match=r"expected a jax\.Array .*ShapeDtypeStruct"):
        step(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state), POINTS)
    with pytest.raises(fz.StateError, match="offload: expected a state"):
        fz.offload(state.params, "params")


FIRST = ["ragged", "odd", "none", "scalar", "list", "text", "empty"]


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("build", [fz.train_step, fz.accumulate_step], ids=["train", "accumulate"])
def test_a_first_batch_is_refused_before_tracing(model, state, build, name):
    step = build(model, TX, PLAN)
    with pytest.raises(fz.BatchError):
        step(state, LATER[name][0])
    assert step.num_traces == 0
    assert not state.params["w"].is_deleted()


def test_a_missing_key_is_told_by_the_model_and_nothing_is_given_away(model):
    """The model's own KeyError, nothing compiled or given away; the complete batch is welcome."""
    state = fz.init(model, TX, PLAN)
    step = fz.train_step(model, TX, PLAN)
    with tiny.counted_compiles() as compiles:
        with pytest.raises(KeyError, match="y"):
            step(state, changed(y=None))
        assert not compiles
    assert not state.params["w"].is_deleted()
    new, _ = step(state, tiny.points())
    assert int(new.step) == 1


def test_batches_of_several_kinds_take_turns():
    """A step is a pure function: what it saw before decides nothing."""

    def loss(p, buffers, batch, rng, train):
        weights = batch.get("weights", jnp.ones(batch["x"].shape[0]))
        total = jnp.sum((batch["x"] @ p["w"]).sum(-1) * weights)
        return fz.Mean(total, jnp.sum(weights)), buffers, {}

    model = fz.Model(lambda key: ({"w": jnp.ones((tiny.D, 3))}, {}), loss)
    state = fz.init(model, TX, PLAN)
    step, evaluate = fz.train_step(model, TX, PLAN, donate=False), fz.eval_step(model, PLAN)
    x = tiny.points()["x"]
    half = {"x": x, "weights": np.float32(np.arange(16) < 8)}
    kinds = [{"x": x}, half, {"x": x.astype(np.float16)}, half, {"x": x}]
    for run in (lambda b: step(state, b)[1], lambda b: evaluate(state, b)):
        found = [float(run(batch)["loss"]) for batch in kinds]
        assert found[0] == found[4]
        assert found[1] == found[3] == pytest.approx(x[:8].sum() * 3 / 8, rel=1e-4)
    assert step.num_traces == evaluate.num_traces == 3


def test_a_leaf_without_elements_is_cut_into_microbatches_too(monkeypatch, model, state, step):
    def loss(p, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ p["w"]), buffers, {}

    own = fz.Model(lambda key: ({"w": jnp.ones((tiny.D, 3))}, {}), loss)
    rows = {"x": np.ones((16, tiny.D), np.float32), "none": np.zeros((16, 0), np.float32)}
    plan = PLAN if why_no_empty(PLAN.mesh()) is None else dataclasses.replace(PLAN, data=1)
    _, metrics = fz.train_step(own, TX, plan)(fz.init(own, TX, plan), rows)
    assert metrics["loss"] == tiny.D
    # jaxlib 0.11 ends the process.
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    for run in (step, fz.eval_step(model, PLAN)):
        with pytest.raises(fz.BatchError, match=r"batch: none has shape \(16, 0\), no elements"):
            run(state, rows)


def test_eval_takes_batches_that_divide_by_devices_only(model, state):
    """Evaluation has no microbatches."""
    evaluate = fz.eval_step(model, PLAN)
    evaluate(state, tiny.points(4))
    with pytest.raises(fz.BatchError, match="multiple of 4"):
        evaluate(state, tiny.points(6))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda x: x.astype(np.float64)])
def test_kinds_of_arrays_that_are_the_same_to_jax_are_one_kind(model, state, step, kind):
    traces = step.num_traces
    new, _ = step(state, jax.tree.map(kind, tiny.points()))
    assert step.num_traces == traces
    tiny.same_bits(new, step(state, tiny.points())[0])


def test_an_array_that_lies_there_already_is_not_copied():
    mesh = PLAN.mesh()
    x = jax.device_put(np.ones((8, 2), np.float32), batch_sharding(mesh))
    assert place_batch({"x": x}, mesh).rows["x"] is x


def test_axes_of_a_mesh_of_jax_make_mesh(model, state, step):
    """They are part of an array's type, which ended in a KeyError of the step's own program."""
    mesh = jax.make_mesh((4,), ("mine",), devices=jax.devices()[:4])
    rows = jax.device_put(tiny.points(), jax.NamedSharding(mesh, jax.P("mine")))
    tiny.same_bits(step(state, rows)[0], step(state, tiny.points())[0])
    leaf = state.params["gain"]
    other = jax.device_put(leaf, jax.NamedSharding(mesh, jax.P()))
    with pytest.raises(fz.StateError, match=r"params/gain: expected P\(\) on .*Explicit"):
        step(state.replace(params={**state.params, "gain": other}), tiny.points())
    several = jax.device_put(
        jax.tree.map(lambda x: np.stack([x, x]), tiny.points()),
        jax.NamedSharding(mesh, jax.P(None, "mine")),
    )
    with pytest.raises(fz.BatchError, match=r"a mesh with explicit axes.*batch_sharding"):
        jax.lax.scan(step, state, several)


def test_padding_of_random_keys_and_by_no_number():
    keys = jax.random.split(jax.random.key(0), 3)
    batch, mask = fz.pad_batch({"x": np.arange(3), "key": keys}, np.int64(4))
    found, first = (jax.random.key_data(x).tolist() for x in (batch["key"], keys))
    assert (found, mask.tolist()) == ([*first, first[0]], [True] * 3 + [False])
    for multiple in (0, -4, 2.5):
        with pytest.raises(fz.BatchError, match=f"multiple={multiple}: expected a whole number"):
            fz.pad_batch({"x": np.arange(3)}, multiple)


def test_rows_lie_in_order_over_replicas_then_data():
    mesh = fz.Plan(replica=2).mesh()
    x = place_batch({"x": np.arange(8, dtype=np.int32)}, mesh).rows["x"]
    where = {shard.device.id: int(shard.data[0]) for shard in x.addressable_shards}
    assert where == {device.id: row for row, device in enumerate(mesh.devices.flat)}


def test_rows_of_processes_go_where_the_plan_has_their_devices():
    sharding = NamedSharding(fz.Plan(data=4).mesh(jax.devices()[:4]), PartitionSpec("data"))
    moved = _moved(sharding, (2, 0, 3, 1))(jax.device_put(np.arange(8), sharding))
    assert moved.tolist() == [4, 5, 0, 1, 6, 7, 2, 3]


def aligned(shape, value):
    """A float32 array on a page boundary: memory that the CPU backend would adopt, not copy."""
    room = np.empty(int(np.prod(shape)) * 4 + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    array = room[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)
    array[...] = value
    return array


def test_a_loader_may_refill_its_buffer_right_after_the_call():
    """Steps run asynchronously: the batch under way must not be the caller's memory."""
    rows, width = 8, 1 << 14

    def loss(p, buffers, batch, rng, train):
        # Slow enough that the refill comes first, were the memory shared.
        x = jax.lax.fori_loop(0, 40, lambda _, x: jnp.sin(x) + batch["x"], batch["x"])
        return jnp.mean(x * p["w"]), buffers, {}

    model = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss)
    plan = fz.Plan(zero=0, data=8)
    state, step = fz.init(model, TX, plan), fz.train_step(model, TX, plan, donate=False)
    buffer = aligned((rows, width), 1.0)
    expected = float(step(state, {"x": buffer})[1]["loss"])
    for _ in range(5):
        buffer[...] = 1.0
        _, metrics = step(state, {"x": buffer})
        buffer[...] = 2.0
        assert float(metrics["loss"]) == expected


def test_check_needs_no_step():
    check_batch(tiny.points(), 4, 2)
    shapes = {"x": jax.ShapeDtypeStruct((16, 3), jnp.int32)}
    check_batch(shapes, 8, 2)
    with pytest.raises(fz.BatchError, match="multiple of 32"):
        check_batch(shapes, 8, 4)


def test_rows_of_processes_are_filled_up_to_what_a_step_takes(model):
    """Devices and microbatches, as without a mask."""
    layout = fz.layout(model, TX, PLAN)
    rows = fz.local_batch(tiny.points(12), layout, mask="real")
    assert (rows["x"].shape[0], int(rows["real"].sum())) == (layout.batch_multiple * 2, 12)
    whole = fz.local_batch(tiny.points(16), layout)
    assert whole["x"].sharding == layout.batch_sharding
    np.testing.assert_array_equal(whole["x"], tiny.points(16)["x"])
    with pytest.raises(fz.BatchError, match=r"a Plan: expected fz\.layout\(model, tx, plan\)"):
        fz.local_batch(tiny.points(16), PLAN)
    with pytest.raises(fz.BatchError, match="positive multiple of 8 rows from every process"):
        fz.local_batch(tiny.points(12), layout)
    with pytest.raises(fz.BatchError, match="mask=3: expected a name for the leaf"):
        fz.local_batch(tiny.points(12), layout, mask=3)


def test_a_leaf_without_rows_beside_others_is_not_a_process_without_rows(model):
    layout, few = fz.layout(model, TX, PLAN), tiny.points(3)
    assert fz.local_batch({n: x[:0] for n, x in few.items()}, layout, mask="real") is None
    first = min(few)
    with pytest.raises(fz.BatchError, match="different numbers of rows"):
        fz.local_batch({**few, first: few[first][:0]}, layout, mask="real")


def test_random_keys_are_rows_of_processes_too(model):
    layout, keys = fz.layout(model, TX, PLAN), jax.random.split(jax.random.key(0, impl="rbg"), 6)
    rows = fz.local_batch({"key": keys}, layout, mask="real")
    assert rows["key"].sharding.is_equivalent_to(layout.batch_sharding, 1)
    assert rows["key"].dtype == keys.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (rows["key"][:6], keys)))


def test_tensors_of_another_library_are_taken_as_they_are(model, state, step):
    """Bit for bit what arrays give, in every step; in 64 bits where all values fit into 32."""
    host = {**tiny.points(), "id": np.arange(16) - 3, "at": np.linspace(0.0, 1.0, 16)}
    given = {name: torch.from_numpy(value.copy()) for name, value in host.items()}
    given["x"] = given["x"].T.contiguous().T  # strides that are not those of rows
    layout = fz.layout(model, TX, PLAN)
    for run in (step, fz.accumulate_step(model, TX, PLAN, donate=False)):
        tiny.same_bits(run(state, given)[0], run(state, host)[0])
    evaluate = fz.eval_step(model, PLAN)
    expected = evaluate(state, host)["loss"]
    short, mask = fz.pad_batch({name: value[:10] for name, value in given.items()}, 8)
    nested = collections.UserDict({**given, "more": collections.UserDict(x=given["x"])})
    # The imaginary part of a conjugate: torch keeps its sign as a bit, which DLPack does not have.
    conjugate = torch.complex(given["x"], -given["x"]).conj()
    assert conjugate.is_conj()
    assert conjugate.imag.is_neg()
    others = (nested, fz.local_batch(given, layout), {**given, "of": fz.Shared(given["id"])},
              {**given, "x": conjugate.imag, "c": conjugate})  # fmt: skip
    for batch in (given, *others):
        assert evaluate(state, batch)["loss"] == expected
    tiny.same_bits(short, fz.pad_batch({n: value[:10] for n, value in host.items()}, 8)[0])
    assert mask.sum() == 10
    with pytest.raises(fz.BatchError, match=r"id has .*does not hold.*jax_enable_x64"):
        step(state, {**given, "id": given["id"] + (1 << 40)})


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "bool", "uint8"])
def test_dtypes_of_tensors_stay(name):
    """Also those that numpy has not; and the memory of a batch under way is not the loader's."""
    given = torch.tensor([[0.0, 1.0], [2.0, 0.5]]).to(getattr(torch, name))
    placed = place_batch({"x": given}, fz.layout(tiny.regression(), TX, fz.Plan(data=1)).mesh)
    before = given.to(torch.float32).numpy().copy()
    given.zero_()
    assert placed.rows["x"].dtype == name
    np.testing.assert_array_equal(np.asarray(placed.rows["x"], np.float32), before)


def test_tensors_reach_every_rank_of_a_pipeline():
    model, plan = tiny.chain(2), tiny.plan(zero=1, data=2, pipe=2, microbatches=2)
    state, batch = fz.init(model, None, plan), tiny.tokens()
    given = {name: torch.from_numpy(value) for name, value in batch.items()}
    evaluate = fz.eval_step(model, plan)
    assert evaluate(state, given)["loss"] == evaluate(state, batch)["loss"]
