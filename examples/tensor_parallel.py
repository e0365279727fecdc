"""A transformer whose layers are divided over devices (tensor parallelism), beside ZeRO-3.

    python examples/tensor_parallel.py

Eight virtual devices: four groups for ZeRO (`data`), two devices in each share out every layer
(`tensor`). The model's functions are those for one device; `shard` says which dims of which
parameters lie along the axis. What a step sends is read from its compiled program; last, losses are
compared with one device's. Under a minute on two CPU cores.
"""

import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz
from fzero.preflight import hlo


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
# A step that was compiled to be read is not compiled again to run.
cache = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", cache.name)
WIDTH, HEADS, LAYERS, SEQ, ROWS, STEPS = 64, 4, 3, 32, 16, 10
# Sums over a divided dim add up in another order.
BOUND = 1e-5

# Text: every byte is a token.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(f.read_bytes() for f in files[::10]), np.uint8)


def batch_at(step):
    """The batch of one step, from its number alone."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ - 1, ROWS)
    return {"ids": np.stack([text[at : at + SEQ + 1] for at in starts]).astype(np.int32)}


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def block_init(rng):
    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS), "out": (HEADS, WIDTH // HEADS, WIDTH),
        "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH),
    }  # fmt: skip
    keys = jax.random.split(rng, len(shapes))
    made = {name: 0.05 * jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)}  # fmt: skip
    return {**made, "norm_1": jnp.ones(WIDTH), "norm_2": jnp.ones(WIDTH)}


def block(p, x, ctx):
    """One layer: nothing in it knows of devices."""
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", norm(x, p["norm_1"]), p["qkv"]), 2, 0)
    seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", seen, p["out"])
    return x + jax.nn.gelu(norm(x, p["norm_2"]) @ p["up"]) @ p["down"]


# Heads and hidden units lie along the axis: each device computes with its own, and what they give
# is added up once after attention and once after the second product.
divided = {
    "qkv": (None, None, "tensor"), "out": ("tensor",), "up": (None, "tensor"), "down": ("tensor",),
}  # fmt: skip


def embed(p, batch, ctx):
    return p["tokens"][batch["ids"][:, :-1]] + p["positions"]


def embed_init(rng):
    tokens, positions = jax.random.split(rng)
    return {
        "tokens": 0.05 * jax.random.normal(tokens, (256, WIDTH)),
        "positions": 0.05 * jax.random.normal(positions, (SEQ, WIDTH)),
    }


def loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 1:])
    return fz.Mean(losses.sum(), jnp.float32(losses.size))


model = fz.Sequential(
    [
        fz.Layer("embed", embed_init, embed),
        fz.Stack("blocks", LAYERS, block_init, block, shard=divided),
        fz.Layer("head", None, lambda p, x, ctx: x @ p["tokens"].T,
                 reads={"tokens": "embed/tokens"}),
    ],
    loss,
)  # fmt: skip
tx = optax.adamw(1e-3)


def train(plan, devices):
    """The loss of every step."""
    state, step = fz.init(model, tx, plan, devices=devices), fz.train_step(
        model, tx, plan, devices=devices
    )  # fmt: skip
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


plan = fz.Plan(zero=3, data=4, tensor=2, clip_norm=1.0, min_shard_bytes=1024)
about = fz.describe(plan, model, tx)
alone = fz.describe(fz.Plan(zero=0, data=1), model, tx)
print(about, end="\n\n")
share = alone.bytes_per_device["total"] / about.bytes_per_device["total"]
print(f"a device keeps 1/{share:.1f} of the bytes that one alone would")

step = fz.train_step(model, tx, plan)
compiled = step.lower(fz.abstract_state(model, tx, plan), batch_at(0)).compile()
sent = Counter()
for one in hlo.collectives(compiled.as_text(), mesh_axes={"replica": 1, "data": 4, "tensor": 2}):
    sent["+".join(one.axes), one.kind] += one.times * one.elements
for (axis, kind), elements in sorted(sent.items()):
    print(f"over {axis}: {elements:>9,} elements in {kind}s a step")

print(f"\ntraining {STEPS} steps on 8 devices, then on one")
eight = train(plan, jax.devices())
one = train(fz.Plan(zero=0, data=1, clip_norm=1.0), jax.devices()[:1])
difference = float(np.max(np.abs(eight / one - 1)))
print(f"loss {one[0]:.3f} -> {one[-1]:.3f}")
print(f"largest difference between 8 devices and one: {difference:.1e} (bound {BOUND:g})")
assert difference < BOUND
