"""A GPT of 4.3 billion parameters on one GPU: trained, parked, and brought back.

    python examples/offload_4b.py

Needs a GPU of 80 GB or more, and says so where there is none; `--tiny` does the same in miniature
on anything. Prints what DeepSpeed's `offload_states` reports for such a model: bytes on the device
before and after, and GB/s each way, by the kind of host memory used (jax's `pinned_host`, or
memory of the process, which is pageable), waiting for it or not. (DeepSpeed's own figures, 4 A100s:
18.2 GB down to 17.7 MB per GPU, 2.45 GB/s to the host and 11.05 GB/s back: its pull request 6011.)
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import fzero as fz


parser = argparse.ArgumentParser()
parser.add_argument("--tiny", action="store_true", help="a small model, on any device")
TINY = parser.parse_args().tiny
VOCAB, WIDTH, LAYERS, SEQ = (256, 64, 4, 32) if TINY else (50257, 3072, 37, 1024)
HEADS = WIDTH // 64 if TINY else WIDTH // 128

if not TINY and jax.default_backend() != "gpu":
    print("skipped: a model of 4.3 billion parameters needs a GPU; try --tiny")
    sys.exit(0)


def block_init(rng):
    """One layer's parameters."""
    keys = jax.random.split(rng, 4)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH),
              "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip
    matrices = {
        name: jax.random.normal(key, shape) * 0.02
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return matrices | {"norm1": jnp.ones(WIDTH), "norm2": jnp.ones(WIDTH)}


def normed(x, scale):
    """Root mean square normalisation."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def block(p, x, ctx):
    """Attention and a feed-forward network, both residual."""
    rows, length, _ = x.shape
    qkv = (normed(x, p["norm1"]) @ p["qkv"]).reshape(rows, length, 3, HEADS, WIDTH // HEADS)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
    x = x + mixed.reshape(rows, length, WIDTH) @ p["out"]
    return x + jax.nn.gelu(normed(x, p["norm2"]) @ p["up"]) @ p["down"]


def head(p, x, ctx):
    """Mean cross entropy of each next token."""
    logits = (x[:, :-1] @ p["table"].T).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ctx.batch["ids"][:, 1:])
    return fz.Mean(jnp.sum(losses), jnp.float32(losses.size))


def embed_init(rng):
    """The table of the vocabulary."""
    return {"table": jax.random.normal(rng, (VOCAB, WIDTH)) * 0.02}


model = fz.Sequential(
    [
        fz.Layer("embed", embed_init, lambda p, batch, ctx: p["table"][batch["ids"]]),
        fz.Stack("blocks", LAYERS, block_init, block),
        fz.Layer("head", None, head, reads={"table": "embed/table"}),
    ]
)
plan, tx = fz.Plan(zero=3, data=1, precision="bf16"), optax.adamw(1e-4)
batch = {"ids": np.random.default_rng(0).integers(0, VOCAB, (1, SEQ), dtype=np.int32)}

state = fz.init(model, tx, plan, rng=0)
step = fz.train_step(model, tx, plan)
state, metrics = step(state, batch)
count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
total = fz.placement(state).bytes_per_device["total"]
print(f"{count:,} parameters, {total:,} bytes of state; "
      f"first loss {float(metrics['loss']):.3f}")  # fmt: skip

table = Table(title=f"{total:,} bytes of state on {jax.devices()[0].device_kind}")
for column in ("host memory", "non_blocking", "device bytes after", "out GB/s", "returns after ms",
               "back GB/s"):  # fmt: skip
    table.add_column(column, justify="right")


def pageable(state):
    """Every leaf as plain memory of the process, as `jax.device_get` gives it."""
    leaves, tree = jax.tree.flatten((state.params, state.opt_state))
    shardings = [leaf.sharding for leaf in leaves]
    start = time.perf_counter()
    held = jax.device_get(leaves)
    out = time.perf_counter() - start
    start = time.perf_counter()
    back = jax.device_put(held, shardings)
    jax.block_until_ready(back)
    return out, time.perf_counter() - start, jax.tree.unflatten(tree, back)


for non_blocking in (False, True):
    for _ in range(2):  # the first time the pool of pinned memory is filled
        start = time.perf_counter()
        state = fz.offload(state, non_blocking=non_blocking)
        returned = time.perf_counter() - start
        jax.block_until_ready((state.params, state.opt_state))
        out = time.perf_counter() - start
        left = fz.placement(state).bytes_per_device["total"]
        kind = " ".join(
            sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)})
        )
        start = time.perf_counter()
        state = fz.reload(state, non_blocking=non_blocking)
        jax.block_until_ready((state.params, state.opt_state))
        back = time.perf_counter() - start
    table.add_row(
        kind, str(non_blocking), f"{left:,}", f"{total / 1e9 / out:.2f}",
        f"{returned * 1e3:.1f}", f"{total / 1e9 / back:.2f}",
    )  # fmt: skip
out, back, _ = pageable(state)
table.add_row(
    "process memory",
    "False",
    "(not released)",
    f"{total / 1e9 / out:.2f}",
    "",
    f"{total / 1e9 / back:.2f}",
)
Console(width=120).print(table)
device = jax.devices()[0]
most = (device.memory_stats() or {}).get("peak_bytes_in_use")
peak = "does not say how much memory was in use" if most is None else f"used {most:,} bytes at most"
print(f"{device.device_kind}, jax {jax.__version__}, 1 of {len(jax.devices())} devices: {peak}")

state, metrics = step(state, batch)
print(f"and on: loss {float(metrics['loss']):.3f} after {int(state.step)} steps")
