"""An optax transformation with what it is told of the parameters, as steps use it."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fzero.compat import is_key
from fzero.errors import PlanError
from fzero.optimizer.layers import Scope, scope_of
from fzero.tree import PyTree


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
        self._takes_value: bool | None = None

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
        with scope_of(self.scope):
            state = self._keys(state, params)
            if self._takes_value is None:
                self._takes_value = takes_value(self.tx, grads, state, params)
            extra = {"value": loss} if self._takes_value else {}
            updates, state = self.tx.update(grads, state, params, **extra)
        return updates, jax.tree.map(_bits, state)

    def _keys(self, state: PyTree, params: PyTree) -> PyTree:
        """The state with its random keys."""
        kinds: list[Any] = []

        def init(params: PyTree) -> PyTree:
            state = self.tx.init(params)
            found = jax.tree.leaves(state)
            kinds.extend(jax.random.key_impl(x) if is_key(x) else None for x in found)
            return state

        jax.eval_shape(init, params)
        leaves, tree = jax.tree.flatten(state)
        keys = [
            leaf if kind is None else jax.random.wrap_key_data(leaf, impl=kind)
            for leaf, kind in zip(leaves, kinds, strict=True)
        ]
        return jax.tree.unflatten(tree, keys)

    def require_usable(self, params: PyTree) -> None:
        """Raises `PlanError` if the transformation cannot be used in a step.

        Args:
            params: shapes of the parameters.
        """
        with scope_of(self.scope):
            state = state_shapes(self.tx, params)
            self._takes_value = takes_value(self.tx, params, state, params)


def state_shapes(tx: optax.GradientTransformation, params: PyTree) -> PyTree:
    """Shapes of a transformation's state."""
    # A function of its own: jax would find the trace of another scope by that of `tx`.
    return jax.eval_shape(lambda params: tx.init(params), params)


def takes_value(
    tx: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree
) -> bool:
    """Whether a transformation takes the loss as `value=`: it is tried, on shapes.

    Raises:
        PlanError: it can be called neither with it nor without.
    """
    loss = jax.ShapeDtypeStruct((), jnp.float32)

    def call(grads: PyTree, state: PyTree, params: PyTree, value: Any) -> Any:
        return tx.update(grads, state, params, **({} if value is None else {"value": value}))

    accepts = inspect.signature(tx.update).parameters
    kinds = {p.kind for p in accepts.values()}
    order = [loss, None] if "value" in accepts or inspect.Parameter.VAR_KEYWORD in kinds else [None]
    problem: Exception | None = None
    for value in order:
        try:
            # Which arguments it takes is asked, not how strict its arithmetic is.
            with jax.numpy_dtype_promotion("standard"):
                jax.eval_shape(call, grads, state, params, value)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            problem = problem or error
        else:
            return value is not None
    raise PlanError(
        f"train_step: the optimizer cannot be used in a step; its update raised"
        f" {type(problem).__name__}: {problem}. A step calls update(gradients, state, params,"
        " value=loss) once, and has no function to evaluate the loss or a gradient again"
        " (value_fn, grad_fn), and parameters in the model's own structure. For a line search use"
        " the same optimizer without one (optax.lbfgs(rate, linesearch=None)); for sharpness-aware"
        " steps optax.contrib.sam(..., opaque_mode=False); for optax.lookahead"
        " fz.lookahead(fast_optimizer, sync_period, slow_step_size)"
    ) from problem


def _bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf
