"""`lookahead`: slow weights that follow fast ones, kept in the optimizer's state."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fzero.errors import PlanError
from fzero.optimizer.layers import with_extra_args
from fzero.tree import PyTree


class LookaheadState(NamedTuple):
    """State of `lookahead`.

    Attributes:
        fast: the fast optimizer's state.
        slow: the slow weights.
        count: int32, steps since the two were made equal.
    """

    fast: PyTree
    slow: PyTree
    count: Any


def lookahead(
    fast: optax.GradientTransformation, sync_period: int, slow_step_size: float
) -> optax.GradientTransformationExtraArgs:
    """`optax.lookahead` for parameters in the model's own structure.

    That one keeps fast and slow weights in a pair, which takes the place of the parameters. Here
    the parameters are the fast weights, and the slow ones are in the optimizer's state, split over
    devices as that is. `fz.eval_params(state, model, tx, plan, lambda opt, params: opt.slow)`
    evaluates at the slow ones.

    Args:
        fast: the optimizer of the fast weights.
        sync_period: steps between two moves of the slow weights, after each of which the fast ones
            start again from there.
        slow_step_size: how far the slow weights move towards the fast ones, 0 to 1.

    Raises:
        PlanError: an argument is something else.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx, params = lookahead(optax.sgd(1.0), 1, 0.5), {"w": jnp.zeros(1)}
        >>> updates, state = tx.update({"w": -jnp.ones(1)}, tx.init(params), params)
        >>> float(updates["w"][0]), float(state.slow["w"][0])
        (0.5, 0.5)

    Source: Zhang et al., Lookahead Optimizer, 2019; optax.lookahead.
    """
    if not isinstance(sync_period, Integral) or sync_period < 1:
        raise PlanError(
            f"lookahead: sync_period={sync_period!r}: expected a whole number from 1 on"
        )
    if not isinstance(slow_step_size, jax.Array) and not (  # (one that is injected has no value)
        isinstance(slow_step_size, Real) and 0 <= slow_step_size <= 1
    ):
        raise PlanError(f"lookahead: slow_step_size={slow_step_size!r}: expected 0 to 1")
    inner = with_extra_args(fast, "lookahead")

    def init(params: PyTree) -> LookaheadState:
        return LookaheadState(inner.init(params), params, jnp.zeros((), jnp.int32))

    def update(
        updates: PyTree, state: LookaheadState, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, LookaheadState]:
        if params is None:
            raise ValueError("lookahead: update needs params")
        updates, inner_state = inner.update(updates, state.fast, params, **extra)
        sync = state.count == sync_period - 1
        moved = jax.tree.map(
            lambda slow, p, u: slow + slow_step_size * (p + u - slow), state.slow, params, updates
        )
        updates = jax.tree.map(
            lambda slow, p, u: jnp.where(sync, slow - p, u), moved, params, updates
        )
        slow = jax.tree.map(lambda a, b: jnp.where(sync, a, b), moved, state.slow)
        return updates, LookaheadState(inner_state, slow, (state.count + 1) % sync_period)

    return optax.GradientTransformationExtraArgs(init, update)
