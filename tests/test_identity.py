"""A leaf is its place in the tree: two whose paths are written alike stay two, everywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


D = 8
TX = optax.adam(0.5)
BATCH = {"x": np.ones((8, D), np.float32)}
NAMES = ["link/a/'b/c'", "link/'a/b'/c"]


def _init(key: jax.Array) -> Any:
    return {"a": {"b/c": jnp.full(D, 1.0)}, "a/b": {"c": jnp.full(D, 2.0)}}


def _apply(p: Any, x: Any, ctx: Any) -> Any:
    first, second = x @ p["a"]["b/c"], x @ p["a/b"]["c"]
    # The loss pulls on the first leaf alone; the second one shows in a metric.
    return x, jnp.stack([first, second * 0 + second])


def _model(frozen: frozenset[str] = frozenset()) -> fz.Sequential:
    def head(p: Any, x: Any, ctx: Any) -> Any:
        _, both = x
        return jnp.mean(both[0]), {"second": jnp.mean(both[1])}

    return fz.Sequential(
        [
            fz.Layer("link", _init, lambda p, x, ctx: _apply(p, x["x"], ctx)),
            fz.Layer("head", lambda key: {"unused": jnp.zeros(D)}, head),
        ],
        frozen=frozen,
    )


PLANS = {
    "zero 0": {"zero": 0, "data": 2},
    "zero 1, bf16": {"zero": 1, "data": 2, "precision": "bf16", "microbatches": 2},
    "zero 3": {"zero": 3, "data": 2, "gather_dtype": "int8", "secondary": 2},
    "small leaves": {"zero": 3, "data": 2, "min_shard_bytes": 10**6},
    "lazy": {"zero": 1, "data": 2, "gather": "lazy"},
    "tiers": {"zero": 3, "data": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 16},
    "pipeline": {"zero": 3, "data": 2, "pipe": 2, "microbatches": 2},
}


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_each_leaf_has_its_own_value_gradient_and_moments(options, tmp_path):
    model, plan = _model(), tiny.plan(**options)
    state = fz.init(model, TX, plan)
    assert float(fz.eval_step(model, plan)(state, BATCH)["second"]) == 2.0 * D
    state, metrics = fz.train_step(model, TX, plan)(state, BATCH)
    assert float(metrics["second"]) == 2.0 * D
    fz.save(tmp_path, state, plan, asynchronous=False)
    whole = tiny.plan(zero=0, data=1)
    for found in (
        fz.replan(state, model, TX, plan, whole),
        fz.restore(tmp_path, model, TX, whole),
    ):
        link = found.params["link"]
        np.testing.assert_allclose(link["a"]["b/c"], 0.5, rtol=1e-3)
        assert np.all(np.asarray(link["a/b"]["c"]) == 2.0)
        mu = found.opt_state[0].mu["link"]
        np.testing.assert_allclose(mu["a"]["b/c"], 0.1, rtol=1e-2)
        assert not np.any(mu["a/b"]["c"])


def test_both_are_named_in_reports_and_may_be_named_by_users():
    plan = tiny.plan(zero=3, data=2)
    about = fz.describe(plan, _model(), TX)
    params = [leaf.path for leaf in about.leaves if leaf.state_class == "params"]
    assert params[1:] == NAMES
    model = _model(frozenset({NAMES[0]}))
    state = fz.init(model, TX, plan)
    assert [leaf.path for leaf in fz.placement(state).leaves[1:3]] == NAMES
    parked = fz.offload(state, "params", to="host", where="'b/c'")
    assert parked.params["link"]["a"]["b/c"].sharding.memory_kind == "pinned_host"
    assert parked.params["link"]["a/b"]["c"].sharding.memory_kind == "device"
    state, _ = fz.train_step(model, TX, plan)(fz.reload(parked), BATCH)
    assert np.all(np.asarray(state.params["link"]["a"]["b/c"]) == 1.0)
    with pytest.raises(fz.StateError, match=r"link/a/b/c.*no parameters"):
        fz.init(_model(frozenset({"link/a/b/c"})), TX, plan)


def test_moments_of_one_of_them_alone_belong_to_it():
    """`optax.masked` keeps no leaf for the other: a moment still knows its parameter."""

    def second(params: Any) -> Any:
        return jax.tree.map(lambda x: False, params) | {
            "link": {"a": {"b/c": False}, "a/b": {"c": True}}
        }

    about = fz.describe(tiny.plan(zero=3, data=2), _model(), optax.masked(TX, second))
    moments = [leaf for leaf in about.leaves if leaf.path.endswith("mu/link/a/b/c")]
    assert [leaf.why for leaf in moments] == [f"as {NAMES[1]}"]


@pytest.mark.parametrize("beside", [{}, {"a": jnp.full(D, 2.0)}], ids=["alone", "beside another"])
def test_a_key_may_be_empty(beside, tmp_path):
    """Its leaf is then written as a tree is that is a leaf itself, and is none."""
    tree = {"": jnp.full(D, 3.0), **beside}

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        return jnp.mean(batch["x"] @ p[""]), buffers, {}

    model = fz.Model((tree, {"": jnp.ones(2)}), loss)
    plan, other = tiny.plan(zero=3, data=2, ema=0.5), tiny.plan(zero=1, data=4, ema=0.5)
    state, _ = fz.accumulate_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    state, _ = fz.train_step(model, TX, plan)(state, BATCH)
    np.testing.assert_allclose(state.params[""], 2.5, rtol=1e-5)
    fz.save(tmp_path, state, plan, asynchronous=False)
    again = fz.restore(tmp_path, model, TX, other)
    tiny.same_bits(again, fz.replan(state, model, TX, plan, other))
