"""Which inputs are rounded: what a model is called with, never what its loss reads beside that."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


TX = optax.sgd(0.0)
D = 8
BATCH = {"x": np.ones((8, D), np.float32), "target": np.full(8, 70001.0, np.float32)}
PLANS = {
    "fp32": {"zero": 1, "data": 2},
    "bf16": {"zero": 3, "data": 2, "precision": "bf16", "microbatches": 2},
    "fp16": {"zero": 1, "data": 2, "precision": "fp16"},
    "mpmd": {"zero": 1, "data": 2, "pipe": 2, "microbatches": 2, "precision": "bf16"},
    "spmd": {"data": 2, "pipe": 2, "microbatches": 2, "precision": "bf16", "pipe_backend": "spmd"},
}
HALF = {"bf16": "bf16", "fp16": "f16"}


def _init(key: jax.Array) -> Any:
    return {"w": jnp.eye(D)}


def _off(out: jax.Array, batch: Any) -> Any:
    """How far outputs of one are from the target: 70000, which needs 17 bits."""
    gap = batch["target"] - out[:, 0].astype(jnp.float32)
    return fz.Mean(jnp.sum(gap), jnp.float32(gap.size))


def _plain() -> fz.Model:
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        return _off(fz.cast(batch["x"], like=p) @ p["w"] @ p["w"], batch), buffers, {}

    return fz.Model(lambda key: (_init(key), {}), loss)


def _chain() -> fz.Sequential:
    first = fz.Layer("a", _init, lambda p, batch, ctx: batch["x"] @ p["w"])
    return fz.Sequential([first, fz.Layer("b", _init, lambda p, x, ctx: x @ p["w"])], _off)


def _flax() -> fz.Model:
    nn = pytest.importorskip("flax.linen")

    def loss(forward: Any, batch: Any) -> Any:
        return _off(forward(batch["x"]), batch)

    dense = nn.Dense(D, use_bias=False, kernel_init=lambda *_: jnp.eye(D))
    return fz.from_flax(nn.Sequential([dense, dense.clone()]), loss, BATCH["x"])


MODELS = {"plain": _plain, "chain": _chain, "flax": _flax}
# Only chains can be cut into stages.
CASES = [(kind, name) for kind in MODELS for name, options in PLANS.items()
         if kind == "chain" or "pipe" not in options]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_targets_keep_all_bits_and_products_have_the_plan_s(kind, name):
    model, plan = MODELS[kind](), tiny.plan(**PLANS[name])
    state, step = fz.init(model, TX, plan), fz.train_step(model, TX, plan)
    assert float(fz.eval_step(model, plan)(state, BATCH)["loss"]) == 70000.0
    if plan.pipe == 1:
        program = step.lower(fz.abstract_state(model, TX, plan), BATCH).as_text()
        products = [line for line in program.splitlines() if "dot_general" in line]
        dtype = HALF.get(plan.precision, "f32")
        assert products
        assert all(f"x{dtype}>, tensor<" in line.rsplit(":", 1)[-1] for line in products)
    assert float(step(state, BATCH)[1]["loss"]) == 70000.0


def test_a_chain_s_layers_read_what_needs_all_bits_from_the_context():
    seen = {}

    def first(p: Any, batch: Any, ctx: Any) -> Any:
        seen.update(x=batch["target"].dtype, context=ctx.batch["target"].dtype)
        return batch["x"] @ p["w"]

    model = fz.Sequential([fz.Layer("a", _init, first)], _off)
    plan = tiny.plan(zero=0, data=1, precision="bf16")
    fz.eval_step(model, plan)(fz.init(model, TX, plan), BATCH)
    assert seen == {"x": jnp.bfloat16, "context": jnp.float32}


@pytest.mark.quick
def test_totals_of_16_bits_are_added_in_32():
    """Each device's and microbatch's total is exact in bfloat16; their sum is not."""

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        half = jnp.bfloat16
        return fz.Mean(jnp.sum(batch["x"]).astype(half), half(1)), buffers, {}

    model = fz.Model(lambda key: (_init(key), {}), loss)
    plan = tiny.plan(zero=1, data=4, precision="bf16", microbatches=2)
    batch = {"x": np.array([257 if i == 3 else 0.0 for i in range(8)], np.float32) + 1}
    metrics = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), batch)[1]
    assert float(metrics["loss"] * metrics["count"]) == 258 + 7
    assert float(metrics["count"]) == 8


def test_cast_says_what_it_cannot_follow():
    half = fz.cast({"x": np.float32([1 / 3]), "i": np.int32(1)}, like=jnp.zeros(1, jnp.bfloat16))
    assert (half["x"].dtype, half["i"].dtype) == (jnp.bfloat16, np.int32)
    for like in ({}, {"i": jnp.arange(2)}, [jnp.zeros(1), jnp.zeros(1, jnp.float16)]):
        with pytest.raises(fz.PlanError, match="cast: expected `like` to have floats of one dtype"):
            fz.cast(BATCH, like=like)
