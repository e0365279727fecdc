"""Random keys: whatever is drawn at two places is drawn from two keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


LAYERS, BLOCKS, OWN = 3, 4, 2
TX = optax.sgd(0.0)
# Row by row the number of the block (of one microbatch on one device) that it is in.
BATCH = {"block": np.repeat(np.arange(BLOCKS, dtype=np.int32), 2)}


def _words(key: jax.Array) -> jax.Array:
    """A key and `OWN` that a user makes of it: of each 32 bits, as two numbers exact in float32."""
    folded = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
    keys = jnp.concatenate([key[None], jax.random.split(key, 1), folded[None]])
    data = jax.random.key_data(keys)[:, 1:]
    return jnp.concatenate([data >> 16, data & 0xFFFF], -1).astype(jnp.float32)


def _init(key: jax.Array) -> Any:
    return {"key": _words(key)}


def _note(p: Any, x: jax.Array, ctx: Any) -> jax.Array:
    return jnp.concatenate([x[1:], _words(ctx.rng)[None]])


def _first(p: Any, batch: Any, ctx: Any) -> jax.Array:
    return _note(p, jnp.zeros((LAYERS, 1 + OWN, 2)), ctx)


def _loss(x: jax.Array, batch: Any) -> Any:
    own = [(batch["block"][0] == block).astype(jnp.float32) for block in range(BLOCKS)]
    metrics = {
        f"{layer} {block} {split} {i}": fz.Mean(x[layer, split, i] * own[block], own[block])
        for layer, split, i in np.ndindex(x.shape)
        for block in range(BLOCKS)
    }
    return jnp.zeros(()), metrics


MODEL = fz.Sequential(
    [fz.Layer("in", _init, _first), fz.Stack("blocks", LAYERS - 1, _init, _note)], loss=_loss
)


def _of(metrics: Any, blocks: int) -> list[tuple[float, ...]]:
    return [
        tuple(float(metrics[f"{layer} {block} {split} {i}"]) for i in range(2))
        for layer in range(LAYERS)
        for block in range(blocks)
        for split in range(1 + OWN)
    ]


def _drawn(plan: fz.Plan) -> dict[str, list[tuple[float, ...]]]:
    """All keys of an initialisation, two steps, an accumulation and an evaluation."""
    state = fz.init(MODEL, TX, plan, rng=7)
    found = {
        "init": [tuple(row) for leaf in jax.tree.leaves(fz.logical(MODEL, state, plan))
                 for row in np.asarray(leaf).reshape(-1, 2).tolist()]
    }  # fmt: skip
    train, add = fz.train_step(MODEL, TX, plan), fz.accumulate_step(MODEL, TX, plan)
    for step in range(2):
        state, metrics = train(state, BATCH)
        found[f"step {step}"] = _of(metrics, BLOCKS)
    for call in range(2):
        state, metrics = add(state, BATCH)
        found[f"call {call}"] = _of(metrics, BLOCKS)
    state, metrics = train(state, BATCH)
    found["last call"] = _of(metrics, BLOCKS)
    # One block of rows for each device, or for each microbatch of it in a pipeline.
    blocks = 2 if plan.pipe == 1 else BLOCKS
    rows = {"block": np.repeat(np.arange(blocks, dtype=np.int32), 2)}
    found["eval"] = _of(fz.eval_step(MODEL, plan)(state, rows), blocks)
    return found


def test_no_two_places_draw_from_one_key():
    plan = tiny.plan(zero=3, data=2, microbatches=2)
    drawn = _drawn(plan)
    everything = [key for keys in drawn.values() for key in keys]
    assert len(everything) == (1 + OWN) * LAYERS * (1 + 5 * BLOCKS + 2)
    assert len(set(everything)) == len(everything)


@pytest.mark.nightly  # two models more to compile
def test_places_of_a_pipeline_draw_from_the_same_keys():
    plan = tiny.plan(zero=3, data=2, microbatches=2)
    drawn, pipeline = _drawn(plan), _drawn(plan.replace(pipe=2))
    everything = [key for keys in drawn.values() for key in keys]
    assert {**pipeline, "eval": []} == {**drawn, "eval": []}
    assert len(set(pipeline["eval"])) == len(pipeline["eval"])
    assert not set(pipeline["eval"]) & set(everything[: -len(drawn["eval"])])


def test_each_device_predicts_with_draws_of_its_own():
    def draw(p, batch, ctx):
        return jax.random.uniform(ctx.rng, batch["x"].shape)

    layer = fz.Layer("noise", lambda key: {"w": jnp.ones(2)}, draw)
    model = fz.Sequential([layer], loss=lambda x, batch: jnp.sum(x))
    plan = tiny.plan(zero=1, data=2)
    found = fz.predict_step(model, plan)(fz.init(model, None, plan), {"x": np.ones((4, 2), "f")})
    assert len(set(np.asarray(found).ravel().tolist())) == 8


def test_microbatches_behind_the_one_that_gathers_have_draws_of_their_own():
    def loss(p, buffers, batch, rng, train):
        noise, place = jax.random.uniform(rng), batch["block"][0]
        metrics = {str(n): fz.Mean(noise * (place == n), place == n) for n in range(BLOCKS)}
        return jnp.sum(p["w"]), buffers, metrics

    model = fz.Model(lambda key: ({"w": jnp.ones(4)}, {}), loss)
    plan = tiny.plan(zero=2, gather="lazy", data=2, microbatches=2)
    _, metrics = fz.train_step(model, TX, plan)(fz.init(model, TX, plan), BATCH)
    assert len({float(metrics[str(n)]) for n in range(BLOCKS)}) == BLOCKS
