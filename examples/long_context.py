"""Sequences divided over devices (context parallelism): 2,048 tokens, of which each has a quarter.

    python examples/long_context.py

Eight virtual devices: two groups for ZeRO-3 (`data`), four devices in each share out every sequence
(`context`). The model's functions see whole sequences; `fz.attention` sends keys and values round.
What a device keeps for a backward pass is measured; last, losses are compared with one device's.
Under a minute on two CPU cores.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
WIDTH, HEADS, LAYERS, SEQ, WORDS, ROWS, STEPS = 32, 2, 2, 2048, 64, 2, 3
# Softmaxes are put together of parts, and sums add up in another order.
BOUND = 1e-5


def batch_at(step):
    """Rows that repeat themselves after half their length: far positions matter."""
    half = np.random.default_rng(step).integers(0, WORDS, (ROWS, SEQ // 2))
    ids = np.concatenate([half, half], 1).astype(np.int32)
    return {"ids": ids, "next": np.roll(ids, -1, 1)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def block_init(rng):
    shapes = {"qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (HEADS, WIDTH // HEADS, WIDTH),
              "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip
    keys = jax.random.split(rng, len(shapes))
    return {name: 0.1 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)}  # fmt: skip


def block(p, x, ctx):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x), p["qkv"]), 2, 0)
    x = x + jnp.einsum("bthk,hkd->btd", fz.attention(q, k, v, causal=True), p["out"])
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def embed(p, batch, ctx):
    return p["words"][batch["ids"]] + p["places"]


def embed_init(rng):
    words, places = jax.random.split(rng)
    return {"words": jax.random.normal(words, (WORDS, WIDTH)),
            "places": 0.1 * jax.random.normal(places, (SEQ, WIDTH))}  # fmt: skip


def head(p, x, ctx):
    return fz.linear_cross_entropy(norm(x), p["words"], ctx.batch["next"])


model = fz.Sequential(
    [
        fz.Layer("embed", embed_init, embed),
        fz.Stack("blocks", LAYERS, block_init, block),
        fz.Layer("head", None, head, reads={"words": "embed/words"}),
    ]
)
tx = optax.adamw(1e-3)


def train(plan, devices):
    """The loss of every step, and the bytes that a step needs beside the state."""
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    memory = step.lower(state, batch_at(0)).compile().memory_analysis().temp_size_in_bytes
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return np.array(losses), memory


divided, kept = train(fz.Plan(zero=3, data=2, context=4), jax.devices())
one, whole = train(fz.Plan(zero=0, data=1), jax.devices()[:1])
print(f"temporary memory of a step: {kept / 2**20:.1f} MiB on each of 8 devices,"
      f" {whole / 2**20:.1f} MiB on one")  # fmt: skip
print(f"loss {one[0]:.4f} -> {one[-1]:.4f} after {STEPS} steps")
difference = float(np.max(np.abs(divided / one - 1)))
print(f"largest difference between 8 devices and one: {difference:.1e} (bound {BOUND:g})")
assert difference < BOUND
