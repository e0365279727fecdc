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
from fzero.state.row_order import is_of_a_state, meant
from fzero.storage.tiers import DEVICE, on_device, tier_of
from fzero.tree import PyTree, is_plain, is_traced, named_leaves, same_structure


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


def refilled(old: PyTree, new: PyTree, rows: Any) -> PyTree:
    """An edited field in whose rows that are no layers nothing was edited.

    What an edit writes there (`moments + 0.1`) optimizers would add up with what layers have.

    Args:
        old: a field of a state.
        new: what takes its place.
        rows: which layer each row of a stack holds, as a state says it.
    """
    if not same_structure(old, new) or all(min(layers, default=0) >= 0 for _, layers in rows):
        return new
    before, (leaves, structure) = jax.tree.leaves(old), jax.tree.flatten(new)
    return jax.tree.unflatten(structure, [
        _with_rows(leaf, had, tuple(layer >= 0 for layer in layers))
        if min(layers, default=0) < 0 and leaf is not had and _is_edited(leaf, had, len(layers))
        else leaf
        for leaf, had, (_, layers) in zip(leaves, before, meant(structure, rows), strict=True)
    ])  # fmt: skip


def _is_edited(leaf: Any, had: Any, num: int) -> bool:
    """Whether an array takes the place of one that keeps so many rows, where that lies.

    One that a state had as it is, is none: whether its layers lie alike, is known of it. One that
    lies elsewhere no step takes.
    """
    return (
        isinstance(leaf, jax.Array)
        and isinstance(had, jax.Array)
        and not is_of_a_state(leaf)
        and is_plain(leaf)
        and leaf.shape == had.shape
        and leaf.shape[:1] == (num,)
        and not is_traced([leaf, had])
        and not (leaf.is_deleted() or had.is_deleted())
        and on_device(leaf.sharding).is_equivalent_to(on_device(had.sharding), leaf.ndim)
    )


def _with_rows(leaf: jax.Array, had: jax.Array, layers: tuple[bool, ...]) -> jax.Array:
    """A leaf with the rows of another where these are no layers."""

    def chosen(leaf: jax.Array, had: jax.Array) -> jax.Array:
        own = np.asarray(layers).reshape(-1, *(1,) * (leaf.ndim - 1))
        return jnp.where(own, leaf, had.astype(leaf.dtype))

    # Either may be parked on the host, where nothing is computed.
    here = on_device(leaf.sharding)
    found = jax.jit(chosen, out_shardings=here)(*jax.device_put((leaf, had), here))
    put: jax.Array = jax.device_put(found, leaf.sharding)
    return put


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
