"""How the devices' values of a buffer become one, and which need no telling.

Every device runs a model on its own rows, so that what a buffer notes of them differs. A running
mean is averaged; a count is added up; a step counter is the same anywhere. Floats are averaged
unless a model says otherwise. Of integers nobody could guess: either the program shows that they
depend on nothing but buffers, or the model says how (`buffer_reduce`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fzero.errors import StateError
from fzero.jaxprs import Program, Var
from fzero.model import Context, Layer, Model, Stack
from fzero.plan import AXES, DATA, REPLICA
from fzero.tree import PyTree, is_floating, is_plain, map_named, named_leaves
from fzero.zero.collectives import Group, all_reduce_tree


REDUCTIONS = ("mean", "sum", "max", "same")
# Collectives after which all devices have one value, if they run over all of them.
_AGREEING = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather"))


def check_buffers(model: Model, buffers: PyTree) -> None:
    """Raises `StateError` for a buffer that no step keeps, or a reduction that it cannot have."""
    for path, leaf in named_leaves(buffers):
        if not is_plain(leaf):
            raise StateError(
                f"init: buffers/{path} is a random key ({leaf.dtype}). Steps fold keys of their own"
                " (ctx.rng, or rng of a loss); to carry one along, keep its bits:"
                " jax.random.key_data(key)"
            )
    for layer in model.layers:
        own = buffers if not layer.name else buffers.get(layer.name, {})
        leaves = dict(named_leaves(own))
        where = f"layer {layer.name!r}: " if layer.name else ""
        declared = layer.buffer_reduce
        for name, how in declared.items() if isinstance(declared, Mapping) else [("", declared)]:
            found = [leaf for path, leaf in leaves.items() if _within(path, name)]
            if isinstance(declared, Mapping) and not found:
                raise StateError(
                    f"init: {where}buffer_reduce names {name!r}, which is no buffer; there are"
                    f" {list(leaves)[:20]}"
                )
            if how not in REDUCTIONS and how is not None:
                raise StateError(
                    f"init: {where}buffer_reduce={how!r}: expected one of {list(REDUCTIONS)}"
                )
            if how == "mean" and isinstance(declared, Mapping) and not all(map(is_floating, found)):
                raise StateError(
                    f"init: {where}buffer_reduce[{name!r}]='mean' of integers; keep a float, or use"
                    " 'sum' or 'max'"
                )


def agreed_buffers(
    layers: Iterable[Layer | Stack], old: PyTree, new: PyTree, group: Group
) -> PyTree:
    """One value of each buffer for all devices.

    Args:
        layers: whose buffers.
        old: before the step, the same on all devices.
        new: after it, each device's own.
        group: the devices.
    """
    # What a loss computes in float32 is kept in the buffer's own precision.
    new = jax.tree.map(lambda a, b: b.astype(a.dtype) if is_floating(a) else b, old, new)
    size = group.data * group.replica
    if size == 1:
        return new
    how = jax.tree.leaves(_reductions(layers, new))
    leaves, treedef = jax.tree.flatten(new)
    before = jax.tree.leaves(old)
    added = {
        i: leaf if how[i] == "mean" else leaf - before[i]
        for i, leaf in enumerate(leaves)
        if how[i] in ("mean", "sum")
    }
    for i, total in zip(added, all_reduce_tree(list(added.values()), group), strict=True):
        leaves[i] = total / size if how[i] == "mean" else before[i] + total
    done = [
        leaf if i in added else _largest(leaf).astype(leaf.dtype) for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, done)


def _largest(leaf: jax.Array) -> jax.Array:
    """The largest of all devices' values; any of them, where all are the same."""
    number = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
    largest: jax.Array = jax.lax.pmax(number, (REPLICA, DATA))
    return largest


def _reductions(layers: Iterable[Layer | Stack], buffers: PyTree) -> PyTree:
    """A word of `REDUCTIONS` for each buffer."""
    by_name = {layer.name: layer for layer in layers}
    if "" in by_name:
        return _of_layer(by_name[""], buffers)
    return {name: _of_layer(by_name[name], tree) for name, tree in buffers.items()}


def _of_layer(layer: Layer | Stack, buffers: PyTree) -> PyTree:
    def reduction(name: str, leaf: Any) -> str:
        return _declared(layer, name) or ("mean" if is_floating(leaf) else "same")

    return map_named(reduction, buffers)


def _declared(layer: Layer | Stack, name: str) -> str | None:
    """What a layer says of one of its buffers, if anything; the longest path counts."""
    declared = layer.buffer_reduce
    if not isinstance(declared, Mapping):
        return declared
    paths = [path for path in declared if _within(name, path)]
    return declared[max(paths, key=len)] if paths else None


def _within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}/")


def require_reductions(layer: Layer | Stack, params: PyTree, x: Any, ctx: Context) -> None:
    """Raises `StateError` if devices would disagree about a buffer that nothing is said of.

    Args:
        layer: the layer.
        params: what it gets.
        x: likewise.
        ctx: likewise; with its buffers.
    """
    if not (layer.stateful and ctx.train):
        return
    unknown = [
        (name, leaf) for name, leaf in named_leaves(ctx.buffers)
        if not is_floating(leaf) and _declared(layer, name) is None
    ]  # fmt: skip
    if not unknown:
        return

    def run(own: Any, buffers: PyTree) -> PyTree:
        params, x, batch, rng = own
        at = dataclasses.replace(ctx, batch=batch, rng=rng, buffers=buffers)
        return layer.apply(params, x, at)[1]

    own = params, x, ctx.batch, ctx.rng
    differing = _differing(jax.make_jaxpr(run)(own, ctx.buffers), len(jax.tree.leaves(own)))
    names = [name for name, _ in named_leaves(ctx.buffers)]
    told = dict(unknown)
    for name, differs in zip(names, differing, strict=True):
        if differs and name in told:
            where = f"{layer.name}/" if layer.name else ""
            raise StateError(
                f"loss: buffers/{where}{name} ({told[name].dtype}) changes with the batch, so that"
                " each device has a value of its own. Say how they become one:"
                f" buffer_reduce={{{name!r}: 'sum'}} (what each device adds), 'max', or 'same'"
                " where all have the same value after all"
            )


def _differing(closed: Any, num_own: int) -> list[bool]:
    """Which results of a program depend on its first arguments: all devices have their own."""
    program = Program(closed.jaxpr, closed.consts)
    own = set(program.inputs[:num_own])
    for step in program.steps:
        if step.equation is None:  # a fence: each result is an operand
            pairs = zip(step.operands, step.results, strict=True)
            own.update(result for operand, result in pairs if _is(operand, own))
            continue
        kind = step.equation.primitive.name
        if kind in _AGREEING and _over_all(step.equation.params):
            continue
        if kind == "axis_index" or any(var in own for var in step.reads()):
            own.update(step.results)
    return [_is(out, own) for out in program.outputs]


def _is(operand: Any, own: set[Var]) -> bool:
    return isinstance(operand, Var) and operand in own


def _over_all(params: Mapping[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    return set(AXES) <= set(axes if isinstance(axes, tuple | list) else (axes,))
