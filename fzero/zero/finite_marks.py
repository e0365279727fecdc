"""Where in a step the first value that is not finite is: what is looked at on the devices.

A mark is a row of a leaf, counted from 1, or 0 where all is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fzero.batch import Inputs, opened
from fzero.keys import block_key
from fzero.links import Stack
from fzero.model import Model
from fzero.pieces import Piece, run_chain, whole_chain
from fzero.sharding.split import Split, flat_splits, trained
from fzero.tree import PyTree
from fzero.zero.chain import entered, train_backward, train_forward
from fzero.zero.collectives import shard_index
from fzero.zero.grads import loss_seed, unscaled
from fzero.zero.rules import Rules
from fzero.zero.stack import stack_watched
from fzero.zero.weights import FetchedWeights


def chain_marks(
    pieces: Sequence[Piece],
    rules: Rules,
    kept: PyTree,
    x: Any,
    buffers: PyTree,
    batch: PyTree,
    rng: jax.Array,
) -> tuple[Any, jax.Array]:
    """Runs pieces in training mode, without a backward pass: what they give, and their marks.

    Returns:
        `(out, marks)`: for each piece the first of its layers whose output is not finite.
    """
    fetched = FetchedWeights(rules, kept)
    x, inputs = entered(rules, pieces[0], x), opened(batch)
    marks: list[jax.Array] = []

    def run_piece(piece: Piece, x: Any, state: PyTree) -> tuple[Any, PyTree]:
        ctx, layer = rules.context(inputs, rng, True, state), piece.layer
        if isinstance(layer, Stack):
            x, state, seen = stack_watched(rules, piece, kept[layer.name], x, ctx, _is_bad)
            marks.append(jnp.where(jnp.any(seen), jnp.argmax(seen) + 1, 0))
            return x, state
        y, state = fetched.apply(layer, x, ctx.at(piece.number))
        marks.append(_is_bad(y).astype(jnp.int32))
        return y, state

    out, _ = run_chain(pieces, x, buffers, run_piece)
    return out, jnp.stack([mark.astype(jnp.int32) for mark in marks])


def gradient_marks(splits: PyTree, grads: PyTree) -> jax.Array:
    """For each gradient the last layer of a stack, or the leaf, that is not finite."""
    found = [
        _leaf_mark(split, grad)
        for split, grad in zip(flat_splits(splits), jax.tree.leaves(grads), strict=True)
    ]
    return jnp.stack(found)


def local_marks(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array,
    scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Marks of every microbatch of a step on one device: of `chain_marks`, of `gradient_marks`.

    Args:
        model: the model.
        rules: as for `local_gradients`, with gradients reduced at once.
        kept: this device's parameters as kept.
        buffers: buffers before the step.
        batch: this device's rows.
        rng: the step's key.
        scale: loss scale, or `None`.
    """
    count = rules.plan.microbatches
    block, pieces = shard_index() * count, whole_chain(model.layers)
    microbatches = batch.in_microbatches(count)

    def one(buffers: PyTree, index: jax.Array) -> tuple[PyTree, tuple[jax.Array, jax.Array]]:
        rows = microbatches.map_rows(lambda x: x[index])
        key = block_key(rng, block + index)
        own = rows, buffers, rows, key
        _, forward = chain_marks(pieces, rules, kept, *own)
        end, saved, new = train_forward(pieces, FetchedWeights(rules, kept), *own)
        seed, unscale = loss_seed(rules, end.mean, scale)
        grads, _ = train_backward(saved, rules, kept, seed)
        backward = gradient_marks(trained(rules.splits), unscaled(grads, unscale))
        return new, (forward, backward)

    _, marks = jax.lax.scan(one, buffers, jnp.arange(count))
    found: tuple[jax.Array, jax.Array] = marks
    return found


def _is_bad(tree: PyTree) -> jax.Array:
    bad = [
        jnp.any(~jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    return jnp.any(jnp.stack(bad)) if bad else jnp.zeros((), bool)


def _leaf_mark(split: Split, grad: jax.Array) -> jax.Array:
    if not split.stacked:
        return _is_bad(grad).astype(jnp.int32)
    rows = jnp.any(~jnp.isfinite(grad).reshape(grad.shape[0], -1), axis=1)
    return jnp.max(jnp.where(rows, jnp.arange(1, len(rows) + 1), 0))
