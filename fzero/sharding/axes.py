"""Which dims of a parameter lie along the further axes of a mesh, as its model says.

ZeRO cuts a leaf so that each device keeps a part and gathers the whole to use it. Along a further
axis (`fzero.axes.FURTHER`) a leaf stays divided while it is used: each device computes with its
own part, and XLA adds what the arithmetic asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fzero.axes import EXPERT, FURTHER, TENSOR, Parts
from fzero.errors import PlanError, UnusedDevicesWarning, warn
from fzero.links import Shard, Stack
from fzero.model import Model
from fzero.plan import Plan
from fzero.tree import PyTree, matching, named_leaves


# For each dim of a leaf, as far as there are any: the axis that it lies along.
Axes = tuple[str | None, ...]


def axes_of(model: Model, plan: Plan, shapes: PyTree) -> dict[str, Axes]:
    """For every parameter, by name, the further axis that each of its dims lies along.

    Args:
        model: the model, which says so (`shard`).
        plan: the plan; axes that it does not have split nothing.
        shapes: the parameters' shapes.

    Raises:
        PlanError: a rule is for no parameter, names an unknown axis or one twice, has too many
            dims, or a dim does not divide; or nothing lies along the plan's `expert` axis. (Along
            its `tensor` axis: an `UnusedDevicesWarning`.)
    """
    leaves = dict(named_leaves(shapes))
    found: dict[str, Axes] = dict.fromkeys(leaves, ())
    rules = [("", model.shard, "model")]
    rules += [(f"{x.name}/", x.shard, f"layer {x.name!r}") for x in model.layers if x.name]
    stacks = [f"{layer.name}/" for layer in model.layers if isinstance(layer, Stack)]
    for prefix, shard, who in rules:  # a layer's own are the last, and stay
        names = [name.removeprefix(prefix) for name in leaves if name.startswith(prefix)]
        for name, dims in _ruled(shard, names, who).items():
            path = prefix + name
            first = int(any(path.startswith(stack) for stack in stacks))
            found[path] = _axes(path, dims, leaves[path].shape, first, plan)
    if EXPERT in plan.further and not any(EXPERT in axes for axes in found.values()):
        raise PlanError(
            f"plan: expert={plan.expert}, but no parameter of the model lies along it: say"
            " which do, shard={'up': ('expert',)}, and use fz.experts (of a converted model,"
            " converted.parallel says which do); or leave expert out and give its devices to data"
        )
    if TENSOR in plan.further and not any(TENSOR in axes for axes in found.values()):
        # No error: what a function computes may be divided all the same, by its own constraints.
        warn(
            f"plan: tensor={plan.tensor}, but no parameter of the model lies along it: but for what"
            " the model's own with_sharding_constraint divides, these devices all do the same. Say"
            " which do, shard={'up': (None, 'tensor')} (of a converted model, converted.parallel"
            " says which do); or leave tensor out and give its devices to data",
            UnusedDevicesWarning,
        )
    return found


def num_ways(plan: Plan, axes: Axes) -> int:
    """Devices that share out a leaf along its further axes."""
    return math.prod(plan.further[axis] for axis in axes if axis is not None)


def _ruled(
    shard: Shard, names: Sequence[str], who: str
) -> Mapping[str, Sequence[str | Parts | None]]:
    """The names that rules are for: of several for one its own name counts, or else the first."""
    found: dict[str, Sequence[str | Parts | None]] = {}
    for key, dims in sorted(shard.items(), key=lambda rule: rule[0] not in names):
        ruled = matching(key, names)
        if not ruled:
            raise PlanError(
                f"model: shard of {who} is for {getattr(key, 'pattern', key)!r}, which is no"
                f" parameter; there are {list(names)[:20]}"
            )
        for name in ruled:
            found.setdefault(name, dims)
    return found


def _axes(path: str, dims: Any, shape: tuple[int, ...], first: int, plan: Plan) -> Axes:
    own, along = shape[first:], () if dims is None else dims
    listed = isinstance(along, list | tuple)
    if listed:
        along = [dim.under(plan.further) if isinstance(dim, Parts) else dim for dim in along]
    named = [axis for axis in along if axis is not None] if listed else []
    if not listed or len(along) > len(own) or len({*named}) < len(named):
        raise PlanError(
            f"model: shard of {path}: expected at most one axis or None for each of its dims"
            f" {list(own)}, none twice, such as (None, 'tensor'); got {dims!r}"
        )
    unknown = [axis for axis in named if axis not in FURTHER]
    if unknown:
        raise PlanError(
            f"model: shard of {path} names the mesh axes {unknown}: expected some of"
            f" {list(FURTHER)} (the data axis is ZeRO's)"
        )
    for dim, axis in enumerate(along):
        size = plan.further.get(axis or "", 1)
        if own[dim] % size:
            raise PlanError(
                f"plan: {axis}={size} does not divide dim {dim} ({own[dim]}) of {path}"
                f" {list(own)}; choose a divisor, pad the parameter, or leave the dim out of shard"
            )
    axes = [None] * first + [axis if axis in plan.further else None for axis in along]
    return tuple(axes) if any(axes) else ()
