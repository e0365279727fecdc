"""Attention by blocks of queries, whose scores are computed again for the gradient.

A dropout of scores has no fused kernel, and what products and a softmax keep of it for the gradient
grows with the square of the length: 3 GiB for 8 heads and 4,096 positions. Of blocks there are the
scores of one at a time, forward and backward; a row's softmax is whole, so nothing is put together.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange.attention import divided_sequences
from torch_bridge.lower.random import dropout_mask


# Queries at a time: products of fewer rows read keys more often than they compute with them.
ROWS = 128
# Up to this many scores of a head, keeping them costs little and is faster.
SCORES = 1024 * 1024


def blocks_of(queries: int, keys: int) -> int:
    """How many blocks of queries there are: 1 where scores are few."""
    return 1 if queries * keys <= SCORES else -(-queries // ROWS)


def kept_scores(key: Any, p: float, shape: tuple[int, ...], blocks: int, block: Any) -> jax.Array:
    """Which scores a dropout keeps; those of a block are the same whether it comes alone or not.

    Args:
        key: of the dropout.
        p: how likely a score is dropped.
        shape: of the scores, `(..., rows, S)`.
        blocks: how many there are.
        block: the one whose rows these are; None if all are there.
    """
    if blocks == 1:
        return dropout_mask(key, p, shape)
    if block is not None:
        return dropout_mask(jax.random.fold_in(key, block), p, shape)
    own = (*shape[:-2], ROWS, shape[-1])
    drawn = jax.vmap(lambda n: dropout_mask(jax.random.fold_in(key, n), p, own))
    return _joined(drawn(jnp.arange(blocks)), shape[-2])


def by_queries(
    attend: Callable[[Any, Any, Any], jax.Array], blocks: int, query: jax.Array, mask: Any
) -> jax.Array:
    """An attention by blocks of its queries; of a sequence that a plan divides all come at once.

    Args:
        attend: of queries `(..., rows, E)`, their rows of the mask, and the number of the block
            (None: all queries are there).
        blocks: of `ROWS` queries each; of 1 block are all.
        query: `(..., T, E)`.
        mask: `(..., T or 1, S)`, or None.

    Returns:
        `(..., T, V)`, what `attend` gives, block by block.
    """
    if blocks == 1 or divided_sequences():
        return attend(query, mask, None)
    length = query.shape[-2]
    own = mask is not None and mask.ndim > 1 and mask.shape[-2] == length

    @jax.checkpoint
    def one(block: Any, rows: jax.Array, seen: Any) -> jax.Array:
        return attend(rows, seen if own else mask, block)

    given = jnp.arange(blocks), _split(query, blocks), _split(mask, blocks) if own else None
    _, found = jax.lax.scan(lambda none, xs: (none, one(*xs)), None, given)
    return _joined(found, length)


def _joined(x: jax.Array, rows: int) -> jax.Array:
    """`(..., rows, n)` of blocks `(blocks, ..., ROWS, n)`."""
    joined = jnp.moveaxis(x, 0, -3)
    return jnp.reshape(joined, (*joined.shape[:-3], -1, joined.shape[-1]))[..., :rows, :]


def _split(x: jax.Array, blocks: int) -> jax.Array:
    """`(blocks, ..., ROWS, n)`; the last one is filled up with zeros: nothing is read of them."""
    more = blocks * ROWS - x.shape[-2]
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, more), (0, 0))) if more else x
    return jnp.moveaxis(jnp.reshape(x, (*x.shape[:-2], blocks, ROWS, x.shape[-1])), -3, 0)
