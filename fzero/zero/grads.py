"""One step's gradients on one device: microbatches, loss seed, accumulation, reduction.

Everything here runs inside `jax.shard_map` with the mesh axes manual. What is summed over devices
and microbatches are totals; they are divided once, by the count of the whole step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fzero.batch import Inputs
from fzero.errors import StateError
from fzero.keys import block_key
from fzero.links import Mean, split_loss
from fzero.model import Model
from fzero.pieces import whole_chain
from fzero.precision import power_of_two_below
from fzero.sharding.split import map_splits, trained, update_dtype, wide
from fzero.tree import PyTree, added, named_leaves
from fzero.zero.buffers import agreed_buffers
from fzero.zero.chain import Saved, eval_forward, train_backward, train_forward
from fzero.zero.collectives import shard_index, summed
from fzero.zero.keeping import with_remat
from fzero.zero.rules import Rules
from fzero.zero.weights import FetchedWeights


def local_gradients(
    model: Model,
    rules: Rules,
    kept: PyTree,
    buffers: PyTree,
    batch: Inputs,
    rng: jax.Array,
    scale: jax.Array | None,
) -> tuple[PyTree, Mean, dict[str, Mean], PyTree]:
    """Gradients of the loss's total over this step's rows.

    Args:
        model: the model.
        rules: how to fetch and reduce.
        kept: this device's parameters as kept.
        buffers: buffers before the step.
        batch: this device's rows.
        rng: the step's key.
        scale: loss scale, or `None`.

    Returns:
        `(sums, loss, metrics, buffers)`: shards of summed gradients (in the compute dtype after
        one microbatch, at least float32 after several or with `reduce_dtype="fp32"`), loss and
        metrics summed over all devices, new buffers.
    """
    plan, group = rules.plan, rules.group
    count = plan.microbatches
    # Keys follow the block of rows, so that dropout is the same however a batch is divided between
    # devices and microbatches.
    block = shard_index() * count
    pieces = whole_chain(model.layers)

    def one(
        rules: Rules, kept: PyTree, buffers: PyTree, rows: Inputs, index: Any
    ) -> tuple[_Sums, PyTree, PyTree]:
        key = block_key(rng, block + index)
        rows = rows.map_rows(group.spread)
        fetched = FetchedWeights(rules, kept)
        end, saved, new = train_forward(pieces, fetched, rows, buffers, rows, key)
        if rules.hold:
            rules, kept = rules.held(), fetched.whole()
        # Everything the forward pass leaves is settled here; only then does the backward pass start
        # from it, in every stage alike.
        mean, metrics = rules.fence((end.mean, end.metrics))
        seed, unscale = loss_seed(rules, mean, scale)
        grads, _ = train_backward(saved, rules, kept, seed)
        return (unscaled(grads, unscale), float_mean(mean), float_means(metrics)), new, kept

    if count == 1:
        (sums, mean, metrics), new, _ = one(rules, kept, buffers, batch, 0)
    else:
        (sums, mean, metrics), new = _accumulated(one, rules, kept, buffers, batch)
    if not rules.reduce:
        rules = dataclasses.replace(rules, reduce=True)
        sums = rules.finish(map_splits(rules.scatter, trained(rules.splits), sums))
    mean, metrics = summed((mean, metrics), group)
    return sums, mean, metrics, agreed_buffers(model.layers, buffers, new, group)


# Summed gradients, loss and metrics.
_Sums = tuple[PyTree, Mean, dict[str, Mean]]


def _accumulated(
    one: Callable[..., tuple[_Sums, PyTree, PyTree]],
    rules: Rules,
    kept: PyTree,
    buffers: PyTree,
    batch: Inputs,
) -> tuple[_Sums, PyTree]:
    """Sums over the microbatches, one after the other, and the last one's buffers.

    Sums have at least float32.

    Where gathered parameters are held, the first microbatch stands before the loop: it alone
    gathers, and the others read what it leaves.
    """
    count = rules.plan.microbatches
    microbatches = batch.in_microbatches(count)
    first = microbatches.map_rows(lambda x: x[0])

    def add(sums: _Sums, found: _Sums) -> _Sums:
        # Added when all of them are there. Otherwise XLA reduces the last layer's gradient only
        # where it is added, beside nothing. (Llama of 8 layers, 4 microbatches, 8 H200: 19 % of
        # the reductions' bytes are exposed without this fence, none with it.)
        total: _Sums = added(sums, rules.fence(found))
        return total

    def room(like: PyTree) -> _Sums:
        zeros: _Sums = jax.tree.map(lambda x: jnp.zeros(x.shape, update_dtype(x.dtype)), like)
        return zeros

    if rules.hold:
        found, buffers, kept = one(rules, kept, buffers, first, 0)
        sums, rules, start = add(room(found), found), rules.held(), 1
        microbatches = microbatches.map_rows(lambda x: x[1:])
    else:
        shapes, *_ = jax.eval_shape(partial(one, rules), kept, buffers, first, 0)
        sums, start = room(shapes), 0

    def body(carry: Any, xs: Any) -> tuple[Any, None]:
        sums, buffers = carry
        # Weights wait for their microbatch: otherwise gathers that do not depend on it would be
        # lifted out of this loop, and stay alive through all of it.
        own, xs = rules.fence((kept, xs))
        rows, index = xs
        inputs = dataclasses.replace(microbatches, rows=rows)
        found, buffers, _ = one(rules, own, buffers, inputs, index)
        return (add(sums, found), buffers), None

    xs = microbatches.rows, jnp.arange(start, count)
    (sums, buffers), _ = jax.lax.scan(body, (sums, buffers), xs)
    return sums, buffers


def keeping_rules(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
) -> Rules:
    """The rules of `local_gradients`, whose plan says what forward passes keep."""
    return with_remat(rules, lambda own: first_saved(model, own, kept, buffers, batch, rng))


def first_saved(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
) -> Saved:
    """What the first microbatch's forward pass in `local_gradients` leaves."""
    rows = batch.in_microbatches(rules.plan.microbatches).map_rows(lambda x: x[0])
    rows = rows.map_rows(rules.group.spread)
    fetched = FetchedWeights(rules, kept)
    return train_forward(whole_chain(model.layers), fetched, rows, buffers, rows, rng)[1]


def loss_seed(
    rules: Rules, mean: Mean, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The cotangent that a microbatch's backward pass starts from, and what undoes its scale.

    Raises:
        StateError: the loss is a whole number.
    """
    if not jnp.issubdtype(mean.total.dtype, jnp.floating):
        raise StateError(
            f"loss: expected a floating-point loss to train with, got {mean.total.dtype}: whole"
            " numbers have no gradient"
        )
    seed = jnp.ones((), jnp.float32)
    unscale = None
    if scale is not None and rules.plan.precision == "fp16":
        # Gradients of a sum over tokens overflow fp16 long before those of its mean.
        count = summed(mean.count.astype(jnp.float32), rules.group)
        shrink = power_of_two_below(count)
        seed, unscale = scale / shrink, shrink / scale
    return seed.astype(mean.total.dtype), unscale


def unscaled(grads: PyTree, unscale: jax.Array | None) -> PyTree:
    """Gradients without the loss scale, in float32 where there was one."""
    if unscale is None:
        return grads
    return jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, grads)


def local_evaluation(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
) -> tuple[Mean, dict[str, Mean]]:
    """Loss and metrics over all devices, in evaluation mode."""
    key = block_key(rng, shard_index())
    batch = batch.map_rows(rules.group.spread)
    pieces = whole_chain(model.layers)
    mean, metrics = split_loss(eval_forward(pieces, rules, kept, batch, buffers, batch, key))
    found: tuple[Mean, dict[str, Mean]] = summed(
        (float_mean(mean), float_means(metrics)), rules.group
    )
    return found


def local_outputs(
    model: Model, rules: Rules, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
) -> PyTree:
    """What the model gives for each of this device's rows, in evaluation mode.

    Raises:
        StateError: an output has another number of rows.
    """
    key = block_key(rng, shard_index())
    batch = batch.map_rows(rules.group.spread)
    pieces = whole_chain(model.predictor)
    out = eval_forward(pieces, rules, kept, batch, buffers, batch, key)
    return require_rows(out, batch)


def require_rows(out: PyTree, batch: Inputs) -> PyTree:
    """Outputs that have a row for each of a device's examples.

    Raises:
        StateError: one has not.
    """
    rows = jax.tree.leaves(batch.rows)[0].shape[0]
    for path, leaf in named_leaves(out):
        shape = jnp.shape(leaf)
        if shape[:1] != (rows,):
            raise StateError(
                f"predict_step: output {path or '(the only one)'} has shape {list(shape)} for"
                f" {rows} examples: outputs have a row for each example on their first dim"
            )
    return out


def float_mean(mean: Mean) -> Mean:
    """A mean whose sums are at least float32."""
    return Mean(wide(mean.total), wide(mean.count))


def float_means(metrics: dict[str, Any]) -> dict[str, Mean]:
    """A model's metrics as means whose sums are at least float32.

    Raises:
        StateError: one is no scalar.
    """
    means = {name: float_mean(Mean.of(value)) for name, value in metrics.items()}
    for name, mean in means.items():
        if mean.total.shape or mean.count.shape:
            raise StateError(
                f"loss: metric {name!r} has shape {list(mean.total.shape or mean.count.shape)}:"
                " metrics are scalars, or fz.Mean of scalars, which add up over devices and"
                " microbatches; outputs for each example come from fz.predict_step(model, plan)"
            )
    return means
