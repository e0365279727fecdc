"""What an optimizer does row by row is done slab by slab."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.storage.tiers import DEVICE, HOST, tier_of
from fzero.tree import named_leaves


def less_another(first):
    """A slice along the last dim is one of rows: its limits along the others are the sizes."""

    def row_by_row(x):
        if x.ndim < 2:
            return x
        last = x.ndim - 1
        start = first(x)
        later = jax.lax.slice_in_dim(x, start, start + x.shape[last] - 1, axis=last)
        return x - 0.1 * jax.lax.pad(later, x.dtype.type(0), [(0, 0, 0)] * last + [(0, 1, 0)])

    return optax.stateless(lambda updates, _: jax.tree.map(row_by_row, updates))


@pytest.mark.parametrize(
    ("first", "by_slabs"),
    [(lambda x: 1, True), (lambda x: int(len(x) > 1), False)],
    ids=["the-next", "by-rows"],
)
def test_an_update_that_takes_a_part_of_each_row_goes_slab_by_slab(first, by_slabs):
    """If it is the same part, however many rows there are."""
    tx = fz.as_stacked(optax.chain(less_another(first), optax.adam(1e-2)))
    model = tiny.chain(16)
    plan = tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=512)
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    state, _ = step(state, tiny.tokens(16))
    seen = []
    step.stream.observer = lambda event, visit: seen.append(visit)
    step(state, tiny.tokens(16))
    assert bool({visit.slab for visit in seen} - {None}) == by_slabs


def counted():
    """A number for each leaf."""

    def update(updates, counts, params=None):
        return updates, jax.tree.map(lambda n: n + 1, counts)

    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda _: jnp.zeros(()), params), update
    )


def test_a_number_for_each_leaf_stays_on_the_device():
    plan = tiny.plan(zero=1, data=2, tiers={"opt_state": "host"})
    tx = fz.per_layer(optax.chain(optax.trace(0.9), counted()))
    leaves = [leaf for _, leaf in named_leaves(fz.init(tiny.chain(), tx, plan).opt_state)]
    assert {tier_of(leaf) for leaf in leaves} == {HOST, DEVICE}
