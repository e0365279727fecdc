"""Parameters that only outputs read which a loss does not (`export/reach.py` says what of it)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fzero.errors import some_of, warn
from torch_bridge.export.mode import Mode
from torch_bridge.export.reach import reached_params
from torch_bridge.lower.refs import Ref


def may_be_unread(mode: Mode) -> bool:
    """Whether some outputs of a graph have parameters of their own."""
    outputs = [leaf for leaf in mode.graph.outputs if isinstance(leaf, Ref)]
    return len({frozenset(reached_params(mode, [leaf])) for leaf in outputs}) > 1


def unread_parameters(mode: Mode, closed: Any, results: Sequence[Any], num_values: int) -> set[str]:
    """Names of leaves that gradients of a loss do not reach, though those of its outputs would.

    Args:
        mode: the graph that the loss runs.
        closed: the traced loss.
        results: its variables of the graph's outputs.
        num_values: how many of what it returns are its value; metrics follow.
    """
    values = closed.jaxpr.outvars[:num_values]
    reached = {v for v in values if not isinstance(v, core.Literal)}
    for equation in reversed(closed.jaxpr.eqns):
        learns = any(v in reached and _has_slope(v) for v in equation.outvars)
        if learns and equation.primitive.name != "stop_gradient":
            reached.update(v for v in equation.invars if not isinstance(v, core.Literal))
    outputs = [leaf for leaf in mode.graph.outputs if isinstance(leaf, Ref)]
    read = [leaf for leaf, v in zip(outputs, results, strict=True) if v in reached]
    return reached_params(mode, outputs) - reached_params(mode, read)


def warn_of_unread(names: set[str]) -> None:
    """Say that a loss does not read what some parameters are for."""
    if not names:
        return
    shown = some_of([f"`{name}`" for name in sorted(names)], 8)
    warn(
        f"the loss reads no output that depends on {shown}."
        " PyTorch gives them no gradient, and its optimizers leave them alone, weight decay"
        " included; an optax transformation decays them. tb.optimizer(..., unread=[their names])"
        " leaves them alone, tb.fit does by itself; so does requires_grad_(False) before"
        " tb.convert"
    )


def _has_slope(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))


def num_values(shapes: Any) -> int:
    """How many leaves of what a loss returns are its value."""
    return len(jax.tree.leaves(shapes[0] if isinstance(shapes, tuple) else shapes))
