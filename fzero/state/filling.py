"""Zeros that fill leaves up: an edit leaves them, or is refused if it moves them among values.

A leaf that no dim divides has zeros at its end, and a stack whose ranks run different numbers of
layers has rows of zeros. What a user computes for each element leaves every value at its place,
whatever it makes of the zeros. `x[::-1]` does not: zeros become a layer, and a layer is lost. Then
there are zeros all across where values were, and values where nothing but zeros belongs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.errors import StateError
from fzero.sharding.split import OwnShapes
from fzero.storage.tiers import DEVICE, tier_of
from fzero.tree import PyTree, named_leaves


def require_unmoved(old: PyTree, new: PyTree, rows: Any, padded: OwnShapes) -> None:
    """Refuses new parameters among which zeros that filled the old ones up have moved.

    Looked at are whole arrays on this process's devices that are not the old ones.

    Args:
        old: the parameters of a state.
        new: what takes their place.
        rows: which layer each row of a stack holds, as a state says it.
        padded: the own shapes of leaves that are filled up, likewise.

    Raises:
        StateError: names the parameters.
    """
    before, layers_of, own_shapes = dict(named_leaves(old)), dict(rows), dict(padded)
    moved = []
    for path, leaf in named_leaves(new):
        layers, own = layers_of.get(path.split("/")[0], ()), own_shapes.get(path)
        if min(layers, default=0) >= 0 and own is None:
            continue
        if leaf is before.get(path) or not _is_here(leaf, before.get(path)):
            continue
        held = [np.arange(n) < m for n, m in zip(leaf.shape, own or leaf.shape, strict=True)]
        if layers:
            held[0] = np.asarray(layers) >= 0
        if any(not own.all() and _mixed(leaf, dim, own) for dim, own in enumerate(held)):
            moved.append(f"params/{path}")
    if moved:
        raise StateError(
            f"TrainState.replace: zeros that fill up {', '.join(moved)} have moved among their own"
            " values, as by x[::-1], which loses some. To move values within a leaf, bring the"
            " state to one device, where nothing is filled up, and back again: fz.replan(state,"
            " model, tx, plan, plan.replace(pipe=1, data=1, replica=1)), and 1 of further axes"
        )


def _is_here(leaf: Any, was: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and tier_of(leaf) == DEVICE
        and leaf.is_fully_addressable
        and leaf.shape == getattr(was, "shape", None)
    )


def _mixed(leaf: jax.Array, dim: int, own: np.ndarray[Any, Any]) -> bool:
    """Whether there are values behind a leaf's own, and nothing but zeros at some place within."""
    others = tuple(d for d in range(leaf.ndim) if d != dim)
    values = np.asarray(_any_value(leaf, others))
    return bool(values[~own].any() and not values[own].all())


@partial(jax.jit, static_argnums=1)
def _any_value(leaf: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.any(leaf != 0, axis=dims)
