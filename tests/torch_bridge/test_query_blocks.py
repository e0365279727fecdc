"""Attention with dropout of long sequences: block by block, the numbers of whole scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from torch_bridge.lower import query_blocks
from torch_bridge.lower.attention import attention


pytestmark = pytest.mark.traced_once

ROWS = query_blocks.ROWS
LENGTH, KEYS = ROWS + 40, 24  # one block, and one that is filled up
P = 0.25


@pytest.fixture(autouse=True)
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_blocks, "SCORES", LENGTH * KEYS - 1)


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def whole(key: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool) -> jax.Array:
    """The definition, with each block's dropout where it belongs."""
    heads = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, heads, axis=1) for x in (k, v))
    scores = q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]).astype(np.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    seen = jnp.any(scores > -jnp.inf, axis=-1, keepdims=True)
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, 0.0)), 0.0)
    shape = (q.shape[0], k.shape[1] // heads, heads, ROWS, KEYS)
    shape = shape if heads > 1 else (*q.shape[:2], ROWS, KEYS)
    kept = [jax.random.bernoulli(jax.random.fold_in(key, n), 1 - P, shape) for n in range(2)]
    kept = jnp.reshape(jnp.concatenate(kept, -2), (*q.shape[:2], 2 * ROWS, KEYS))[..., :LENGTH, :]
    return jnp.where(kept, weights / (1 - P), 0.0) @ v


SEEN = drawn(2, 1, LENGTH, KEYS, seed=9) > -0.5
MASKS = {
    "none": None,
    "padding": jnp.arange(KEYS) < jnp.array([20, 7])[:, None, None, None],
    "rows": SEEN.at[0, 0, :3].set(False),  # some see nothing
    "bias": drawn(1, 4, LENGTH, KEYS, seed=8),
}


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", [*MASKS, "causal"])
def test_blocks_have_the_values_and_gradients_of_whole_scores(kind: str, groups: int) -> None:
    key, causal, mask = jax.random.key(5), kind == "causal", MASKS.get(kind)
    q, k, v = drawn(2, 4, LENGTH, 8), drawn(2, groups, KEYS, 8, seed=1), drawn(2, groups, KEYS, 6)
    learnt = mask if kind == "bias" else jnp.zeros(())

    def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
        given = bias if kind == "bias" else mask
        out = attention(q, k, v, given, P, causal, enable_gqa=groups < 4, key=key)
        return jnp.sum(jnp.sin(out)), out

    def plain(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out = whole(key, q, k, v, bias if kind == "bias" else mask, causal)
        return jnp.sum(jnp.sin(out)), out

    got, want = (
        jax.jit(jax.grad(fn, (0, 1, 2, 3), has_aux=True))(q, k, v, learnt) for fn in (ours, plain)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_divided_sequence_drops_the_same_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries come at once: blocks would be taken from one device after another."""
    q, k, v = drawn(1, 2, LENGTH, 8), drawn(1, 2, KEYS, 8, seed=1), drawn(1, 2, KEYS, 6)
    key = jax.random.key(5)
    blocks = attention(q, k, v, dropout_p=P, key=key)
    monkeypatch.setattr(query_blocks, "divided_sequences", lambda: True)
    at_once = attention(q, k, v, dropout_p=P, key=key)
    np.testing.assert_allclose(blocks, at_once, rtol=1e-5, atol=1e-6)


def test_blocks_drop_apart_and_on_average_nothing() -> None:
    q, k, v = drawn(1, 1, LENGTH, 4), drawn(1, 1, KEYS, 4, seed=1), drawn(1, 1, KEYS, 4, seed=2)
    draws = 2000
    found = jax.jit(jax.vmap(lambda key: attention(q, k, v, dropout_p=P, key=key)))(
        jax.random.split(jax.random.key(0), draws)
    )
    want, spread = attention(q, k, v), jnp.std(found, axis=0)
    off = (jnp.mean(found, axis=0) - want) / (spread / draws**0.5)
    assert float(jnp.abs(off).max()) < 5
    assert 0.9 < float(jnp.std(off)) < 1.1
    alike = attention(jnp.zeros_like(q), k, v, dropout_p=P, key=jax.random.key(0))[0, 0]
    assert not np.allclose(alike[:40], alike[ROWS:])  # the same queries, not the same draws


def test_a_long_sequence_keeps_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def temporary(length: int) -> int:
        given = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)

        def loss(q: Any, k: Any, v: Any, key: Any) -> Any:
            return jnp.sum(attention(q, k, v, dropout_p=P, is_causal=True, key=key) ** 2)

        args = *[given] * 3, jax.eval_shape(lambda: jax.random.key(0))
        found = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile().memory_analysis()
        return int(found.temp_size_in_bytes)

    scores = 4 * 2 * 4096**2
    assert temporary(4096) < scores / 2  # whole, they are there six times
    assert query_blocks.blocks_of(1024, 1024) == 1


def test_a_dropout_of_all_scores_leaves_no_gradient() -> None:
    x = drawn(1, 1, LENGTH, 4)
    slopes = jax.grad(lambda q: jnp.sum(attention(q, x, x, dropout_p=1.0, key=jax.random.key(0))))
    np.testing.assert_array_equal(slopes(x), 0)
