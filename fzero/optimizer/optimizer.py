"""An optax transformation with what it is told of the parameters, as steps use it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fzero.compat import is_key, key_bits
from fzero.errors import FzeroError, PlanError
from fzero.optimizer.layers import Rows, Scope, scope_of, stack_of
from fzero.tree import PyTree, named_leaves, same_structure


@dataclass(frozen=True)
class Traced:
    """A transformation's functions for parameters of some shapes.

    Args:
        init: the program that makes a state of parameters.
        update: the program that takes gradients, a state, parameters and, if `takes_value`, a loss.
        state: shapes of the state.
        after: shapes of the state after an update.
        keys: of each leaf of the state the kind of random key that it is, or `None`.
        takes_value: whether the loss is given as `value=`.
    """

    init: Any
    update: Any
    state: PyTree
    after: PyTree
    keys: Sequence[Any]
    takes_value: bool


class Optimizer:
    """A transformation for the parameters of one model under one plan.

    Random keys in its state are kept as their bits: arrays like others, which can be split, moved
    and saved.

    Args:
        tx: the transformation.
        scope: what it is told of the parameters.
    """

    def __init__(self, tx: optax.GradientTransformation, scope: Scope) -> None:
        self.tx, self.scope = tx, scope
        self._traced: dict[Any, Traced] = {}

    def init(self, params: PyTree) -> PyTree:
        """A new state for parameters (or for their shapes, under `jax.eval_shape`)."""
        with scope_of(self.scope):
            return jax.tree.map(_bits, self.tx.init(params))

    def update(
        self, grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Updates of the parameters, and the new state.

        Args:
            grads: mean gradients.
            state: the state.
            params: the parameters.
            loss: the mean loss, given as `value` to transformations that take it.

        Raises:
            PlanError: the transformation wants something else.
        """
        # What is asked here does not depend on sizes: a shard's do as well as a whole leaf's.
        known = next(iter(self._traced.values()), None) or self.traced(params)
        with scope_of(self.scope):
            extra = {"value": loss} if known.takes_value else {}
            updates, state = self.tx.update(grads, _keys(state, known.keys), params, **extra)
        return updates, jax.tree.map(_bits, state)

    def traced(self, params: PyTree) -> Traced:
        """The transformation's functions for parameters of these shapes, traced once.

        Raises:
            PlanError: the transformation cannot be used in a step.
        """
        key = shape_key(params)
        if key not in self._traced:
            try:
                with scope_of(self.scope):
                    self._traced[key] = traced(self.tx, params)
            except PlanError as error:
                self._require_any_rows(params, error)
                raise
        return self._traced[key]

    def _require_any_rows(self, params: PyTree, error: PlanError) -> None:
        """Raises `PlanError` if what failed works with the layers of stacks and no other rows."""
        filled = {name: rows for name, rows in self.scope.stacks.items() if rows.filled}
        if not filled:
            return
        alone = {name: Rows.in_order(len(rows.order)) for name, rows in filled.items()}

        def of_layers(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            rows = alone.get(stack_of(path, alone) or "")
            shape = leaf.shape if rows is None else (rows.num, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        try:
            with scope_of(replace(self.scope, stacks={**self.scope.stacks, **alone})):
                traced(self.tx, jax.tree_util.tree_map_with_path(of_layers, params))
        except PlanError:
            return
        kept = [f"{name!r} has {len(x.order)} layers in {x.num} rows" for name, x in filled.items()]
        raise PlanError(
            "train_step: the optimizer takes as many rows of a Stack as it has layers, and a"
            f" pipeline keeps others besides (TrainState.rows): {', '.join(kept)}"
            f" ({error.__cause__ or error}). Say fz.per_layer(tx), for the whole optimizer or for"
            " the part of its chain that tells layers apart: it then sees each layer as a leaf of"
            " its own, with its number in the path (blocks/w/0, blocks/w/1, ...)"
        ) from error


def shape_key(params: PyTree) -> Any:
    """What two trees of the same structure, shapes and dtypes have in common."""
    leaves, tree = jax.tree.flatten(params)
    return tree, tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves)


def _require_arrays(state: PyTree) -> None:
    for path, leaf in named_leaves({"opt_state": state}):
        if not hasattr(leaf, "dtype"):
            raise PlanError(
                f"init: {path} is a {type(leaf).__name__}: expected the optimizer's init to give"
                " arrays (of a number, jnp.asarray), which a step takes and gives; what is no array"
                " belongs into the function that makes the optimizer"
            )


def _require_updates(updates: PyTree, params: PyTree) -> None:
    given, wanted = dict(named_leaves(updates)), dict(named_leaves(params))
    if without := [path for path in wanted if path not in given]:
        what = f"nothing for {', '.join(without[:4])}"
    elif not same_structure(updates, params):
        what = "a tree of another structure"
    elif others := [path for path, leaf in wanted.items() if given[path].shape != leaf.shape]:
        path = others[0]
        what = f"{list(given[path].shape)} for {path}, whose shape is {list(wanted[path].shape)}"
    else:
        return
    raise PlanError(
        f"train_step: the optimizer's update gives {what}: expected an update for each"
        " parameter, as a tree of their structure; one that shall not change gets zeros"
        " (optax.set_to_zero), or is frozen (the model's frozen=)"
    )


def _require_same_state(before: PyTree, after: PyTree) -> None:
    was, now = (
        {path: f"{x.dtype}{list(x.shape)}" for path, x in named_leaves({"opt_state": tree})}
        for tree in (before, after)
    )
    if was == now and same_structure(before, after):
        return
    said = [
        f"{path} is {was.get(path, 'not there')} before and {now.get(path, 'not there')} after"
        for path in {**was, **now}
        if was.get(path) != now.get(path)
    ]
    raise PlanError(
        "train_step: the optimizer's update gives another state than its init:"
        f" {', '.join(said[:4]) or 'its nodes differ'}. A step's state is the next one's, in a scan"
        " and in a checkpoint: expected the same tree, shapes and dtypes"
    )


def traced(tx: optax.GradientTransformation, params: PyTree) -> Traced:
    """Traces a transformation's functions; whether it takes the loss as `value=` is tried.

    Raises:
        PlanError: its update can be called neither with it nor without, leaves parameters out, or
            gives another state than its init.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    keys: list[Any] = []

    # A function of its own: jax would find the trace of another scope by that of `tx`.
    def start(params: PyTree) -> PyTree:
        state = tx.init(params)
        _require_arrays(state)
        found = jax.tree.leaves(state)
        keys[:] = [jax.random.key_impl(leaf) if is_key(leaf) else None for leaf in found]
        return state

    try:
        init, state = jax.make_jaxpr(start, return_shape=True)(params)
    except FzeroError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise PlanError(
            f"init: the optimizer cannot be used: its init raised {type(error).__name__}: {error}."
            " It is given the model's tree of parameters, with None in place of frozen ones (masks"
            " and labels that are trees name those, too) and each leaf of a Stack as its layers:"
            " blocks/w/0, blocks/w/1, ..."
        ) from error

    def update(grads: PyTree, state: PyTree, params: PyTree, *loss: jax.Array) -> Any:
        return tx.update(grads, state, params, **({"value": loss[0]} if loss else {}))

    accepts = inspect.signature(tx.update).parameters
    may = "value" in accepts or any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    problem: Exception | None = None
    for value in ([loss], []) if may else ([],):
        try:
            # Which arguments it takes is asked, not how strict its arithmetic is.
            with jax.numpy_dtype_promotion("standard"):
                program, (updates, after) = jax.make_jaxpr(update, return_shape=True)(
                    params, state, params, *value
                )
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            problem = problem or error
        else:
            _require_updates(updates, params)
            _require_same_state(state, after)
            return Traced(init, program, state, after, tuple(keys), bool(value))
    raise PlanError(
        f"train_step: the optimizer cannot be used in a step; its update raised"
        f" {type(problem).__name__}: {problem}. A step calls update(gradients, state, params,"
        " value=loss) once, and has no function to evaluate the loss or a gradient again"
        " (value_fn, grad_fn), and parameters in the model's own structure. For a line search use"
        " the same optimizer without one (optax.lbfgs(rate, linesearch=None)); for sharpness-aware"
        " steps optax.contrib.sam(..., opaque_mode=False); for optax.lookahead"
        " fz.lookahead(fast_optimizer, sync_period, slow_step_size)"
    ) from problem


def state_shapes(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Shapes of a transformation's state."""
    # A function of its own: jax would find the trace of another scope by that of `tx`.
    return jax.eval_shape(lambda params: tx.init(params), params)


def _keys(state: PyTree, kinds: Sequence[Any]) -> PyTree:
    """The state with its random keys."""
    leaves, tree = jax.tree.flatten(state)
    keys = [
        leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]
    return jax.tree.unflatten(tree, keys)


def _bits(leaf: Any) -> Any:
    return key_bits(jnp.asarray(leaf))  # an update may give a number
