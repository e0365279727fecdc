"""What pipelines compute where it is easily missed: fp16 with late unscaling, buffers, evaluation.

Each case is compared with the unpipelined step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


def stepped(plan, scale):
    """Parameters and metrics after one step of plain SGD, from a loss scale."""
    model, tx = tiny.chain(), optax.sgd(1.0)
    state = fz.init(model, tx, plan, rng=0)
    old = state.loss_scale
    loss_scale = dataclasses.replace(
        old, scale=jax.device_put(np.float32(scale), old.scale.sharding)
    )
    state = state.replace(loss_scale=loss_scale)
    state, metrics = fz.train_step(model, tx, plan)(state, tiny.tokens(16))
    return tiny.host(fz.logical(model, state, plan)), jax.device_get(metrics)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_fp16_gradients_are_unscaled(schedule):
    """Weight gradients come from actions of their own."""
    plain = tiny.plan(zero=3, data=2, microbatches=2, precision="fp16")
    expected, metrics = stepped(plain, 2.0**8)
    found, others = stepped(plain.replace(pipe=2, schedule=schedule), 2.0**8)
    assert others["nonfinite"] == metrics["nonfinite"] == 0
    np.testing.assert_allclose(others["grad_norm"], metrics["grad_norm"], rtol=1e-3)
    tiny.close(found, expected, rtol=0, atol=2e-3)


def test_gradients_of_microbatches_are_added_in_float32():
    """Beside 256 bfloat16 has no ones."""

    def one(key):
        return {"w": jnp.ones(())}

    model, tx = (
        fz.Sequential(
            [fz.Layer("first", one, lambda p, batch, ctx: fz.cast(batch["x"], like=p) * p["w"]),
             fz.Layer("last", one, lambda p, x, ctx: x * p["w"])],
            loss=lambda x, batch: fz.Mean(jnp.sum(x.astype(jnp.float32)), jnp.float32(x.size)),
        ),
        optax.sgd(1.0),
    )  # fmt: skip
    plan = tiny.plan(pipe=2, data=1, microbatches=8, precision="bf16")
    batch = {"x": np.float32([[256], *[[1]] * 7])}
    state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), batch)
    for leaf in jax.tree.leaves(fz.logical(model, state, plan)):
        assert leaf == 1 - (256 + 7) / 8


def counted():
    """A chain whose layers count their calls and add up what they see."""

    def init(rng):
        return {"w": jnp.ones((4,))}, {"calls": jnp.zeros(()), "sum": jnp.zeros(4)}

    def apply(p, x, ctx):
        new = {"calls": ctx.buffers["calls"] + 1, "sum": ctx.buffers["sum"] + jnp.mean(x, 0)}
        return x * p["w"] + 1, new if ctx.train else ctx.buffers

    return fz.Sequential([
        fz.Layer("in", init, lambda p, b, ctx: apply(p, b["x"], ctx), stateful=True),
        fz.Stack("more", 4, init, apply, stateful=True),
    ], lambda x, batch: fz.Mean(jnp.sum(x), jnp.float32(x.size)))  # fmt: skip


@pytest.mark.parametrize("options", [
    {"zero": 3, "pipe": 2, "schedule": "zb_h1"}, {"zero": 1, "pipe": 4, "schedule": "gpipe"},
], ids=["zb_h1", "gpipe"])  # fmt: skip
def test_buffers_of_every_layer_are_updated_once_a_microbatch(options):
    plan = tiny.plan(data=2, microbatches=2, **options)
    batch = {"x": np.ones((8, 4), np.float32)}
    model, tx = counted(), optax.sgd(0.0)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    for _ in range(2):  # two microbatches each
        state, _ = step(state, batch)
    plain = plan.replace(pipe=1, schedule=None)
    found = tiny.host(fz.replan(state, model, tx, plan, plain).buffers)
    assert {path: value.tolist() for path, value in found.items()} == {
        "in/calls": 4, "in/sum": [4.0] * 4, "more/calls": [4.0] * 4,
        "more/sum": [[4.0 * n] * 4 for n in (2, 3, 4, 5)],
    }  # fmt: skip
