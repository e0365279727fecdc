"""The loop over a stack's layers, which fetches the next layer while one computes.

A compiler only overlaps what does not depend on each other within one loop body, so the weights of
the layer to come are carried around the loop. The layer that comes last has none to fetch and
stands outside of it: a wasted gather per pass would be 1/L of the traffic. Where nothing can run
beside computation (CPUs, a single device; `Plan.prefetch`) each layer is fetched when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fzero.tree import PyTree


def look_ahead(
    num: int,
    fetch: Callable[[Any], PyTree],
    compute: Callable[[Any, PyTree, Any, bool], tuple[Any, Any]],
    carry: Any,
    *,
    ahead: bool,
    reverse: bool = False,
    outside: bool = True,
) -> tuple[Any, tuple[Any, Any]]:
    """Runs layers 0 to `num - 1`, or back.

    Args:
        num: how many layers.
        fetch: `fetch(k)`, the weights of layer k.
        compute: `compute(carry, weights, k, outside) -> (carry, result)`; `outside` for the one
            layer that stands outside of the loop.
        carry: what the first one gets.
        ahead: whether to fetch one ahead; two layers' weights are alive then.
        reverse: whether layer `num - 1` is the first.
        outside: whether, where weights are fetched ahead, the layer that comes last stands outside
            of the loop. It spares a gather; results are then two arrays, which only a copy joins.

    Returns:
        `(carry, (results of the looped layers, stacked; that of the layer outside))`, with `None`
        for what there is not. Results are stacked in the order of layers.
    """
    if not ahead:

        def plain(carry: Any, k: jax.Array) -> tuple[Any, Any]:
            return compute(carry, fetch(k), k, False)

        carry, looped = jax.lax.scan(plain, carry, jnp.arange(num), reverse=reverse)
        return carry, (looped, None)
    first, final, step = (num - 1, 0, -1) if reverse else (0, num - 1, 1)

    def trip(state: Any, k: jax.Array) -> tuple[Any, Any]:
        carry, weights = state
        following = fetch(k + step if outside else jnp.clip(k + step, 0, num - 1))
        carry, result = compute(carry, weights, k, False)
        return (carry, following), result

    state, looped = (carry, fetch(first)), None
    if not outside:
        state, looped = jax.lax.scan(trip, state, jnp.arange(num), reverse=reverse)
        return state[0], (looped, None)
    if num > 1:
        trips = jnp.arange(1, num) if reverse else jnp.arange(num - 1)
        state, looped = jax.lax.scan(trip, state, trips, reverse=reverse)
    carry, result = compute(*state, jnp.int32(final), True)
    return carry, (looped, result)
