"""A batch in which nothing counts, all padding, takes no step."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


MODEL, TX = tiny.chain(2), optax.adamw(1e-2, weight_decay=0.1)
PLANS = {
    "zero 0": {"zero": 0, "data": 1},
    "zero 3, clipped": {"zero": 3, "data": 2, "clip_norm": 0.1, "microbatches": 2},
    "fp16": {"zero": 1, "data": 2, "precision": "fp16"},
    "tiers": {"zero": 3, "data": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 300},
    "pipeline": {"zero": 1, "pipe": 2, "data": 2, "microbatches": 2},
}


def _padded() -> dict[str, Any]:
    batch = tiny.tokens(8)
    return {**batch, "mask": np.zeros_like(batch["mask"])}


def _whole(state: fz.TrainState, plan: fz.Plan) -> dict[str, np.ndarray]:
    """What a step changes, by path, as one device would have it."""
    whole = fz.replan(state, MODEL, TX, plan, tiny.plan(zero=0, data=1))
    return tiny.host((whole.step, whole.params, whole.opt_state))


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_state_stays_as_it_is(options):
    plan = tiny.plan(**options)
    state, step = fz.init(MODEL, TX, plan), fz.train_step(MODEL, TX, plan)
    state, _ = step(state, tiny.tokens(8))
    before = _whole(state, plan)
    state, metrics = step(state, _padded())
    assert (float(metrics["loss"]), float(metrics["count"])) == (0.0, 0.0)
    assert float(metrics["grad_norm"]) == 0.0
    after = _whole(state, plan)
    for path, value in before.items():
        assert value.tobytes() == after[path].tobytes(), path
    assert float(fz.eval_step(MODEL, plan)(state, _padded())["loss"]) == 0.0
    _, metrics = step(state, tiny.tokens(8))
    assert np.isfinite(float(metrics["loss"]))


def test_running_statistics_of_padding_are_dropped():
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        total = jnp.sum(batch["m"] * (batch["x"] @ p["w"]))
        return fz.Mean(total, jnp.sum(batch["m"])), {"mean": jnp.mean(batch["x"])}, {}

    model = fz.Model(lambda key: ({"w": jnp.ones(4)}, {"mean": jnp.ones(())}), loss)
    plan = tiny.plan(zero=0, data=2)
    batch = {"x": np.full((4, 4), 7.0, np.float32), "m": np.zeros(4, np.float32)}
    state, metrics = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), batch)
    assert float(state.buffers["mean"]) == 1.0
    assert float(metrics["grad_norm"]) == float(metrics["nonfinite"]) == 0.0  # and no overflow


def test_a_state_of_one_value_twice_of_another_leaf_or_of_a_number_stays():
    """What cannot be chosen where it is computed is chosen all the same."""
    first = {"one": 1.0, "two": 2.0, "here": 3.0, "there": 4.0, "number": 5.0}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        twice = optax.tree.sum(grads)
        moved = {"here": state["there"], "there": state["here"]}
        return grads, {"one": twice, "two": twice, **moved, "number": np.float32(6)}

    def init(_: Any) -> Any:
        return {name: jnp.float32(value) for name, value in first.items()}

    tx, plan = optax.GradientTransformation(init, update), tiny.plan(zero=1, data=2)
    state, step = fz.init(MODEL, tx, plan), fz.train_step(MODEL, tx, plan)
    state, _ = step(state, _padded())
    assert {name: float(x) for name, x in state.opt_state.items()} == first
    state, _ = step(state, tiny.tokens(8))
    found = {name: float(x) for name, x in state.opt_state.items()}
    assert found["one"] == found["two"] != 0
    assert [found[name] for name in ("here", "there", "number")] == [4.0, 3.0, 6.0]
