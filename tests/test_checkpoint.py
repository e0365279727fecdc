"""Checkpoints: bit-identical under any plan, whole or not there at all."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.checkpoint.write import _readable
from fzero.sharding.buckets import Parking
from fzero.sharding.park import park, unpark
from fzero.tree import named_leaves


MODEL, TX, BATCH = tiny.chain(3), optax.adamw(1e-2), tiny.tokens(16)
PLANS = {
    "zero 0": tiny.plan(zero=0, data=8),
    "zero 3": tiny.plan(zero=3, data=8),
    "one device": tiny.plan(zero=3, data=1),
    "bf16": tiny.plan(zero=1, data=4, precision="bf16"),
    "pipeline": tiny.plan(zero=3, pipe=2, data=2, microbatches=2),
    "tiers": tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=300),
}
WAYS = [
    ("zero 3", "zero 0"),
    ("zero 0", "zero 3"),
    ("zero 3", "one device"),
    ("one device", "pipeline"),
    ("pipeline", "zero 3"),
    ("zero 3", "bf16"),
    ("bf16", "zero 0"),
    ("tiers", "zero 3"),
    ("zero 0", "tiers"),
    ("pipeline", "tiers"),
    ("tiers", "tiers"),
    ("zero 3", "zero 3"),
]


pytestmark = pytest.mark.usefixtures("in_the_background")


@pytest.fixture(scope="module")
def states():
    return tiny.stepped(PLANS, MODEL, TX, BATCH)


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_the_same_bits_under_another_plan(old, new, states, tmp_path):
    before, plan = states(old), PLANS[new]
    fz.save(tmp_path, before, PLANS[old], data_position={"epoch": 1, "row": 64})
    after = fz.restore(tmp_path, MODEL, TX, plan)
    expected = fz.replan(before, MODEL, TX, PLANS[old], plan)
    assert jax.tree.structure(after) == jax.tree.structure(expected)
    tiny.same_bits(jax.tree.map(unpark, after), jax.tree.map(unpark, expected))
    shardings = [[x.sharding for x in jax.tree.leaves(s)] for s in (after, expected)]
    assert shardings[0] == shardings[1]
    about = fz.checkpoint(tmp_path)
    assert (about.number, about.step, about.plan) == (0, 1, PLANS[old])
    assert about.data_position == {"epoch": 1, "row": 64}


@pytest.mark.parametrize("name", ["zero 3", "pipeline", "tiers"])
def test_training_goes_on_as_if_nothing_had_been(name, tmp_path):
    plan = PLANS[name]
    step, add = fz.train_step(MODEL, TX, plan), fz.accumulate_step(MODEL, TX, plan)
    state, _ = step(fz.init(MODEL, TX, plan, rng=3), BATCH)
    state, _ = add(state, tiny.tokens(16, seed=1))  # in the middle of an accumulation
    fz.save(tmp_path, state, plan)
    state, straight = step(state, tiny.tokens(16, seed=2))
    again, resumed = step(fz.restore(tmp_path, MODEL, TX, plan), tiny.tokens(16, seed=2))
    assert {k: float(v) for k, v in straight.items()} == {k: float(v) for k, v in resumed.items()}
    tiny.same_bits(jax.tree.map(unpark, state), jax.tree.map(unpark, again))


def test_the_newest_are_kept_and_numbered(states, tmp_path):
    state, plan = states("zero 3"), PLANS["zero 3"]
    numbers = [fz.save(tmp_path, state, plan, keep=np.int64(2), data_position=i) for i in range(4)]
    assert numbers == [0, 1, 2, 3]
    fz.wait(tmp_path)
    assert fz.checkpoint(tmp_path).data_position == 3
    assert fz.checkpoint(tmp_path, 2).data_position == 2
    with pytest.raises(fz.CheckpointError, match=r"expected a checkpoint 0 .* found \[2, 3\]"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"], number=0)
    # By number, not by name: 10 comes after 2.
    (tmp_path / "3").rename(tmp_path / "10")
    assert fz.checkpoint(tmp_path).number == 10


def test_a_damaged_one_is_named_with_the_one_before(states, tmp_path):
    for _ in range(2):
        fz.save(tmp_path, states("zero 3"), PLANS["zero 3"])
    fz.wait(tmp_path)
    (tmp_path / "7").write_text("a user's own file")
    (tmp_path / "007").mkdir()
    (tmp_path / "1" / "state" / "manifest.ocdbt").unlink()
    for name in ("arrays of checkpoint 1", "checkpoint 1"):
        with pytest.raises(fz.CheckpointError, match=rf"{name} (.|\n)* number=0, or move 1 out"):
            fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])
        (tmp_path / "1" / "meta" / "metadata").unlink(missing_ok=True)
    read = fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"], number=0)
    tiny.same_bits(read.params, states("zero 3").params)


def test_one_that_is_put_together_of_two_is_refused(states, tmp_path):
    """As a copy over an older one leaves it that was cut off."""
    plan = PLANS["zero 3"]
    for position in range(3):
        fz.save(tmp_path, states("zero 3"), plan, data_position=position)
    fz.wait(tmp_path)
    for item, number in (("meta", "0"), ("state", "1")):
        shutil.rmtree(tmp_path / number / item)
        shutil.copytree(tmp_path / "2" / item, tmp_path / number / item)
        with pytest.raises(fz.CheckpointError, match=rf"{number} in .* of two: .* number=2, or"):
            fz.restore(tmp_path, MODEL, TX, plan, number=int(number))
    fz.restore(tmp_path, MODEL, TX, plan)


def test_a_damaged_one_with_none_beside_it_names_no_other(states, tmp_path):
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    (tmp_path / "0" / "state" / "manifest.ocdbt").unlink()
    with pytest.raises(fz.CheckpointError, match="of checkpoint 0") as caught:
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])
    assert "to go on from" not in str(caught.value)


@pytest.mark.parametrize("change", [
    lambda meta: meta.pop("step"), lambda meta: meta.update(step=7, plan=None),
    lambda meta: meta["rng"].reverse(), lambda meta: meta["data_position"].update(row=65),
])  # fmt: skip
def test_what_is_said_beside_the_arrays_is_as_it_was_written(states, tmp_path, change):
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], data_position={"row": 64, 1: (2.5, None)})
    fz.wait(tmp_path)
    assert fz.checkpoint(tmp_path).data_position == {"row": 64, "1": [2.5, None]}
    file = tmp_path / "0" / "meta" / "metadata"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))
    with pytest.raises(fz.CheckpointError, match=r"checkpoint 0 in .* damaged: .*meta/metadata"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])


@pytest.mark.parametrize("torn", [b"", b'{"step": 1', b"\xff"])
def test_a_torn_file_beside_the_arrays_is_told(states, tmp_path, torn):
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    (tmp_path / "0" / "meta" / "metadata").write_bytes(torn)
    with pytest.raises(fz.CheckpointError, match=r"checkpoint 0 in .* cannot be read"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])


WRONG = [
    {"step": "x"}, {"step": 2**31}, {"step": -1}, {"step": True}, {"rng": ["no kind", [1, 2]]},
    {"rng": ["threefry2x32", [1]]}, {"rng": ["threefry2x32", [1.5, 2.0]]},
    {"rng": ["threefry2x32", [-1, 2]]}, {"rng": ["threefry2x32", [1, 2**32]]}, {"rng": 7},
]  # fmt: skip


def test_what_is_edited_by_hand_is_looked_at(states, tmp_path):
    """Its checksum is taken out then."""
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"], asynchronous=False)
    file = tmp_path / "0" / "meta" / "metadata"
    meta = {key: value for key, value in json.loads(file.read_text()).items() if key != "sum"}
    for change in WRONG:
        file.write_text(json.dumps({**meta, **change}))
        ((name, value),) = change.items()
        with pytest.raises(fz.CheckpointError, match=rf"has {name} {re.escape(repr(value))}: exp"):
            fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])
    file.write_text(json.dumps({key: value for key, value in meta.items() if key != "plan"}))
    with pytest.raises(fz.CheckpointError, match=r"checkpoint 0 in .* damaged: .* has no plan"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])
    file.write_text(json.dumps({**meta, "plan": {**meta["plan"], "zero": 7}}))
    with pytest.raises(fz.CheckpointError, match=r"the plan of checkpoint 0 in .* is none: .*zero"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"])
    with pytest.raises(fz.CheckpointError, match=r"number='0': expected a whole number"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"], number="0")
    file.write_text(json.dumps({**meta, "step": 9}))
    assert int(fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"]).step) == 9


def test_leaves_without_elements_go_along(tmp_path):
    """They are not written; those behind them keep their places."""
    values = {"a": np.zeros((0, 4), np.float32), "b": np.arange(8.0, dtype=np.float32)}
    model = fz.Model((values, {}), lambda p, b, batch, rng, train: (jnp.sum(p["b"]), b, {}))
    tx, plan = optax.adam(1e-2), fz.Plan(data=1)
    state = fz.init(model, tx, plan)
    fz.save(tmp_path, state, plan)
    read = fz.restore(tmp_path, model, tx, plan)
    tiny.same_bits((state.params, state.opt_state), (read.params, read.opt_state))


def test_a_directory_s_name_is_no_url(states, tmp_path):
    """`%41` is not an A, and nothing ends at a question mark."""
    plan, found = PLANS["zero 3"], []
    for number, name in enumerate(("A?#", "%41?#")):
        params = jax.tree.map(lambda x, n=number: x * 2**n, states("zero 3").params)
        fz.save(tmp_path / name, states("zero 3").replace(params=params), plan, asynchronous=False)
    for name in ("A?#", "%41?#"):
        found.append(tiny.host(fz.logical(MODEL, fz.restore(tmp_path / name, MODEL, TX, plan))))
    for path, leaf in found[0].items():
        np.testing.assert_array_equal(found[1][path], leaf * 2)


def test_parameters_alone(states, tmp_path):
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"])
    state = fz.restore(tmp_path, MODEL, None, PLANS["zero 0"])
    tiny.same_bits(fz.logical(MODEL, state), fz.logical(MODEL, states("zero 3")))
    assert np.isfinite(float(fz.eval_step(MODEL, PLANS["zero 0"])(state, BATCH)["loss"]))


FP16 = tiny.plan(zero=3, data=4, precision="fp16")


def scaled(state, **values):
    """A state with another loss scale."""
    old = state.loss_scale
    new = {
        name: jax.device_put(np.asarray(value, was.dtype), was.sharding)
        for name, value in values.items()
        for was in [getattr(old, name)]
    }
    return state.replace(loss_scale=dataclasses.replace(old, **new))


@pytest.mark.parametrize("new", [
    FP16, FP16.replace(data=2, replica=2), FP16.replace(pipe=2, data=2, microbatches=2),
], ids=["same", "replica", "pipe"])  # fmt: skip
def test_the_loss_scale_and_any_kind_of_key_go_along(new, tmp_path):
    state = fz.init(MODEL, TX, FP16, rng=jax.random.key(7, impl="rbg"))
    state = scaled(state, scale=2.0**5, good_steps=11, hysteresis=1, skipped=3)
    fz.save(tmp_path, state, FP16)
    restored = fz.restore(tmp_path, MODEL, TX, new)
    replanned = fz.replan(state, MODEL, TX, FP16, new)
    for after in (restored, replanned):
        tiny.same_bits(state.loss_scale, after.loss_scale)
        assert jax.random.key_impl(after.rng) == "rbg"
        tiny.same_bits(state.rng, after.rng)
    found = [fz.train_step(MODEL, TX, new)(s, BATCH)[1]["loss"] for s in (restored, replanned)]
    assert float(found[0]) == float(found[1])


def test_a_replica_plan_goes_on_from_a_checkpoint(tmp_path):
    old, new = tiny.plan(zero=1, data=2, replica=2), tiny.plan(zero=3, data=2, replica=4)
    state, _ = fz.train_step(MODEL, TX, old)(fz.init(MODEL, TX, old, rng=3), BATCH)
    fz.save(tmp_path, state, old)
    tiny.same_bits(
        fz.logical(MODEL, state), fz.logical(MODEL, fz.restore(tmp_path, MODEL, TX, new))
    )


def twisted(**changes):
    """A small model, with changes."""
    values = {"w": (4, 3), "count": (3,), "dtype": jnp.float32, "counts": jnp.int32} | changes

    def init(rng):
        params = {"body": jnp.ones(values["w"], values["dtype"]), "head": jnp.full((3, 2), 5.0)}
        return params, {"seen": jnp.zeros(values["count"], values["counts"])}

    return fz.Model(init, lambda p, b, batch, rng, train: (jnp.sum(p["body"]), b, {}))


@pytest.mark.parametrize(("changes", "path", "expected", "found"), [
    ({"w": (4, 5)}, "params/body", "float32[4, 5]", "float32[4, 3]"),
    ({"dtype": jnp.bfloat16}, "params/body", "bfloat16[4, 3]", "float32[4, 3]"),
    ({"count": (7,)}, "buffers/seen", "int32[7]", "int32[3]"),
    ({"counts": jnp.float32}, "buffers/seen", "float32[3]", "int32[3]"),
], ids=["shape", "dtype", "buffer shape", "buffer dtype"])  # fmt: skip
def test_leaves_that_do_not_fit_are_refused_by_path(changes, path, expected, found, tmp_path):
    plan = tiny.plan(data=1)
    fz.save(tmp_path, fz.init(twisted(), None, plan), plan, asynchronous=False)
    with pytest.raises(fz.CheckpointError) as caught:
        fz.restore(tmp_path, twisted(**changes), None, plan)
    assert f"{path}: expected {expected}, the checkpoint has {found}" in str(caught.value)
    # The files are looked at as well as what is said of them.
    file = tmp_path / "0" / "meta" / "metadata"
    meta = {key: value for key, value in json.loads(file.read_text()).items() if key != "sum"}
    dtype, shape = expected.rstrip("]").split("[")
    meta["leaves"][path] = [[int(n) for n in shape.split(",")], dtype]
    file.write_text(json.dumps(meta))
    with pytest.raises(fz.CheckpointError) as caught:
        fz.restore(tmp_path, twisted(**changes), None, plan)
    assert f"{path} of checkpoint 0" in str(caught.value)
    assert f"expected {expected}, the file has {found}" in str(caught.value)


def test_weights_alone_start_another_training(tmp_path):
    """From a checkpoint with an optimizer into a run with another one, at step 0."""
    old, new = PLANS["zero 3"], tiny.plan(zero=1, data=4, precision="bf16")
    state, _ = fz.train_step(MODEL, TX, old)(fz.init(MODEL, TX, old, rng=3), BATCH)
    fz.save(tmp_path, state, old)
    tx = optax.sgd(0.1, momentum=0.9)
    found = fz.restore(tmp_path, MODEL, tx, new, fields=("params", "buffers"), rng=5)
    tiny.same_bits(fz.logical(MODEL, state), fz.logical(MODEL, found))
    wanted = fz.init(MODEL, tx, new, rng=5)
    for name in ("step", "opt_state", "rng", "loss_scale"):
        tiny.same_bits(getattr(wanted, name), getattr(found, name))
    step = fz.train_step(MODEL, tx, new)
    params = fz.logical(MODEL, state)
    by_hand = fz.init(MODEL.with_init((jax.device_get(params), {})), tx, new, rng=5)
    losses = [float(step(s, BATCH)[1]["loss"]) for s in (found, by_hand)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("fields", "step"), [(("params",), 0), (("params", "step"), 7)])
def test_the_step_is_taken_where_it_is_asked_for(fields, step, tmp_path):
    plan = tiny.plan(data=1)
    state = fz.init(MODEL, None, plan)
    fz.save(tmp_path, state.replace(step=state.step + 7), plan)
    assert int(fz.restore(tmp_path, MODEL, None, plan, fields=fields).step) == step


def test_nothing_stays_new_in_a_checkpoint_of_a_pipeline(tmp_path):
    """What is refused is where it comes from, not where it goes to."""
    cut, plan = tiny.plan(pipe=2, data=1, microbatches=2), tiny.plan(data=1)
    fz.save(tmp_path / "cut", fz.init(MODEL, None, cut), cut)
    with pytest.raises(fz.CheckpointError, match=r"fresh= needs .* without a pipeline.*pipe=2\)"):
        fz.restore(tmp_path / "cut", MODEL, None, plan, fresh=("head",))
    fz.save(tmp_path / "whole", fz.init(MODEL, None, plan), plan)
    fz.restore(tmp_path / "whole", MODEL, None, cut, fresh=("head",))


def test_a_new_head_stays_new_and_so_do_its_moments(tmp_path):
    old, plan = tiny.plan(zero=3, data=4), tiny.plan(zero=3, data=2)

    def model(head, width):
        def init(rng):
            own = {"body": jnp.ones((8, 4)), head: jax.random.normal(rng, (4, width))}
            return {**own, "out_scale": jnp.ones(4)}, {}  # which begins as `out` does

        return fz.Model(init, lambda p, b, batch, rng, train: (
            jnp.sum((batch["x"] @ p["body"] * p["out_scale"] @ p[head]) ** 2), b, {}))  # fmt: skip

    batch = {"x": np.ones((8, 8), np.float32)}
    state, _ = fz.train_step(model("out", 3), TX, old)(fz.init(model("out", 3), TX, old), batch)
    fz.save(tmp_path, state, old)
    new = model("labels", 5)
    with pytest.raises(fz.CheckpointError) as caught:
        fz.restore(tmp_path, new, TX, plan)
    assert "params/out: in the checkpoint only" in str(caught.value)
    assert "params/labels: not in the checkpoint" in str(caught.value)
    with pytest.raises(fz.CheckpointError, match="fresh names 'params/out', which is no parameter"):
        fz.restore(tmp_path, model("out", 3), TX, plan, fresh=("params/out",))
    found = fz.restore(tmp_path, new, TX, plan, fresh=("out", "labels"), rng=5)
    fresh = tiny.host(fz.init(new, TX, plan, rng=5))
    was, now = tiny.host(state), tiny.host(found)
    for path, value in now.items():
        from_init = "labels" in path
        np.testing.assert_array_equal(value, (fresh if from_init else was)[path], err_msg=path)
    assert int(found.step) == 1
    fz.train_step(new, TX, plan)(found, batch)


@pytest.mark.parametrize("root", ["w", "mu", "blocks"])
def test_only_the_moments_of_what_stays_new_are_new(root, tmp_path):
    """Also where other paths hold its name: another parameter's, and an optimizer's own."""
    plan = tiny.plan(zero=1, data=2, ema=0.9)

    def init(rng):
        return {"w": jnp.ones(4), "mu": jnp.ones(4), "blocks": {"w": jnp.ones(4)}}, {}

    model = fz.Model(init, lambda p, b, batch, rng, train: (
        jnp.mean((batch["x"] * p["w"] * p["blocks"]["w"] + p["mu"]) ** 2), b, {}))  # fmt: skip
    batch = {"x": np.ones((4, 4), np.float32)}
    state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), batch)
    fz.save(tmp_path, state, plan)
    was = dict(named_leaves(state))
    now = dict(named_leaves(fz.restore(tmp_path, model, TX, plan, fresh=(root,))))
    assert now.keys() == was.keys()
    moments = ("opt_state/0/mu", "opt_state/0/nu", "ema")
    own = [p for p in ("w", "mu", "blocks/w") if p.startswith(root)]
    differ = {p for p, leaf in was.items() if p != "rng" and np.any(leaf != now[p])}
    assert differ == {f"{field}/{p}" for field in ("params", *moments) for p in own}
    # Gradients that wait for their step were computed with the old one, those of the others too.
    state, _ = fz.accumulate_step(model, TX, plan)(state, batch)
    fz.save(tmp_path, state, plan)
    with pytest.raises(fz.CheckpointError, match=rf"in progress, of another fresh=\('{root}',\)"):
        fz.restore(tmp_path, model, TX, plan, fresh=(root,))
    rest = ("params", "opt_state", "ema", "buffers", "step", "rng")
    assert fz.restore(tmp_path, model, TX, plan, fresh=(root,), fields=rest).grads is None
    for fields in ("params", ("params", "weights")):
        with pytest.raises(fz.CheckpointError, match=r"fields=.*: expected some of \('params'"):
            fz.restore(tmp_path, model, TX, plan, fields=fields)
    with pytest.raises(fz.CheckpointError, match=r"fresh has re\.compile\('w'\): expected paths"):
        fz.restore(tmp_path, model, TX, plan, fresh=(re.compile("w"),))


def test_several_moments_of_what_stays_new_are_new_too(tmp_path):
    """A tuple for each parameter, behind its path; not what is in one array, or in a list."""
    plan, kept = tiny.plan(zero=3, data=2), optax.sm3(0.1)
    listed = optax.GradientTransformation(
        lambda params: [jnp.zeros_like(p) for p in jax.tree.leaves(params)],
        lambda updates, state, _: (updates, [s + u for s, u in zip(
            state, jax.tree.leaves(updates), strict=True)]),
    )  # fmt: skip
    model = fz.Model(({"w": np.ones((16, 3)), "v": np.ones((3, 27))}, {}), lambda p, b, batch, *_: (
        jnp.mean((batch["x"] @ p["w"] @ p["v"] - batch["y"]) ** 2), b, {}))  # fmt: skip
    for name, tx in {"kept": kept, "flat": optax.flatten(TX), "listed": listed}.items():
        state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), tiny.points())
        fz.save(tmp_path / name, state, plan)
    was = dict(named_leaves(fz.restore(tmp_path / "kept", model, kept, plan).opt_state))
    now = fz.restore(tmp_path / "kept", model, kept, plan, fresh=("w",)).opt_state
    own = {path for path in was if "/w" in path}
    assert own == {"0/mu/w/0", "0/mu/w/1", "0/nu/w"}
    assert {path for path, leaf in named_leaves(now) if np.any(leaf != was[path])} == own
    assert not any(np.any(leaf) for path, leaf in named_leaves(now) if path in own)
    with pytest.raises(fz.CheckpointError, match=r"0/mu \[\d+\] is of no parameter by its path"):
        fz.restore(tmp_path / "flat", model, optax.flatten(TX), plan, fresh=("w",))
    with pytest.raises(fz.CheckpointError, match=r"/0 \[3, 27\] is of no parameter by its path"):
        fz.restore(tmp_path / "listed", model, listed, plan, fresh=("w",))


def test_what_was_parked_by_hand_is_saved_and_replanned(states, tmp_path):
    plan, new = PLANS["zero 3"], tiny.plan(zero=1, data=2)
    state = states("zero 3")
    for tier in ("host", "disk"):
        parked = fz.offload(state, "opt_state", to=tier, donate=False)
        fz.save(tmp_path / tier, parked, plan)
        tiny.same_bits(state, fz.restore(tmp_path / tier, MODEL, TX, plan))
        moved = fz.replan(parked, MODEL, TX, plan, new)
        fz.placement(moved).require(opt_state=tier, params="device")
        tiny.same_bits(fz.reload(moved), fz.replan(state, MODEL, TX, plan, new))
        fz.placement(parked).require(opt_state=tier)  # the one given stays as it is


def test_refusals(states, tmp_path):
    plan = PLANS["zero 3"]
    with pytest.raises(fz.CheckpointError, match="found none"):
        fz.restore(tmp_path, MODEL, TX, plan)
    fz.save(tmp_path, states("zero 3"), plan)
    with pytest.raises(
        fz.CheckpointError, match=r"opt_state/0/nu/blocks/b: in the checkpoint only"
    ):
        fz.restore(tmp_path, MODEL, optax.sgd(0.1), plan)
    with pytest.raises(
        fz.CheckpointError,
        match=r"blocks/w: expected float32\[4, 16, 16\], .* float32\[3, 16, 16\]",
    ):
        fz.restore(tmp_path, tiny.chain(4), TX, plan)
    with pytest.raises(fz.PlanError, match=r"save\(path, state, plan\): expected an fz.Plan"):
        fz.save(tmp_path, states("zero 3"), None)
    for keep, shown in ((0, "0"), ("2", "'2'"), (1.5, "1.5"), (np.int64(0), "0")):
        with pytest.raises(fz.CheckpointError, match=f"keep={shown}: expected at least 1"):
            fz.save(tmp_path, states("zero 3"), plan, keep=keep)
    ordered = states("zero 3").replace(rows=(("blocks", (2, 0, 1)),))
    with pytest.raises(fz.CheckpointError, match="it is a pipeline's, the plan has none"):
        fz.save(tmp_path, ordered, plan)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(fz.CheckpointError, match="file"):
        fz.save(blocked / "run", states("zero 3"), plan, asynchronous=False)
    assert fz.checkpoint(tmp_path).number == 0


def test_a_position_that_json_cannot_hold_is_refused_at_once(states, tmp_path):
    with pytest.raises(fz.CheckpointError, match=r"data_position: expected .* got \{'rows': \{1"):
        fz.save(tmp_path / "run", states("zero 3"), PLANS["zero 3"], data_position={"rows": {1}})
    assert not (tmp_path / "run").exists()


def test_skipped_steps_are_counted_on_in_another_precision(tmp_path):
    old = tiny.plan(zero=3, data=8, precision="fp16")
    new = old.replace(precision="bf16", skip_nonfinite=True)
    state = fz.init(MODEL, TX, old)
    scale = dataclasses.replace(state.loss_scale, skipped=state.loss_scale.skipped + 3)
    fz.save(tmp_path, state.replace(loss_scale=scale), old)
    after = fz.restore(tmp_path, MODEL, TX, new)
    assert (int(after.loss_scale.skipped), float(after.loss_scale.scale)) == (3, 1.0)


def test_a_leaf_in_slabs_along_a_later_dim_is_written_whole(tmp_path):
    at = fz.init(tiny.chain(), None, tiny.plan(data=1)).step.sharding
    x = jax.device_put(jnp.arange(24.0).reshape(4, 6), at)
    want = np.array(x)
    leaf = park(x, Parking("host", (1, 2)), str(tmp_path))
    np.testing.assert_array_equal(_readable(leaf, "x"), want)


@pytest.mark.parametrize("given", [{"zero": 0}, {"ema": None}, {"min_shard_bytes": 2**14}])
def test_a_state_that_was_saved_with_another_plan_is_restored_as_it_was_kept(given, tmp_path):
    plan = tiny.plan(zero=3, data=4, ema=0.5)
    state = fz.init(MODEL, TX, plan, devices=jax.devices()[:4])
    fz.save(tmp_path, state, plan.replace(**given))
    tiny.same_bits(fz.restore(tmp_path, MODEL, TX, plan, devices=jax.devices()[:4]), state)


@pytest.mark.parametrize("num", [2, 4])
def test_the_layers_of_a_checkpoint_of_a_pipeline_are_counted(num, tmp_path):
    plan = tiny.plan(zero=1, pipe=2, data=1, microbatches=2)  # 3 layers in 4 rows
    fz.save(tmp_path, fz.init(MODEL, None, plan, devices=jax.devices()[:2]), plan)
    message = re.escape(f"blocks/b: expected float32[{num}, 16], the checkpoint has float32[3, 16]")
    with pytest.raises(fz.CheckpointError, match=message):
        fz.restore(tmp_path, tiny.chain(num), None, fz.Plan(data=1), devices=jax.devices()[:1])


def rows_of(num, columns=3):
    """A model of so many rows: any from 25 to 28 lie in 28 on four devices."""
    init = {"w": jnp.ones((num, columns)), "v": jnp.ones((8, 3))}, {}
    return fz.Model(init, lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize(("had", "wanted"), [(27, 28), (28, 27), (26, 27)])
def test_a_model_of_a_few_rows_more_or_less_is_another(had, wanted, zero, tmp_path):
    plan, devices = tiny.plan(zero=zero, data=4), jax.devices()[:4]
    state, other = fz.init(rows_of(had), TX, plan, devices=devices), rows_of(wanted)
    shapes = rf"params/w: expected \S*\[{wanted}, 3\], (got|the checkpoint has) \S*\[{had}, 3\]"
    batch = {"x": np.ones((4, 1), np.float32)}
    for use in (
        lambda: fz.replan(state, other, TX, plan, plan.replace(zero=0), devices=devices),
        lambda: fz.train_step(other, TX, plan, devices=devices)(state, batch),
        lambda: jax.jit(fz.eval_step(other, plan, devices=devices))(state, batch),
    ):
        with pytest.raises(fz.StateError, match=shapes):
            use()
    with pytest.raises(fz.StateError, match=rf"w: expected \[{wanted}, .* got \[{had}, 3\]"):
        fz.logical(other, state)
    fz.save(tmp_path, state, plan)
    for fields in (("params",), ("opt_state",)):
        with pytest.raises(fz.CheckpointError, match=shapes):
            fz.restore(tmp_path, other, TX, plan, fields=fields, devices=devices)
    fresh = fz.restore(tmp_path, other, TX, plan, fresh=("w",), devices=devices)
    assert fz.logical(other, fresh)["w"].shape == (wanted, 3)
    tiny.same_bits(fz.restore(tmp_path, rows_of(had), TX, plan, devices=devices), state)


def test_rows_that_only_a_larger_model_has_are_named_where_they_are_left_out(tmp_path):
    plan, devices = tiny.plan(zero=3, data=4), jax.devices()[:4]
    fz.save(tmp_path, fz.init(rows_of(28), None, plan, devices=devices), plan, asynchronous=False)
    meta = tmp_path / "0" / "meta" / "metadata"
    earlier = json.loads(meta.read_text())
    del earlier["padded"], earlier["sum"]  # as earlier versions wrote it
    meta.write_text(json.dumps(earlier))
    with pytest.warns(UserWarning, match=r"params/w: expected float32\[26, 3\].* \[28, 3\]"):
        fz.restore(tmp_path, rows_of(26), None, plan, devices=devices)
