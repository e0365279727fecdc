"""A trained state with another optimizer or other frozen parameters, or as it is evaluated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fzero.compat import outside_of_meshes
from fzero.errors import StateError, some_of
from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint, blueprint
from fzero.sharding.park import unpark
from fzero.sharding.relayout import Kept
from fzero.sharding.split import map_splits, trained, with_frozen
from fzero.state.compute_copy import settled_state
from fzero.state.init import (
    compiled_fields,
    compute_of,
    new_opt_state,
    parked_field,
    parked_opt_state,
)
from fzero.state.logical import logical_view, store
from fzero.state.replan import (
    averages_at,
    blueprint_of_state,
    devices_of_state,
    relaid,
    relaid_field,
)
from fzero.state.require import require_alive, require_fits
from fzero.state.train_state import TrainState
from fzero.tree import PyTree, map_named, named_leaves, shapes_of


@outside_of_meshes()
def with_optimizer(
    state: TrainState,
    model: Model,
    old_tx: optax.GradientTransformation | None,
    new_tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    old_model: Model | None = None,
) -> TrainState:
    """A trained state that goes on with another optimizer, or with other frozen parameters.

    Parameters, buffers, the step count, the key, the loss scale and an accumulation in progress
    stay as they are (the two states share them); the new optimizer starts afresh, from these
    parameters, in the layout and the tiers of the plan. Averages (`Plan(ema=)`) go on; those of
    parameters that were frozen begin at these.

    Args:
        state: the state; it is not consumed.
        model: the model that it goes on with: its own, unless `old_model` is.
        old_tx: the optimizer that it has, or `None`.
        new_tx: the one wanted, or `None`.
        plan: the state's plan.
        old_model: its model, where that freezes other parameters than `model` does.

    Returns:
        A state of `new_tx`.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: the state is not one of its model, `old_tx` and plan; or `old_model` has other
            parameters or buffers, or the state an accumulation in progress, of what it trains.
        PlanError: the new optimizer cannot be used, or would mix the layers of a `Stack`.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((2, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
        >>> plan = fz.Plan(data=1)
        >>> state = fz.init(model, optax.sgd(0.1), plan)
        >>> state = with_optimizer(state, model, optax.sgd(0.1), optax.adam(1e-3), plan)
        >>> state.opt_state[0].mu["w"].shape
        (2, 2)
    """
    state, old = _known(state, old_model or model, old_tx, plan, "with_optimizer")
    new = blueprint(model, new_tx, plan, devices_of_state(state))
    new.require_optimizer("with_optimizer")
    if old_model is not None:
        state = _with_other_frozen(state, old, new)
    if new_tx is None:
        return state.replace(opt_state=())
    params = jax.tree.map(unpark, state.params)
    if new.parks("opt_state"):
        return state.replace(opt_state=parked_opt_state(new, params))

    def make(params: PyTree) -> dict[str, PyTree]:
        opt_state = new_opt_state(new, logical_view(new, "params", params))
        return {"opt_state": store(new, "opt_state", opt_state)}

    return state.replace(**compiled_fields(new, "opt_state", make, params)(params))


def _with_other_frozen(state: TrainState, old: Blueprint, new: Blueprint) -> TrainState:
    """A state, but for its optimizer, of a model that trains other parameters of the same."""
    ours, theirs = (_held(blue) for blue in (new, old))
    if ours != theirs:
        unlike = [
            f"{path}: {theirs.get(path, 'none')} in old_model, {ours.get(path, 'none')} in model"
            for path in {**theirs, **ours} if theirs.get(path) != ours.get(path)
        ]  # fmt: skip
        raise StateError(
            "with_optimizer: expected an old_model of the same parameters and buffers, of which"
            f" others are frozen (model.with_frozen(...)), got {some_of(unlike, 4)}"
        )
    if state.grads is not None:
        raise StateError(
            "with_optimizer: an accumulation is in progress (state.grads), of the parameters that"
            " old_model trains; finish it with train_step, or drop it with"
            " state.replace(grads=None)"
        )
    params = relaid_field(state, "params", old, new)
    return dataclasses.replace(
        state,
        params=params,
        compute=compute_of(new, params),
        ema=_averages_going_on(state, old, new, params),
        **new.statics,
    )


def _held(blue: Blueprint) -> dict[str, str]:
    """The shapes that a model keeps, by path, whatever of it is frozen."""
    params = map_splits(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), blue.params)
    leaves = named_leaves({"params": params, "buffers": blue.buffers})
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _averages_going_on(state: TrainState, old: Blueprint, new: Blueprint, params: PyTree) -> PyTree:
    """Averages of what the new model trains; of what was frozen they begin at `params`."""
    if new.ema is None:
        return None
    had, was = (dict(named_leaves(tree)) for tree in (state.ema, old.kept("ema")))

    def of(path: str, leaf: Any, now: Kept, to: Any) -> Any:
        if path not in had:
            return leaf
        parking = new.buckets.parked.get(("ema", path))
        return relaid(had[path], was[path], now, to, parking, new)

    return map_named(of, averages_at(new, params), new.kept("ema"), new.shapes()["ema"])


@outside_of_meshes()
def eval_params(
    state: TrainState,
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    of: Callable[[PyTree, PyTree], PyTree] | None = None,
) -> TrainState:
    """The state with the parameters that its optimizer means to be evaluated.

    Some optimizers train parameters at one point and have found another: the average of
    `optax.contrib.schedule_free`, the slow weights of `fz.lookahead`, a running mean. Evaluate the
    result, export it; train with the state given.

    Args:
        state: the state; it is not consumed.
        model: its model.
        tx: its optimizer.
        plan: its plan.
        of: `of(opt_state, params)` gives the parameters; both are in their own shapes, without
            padding, and frozen ones are `None`. In a chain it picks its part:
            `lambda opt_state, params: opt_state[1].slow`. By default those that
            `optax.contrib.schedule_free` or `fz.lookahead` means.

    Returns:
        The state with these as `params`, laid out as the plan says.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: the state is not one of the model, `tx` and plan, `of` gives other
            shapes, or there is none and the optimizer is another one.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((2, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
        >>> plan, tx = fz.Plan(data=1), optax.contrib.schedule_free_sgd(0.1)
        >>> state = fz.init(model, tx, plan)
        >>> float(fz.eval_step(model, plan)(eval_params(state, model, tx, plan), {"x": jnp.ones(1)})
        ...       ["loss"])
        4.0
    """
    state, blue = _known(state, model, tx, plan, "eval_params")

    def make(opt_state: PyTree, params: PyTree) -> dict[str, PyTree]:
        whole = logical_view(blue, "params", params)
        own = trained(blue.params, whole)  # as the optimizer sees them
        found = (of or _own_average)(logical_view(blue, "opt_state", opt_state), own)
        if shapes_of(found) != shapes_of(own):
            raise StateError(
                f"eval_params: expected parameters of the model's structure, shapes and dtypes,"
                f" got {shapes_of(found)}"
            )
        # Arrays of their own, even where they are those of the state: both may be given away.
        found = with_frozen(blue.params, found, whole)
        return {"params": store(blue, "params", jax.tree.map(jnp.copy, found))}

    trees = [jax.tree.map(unpark, tree) for tree in (state.opt_state, state.params)]
    params = compiled_fields(blue, "params", make, *trees, by=of)(*trees)["params"]
    return state.replace(params=parked_field(blue, "params", params))


def _own_average(opt_state: PyTree, params: PyTree) -> PyTree:
    """The parameters that an optimizer's own state means to be evaluated."""
    from fzero.optimizer.lookahead import LookaheadState  # which is imported when it is used

    if isinstance(opt_state, LookaheadState):
        return opt_state.slow
    if isinstance(opt_state, optax.contrib.ScheduleFreeState):
        return optax.contrib.schedule_free_eval_params(opt_state, params)
    raise StateError(
        "eval_params: expected the state of optax.contrib.schedule_free or fz.lookahead, got"
        f" {type(opt_state).__name__}; say where the parameters are:"
        " of=lambda opt_state, params: opt_state[1].slow"
    )


def _known(
    state: TrainState, model: Model, tx: Any, plan: Plan, operation: str
) -> tuple[TrainState, Blueprint]:
    """A state that is alive and fits, and its blueprint."""
    state = settled_state(state)
    require_alive(state, operation)
    blue = blueprint_of_state(state, model, tx, plan, operation)
    require_fits(state, blue, operation, ())
    return state, blue
