"""Numbers, and a key, that a user wrote into a state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from fzero.compat import is_key
from fzero.errors import StateError
from fzero.hosts.agree import require_same
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.relayout import place
from fzero.state.init import key_of
from fzero.state.train_state import TrainState
from fzero.tree import PyTree, path_name


def with_scalars_placed(state: TrainState, blue: Blueprint, operation: str) -> TrainState:
    """The state with numbers and a key that a user wrote into it where the plan has them.

    A hyperparameter of `optax.inject_hyperparams` is a scalar array on all devices, as are the
    step's number and the key. Users set them to a Python number, or to an array that lies on one
    device.

    Raises:
        StateError: one is not of the dtype that the state has, or another one in each process.
    """
    state = _with_typed_key(state, operation)
    fields = {name: getattr(state, name) for name in ("step", "rng", "opt_state")}
    if not any(map(_is_given, jax.tree.leaves(fields))):
        return state
    named = jax.tree_util.tree_leaves_with_path(fields)
    given = {path_name(path): str(leaf) for path, leaf in named if _is_given(leaf)}
    require_same(operation, given, StateError)
    shapes = blue.shapes()

    def placed(name: str, tree: PyTree) -> PyTree:
        named, structure = jax.tree_util.tree_flatten_with_path({name: tree})
        expected: Any = jax.tree.structure({name: shapes[name]})
        fits = structure == expected  # else checks will say so
        wanted = jax.tree.leaves(shapes[name]) if fits else [None] * len(named)
        leaves = [
            _placed(leaf, to, operation, path_name(path)) if _is_given(leaf) else leaf
            for (path, leaf), to in zip(named, wanted, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)[name]

    return state.replace(**{name: placed(name, tree) for name, tree in fields.items()})


def _with_typed_key(state: TrainState, operation: str) -> TrainState:
    """The state with a key for the bits of one, as `jax.random.PRNGKey` gives them."""
    rng = state.rng
    bits = isinstance(rng, jax.Array | np.ndarray) and rng.ndim == 1 and not is_key(rng)
    if not bits or isinstance(rng, jax.core.Tracer):
        return state
    return dataclasses.replace(state, rng=key_of(jnp.asarray(rng), operation))


def _is_given(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer):
        return False
    if isinstance(leaf, jax.Array):
        return leaf.ndim == 0 and not isinstance(leaf.sharding, NamedSharding)
    return np.ndim(leaf) == 0 and isinstance(leaf, bool | int | float | np.generic | np.ndarray)


def _placed(leaf: Any, to: Any, operation: str, path: str) -> jax.Array:
    """A scalar as the plan keeps it; where it keeps none here, checks will say so."""
    if path == "rng":
        return place(key_of(leaf, operation), to.sharding)
    if to is None or to.shape != ():
        return jnp.asarray(leaf)
    number = np.asarray(leaf)
    fits = np.can_cast(number.dtype, to.dtype, "same_kind")
    if fits and np.issubdtype(to.dtype, np.integer):
        fits = number.astype(to.dtype) == number
    if not fits:
        raise StateError(f"{operation}: {path} is {leaf!r}; expected a number of dtype {to.dtype}")
    return jax.device_put(number.astype(to.dtype), to.sharding)
