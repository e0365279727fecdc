"""Which parameters of a state something reads: those trained, or their moving averages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fzero.errors import PlanError, StateError
from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.park import unpark
from fzero.sharding.relayout import Kept
from fzero.sharding.split import Split, flat_splits, map_splits, trained, with_frozen
from fzero.state.compute_copy import settled_state
from fzero.state.init import compute_of
from fzero.state.logical import logical_view
from fzero.state.replan import blueprint_of_state, relaid
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState
from fzero.storage.tiers import require_on_device
from fzero.tree import PyTree, is_traced, named_leaves


WHICH = ("params", "ema")


def averaged(state: TrainState, model: Model, plan: Plan) -> TrainState:
    """The state with its moving averages as parameters: to predict, generate and export with.

    Args:
        state: a state of a plan with `ema`; it is not consumed. Averages may be parked.
        model: its model.
        plan: its plan.

    Returns:
        A state of the same plan. Frozen parameters, buffers, moments and the averages themselves
        are the state's own arrays: a training step that is given one state consumes both.

    Raises:
        StateConsumedError: the state was given to a step.
        PlanError: the plan keeps no averages.
        StateError: the state has none.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones(2)}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
        >>> plan, tx = fz.Plan(data=1, ema=0.5), optax.sgd(1.0)
        >>> state, _ = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), {"x": jnp.ones(1)})
        >>> state.params["w"].tolist(), fz.averaged(state, model, plan).params["w"].tolist()
        ([0.0, 0.0], [0.5, 0.5])
    """
    state = settled_state(state)
    require_alive(state, "averaged")
    blue = blueprint_of_state(state, model, None, plan, "averaged")
    require_known("ema", blue, "averaged")
    if state.ema is None:
        raise StateError("averaged: the state has no averages (state.ema), which its plan says")
    return with_chosen(state, blue, "ema")


def require_known(which: str, blue: Blueprint, operation: str) -> None:
    """Raises `PlanError` if there is no such choice, or the plan keeps no such parameters."""
    if which not in WHICH:
        raise PlanError(f"{operation}: which={which!r}: expected one of {WHICH}")
    if blue.shapes()[which] is None:
        raise PlanError(
            f"{operation}: which={which!r}, but the plan keeps no averages: expected"
            " Plan(ema=0.999), or some other decay"
        )


def reads_of(blue: Blueprint, which: str) -> tuple[str, ...]:
    """The fields of a state that a pass reads parameters from, by which it takes."""
    if which == "params":
        return blue.reads
    frozen = any(split.frozen for split in flat_splits(blue.params))
    return (which, "params") if frozen else (which,)  # frozen ones have no average


def with_chosen(state: TrainState, blue: Blueprint, which: str) -> TrainState:
    """A state whose parameters, and compute copy, are those chosen.

    Arrays or traced values; `TrainState.params` itself stays as it is kept.
    """
    if which == "params":
        return state
    traced = is_traced(jax.tree.leaves(state))
    params = (_traced if traced else _relaid)(state.ema, blue)
    params = with_frozen(blue.params, params, state.params)
    if traced:  # steps cast traced parameters themselves
        return dataclasses.replace(state, params=params)
    return dataclasses.replace(state, params=params, compute=compute_of(blue, params))


def _relaid(averages: PyTree, blue: Blueprint) -> PyTree:
    """Averages as parameters are kept, leaf by leaf, on whatever devices they are."""

    def move(split: Split, leaf: Any, was: Kept, now: Kept, to: Any) -> Any:
        if leaf.dtype != to.dtype:
            leaf = unpark(leaf).astype(to.dtype)
        return relaid(leaf, was, now, to, blue.buckets.parked.get(("params", split.path)), blue)

    own = blue.params, blue.kept("params"), blue.shapes()["params"]
    splits, now, to = (trained(blue.params, tree) for tree in own)
    return map_splits(move, splits, averages, blue.kept("ema"), now, to)


def _traced(averages: PyTree, blue: Blueprint) -> PyTree:
    """Averages as parameters are kept, inside a program."""
    shapes = trained(blue.params, blue.shapes()["params"])

    def move(split: Split, leaf: jax.Array, to: Any) -> jax.Array:
        kept = split.store(leaf) if blue.plan.shards("params") else leaf
        return jax.lax.with_sharding_constraint(kept.astype(to.dtype), to.sharding)

    own = logical_view(blue, "ema", averages)
    return map_splits(move, trained(blue.params), own, shapes)


def read_from(state: Any, which: str, operation: str) -> Any:
    """A state to read parameters from, as they are kept: no step takes it, and nothing is copied.

    Moments belong to the parameters that are trained, so they do not come along with averages.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: there is no such choice, or the state has no averages.
        PlacementError: averages are parked.
    """
    if which == "params":
        return state
    if which not in WHICH or getattr(state, "ema", None) is None:
        why = "" if which not in WHICH else ", but the state has no averages (Plan(ema=0.999))"
        raise StateError(f"{operation}: which={which!r}{why}: expected one of {WHICH}")
    require_alive(state, operation)
    require_on_device(named_leaves({"ema": state.ema}), operation)
    own = jax.tree.leaves(state.params)
    tree: Any = jax.tree.structure(state.params)
    averages = tree.flatten_up_to(state.ema)  # None for what is frozen
    params = [a if b is None else b for a, b in zip(own, averages, strict=True)]
    return dataclasses.replace(
        state, params=jax.tree.unflatten(tree, params), compute=None, opt_state=()
    )  # fmt: skip
