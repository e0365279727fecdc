"""Buffers: how devices' values become one is said, shown by the program, or asked for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.sharding.buffers import declared_reduction


D = 4
TX = optax.sgd(0.0)
# Eight rows; four of them above 3.
BATCH = {"x": np.tile(np.arange(8, dtype=np.float32)[:, None], (1, D))}
FIRST = {
    "above": jnp.zeros((), jnp.int32),
    "least": jnp.zeros((), jnp.int32),
    "seen": jnp.zeros((), bool),
    "total": jnp.zeros(()),
    "mean": jnp.zeros(()),
    "steps": jnp.zeros((), jnp.int32),
}
HOW = {"above": "sum", "least": "max", "seen": "max", "total": "sum"}


def _noted(buffers: Any, x: jax.Array) -> Any:
    above = jnp.sum(x[:, 0] > 3).astype(jnp.int32)
    return {
        "above": buffers["above"] + above,
        "least": jnp.maximum(buffers["least"], jnp.max(x).astype(jnp.int32) - 20),
        "seen": buffers["seen"] | jnp.any(x[:, 0] == 6),
        "total": buffers["total"] + above.astype(jnp.float32),
        "mean": jnp.mean(x).astype(jnp.float32),
        "steps": buffers["steps"] + 1,
    }


def _weights(key: jax.Array) -> Any:
    return {"w": jnp.eye(D)}


def _plain(how: Any) -> fz.Model:
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        return jnp.mean(batch["x"] @ p["w"]), _noted(buffers, batch["x"]), {}

    return fz.Model(lambda key: (_weights(key), FIRST), loss, buffer_reduce=how)


def _chain(how: Any) -> fz.Sequential:
    def note(p: Any, x: Any, ctx: Any) -> Any:
        return x @ p["w"], _noted(ctx.buffers, ctx.batch["x"])

    def both(key: jax.Array) -> Any:
        return _weights(key), FIRST

    return fz.Sequential(
        [
            fz.Layer("in", _weights, lambda p, x, ctx: x["x"] @ p["w"]),
            fz.Stack("stack", 2, both, note, stateful=True, buffer_reduce=how),
            fz.Layer("own", both, note, stateful=True, buffer_reduce=how),
        ],
        loss=lambda x, batch: jnp.mean(x),
    )


PLANS = {
    "one device": ("plain", {"zero": 0, "data": 1}, 1),
    "devices": ("plain", {"zero": 3, "data": 4}, 1),
    "hybrid, microbatches": ("chain", {"data": 2, "replica": 2, "microbatches": 2}, 2),
    "pipeline": ("chain", {"pipe": 2, "data": 2, "microbatches": 2}, 2),
}


@pytest.mark.parametrize(("kind", "options", "passes"), PLANS.values(), ids=PLANS)
def test_a_count_is_the_whole_batch_s(kind, options, passes):
    model, plan = {"plain": _plain, "chain": _chain}[kind](HOW), tiny.plan(**options)
    state, step = fz.init(model, TX, plan), fz.train_step(model, TX, plan)
    for _ in range(2):
        state, _ = step(state, BATCH)
    state = fz.replan(state, model, TX, plan, tiny.plan(zero=0, data=1))
    owners = [state.buffers] if kind == "plain" else [state.buffers["own"], state.buffers["stack"]]
    for buffers in owners:
        wanted = {"above": 8, "least": 0, "seen": True, "total": 8.0, "steps": 2 * passes}
        for name, value in wanted.items():
            assert np.all(np.asarray(buffers[name]) == value), (name, buffers[name])
        # Of the last microbatch of each device.
        assert kind == "chain" or np.all(np.asarray(buffers["mean"]) == 3.5)


@pytest.mark.parametrize("kind", ["plain", "chain"])
def test_integers_that_follow_the_batch_must_be_told(kind):
    """Alone on one device there is nothing to tell."""
    how = {name: word for name, word in HOW.items() if name != "above"}
    model = {"plain": _plain, "chain": _chain}[kind](how)
    one = tiny.plan(zero=0, data=1)
    fz.train_step(model, TX, one)(fz.init(model, TX, one), BATCH)
    plan = tiny.plan(zero=0, data=2)
    where = {"plain": "above", "chain": "(stack|own)/above"}[kind]
    with pytest.raises(fz.StateError, match=rf"buffers/{where} \(int32\) .*buffer_reduce=.*'sum'"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)


def test_a_stack_alone_on_one_device_is_told_nothing_either():
    def note(p: Any, x: Any, ctx: Any) -> Any:
        seen = ctx.buffers["above"] + jnp.sum(x[:, 0] > 3).astype(jnp.int32)
        return x @ p["w"], {"above": seen}

    def both(key: jax.Array) -> Any:
        return _weights(key), {"above": FIRST["above"]}

    links = [
        fz.Layer("in", _weights, lambda p, x, ctx: x["x"] @ p["w"]),
        fz.Stack("stack", 2, both, note, stateful=True),
    ]
    model, plan = fz.Sequential(links, loss=lambda x, batch: jnp.mean(x)), tiny.plan(data=1)
    state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    np.testing.assert_array_equal(state.buffers["stack"]["above"], [4, 4])


def _counting(count: Any) -> fz.Model:
    first = {"seen": jnp.zeros((), jnp.int32), "steps": jnp.zeros((), jnp.int32)}

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        new = {"seen": buffers["seen"] + count(batch["x"]), "steps": buffers["steps"] + 1}
        return jnp.mean(batch["x"] @ p["w"]), new, {}

    return fz.Model(lambda key: (_weights(key), first), loss)


@pytest.mark.parametrize(
    "count",
    [
        lambda x: x.size,
        lambda x: jnp.sum(jnp.ones_like(x), dtype=jnp.int32),
        lambda x: np.ones(x.shape, np.int32).sum(),
    ],
    ids=["size", "computed", "constant"],
)
def test_a_count_of_rows_must_be_told_as_that_of_values(count):
    """No value of the batch is in it, yet each device counts its own."""
    model, plan = _counting(count), tiny.plan(zero=0, data=2)
    with pytest.raises(fz.StateError, match=r"buffers/seen \(int32\) changes .*'sum'"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)


def test_an_evaluation_wants_buffers_on_the_device():
    model, plan = _counting(lambda x: 1), tiny.plan(zero=0, data=1)
    state = fz.offload(fz.init(model, TX, plan), "buffers")
    with pytest.raises(fz.PlacementError, match=r"eval_step: .* buffers/seen"):
        fz.eval_step(model, plan)(state, BATCH)


def test_a_count_of_rows_is_seen_beside_values_that_are_no_rows():
    def count(p: Any, x: Any, ctx: Any) -> Any:
        return x["rows"] * x["gain"], {"seen": ctx.buffers["seen"] + x["rows"].shape[0]}

    model = fz.Sequential(
        [
            fz.Layer("in", _weights, lambda p, x, ctx: {
                "rows": x["x"] @ p["w"], "gain": jnp.float32(2)}),
            fz.Layer("count", lambda key: ({}, {"seen": jnp.int32(0)}), count, stateful=True),
        ],
        loss=lambda x, batch: jnp.mean(x),
    )  # fmt: skip
    plan = tiny.plan(zero=0, data=2)
    with pytest.raises(fz.StateError, match=r"buffers/count/seen \(int32\) changes .*'sum'"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)


def test_a_count_of_rows_is_seen_beside_an_array_that_is_no_rows():
    """Which leaves are rows, a loss is not told; by name the other one comes first."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        total = jnp.mean(batch["x"] @ p["w"]) * jnp.mean(batch["classes"])
        return total, {"seen": buffers["seen"] + (batch["x"].shape[0] if train else 0)}, {}

    model = fz.Model(lambda key: (_weights(key), {"seen": jnp.int32(0)}), loss)
    plan = tiny.plan(zero=0, data=2)
    batch = {"classes": fz.Shared(np.ones(7, np.float32)), **BATCH}
    with pytest.raises(fz.StateError, match=r"buffers/seen \(int32\) changes .*'sum'"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), batch)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("enters", "counts"),
    [
        (lambda x: jnp.tile(x, (3, 1)), lambda x: x.shape[0]),
        (lambda x: jnp.stack([x] * 3), lambda x: x.shape[1]),
        (lambda x: x, lambda x: 1),
    ],
    ids=["flattened", "time first", "a step"],
)
def test_a_count_of_rows_is_seen_wherever_they_are(enters, counts, stacked):
    """A layer is given tokens of all rows in one dim, or rows in another than the first."""

    def count(p: Any, x: Any, ctx: Any) -> Any:
        return x * p["gain"], {"seen": ctx.buffers["seen"] + counts(x)}

    def init(key: Any) -> Any:
        return {"gain": jnp.ones(())}, {"seen": jnp.int32(0)}

    of = fz.Stack("count", 3, init, count, stateful=True)
    model = fz.Sequential(
        [
            fz.Layer("in", _weights, lambda p, x, ctx: enters(x["x"] @ p["w"])),
            of if stacked else fz.Layer("count", init, count, stateful=True),
        ],
        loss=lambda x, batch: jnp.mean(x),
    )
    for plan in (tiny.plan(zero=0, data=2), tiny.plan(data=2, pipe=2, microbatches=1)):
        state = fz.init(model, TX, plan)
        step = fz.train_step(model, TX, plan)
        if counts(jnp.ones((2, 2))) == 1:
            state, _ = step(state, BATCH)
            assert np.max(state.buffers["count"]["seen"]) == 1
            continue
        with pytest.raises(fz.StateError, match=r"buffers/count/seen \(int32\) changes .*'sum'"):
            step(state, BATCH)


def test_what_takes_one_number_of_rows_or_counts_none_is_not_asked():
    """The reshape fails for any other number of rows."""
    plan = tiny.plan(zero=0, data=2)
    for count in (lambda x: x.reshape(4, D).shape[0], lambda x: x.shape[1]):
        model = _counting(count)
        state = fz.init(model, TX, plan)
        assert fz.train_step(model, TX, plan)(state, BATCH)[0].buffers["seen"] == D


def test_the_largest_is_not_a_number_where_one_device_has_none():
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        return jnp.mean(p["w"]), {"largest": jnp.max(batch["x"])}, {}

    first = {"largest": jnp.zeros(())}
    model = fz.Model(lambda key: (_weights(key), first), loss, buffer_reduce={"largest": "max"})
    plan = tiny.plan(data=4)
    state, step = fz.init(model, TX, plan), fz.train_step(model, TX, plan)
    state, _ = step(state, BATCH)
    assert state.buffers["largest"] == 7
    state, _ = step(state, {"x": np.where(BATCH["x"] == 2, np.nan, BATCH["x"])})
    assert np.isnan(state.buffers["largest"])


def test_what_a_model_agreed_about_itself_is_the_same():
    """A count that the loss adds up over all devices with a collective."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        above = jnp.sum(batch["x"][:, 0] > 3).astype(jnp.int32)
        if train:
            above = jax.lax.psum(above, ("replica", "data"))
        return jnp.mean(batch["x"] @ p["w"]), {"above": buffers["above"] + above}, {}

    model = fz.Model(lambda key: (_weights(key), {"above": FIRST["above"]}), loss)
    plan = tiny.plan(zero=0, data=4)
    state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    assert int(state.buffers["above"]) == 4


@pytest.mark.parametrize(
    "own",
    [lambda above: jax.lax.psum(above, "data"), lambda above: jax.lax.axis_index("data")],
    ids=["over one axis", "its place"],
)
def test_what_devices_agree_about_in_part_must_be_told(own):
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        above = jnp.sum(batch["x"][:, 0] > 3).astype(jnp.int32)
        above = own(above) if train else above
        return jnp.mean(batch["x"] @ p["w"]), {"above": buffers["above"] + above}, {}

    model = fz.Model(lambda key: (_weights(key), {"above": FIRST["above"]}), loss)
    plan = tiny.plan(zero=0, data=2, replica=2)
    with pytest.raises(fz.StateError, match="changes with the batch"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)


def test_of_truth_values_and_a_mean_of_them_is_said_what_there_is():
    plan = tiny.plan(zero=0, data=2)
    for how in ({name: word for name, word in HOW.items() if name != "seen"}, "mean"):
        model = _plain(how)
        said = r"buffers/(above|seen) .*there is no mean" if how == "mean" else "buffers/seen"
        with pytest.raises(fz.StateError, match=said) as caught:
            fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
        if how != "mean":
            assert "{'seen': 'max'} (true where it is on any device), or 'same'" in str(
                caught.value
            )


def test_the_longest_path_says_how():
    layer = fz.Layer("a", _weights, _noted, stateful=True,
                     buffer_reduce={"": "same", "above": "sum", "above/all": "max"})  # fmt: skip
    found = [declared_reduction(layer, name) for name in ("above/all", "above/some", "below")]
    assert found == ["max", "sum", "same"]


REFUSED = {
    "a word": ({"above": "median"}, "buffer_reduce='median': expected one of"),
    "a path": ({"below": "sum"}, "names 'below', which is no buffer"),
    "a sum of booleans": ({"seen": "sum"}, r"buffer_reduce\['seen'\]='sum' of booleans"),
    "a mean of integers": ({"above": "mean"}, r"buffer_reduce\['above'\]='mean' of integers"),
}


@pytest.mark.parametrize(("how", "said"), REFUSED.values(), ids=REFUSED)
def test_reductions_that_cannot_be_are_refused(how, said):
    with pytest.raises(fz.StateError, match=said):
        fz.init(_plain(how), TX, tiny.plan(data=1))


def test_parameters_and_buffers_may_be_one_array_each(tmp_path):
    def loss(params, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ params), buffers + 1, {}

    model, tx = fz.Model((jnp.ones((D, D)), jnp.zeros(())), loss), optax.adam(0.1)
    plan, other = tiny.plan(zero=0, data=8, ema=0.5), tiny.plan(zero=3, data=4, ema=0.5)
    state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), BATCH)
    state = fz.replan(state, model, tx, plan, other)
    state, _ = fz.accumulate_step(model, tx, other)(state, BATCH)
    fz.save(tmp_path, state, other)
    same = fz.restore(tmp_path, model, tx, other)
    assert float(same.buffers) == 2
    for name in ("params", "opt_state", "grads", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(same, name), getattr(state, name))


def test_random_keys_are_no_buffers():
    model = fz.Model(lambda key: (_weights(key), {"key": key}), _plain(HOW).loss)
    with pytest.raises(fz.StateError, match=r"buffers/key is a random key .*key_data"):
        fz.init(model, TX, tiny.plan(data=1))


def test_a_mean_is_that_of_all_groups_of_replicas():
    plan = tiny.plan(zero=1, data=2, replica=2)
    state, _ = fz.train_step(_plain(HOW), TX, plan)(fz.init(_plain(HOW), TX, plan), BATCH)
    assert float(state.buffers["mean"]) == 3.5


def test_one_word_for_all_leaves_integers_as_they_are_and_averages_complex_numbers():
    def loss(params, buffers, batch, rng, train):
        told = jnp.mean(batch["x"]) * (1 + 2j)
        new = {"count": buffers["count"] + 1, "told": told.astype(jnp.complex64)}
        return jnp.mean(batch["x"] @ params), new, {}

    start = {"count": jnp.int32(0), "told": jnp.complex64(0)}
    plan = tiny.plan(data=4)
    for how in ("mean", {}):
        model = fz.Model((jnp.ones((D, D)), start), loss, buffer_reduce=how)
        state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
        assert state.buffers["count"].dtype == jnp.int32
        assert int(state.buffers["count"]) == 1
        expected = np.mean(BATCH["x"]) * (1 + 2j)
        np.testing.assert_allclose(state.buffers["told"], expected, rtol=1e-5)

    def differs(params, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ params), jnp.int32(batch["x"][0, 0]), {}

    model = fz.Model((jnp.ones((D, D)), jnp.int32(0)), differs, buffer_reduce="mean")
    with pytest.raises(fz.StateError, match="changes with the batch"):
        fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)


def test_a_mean_of_float16_does_not_overflow_on_its_way():
    def loss(params, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ params), jnp.float16(30000), {}

    model, plan = fz.Model((jnp.ones((D, D)), jnp.float16(0)), loss), tiny.plan(data=4)
    state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    assert state.buffers.dtype == jnp.float16
    assert float(state.buffers) == 30000


@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_may_be_set_to_a_number(devices):
    def loss(p, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ p["w"]), {"a": jnp.asarray(2.5), "b": jnp.asarray(3)}, {}

    def init(key):
        return {"w": jnp.ones(D)}, {"a": jnp.zeros(()), "b": jnp.zeros((), jnp.int32)}

    plan, model = tiny.plan(zero=3, data=devices), fz.Model(init, loss, buffer_reduce={"b": "same"})
    state, _ = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    assert (float(state.buffers["a"]), int(state.buffers["b"])) == (2.5, 3)
    assert (state.buffers["a"].dtype, state.buffers["b"].dtype) == ("float32", "int32")
