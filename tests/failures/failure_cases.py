"""A tiny training run with everything that evaluation could disturb, shared by the tests here.

The model has a tied table, a stack, dropout (keys folded from the step), running statistics, a
leaf that is padded (9 x 11: no dim divides by 8) and a scalar. Leaves of any size are split.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


VOCAB, WIDTH, ROWS, LENGTH = 24, 8, 16, 5
STAGES = (0, 1, 2, 3)


def _embed(p: dict, batch: dict, ctx: fz.Context) -> jax.Array:
    return p["table"][batch["ids"]] * p["gain"]


def _block(p: dict, x: jax.Array, ctx: fz.Context) -> jax.Array:
    y = jnp.tanh(x @ p["w"])
    if ctx.train:
        y = jnp.where(jax.random.bernoulli(ctx.rng, 0.75, y.shape), y / 0.75, 0.0)
    return x + y


def _center(p: dict, x: jax.Array, ctx: fz.Context) -> tuple[jax.Array, dict]:
    """Subtracts the mean: of the batch in training, the running one in evaluation."""
    if not ctx.train:
        return x - ctx.buffers["mean"] + p["shift"], ctx.buffers
    mean = jnp.mean(x, (0, 1))
    new = {"mean": 0.9 * ctx.buffers["mean"] + 0.1 * mean, "calls": ctx.buffers["calls"] + 1}
    return x - mean + p["shift"], new


def _head(p: dict, x: jax.Array, ctx: fz.Context) -> fz.Mean:
    odd = jnp.tanh(x @ p["odd"][:WIDTH]) @ p["odd"][:WIDTH].T
    logits = odd @ p["table"].T
    hit = jnp.take_along_axis(logits, ctx.batch["ids"][..., None], -1)[..., 0]
    nats = jax.nn.logsumexp(logits, -1) - hit
    return fz.Mean(jnp.sum(nats), jnp.float32(nats.size))


def tiny_model() -> fz.Sequential:
    """The model; a new object at every call."""

    def embed(rng: jax.Array) -> dict:
        return {"table": jax.random.normal(rng, (VOCAB, WIDTH)), "gain": jnp.float32(1)}

    def center(rng: jax.Array) -> tuple[dict, dict]:
        return {"shift": jnp.zeros(WIDTH)}, {"mean": jnp.zeros(WIDTH), "calls": jnp.int32(0)}

    def square(rng: jax.Array) -> dict:
        return {"w": 0.3 * jax.random.normal(rng, (WIDTH, WIDTH))}

    def odd(rng: jax.Array) -> dict:
        return {"odd": 0.3 * jax.random.normal(rng, (9, 11))}

    return fz.Sequential(
        [
            fz.Layer("embed", embed, _embed),
            fz.Stack("blocks", 2, square, _block),
            fz.Layer("center", center, _center, stateful=True),
            fz.Layer("head", odd, _head, reads={"table": "embed/table"}),
        ]
    )


def bigram_model() -> fz.Model:
    """A bigram model: the smallest program that still gathers, reduces and updates."""

    def loss(params: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        logits = params["table"][batch["ids"]] @ params["out"]
        nats = jax.nn.logsumexp(logits, -1) - logits[..., 0]
        return fz.Mean(jnp.sum(nats), jnp.float32(nats.size)), buffers, {}

    def init(rng: jax.Array) -> tuple[dict, dict]:
        table = jax.random.normal(rng, (VOCAB, 8))
        return {"table": table, "out": jnp.ones((8, 9))}, {}

    return fz.Model(init, loss)


def tiny_plan(zero: int, **changes: Any) -> fz.Plan:
    """A plan on 8 devices that splits leaves of any size and clips."""
    return fz.Plan(**{"zero": zero, "data": 8, "min_shard_bytes": 0, "clip_norm": 1.0, **changes})


@dataclass(frozen=True)
class Run:
    """A model, an optimizer, a plan and the steps built from them; it holds no state.

    Args:
        first: a new state, of which `start` makes a copy at every call.
    """

    model: fz.Model
    tx: optax.GradientTransformation
    plan: fz.Plan
    train: Any
    evaluate: Any
    accumulate: Any
    first: fz.TrainState

    def start(self) -> fz.TrainState:
        return copied(self.first)


def build(model: fz.Model, tx: optax.GradientTransformation, plan: fz.Plan, **kw: Any) -> Run:
    """All steps of one model; nothing is compiled before its first call."""
    steps = (fz.train_step(model, tx, plan, **kw), fz.eval_step(model, plan, **kw),
             fz.accumulate_step(model, tx, plan, **kw))  # fmt: skip
    return Run(model, tx, plan, *steps, first=fz.init(model, tx, plan, rng=7, **kw))


def tiny_adamw() -> optax.GradientTransformation:
    """AdamW with a schedule, so that its counter matters."""
    return optax.adamw(optax.linear_schedule(1e-2, 1e-3, 6), weight_decay=0.1)


@functools.cache
def tiny_run(zero: int) -> Run:
    """The tiny run on a stage, built once a session."""
    return build(tiny_model(), tiny_adamw(), tiny_plan(zero))


def batch_at(step: int, seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    """The loader: a pure function of the step, so that the state says where the data is."""
    ids = np.random.RandomState(1000 * seed + step).randint(0, VOCAB, (rows, LENGTH))
    return {"ids": ids.astype(np.int32)}


def fit(run: Run, state: fz.TrainState, steps: int, trace: list[Any]) -> fz.TrainState:
    """Trains on the batches that follow, and writes down the bits of every metric."""
    for _ in range(steps):
        state, metrics = run.train(state, batch_at(int(state.step)))
        trace.append(bits(metrics))
    return state


def copied(state: Any) -> Any:
    """The same tree in memory of its own, laid out the same."""

    def copy(leaf: jax.Array) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.array(np.asarray(leaf)[index])
        )

    return jax.tree.map(copy, state)


def raw(leaf: Any) -> bytes:
    """An array's bits; equal for NaNs of the same bits, different for 0.0 and -0.0."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.ascontiguousarray(np.asarray(leaf)).tobytes()


def bits(tree: Any) -> dict[str, tuple[Any, ...]]:
    """Shape, dtype and bits of every leaf, by path: equal only for trees that are the same."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    return {"": (str(treedef),)} | {
        path: (leaf.shape, str(leaf.dtype), raw(leaf)) for path, leaf in named.items()
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Paths at which two results of `bits` differ; empty when they are the same."""
    return sorted(path for path in {*a, *b} if a.get(path) != b.get(path))


def memory(tree: Any) -> list[Any]:
    """Where every shard of a tree lies: objects and addresses."""
    out: list[Any] = []
    for leaf in jax.tree.leaves(tree):
        assert not leaf.is_deleted()
        out.append(id(leaf))
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            out += [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]
    return out


def shard_bits(tree: Any) -> list[bytes]:
    """The bits of every device's copy of every leaf."""
    out: list[bytes] = []
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        out += [raw(shard.data) for shard in leaf.addressable_shards]
    return out
