"""Gradients of 16 bits, added in float32: over devices with `Plan(reduce_dtype="fp32")`, over
microbatches and accumulated calls always."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


D = 16
TX = optax.sgd(1.0)
# One device's gradient is large, the others' are small: their sum has more digits than bfloat16.
ROWS = np.array([256.0] + [0.5] * 7, np.float32)[:, None]
EXACT = 256 + 7 * 0.5


def _model() -> fz.Sequential:
    """A stack and a layer without one, whose weights start at zero; `b` is never split."""

    def zeros(key: jax.Array) -> Any:
        return {"w": jnp.zeros(D), "b": jnp.zeros(())}

    def add(p: Any, x: Any, ctx: Any) -> Any:
        return {**x, "y": x["y"] + x["g"] * (jnp.sum(p["w"]) + p["b"])}

    def first(p: Any, x: Any, ctx: Any) -> Any:
        return add(p, {"g": x["g"], "y": jnp.zeros_like(x["g"])}, ctx)

    def loss(x: Any, batch: Any) -> Any:
        # Of all devices together: one.
        share = batch["g"].shape[0] / 8
        return fz.Mean(jnp.sum(x["y"].astype(jnp.float32)), jnp.float32(share))

    return fz.Sequential(
        [fz.Layer("own", zeros, first), fz.Stack("stack", 2, zeros, add)], loss=loss
    )


PLANS = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "1, once a step": {"zero": 1, "reduce": "step"},
    "3": {"zero": 3},
    "3, ahead": {"zero": 3, "prefetch": True},
    "hybrid": {"zero": 3, "data": 4, "replica": 2},
    "pipeline": {"zero": 1, "data": 4, "pipe": 2, "microbatches": 2},
}


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_the_sum_has_float32_s_digits(options):
    """With `None` the sum is rounded to 16 bits: 260 in bfloat16, where one device has 256."""
    model = _model()
    plan = tiny.plan(**{"precision": "bf16", "data": 8, **options}, reduce_dtype="fp32")
    state = fz.init(model, TX, plan)
    state, _ = fz.train_step(model, TX, plan)(state, {"g": ROWS})
    for path, leaf in tiny.host(fz.logical(model, state, plan)).items():
        assert np.all(leaf == -EXACT), (path, leaf)


HALF = {**PLANS["3, ahead"], "precision": "fp16", "loss_scale": fz.LossScaling(initial=2**4)}


@pytest.mark.parametrize("options", [PLANS["1"], HALF], ids=["1", "3"])
def test_float32_travels(options):
    found = {}
    for dtype in (None, "fp32"):
        plan = tiny.plan(**{"precision": "bf16", "data": 8, **options}, reduce_dtype=dtype)
        step = fz.train_step(_model(), TX, plan)
        text = step.lower(fz.abstract_state(_model(), TX, plan), {"g": ROWS}).as_text()
        kinds = re.findall(
            r'"stablehlo\.reduce_scatter"\(.*?\}\) : \(tensor<(?:\d+x)*(\w+)>\)', text, re.S
        )
        assert kinds
        found[dtype] = set(kinds)
    assert found["fp32"] == {"f32"}
    assert found[None] == {"f16" if options.get("precision") == "fp16" else "bf16"}


# One device's eight rows, one for each microbatch; on the other devices nothing needs rounding.
SEVERAL = np.concatenate([ROWS, np.zeros((56, 1), np.float32)])
OVER_MICROBATCHES = {
    **{name: PLANS[name] | {"microbatches": 8} for name in ("0", "1, once a step", "3")},
    "1, lazy": {"zero": 1, "gather": "lazy", "microbatches": 8},
    "pipeline": {"zero": 1, "data": 1, "pipe": 2, "microbatches": 8},
}


@pytest.mark.parametrize("options", OVER_MICROBATCHES.values(), ids=OVER_MICROBATCHES)
def test_sums_over_microbatches_have_float32_s_digits(options):
    plan = tiny.plan(**{"precision": "bf16", "data": 8, **options})
    rows = SEVERAL[: 8 * plan.data]
    _has_the_exact_sum(plan, [rows])


@pytest.mark.parametrize("zero", [0, 3])
def test_sums_over_accumulated_calls_have_float32_s_digits(zero):
    spread = ROWS[:, None] * (np.arange(8) == 0)[:, None]  # a call, a row for each device, 1
    _has_the_exact_sum(tiny.plan(precision="bf16", data=8, zero=zero), list(spread))


def _has_the_exact_sum(plan, batches):
    model, count = _model(), len(batches) * len(batches[0]) / 8
    state = fz.init(model, TX, plan)
    add, step = fz.accumulate_step(model, TX, plan), fz.train_step(model, TX, plan)
    for rows in batches[:-1]:
        state, _ = add(state, {"g": rows})
    state, _ = step(state, {"g": batches[-1]})
    for path, leaf in tiny.host(fz.logical(model, state, plan)).items():
        assert np.all(leaf == -EXACT / count), (path, leaf)
