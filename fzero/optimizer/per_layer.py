"""`per_layer`: an optimizer that sees each layer of a stack as a leaf of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from fzero.errors import PlanError
from fzero.optimizer.layers import (
    Rows,
    Scope,
    as_layers,
    current_scope,
    is_layers,
    stack_of,
    with_extra_args,
)
from fzero.optimizer.optimizer import state_shapes
from fzero.optimizer.roll import Rolled, layers_of, state_layers
from fzero.tree import PyTree


def per_layer(
    tx: optax.GradientTransformation, stacks: Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The transformation applied to each layer of every `Stack` as to a leaf of its own.

    A stack then trains as the same layers written out, whatever the transformation does: Muon sees
    matrices, LAMB has a trust ratio for each layer, Adafactor factors each layer, masks and labels
    see the layers' own shapes (`leaf.ndim > 1` is true of a matrix, and of no stacked bias).
    Masks and labels that are trees name stacked leaves as ever. What is the same for all layers is
    still computed for all of them at once, and products of matrices are divided over the data
    axis: each device computes those of its layers.

    Args:
        tx: any optax transformation; the whole optimizer, or a part of a chain.
        stacks: first keys of the paths of leaves that are stacked, though by no `Stack` of the
            model: `fz.init` and steps tell of those. Needed outside of them.

    Returns:
        The transformation. Its state has leaves `(L, ...)` for stacked parameters, where that of
        `tx` has `(...)` for a layer. Layers that are kept differently (labels by number) are a
        tuple there.

    Raises:
        PlanError: what is given is no optax transformation; (when called) outside of fzero,
            without `stacks`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> params = {"blocks": {"w": jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])}}
        >>> tx = per_layer(optax.clip_by_block_rms(1.0), stacks=["blocks"])
        >>> updates, _ = tx.update(params, tx.init(params))
        >>> [round(float(layer[0, 0]), 3) for layer in updates["blocks"]["w"]]
        [1.0, 1.414]
    """
    inner = with_extra_args(tx, "per_layer")

    def init(params: PyTree) -> PyTree:
        scope = _known(params, stacks)
        if scope.checking:
            return optax.EmptyState()
        return Rolled(inner.init, layers_of(params, scope.stacks))(scope)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        scope = _known(updates, stacks)
        if scope.checking:
            return updates, state
        like = updates if params is None else params
        shapes = state_shapes(inner, as_layers(like, scope.stacks))
        tree: Any = jax.tree.structure(updates)
        arrays = {
            name: layers_of(value, scope.stacks if jax.tree.structure(value) == tree else {})
            for name, value in extra.items()
            if all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
        }
        others = {name: value for name, value in extra.items() if name not in arrays}

        def apply(updates: PyTree, state: PyTree, params: PyTree, arrays: PyTree) -> Any:
            return inner.update(updates, state, params, **arrays, **others)

        rolled = Rolled(
            apply,
            layers_of(updates, scope.stacks),
            state_layers(state, shapes, scope.stacks),
            layers_of(params, scope.stacks),
            arrays,
        )
        new, state = rolled(scope)
        return new, state

    return optax.GradientTransformationExtraArgs(init, update)


def as_stacked(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation as it is: it knows of leaves that stack layers, and means what it does.

    `init` and steps refuse an optimizer that would train a `Stack` otherwise than the same layers
    written out, as it does not say that it means to. This says so: for a mask such as
    `leaf.ndim > 2`, or `optax.contrib.muon` with dimension numbers for stacked leaves. In a
    pipeline it sees rows as ranks keep them: in the schedule's order, shorter ranks filled up with
    zeros (`state.rows`). One that looks at several layers at once is another one there.

    Args:
        tx: any optax transformation; the whole optimizer, or a part of a chain.

    Example:
        >>> import jax, optax
        >>> matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params)
        >>> tx = as_stacked(optax.adamw(1e-3, weight_decay=0.1, mask=matrices))
    """
    inner = with_extra_args(tx, "as_stacked")

    def checking() -> bool:
        scope = current_scope()
        return scope is not None and scope.checking

    def init(params: PyTree) -> PyTree:
        return optax.EmptyState() if checking() else inner.init(params)

    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        return (updates, state) if checking() else inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _known(params: PyTree, stacks: Sequence[str] | None) -> Scope:
    """The scope that a transformation is called in, with the stacks that it was given besides."""
    scope = current_scope()
    if scope is None and stacks is None:
        raise PlanError(
            "per_layer: which leaves are stacked is not known outside of fz.init and steps; say"
            " per_layer(tx, stacks=[...]) with the first keys of their paths"
        )
    scope = scope or Scope()
    found: dict[str, Rows] = {}
    named = dict.fromkeys(stacks or (), Rows(0, ()))
    for path, leaf in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_layers)[0]:
        stack = stack_of(path, named)
        if stack is not None and not is_layers(leaf):
            found[stack] = Rows.in_order(leaf.shape[0])
    return replace(scope, stacks={**found, **scope.stacks})
