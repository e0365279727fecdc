"""`replan`: a state under another plan, leaf by leaf and bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from fzero.errors import PlanError, StateError
from fzero.loss_scaling import initial_loss_scale
from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint, blueprint, require_in_order
from fzero.sharding.buckets import Parking
from fzero.sharding.park import is_parked_so, park, unpark
from fzero.sharding.relayout import Kept, place, relayout
from fzero.sharding.split import Split, map_splits, trained
from fzero.state import compute_copy
from fzero.state.init import compute_of, parking_folder
from fzero.state.require import require_alive, require_fits
from fzero.state.train_state import TrainState
from fzero.storage.tiers import DEVICE, on_device, tier_of
from fzero.tree import PyTree, map_named


def on_one_rank(plan: Plan) -> Plan:
    """A plan of the same devices, of whose states all is on them and no layer on a rank."""
    there = plan.replace(tiers={}, update_on="device") if plan.tiers else plan
    if plan.pipe == 1:
        return there
    data = None if plan.data is None else plan.data * plan.pipe
    return there.replace(zero=3, pipe=1, data=data, schedule=None, partition="uniform")


def replan(
    state: TrainState,
    model: Model,
    tx: optax.GradientTransformation | None,
    old_plan: Plan,
    new_plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
) -> TrainState:
    """The same state under another plan: other ZeRO stage, devices or precision.

    Values are bit-identical. What already lies where the new plan wants it is not copied: the two
    states share it, and a step that is given one of them consumes it for both (`donate=False`
    keeps it). Replanning twice is replanning once. What was parked by hand stays in its tier.
    Averages that only the new plan has begin at the parameters; a plan without `ema` drops them.

    Args:
        state: a state of `old_plan`.
        model: its model.
        tx: its optimizer, or `None`.
        old_plan: the plan it was made or last replanned with.
        new_plan: the plan wanted.
        devices: devices for the new plan; all by default.

    Returns:
        A state of `new_plan`.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: the state is not one of `old_plan`, or holds an accumulation in progress; or a
            leaf would go to other devices of other processes (save the state, and restore it).
    """
    state = compute_copy.settled_state(state)
    require_alive(state, "replan")
    old = blueprint_of_state(state, model, tx, old_plan, "replan")
    new = blueprint(model, tx, new_plan, devices)
    require_fits(state, old, "replan", reads=())
    if state.grads is not None:
        raise StateError(
            "replan: an accumulation is in progress (state.grads); finish it with train_step, or"
            " drop it with state.replace(grads=None)"
        )
    shapes = new.shapes()
    fields: dict[str, Any] = {"grads": None}
    for name in ("params", "opt_state", "buffers"):
        fields[name] = relaid_field(state, name, old, new)
    fields["ema"] = _replanned_averages(state, old, new, fields["params"])
    for name in ("step", "rng"):
        fields[name] = jax.tree.map(
            lambda leaf, to: place(leaf, to.sharding), getattr(state, name), shapes[name]
        )
    fields["compute"] = _replanned_compute(state, old, new, fields["params"], shapes)
    scale = state.loss_scale
    if new_plan.skips and (scale is None or old_plan.precision != new_plan.precision):
        fresh = initial_loss_scale(new_plan)
        assert fresh is not None
        scale = fresh if scale is None else dataclasses.replace(fresh, skipped=scale.skipped)
    fields["loss_scale"] = jax.tree.map(
        lambda leaf, to: place(leaf, to.sharding), scale if new_plan.skips else None,
        shapes["loss_scale"],
    )  # fmt: skip
    return TrainState(**fields, **new.statics)


def relaid_field(state: TrainState, name: str, old: Blueprint, new: Blueprint) -> PyTree:
    """A field of the state as another layout keeps it."""

    def move(path: str, leaf: Any, was: Kept, now: Kept, to: Any) -> Any:
        by_plan = (name, path) in old.buckets.parked
        parking = new.buckets.parked.get((name, path), _by_hand(leaf, by_plan))
        there, wanted = leaf.sharding.device_set, to.sharding.device_set
        _require_within_reach(f"{name}/{path}", there, wanted, was.alike(now))
        return relaid(leaf, was, now, to, parking, new)

    tree, to = getattr(state, name), new.shapes()[name]
    return map_named(move, tree, old.kept(name), new.kept(name), to)


def _require_within_reach(path: str, old: Set[Any], new: Set[Any], alike: bool) -> None:
    """Refuses to move a leaf between processes that do not all have a part of it.

    jax sends an array to as many devices elsewhere, as it is. All else takes devices that have it.
    """
    one_process = len({device.process_index for device in old | new}) == 1
    if one_process or old == new or (alike and len(old) == len(new)):
        return
    raise StateError(
        f"replan: {path} lies on {len(old)} devices, and the new plan keeps it on {len(new)}, other"
        " ones, of several processes, between which a leaf is not laid out anew. Go by way of a"
        " checkpoint: fz.save(path, state, old_plan), fz.wait(path), fz.restore(path, model, tx,"
        " new_plan)"
    )


def _replanned_averages(
    state: TrainState, old: Blueprint, new: Blueprint, params: PyTree
) -> PyTree:
    """Averages as the new plan keeps them; where only that has any, they begin at `params`."""
    if new.ema is None:
        return None
    if old.ema is None:
        return averages_at(new, params)
    return relaid_field(state, "ema", old, new)


def averages_at(blue: Blueprint, params: PyTree) -> PyTree:
    """Averages that begin at kept parameters, in any tier; they share no memory with them."""

    def copy(split: Split, leaf: Any, was: Kept, now: Kept, to: Any) -> Any:
        here = jnp.array(unpark(leaf), to.dtype, copy=True)
        return relaid(here, was, now, to, blue.buckets.parked.get(("ema", split.path)), blue)

    own, was = (trained(blue.params, tree) for tree in (params, blue.kept("params")))
    return map_splits(copy, blue.ema, own, was, blue.kept("ema"), blue.shapes()["ema"])


def _by_hand(leaf: Any, by_plan: bool) -> Parking | None:
    """Where a leaf was parked by hand, and so stays."""
    tier = tier_of(leaf)
    return None if by_plan or tier == DEVICE else Parking(tier)


def relaid(
    leaf: Any, old: Kept, new: Kept, to: Any, parking: Parking | None, blue: Blueprint
) -> Any:
    """A leaf of a state as another plan keeps it; the state's own stays as it is.

    Args:
        leaf: the leaf, in any tier.
        old: how it is kept.
        new: how it shall be kept.
        to: shape, dtype and sharding wanted, as if on the device.
        parking: where it shall be parked, if it shall.
        blue: the blueprint of the plan wanted.
    """
    stays = old.alike(new) and on_device(leaf.sharding) == to.sharding
    if stays and parking is not None and is_parked_so(leaf, parking):
        return leaf
    moved = relayout(unpark(leaf), old, new, to)
    if parking is None:
        return moved
    if old.alike(new) and tier_of(leaf) == DEVICE:  # what is parked is given away
        moved = jnp.array(moved, copy=True)
    return park(moved, parking, parking_folder(blue))


def _replanned_compute(
    state: TrainState, old: Blueprint, new: Blueprint, params: PyTree, shapes: Any
) -> PyTree:
    if not new.plan.keeps_compute_copy:
        return None
    if state.compute is not None and compute_copy.is_current(state.params, state.compute):
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.compute)]
        if dtypes == [leaf.dtype for leaf in jax.tree.leaves(shapes["compute"])]:
            moved = jax.tree.map(
                lambda leaf, was, now, to: relayout(unpark(leaf), was, now, to),
                state.compute, old.kept("compute"), new.kept("compute"), shapes["compute"],
            )  # fmt: skip
            compute_copy.pair(params, moved)
            return moved
    return compute_of(new, params)


def blueprint_of_state(
    state: TrainState, model: Model, tx: Any, plan: Plan, operation: str
) -> Blueprint:
    """The layout of a state's plan on the devices where the state is.

    Raises:
        StateError: the plan wants other numbers of devices.
    """
    devices = devices_of_state(state)
    require_in_order(model, plan)
    try:
        plan.sizes(len(devices))
    except PlanError as error:
        raise StateError(
            f"{operation}: the state lies on {len(devices)} devices, and is none of {plan!r}: pass"
            " the plan that it was made or last replanned with. One that was pickled comes back on"
            " one device: jax.device_put(state, fz.layout(model, tx, plan).shardings)"
        ) from error
    return blueprint(model, tx, plan, devices)


def devices_of_state(state: TrainState) -> list[Any]:
    sharding = getattr(state.step, "sharding", None)
    if sharding is None:  # put in by hand; what comes next says so
        return list(jax.devices())
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    return list(sharding.device_set)
