"""Numbers that a user wrote into the optimizer's state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fzero.errors import StateError
from fzero.hosts.agree import require_same
from fzero.sharding.blueprint import Blueprint
from fzero.state.train_state import TrainState
from fzero.tree import path_name


def with_scalars_placed(state: TrainState, blue: Blueprint, operation: str) -> TrainState:
    """The state with numbers that a user wrote into the optimizer's state where the plan has them.

    A hyperparameter of `optax.inject_hyperparams` is a scalar array on all devices. Users set it to
    a Python number, or to an array that lies on one device.

    Raises:
        StateError: one is not of the dtype that the optimizer's state has, or another one in each
            process.
    """
    if not any(map(_is_given, jax.tree.leaves(state.opt_state))):
        return state
    named, tree = jax.tree_util.tree_flatten_with_path(state.opt_state)
    shapes = blue.shapes()["opt_state"]
    expected: Any = jax.tree.structure(shapes)
    given = {f"opt_state/{path_name(path)}": str(leaf) for path, leaf in named if _is_given(leaf)}
    require_same(operation, given, StateError)
    wanted = jax.tree.leaves(shapes) if tree == expected else [None] * len(named)
    placed = [
        _placed(leaf, to, f"{operation}: opt_state/{path_name(path)}") if _is_given(leaf) else leaf
        for (path, leaf), to in zip(named, wanted, strict=True)
    ]
    return state.replace(opt_state=jax.tree.unflatten(tree, placed))


def _is_given(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    if isinstance(leaf, jax.Array):
        return leaf.ndim == 0 and not isinstance(leaf.sharding, NamedSharding)
    return np.ndim(leaf) == 0 and isinstance(leaf, bool | int | float | np.generic | np.ndarray)


def _placed(leaf: Any, to: Any, where: str) -> jax.Array:
    """A scalar as the plan keeps it; where it keeps none here, checks will say so."""
    if to is None or to.shape != ():
        return jnp.asarray(leaf)
    if not np.can_cast(np.asarray(leaf).dtype, to.dtype, "same_kind"):
        raise StateError(f"{where} is {leaf!r}; expected a number of dtype {to.dtype}")
    return jax.device_put(np.asarray(leaf, to.dtype), to.sharding)
