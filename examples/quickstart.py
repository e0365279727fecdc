"""ZeRO-3 in plain JAX: one state that trains, evaluates and changes its layout.

    python examples/quickstart.py

Runs on every GPU there is, or else on 8 virtual CPU devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first


def init(rng):
    """Initial (parameters, buffers); runs under jit, each array is born in its sharding."""
    first, second = jax.random.split(rng)
    return {
        "in": jax.random.normal(first, (64, 256)) / 8,
        "out": jax.random.normal(second, (256, 16)) / 16,
    }, {}


def loss(params, buffers, batch, rng, train):
    """Squared error as an exact mean: total and count are summed over all devices."""
    error = jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]
    return fz.Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}


model = fz.Model(init, loss)
plan = fz.Plan(zero=3, microbatches=2, clip_norm=1.0)
tx = optax.adamw(1e-2)

state = fz.init(model, tx, plan, rng=0)
train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)

rng = np.random.default_rng(0)
x = rng.normal(size=(256, 64)).astype(np.float32)
batch = {"x": x, "y": np.sin(x[:, :16])}

before = float(eval_step(state, batch)["loss"])
for _ in range(50):
    state, metrics = train_step(state, batch)
after = float(eval_step(state, batch)["loss"])
print(f"loss {before:.3f} -> {after:.3f} after {int(state.step)} steps of ZeRO-3")
print(fz.placement(state))

# The same state, whole on one device: same values, same loss.
single = fz.Plan(zero=0, data=1)
moved = fz.replan(state, model, tx, plan, single)
again = float(fz.eval_step(model, single)(moved, batch)["loss"])
print(f"loss {again:.3f} of the same state on one device")
assert after < before / 4
assert abs(again - after) < 1e-6
