"""With `jax_enable_x64`, parameters in float64 have gradients, sums and losses in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


# Gradients of such a loss are 0 in float32.
SMALL = 1e-60
STEPS = 3


def chain():
    """A chain of two layers whose parameters are float64, and a batch."""
    rng = np.random.default_rng(0)
    w, v, x = (jnp.asarray(rng.normal(size=shape)) for shape in ((5, 8), (8, 3), (8, 5)))

    def loss(y, _):
        return fz.Mean(SMALL * jnp.sum(y**2), jnp.float32(y.size)), {"mean": SMALL * jnp.mean(y)}

    links = [
        fz.Layer("in", lambda _: {"w": w}, lambda p, batch, ctx: jnp.tanh(batch["x"] @ p["w"])),
        fz.Layer("out", lambda _: {"v": v}, lambda p, x, ctx: x @ p["v"]),
    ]
    return fz.Sequential(links, loss=loss), {"x": x}


def by_hand(model, tx, batch):
    params, _ = model.init(jax.random.key(0))
    opt_state, losses = tx.init(params), []

    def loss(params):
        out, _, _ = model.loss(params, {}, batch, jax.random.key(0), True)
        return out.total / out.count

    for _ in range(STEPS):
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 0},
        {"zero": 3, "microbatches": 2, "ema": 0.9},
        {"zero": 1, "microbatches": 2, "reduce": "step", "tiers": {"opt_state": "host"}},
        {"zero": 1, "microbatches": 2, "pipe": 2},
    ],
    ids=str,
)
def test_training_in_float64_is_that_of_a_loop_by_hand(options, tmp_path):
    with jax.enable_x64(True):
        (model, batch), tx = chain(), optax.sgd(0.1 / SMALL, momentum=0.9)
        plan = tiny.plan(data=2, min_shard_bytes=0, **options)
        expected, losses = by_hand(model, tx, batch)
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        for loss in losses:
            state, metrics = step(state, batch)
            np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-13)
        assert 0 < float(metrics["grad_norm"]) < 1e-50
        found = fz.logical(model, state, plan)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)

        state, _ = fz.accumulate_step(model, tx, plan)(state, batch)
        fz.save(tmp_path, state, plan)
        fz.wait(tmp_path)
        restored = fz.restore(tmp_path, model, tx, plan)
        assert restored.grads.total == state.grads.total
        same = jax.tree.map(np.array_equal, restored.grads.sums, state.grads.sums)
        assert jax.tree.all(same)
