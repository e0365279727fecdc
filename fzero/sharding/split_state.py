"""How the trees that follow the parameters are split: an optimizer's state, averages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fzero.errors import PlanError
from fzero.plan import Plan
from fzero.sharding.split import (
    Home,
    Split,
    flat_splits,
    map_leaves,
    map_splits,
    split_leaf,
    trained,
    update_dtype,
)
from fzero.tree import PyTree, leaf_keys, named_leaves


def split_opt_state(
    init: Callable[[PyTree], PyTree], params: PyTree, plan: Plan, sizes: Mapping[str, int]
) -> PyTree:
    """How any optax state is split.

    A leaf that mirrors a parameter (its path ends with the parameter's, same shape) is cut like it,
    so that the update touches only local memory. Any other leaf (factored moments, counters) is
    cut by its own shape.

    Args:
        init: the transformation's `init`.
        params: the splits of the parameters; it is given those that are trained.
        plan: the plan.
        sizes: ZeRO's axes and how many devices are along each.
    """
    params = trained(params)
    shapes = jax.eval_shape(init, map_splits(_kept, params))
    by_rows = _by_rows(init, params, shapes)
    by_keys = dict(zip(_split_keys(params), flat_splits(params), strict=True))
    ranks = {rank for split in by_keys.values() if split.home for rank in split.home.ranks}
    everywhere = Home(tuple(sorted(ranks))) if ranks else None

    def split(keys: tuple[str, ...], name: str, leaf: Any) -> Split:
        shape = tuple(leaf.shape)
        ends = (keys[start:] for start in range(len(keys)))
        owner = next((by_keys[end] for end in ends if end in by_keys), None)
        if owner is not None and owner.shape == shape:
            return dataclasses.replace(
                owner, path=name, dtype=np.dtype(leaf.dtype), reason=f"as {owner.path}",
                owner=owner.path,
            )  # fmt: skip
        own = split_leaf(name, leaf, sizes, plan)
        own = dataclasses.replace(own, owner=None if owner is None else owner.path)
        if everywhere is None:
            return own
        if owner is None or (own.dim is None and not shape):
            return dataclasses.replace(own, home=everywhere)
        assert owner.home is not None
        if owner.home.rows and not (shape[:1] == owner.shape[:1] and name in by_rows):
            return dataclasses.replace(own, home=Home(owner.home.ranks, label=owner.home.label))
        if owner.home.rows and own.dim == 0:
            own = split_leaf(name, leaf, sizes, plan, stacked=True)
        return dataclasses.replace(own, home=owner.home, owner=owner.path)

    return map_leaves(split, shapes)


def split_averages(params: PyTree) -> PyTree:
    """The splits of averages of the trained parameters: each lies as its parameter, in float32."""

    def split(own: Split) -> Split:
        why = f"as {own.path}"
        return dataclasses.replace(
            own, dtype=update_dtype(own.dtype), reason=why, owner=own.path
        )  # fmt: skip

    return map_splits(split, trained(params))


def _by_rows(init: Callable[[PyTree], PyTree], params: PyTree, shapes: PyTree) -> set[str]:
    """Paths of leaves that have a row for each row of a cut stack on dim 0.

    Shapes alone do not tell: a stack may have as many layers as features. So it gets fewer layers,
    and then more features. (Not more layers: factored moments could change places.)

    Raises:
        PlanError: a leaf has rows on another dim, or those of several leaves.
    """

    def changed(rows: int, features: int) -> list[tuple[int, ...]]:
        def change(split: Split) -> jax.ShapeDtypeStruct:
            if split.home is None or not split.home.rows:
                return _kept(split)
            shape = split.shape[0] + rows, *(n + features for n in split.shape[1:])
            return jax.ShapeDtypeStruct(shape, update_dtype(split.dtype))

        return [x.shape for x in jax.tree.leaves(jax.eval_shape(init, map_splits(change, params)))]

    splits = flat_splits(params)
    if all(split.home is None or not split.home.rows for split in splits):
        return set()
    found: set[str] = set()
    leaves, owned = named_leaves(shapes), [keys for keys in _split_keys(params) if keys]
    for (name, leaf), keys, fewer, wider in zip(
        leaves, leaf_keys(shapes), changed(-1, 0), changed(0, 1), strict=True
    ):
        was = leaf.shape
        if fewer == was:
            continue
        if wider[:1] == was[:1]:
            found.add(name)
        mirrors = any(keys[-len(own) :] == own for own in owned)
        if not mirrors or (len(fewer) == len(was) and fewer[1:] != was[1:]):
            raise PlanError(
                f"plan: opt_state/{name} {list(was)} holds the layers of a stack that is cut, but"
                " not one by one on its first dim, so that no other plan could take them over:"
                " choose a partition that keeps the stack on one rank, or an optimizer that keeps"
                " one leaf per parameter, or pipe=1"
            )
    return found


def _split_keys(splits: PyTree) -> list[tuple[str, ...]]:
    return leaf_keys(map_splits(lambda split: split.path, splits))


def _kept(split: Split) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(split.shape, update_dtype(split.dtype))
