"""Models small enough to compile in a second, and comparisons that every core test uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz
from fzero.compat import is_key
from fzero.tree import named_leaves


D, VOCAB, WIDTH, TOKENS = 16, 27, 13, 5


def embed_init(key: jax.Array) -> dict[str, jax.Array]:
    """A table that no dim of eight devices divides (padded), and one that they do."""
    table, up = jax.random.split(key)
    return {
        "table": jax.random.normal(table, (VOCAB, WIDTH)) * 0.3,
        "up": jax.random.normal(up, (WIDTH, D)) * 0.3,
    }


def embed(p: Any, batch: Any, ctx: Any) -> jax.Array:
    """Token vectors."""
    return p["table"][batch["ids"]] @ p["up"]


def block_init(key: jax.Array) -> dict[str, jax.Array]:
    """One layer of the stack."""
    return {"w": jax.random.normal(key, (D, D)) * 0.3, "b": jnp.zeros(D)}


def block(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
    """A residual layer."""
    return x + jnp.tanh(x @ p["w"] + p["b"])


def dropped_block(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
    """A residual layer with dropout in training."""
    y = jnp.tanh(x @ p["w"] + p["b"])
    if ctx.train:
        keep = jax.random.bernoulli(ctx.rng, 0.5, y.shape)
        y = jnp.where(keep, y * 2, jnp.zeros((), y.dtype))
    return x + y


def head_init(key: jax.Array) -> dict[str, jax.Array]:
    """The way back to the table's width, and a scalar (never split)."""
    return {"down": jax.random.normal(key, (D, WIDTH)) * 0.3, "gain": jnp.ones(())}


def head(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
    """Logits through the tied table."""
    return (x @ p["down"]) @ p["table"].T * p["gain"]


def token_loss(logits: jax.Array, batch: Any) -> tuple[fz.Mean, dict[str, Any]]:
    """Cross entropy over the tokens that the mask keeps; accuracy as a metric of the model."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    mask = batch["mask"].astype(jnp.float32)
    right = (jnp.argmax(logits, -1) == batch["labels"]) * mask
    count = jnp.sum(mask)
    return fz.Mean(jnp.sum(losses * mask), count), {"accuracy": fz.Mean(jnp.sum(right), count)}


def chain(num: int = 3, apply: Callable[..., Any] = block) -> fz.Sequential:
    """Embedding, a stack of `num` layers, a head that reads the embedding's table."""
    return fz.Sequential(
        [
            fz.Layer("embed", embed_init, embed),
            fz.Stack("blocks", num, block_init, apply),
            fz.Layer("head", head_init, head, reads={"table": "embed/table"}),
        ],
        loss=token_loss,
    )


def tokens(rows: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch whose rows have different numbers of unpadded tokens, from 1 to all of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, TOKENS + 1, rows)
    return {
        "ids": rng.integers(0, VOCAB, (rows, TOKENS), dtype=np.int32),
        "labels": rng.integers(0, VOCAB, (rows, TOKENS), dtype=np.int32),
        "mask": np.arange(TOKENS)[None, :] < lengths[:, None],
    }


def regression(dtype: Any = jnp.float32) -> fz.Model:
    """A plain model: one leaf that divides, a padded one, a scalar. Inputs `x`, targets `y`."""

    def init(key: jax.Array) -> tuple[Any, Any]:
        a, b = jax.random.split(key)
        return {
            "w": (jax.random.normal(a, (D, WIDTH)) * 0.3).astype(dtype),
            "odd": (jax.random.normal(b, (WIDTH, VOCAB)) * 0.3).astype(dtype),
            "gain": jnp.ones((), dtype),
        }, {}

    return fz.Model(init, regression_loss)


def regression_loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
    """Squared error of a two-layer network."""
    out = jnp.tanh(fz.cast(batch["x"], like=p) @ p["w"]) @ p["odd"] * p["gain"]
    error = (out - batch["y"]).astype(jnp.float32)
    return fz.Mean(jnp.sum(jnp.square(error)), jnp.float32(error.size)), buffers, {}


def points(rows: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch for `regression`."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, D)).astype(np.float32),
        "y": rng.standard_normal((rows, VOCAB)).astype(np.float32),
    }


def plan(**options: Any) -> fz.Plan:
    """A plan that splits even tiny leaves."""
    return fz.Plan(**{"min_shard_bytes": 0, **options})


def whole_loss(model: fz.Model, params: Any, batch: Any, buffers: Any = None) -> jax.Array:
    """The loss of one big batch on one device, without fzero's steps."""
    mean, _, _ = model.loss(params, buffers or {}, batch, jax.random.key(0), True)
    return mean.total / mean.count


def reference(model: fz.Model, params: Any, batch: Any, buffers: Any = None) -> tuple[Any, Any]:
    """Loss and gradient of one big batch on one device, by `jax.grad`."""
    run = jax.jit(jax.value_and_grad(lambda p: whole_loss(model, p, batch, buffers)))
    return jax.device_get(run(on_one_device(params)))


def on_one_device(tree: Any) -> Any:
    """Copies of a tree's arrays on the first device."""
    return jax.tree.map(jnp.asarray, jax.device_get(tree))


def copied(tree: Any) -> Any:
    """The same tree in memory of its own, laid out the same: a step may consume it."""

    def copy(leaf: jax.Array) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index: np.array(np.asarray(leaf)[index])
        )

    return jax.tree.map(copy, tree)


def host(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf as a numpy array, by path; keys as their data."""

    def value(leaf: Any) -> np.ndarray:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf, copy=True)

    return {path: value(leaf) for path, leaf in named_leaves(tree)}


def same_bits(a: Any, b: Any) -> None:
    """Asserts that two trees have the same leaves, bit for bit."""
    one, two = host(a), host(b)
    assert one.keys() == two.keys()
    for path, value in one.items():
        assert value.dtype == two[path].dtype, path
        assert value.shape == two[path].shape, path
        assert value.tobytes() == two[path].tobytes(), f"{path} differs"


def same_shards(a: Any, b: Any) -> None:
    """Asserts that this process's shards of two trees are the same, bit for bit."""
    for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.sharding == two.sharding
        if not is_key(one):
            for x, y in zip(one.addressable_shards, two.addressable_shards, strict=True):
                assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()


def close(a: Any, b: Any, rtol: float, atol: float = 0.0) -> None:
    """Asserts that two trees agree; `atol` is relative to each leaf's largest value."""
    one, two = host(a), host(b)
    assert one.keys() == two.keys()
    for path, value in one.items():
        scale = float(np.max(np.abs(two[path]), initial=0.0))
        np.testing.assert_allclose(value, two[path], rtol, atol * scale, err_msg=path)


@contextmanager
def counted_compiles() -> Iterator[list[str]]:
    """A list that grows by one for every program XLA compiles meanwhile (or loads)."""
    found: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def stepped(plans, model, tx, batch):
    """A function of a plan's name that gives its state after a step, made when it is asked for."""
    found = {}

    def get(name):
        if name not in found:
            state = fz.init(model, tx, plans[name], rng=3)
            found[name], _ = fz.train_step(model, tx, plans[name])(state, batch)
        return found[name]

    return get
