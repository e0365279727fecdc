"""A GPT-2 of any size as a `fz.Sequential`, and steps over it, for tests of sharding."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


@dataclass(frozen=True)
class Size:
    """Shapes of a GPT-2; the default is small enough to run, `GPT2` is the 124M one."""

    vocab: int = 61
    d: int = 32
    layers: int = 3
    heads: int = 2
    seq: int = 8


GPT2 = Size(vocab=50257, d=768, layers=12, heads=12, seq=1024)


def num_params(size: Size) -> int:
    """Ψ: parameters of a GPT-2 with a tied head (each `d`-wide block has 12 d² + 13 d)."""
    d = size.d
    return size.vocab * d + size.seq * d + size.layers * (12 * d * d + 13 * d) + 2 * d


def _norm(x, p):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * p["scale"] + p["bias"]


def _attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _block(size: Size, dropout: float):
    def apply(p, x, ctx):
        b, t, d = x.shape
        qkv = _norm(x, p["ln_1"]) @ p["qkv"]["w"] + p["qkv"]["b"]
        q, k, v = (part.reshape(b, t, size.heads, -1) for part in jnp.split(qkv, 3, -1))
        x = x + _attention(q, k, v).reshape(b, t, d) @ p["proj"]["w"] + p["proj"]["b"]
        hidden = jax.nn.gelu(_norm(x, p["ln_2"]) @ p["fc"]["w"] + p["fc"]["b"])
        out = hidden @ p["out"]["w"] + p["out"]["b"]
        if dropout and ctx.train:
            keep = jax.random.bernoulli(ctx.rng, 1 - dropout, out.shape)
            out = jnp.where(keep, out / (1 - dropout), 0)
        return x + out

    return apply


def _init_block(size: Size):
    d = size.d

    def init(rng):
        keys = iter(jax.random.split(rng, 4))

        def dense(n, m):
            return {"w": 0.05 * jax.random.normal(next(keys), (n, m)), "b": jnp.zeros(m)}

        def norm():
            return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

        return {
            "ln_1": norm(), "qkv": dense(d, 3 * d), "proj": dense(d, d),
            "ln_2": norm(), "fc": dense(d, 4 * d), "out": dense(4 * d, d),
        }  # fmt: skip

    return init


def gpt(size: Size = Size(), dropout: float = 0.0, given=None) -> fz.Model:
    """The model; batches are `{"ids": int (batch, seq + 1)}`, the loss an exact token mean.

    `given` are initial values, as `(params, buffers)`, that need no program to draw them.
    """

    def embed(p, batch, ctx):
        return p["tokens"][batch["ids"][:, :-1]] + p["positions"]

    def init_embed(rng):
        tokens, positions = jax.random.split(rng)
        return {
            "tokens": 0.05 * jax.random.normal(tokens, (size.vocab, size.d)),
            "positions": 0.05 * jax.random.normal(positions, (size.seq, size.d)),
        }

    def head(p, x, ctx):
        return _norm(x, p) @ p["tokens"].T

    def loss(logits, batch):
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        target = batch["ids"][:, 1:, None]
        total = -jnp.take_along_axis(logp, target, -1).sum()
        return fz.Mean(total, jnp.float32(target.size))

    return fz.Sequential(
        [
            fz.Layer("embed", init_embed, embed),
            fz.Stack("blocks", size.layers, _init_block(size), _block(size, dropout)),
            fz.Layer(
                "head",
                lambda rng: {"scale": jnp.ones(size.d), "bias": jnp.zeros(size.d)},
                head,
                reads={"tokens": "embed/tokens"},
            ),
        ],
        loss,
        init=given,
    )


def batches(size: Size = Size(), rows: int = 16, seed: int = 0):
    """Endless batches of sequences that count upwards from a random start."""
    random = np.random.RandomState(seed)
    while True:
        start = random.randint(0, size.vocab, (rows, 1))
        yield {"ids": ((start + np.arange(size.seq + 1)) % size.vocab).astype(np.int32)}


def abstract_batch(size: Size, rows: int):
    """A batch's shapes."""
    return {"ids": jax.ShapeDtypeStruct((rows, size.seq + 1), jnp.int32)}


def train(model, plan, steps, rows=16, size=Size(), tx=None, devices=None):
    """Trains from scratch: `([(loss, grad_norm), ...] as bits, final state)`."""
    tx = tx or optax.adamw(3e-3)
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    trace, data = [], batches(size, rows)
    for _ in range(steps):
        state, metrics = step(state, next(data))
        trace.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return trace, state


def host(tree):
    """Every leaf as numpy."""
    return jax.tree.map(np.asarray, tree)


def same_bits(a, b) -> bool:
    """Whether two trees of arrays have the same structure and the same bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(host(a)), jax.tree.leaves(host(b)), strict=True)
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )
