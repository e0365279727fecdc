"""Leaves as they are kept, and in their own shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.errors import StateError
from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint, initial_shapes
from fzero.sharding.homes import cut_into_stages
from fzero.sharding.relayout import TO_ONE_RANK, Kept, filled_up, over_ranks, relayout, ways_of
from fzero.sharding.split import Split, map_splits
from fzero.state.require import require_alive, wrong_rows
from fzero.state.train_state import TrainState
from fzero.storage.tiers import require_on_device, settled
from fzero.tree import PyTree, key_name, map_named, named_leaves


def store(blue: Blueprint, name: str, logical: PyTree) -> PyTree:
    """Logical leaves of a state class as they are kept."""
    if not blue.plan.shards(name):
        return logical
    return map_splits(Split.store, getattr(blue, name), logical)


def logical_view(blue: Blueprint, name: str, stored: PyTree) -> PyTree:
    """Kept leaves of a state class in their own shapes (inside jit)."""
    if not blue.plan.shards(name):
        return stored

    def view(split: Split, leaf: jax.Array) -> jax.Array:
        return blue.constrain(split, split.logical(leaf)) if split.pad else leaf

    return map_splits(view, getattr(blue, name), stored)


def logical(model: Model, state: TrainState, plan: Plan | None = None) -> PyTree:
    """The parameters in their own shapes, without the padding of sharded leaves.

    Args:
        model: the state's model.
        state: the state.
        plan: its plan; needed in a pipeline, to put the layers of cut stacks in order.

    Returns:
        A params tree; leaves without padding are the state's own arrays. No dim of a padded leaf
        divides by the devices: without its padding every device has all of it.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: the state is one of another model; or a pipeline's and no plan, or another one,
            was given; or a leaf was put in by hand, padded, and lies elsewhere.
    """
    state = settled(state)
    require_alive(state, "logical")
    require_on_device(named_leaves({"params": state.params}), "logical")
    shapes, _ = initial_shapes(model)
    padded = dict(state.padded)
    _require_leaves(state.params, shapes, padded)
    homes = None
    if plan is not None and plan.pipe > 1:
        stages = cut_into_stages(model, plan)
        homes = stages.homes
        if wrong := wrong_rows(state, stages.rows):
            raise StateError("logical: the state is not one of this plan: " + "; ".join(wrong))

    def own(path: Any, name: str, leaf: Any, to: Any) -> jax.Array:
        home = homes[key_name(path[0])] if homes else None
        at = getattr(leaf, "sharding", None)
        if home is None and over_ranks(leaf):
            raise StateError(
                f"logical: the layers of {name} are spread over the ranks of a pipeline: pass the"
                f" state's plan as well, or {TO_ONE_RANK}"
            )
        if not isinstance(at, NamedSharding) and leaf.shape != to.shape:
            raise StateError(
                f"logical: {name}: expected {list(to.shape)}, or an array as the plan keeps it, got"
                f" {type(leaf).__name__} {list(leaf.shape)} at {at}. A leaf put in by hand goes"
                " where the old one is: jax.device_put(new, old.sharding)"
            )
        if not isinstance(at, NamedSharding):
            return leaf
        spec = PartitionSpec(None, *leaf.sharding.spec[1:]) if home and home.rows else None
        shape = (len(home.rows), *to.shape[1:]) if home and home.rows else to.shape
        _require_shape(name, leaf, shape, name in padded)
        if leaf.shape == to.shape and spec is None:
            return leaf
        if leaf.shape != shape:
            spec = PartitionSpec()
        whole = NamedSharding(leaf.sharding.mesh, spec or PartitionSpec())
        old = Kept(shape, leaf.shape, home.rows if home else ())
        there = jax.ShapeDtypeStruct(to.shape, leaf.dtype, sharding=whole)
        return relayout(leaf, old, Kept.whole(to.shape), there)

    names = map_named(lambda name, _: name, shapes)
    return jax.tree_util.tree_map_with_path(own, names, state.params, shapes)


def _require_leaves(params: PyTree, shapes: PyTree, padded: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `StateError` if parameters have other names than a model's, or other own shapes."""
    have, want = ([path for path, _ in named_leaves(tree)] for tree in (params, shapes))
    if have != want:
        raise StateError(
            "logical: the state is not one of this model: expected parameters"
            f" {sorted({*want} - {*have})[:8]}, got {sorted({*have} - {*want})[:8]}"
        )
    for path, to in named_leaves(shapes):
        if padded.get(path, to.shape) != to.shape:
            raise StateError(
                f"logical: the state is not one of this model: {path}: expected {list(to.shape)},"
                f" got {list(padded[path])}, filled up with zeros"
            )


def _require_shape(path: str, leaf: Any, shape: tuple[int, ...], padded: bool) -> None:
    """Raises `StateError` if a kept leaf is not of this shape, or that filled up."""
    if leaf.shape != shape and not (padded and leaf.shape == filled_up(shape, ways_of(leaf))):
        raise StateError(
            f"logical: the state is not one of this model: {path}: expected {list(shape)}, or that"
            f" filled up with zeros where it is divided, got {list(leaf.shape)} in"
            f" {leaf.sharding.spec}. A leaf put in by hand goes where the old one is:"
            " jax.device_put(new, old.sharding)"
        )
