"""What a model says of how the devices' values of a buffer become one, and which need no telling.

Every device runs a model on its own rows, so that what a buffer notes of them differs. A running
mean is averaged; a count is added up; a step counter is the same anywhere. Floats are averaged
unless a model says otherwise. Of integers nobody could guess, also where the model's one word is
`mean`: either the program shows that they depend on nothing but buffers (nor on the number of rows
that a device has), or the model says how (`buffer_reduce`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.axes import AXES
from fzero.errors import StateError
from fzero.links import Context, Layer, Stack, require_buffers
from fzero.model import Model
from fzero.programs.digest import digest
from fzero.programs.jaxprs import Op, Program, Var, needed, read, run_ops
from fzero.tree import PyTree, named_leaves


REDUCTIONS = ("mean", "sum", "max", "same")
# Collectives after which all devices have one value, if they run over all of them.
_AGREEING = frozenset(("psum", "psum_invariant", "pmax", "pmin", "all_gather"))


def check_buffers(model: Model, buffers: PyTree) -> None:
    """Raises `StateError` for a reduction that a buffer cannot have."""
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
            if how == "mean" and isinstance(declared, Mapping) and not all(map(has_mean, found)):
                raise StateError(
                    f"init: {where}{_at(name)}='mean' of integers; keep a float, or use"
                    " 'sum' or 'max'"
                )
            if how == "sum" and any(leaf.dtype == jnp.bool_ for leaf in found):
                raise StateError(
                    f"init: {where}{_at(name)}='sum' of booleans; count in an integer,"
                    " or use 'max', which is true where it is on any device"
                )


def _at(name: str) -> str:
    """As it is written for one buffer, or for all."""
    return f"buffer_reduce[{name!r}]" if name else "buffer_reduce"


def has_mean(leaf: Any) -> bool:
    """Whether the devices' values of a buffer may be averaged: floats and complex numbers."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def declared_reduction(layer: Layer | Stack, name: str) -> str | None:
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
    unknown = undeclared(layer, ctx.buffers)
    if not unknown:
        return

    def run(own: Any, buffers: PyTree) -> PyTree:
        params, x, batch, rng = own
        at = dataclasses.replace(ctx, batch=batch, rng=rng, buffers=buffers)
        new = layer.apply(params, x, at)[1]
        require_buffers(layer, buffers, new)
        return new

    own = params, x, ctx.batch, ctx.rng
    names = [name for name, _ in named_leaves(ctx.buffers)]
    told = dict(unknown)
    for name, differs in zip(names, _following(run, own, ctx.buffers), strict=True):
        if differs and name in told:
            raise not_told(layer, name, told[name])


def undeclared(layer: Layer | Stack, buffers: PyTree) -> list[tuple[str, Any]]:
    """A layer's buffers that have no mean, and of which nothing else is said."""
    return [
        (name, leaf) for name, leaf in named_leaves(buffers)
        if not has_mean(leaf) and declared_reduction(layer, name) in (None, "mean")
    ]  # fmt: skip


def not_told(layer: Layer | Stack, name: str, leaf: Any) -> StateError:
    """What is said of a buffer of which each device has a value of its own."""
    where = f"{layer.name}/" if layer.name else ""
    said = declared_reduction(layer, name)
    truth = leaf.dtype == jnp.bool_
    one = "'max'} (true where it is on any device)" if truth else "'sum'} (what each adds)"
    return StateError(
        f"loss: buffers/{where}{name} ({leaf.dtype}) changes with the batch, so that"
        " each device has a value of its own"
        + (f", of which there is no {said}" if said else "")
        + f". Say how they become one: buffer_reduce={{{name!r}: {one},"
        + ("" if truth else " 'max',")
        + " or 'same' where all have the same value after all"
    )


def _following(run: Any, own: tuple[Any, ...], buffers: PyTree) -> list[bool]:
    """Which new buffers follow what a device has of its own: its values, or how many rows."""
    num_own = len(jax.tree.leaves(own))

    def twice(rows: int, own: Any, buffers: PyTree) -> PyTree:
        params, x, batch, rng = own
        x, batch = jax.tree.map(
            lambda leaf: jnp.concatenate([leaf, leaf]) if np.shape(leaf)[:1] == (rows,) else leaf,
            (x, batch),
        )
        return run((params, x, batch, rng), buffers)

    program = _traced(run, own, buffers)
    differing = _differing(program, num_own)
    # Which leaves of a batch are rows, and which `fz.Shared`, no layer is told.
    for rows in {np.shape(leaf)[0] for leaf in jax.tree.leaves(own[2]) if np.ndim(leaf)}:
        try:
            more = _traced(partial(twice, rows), own, buffers)
        except Exception:  # the layer takes this many and no other number
            continue
        differing = [
            differs or _of_buffers(program, i, num_own) != _of_buffers(more, i, num_own)
            for i, differs in enumerate(differing)
        ]
    return differing


def _traced(function: Any, own: tuple[Any, ...], buffers: PyTree) -> Program:
    closed = jax.make_jaxpr(function)(own, buffers)
    return Program(closed.jaxpr, closed.consts)


def _differing(program: Program, num_own: int) -> list[bool]:
    """Which results of a program depend on its first arguments: all devices have their own."""
    own = set(program.inputs[:num_own])
    for op in program.ops:
        if op.equation is None:  # a fence: each result is an operand
            pairs = zip(op.operands, op.results, strict=True)
            own.update(result for operand, result in pairs if _is(operand, own))
            continue
        if _agrees(op):
            continue
        if op.equation.primitive.name == "axis_index" or any(var in own for var in op.reads()):
            own.update(op.results)
    return [_is(out, own) for out in program.outputs]


def _of_buffers(program: Program, index: int, num_own: int) -> str | None:
    return follows_from(program, program.outputs[index], program.inputs[num_own:])


def follows_from(program: Program, out: Any, buffers: Sequence[Var]) -> str | None:
    """How a result follows from buffers and from what devices agreed on; None: not from these."""
    agreed = [var for op in program.ops if _agrees(op) for var in op.results]
    # (What a layer closes over may be traced around it.)
    outer = [var for var, x in program.consts.items() if isinstance(x, jax.core.Tracer)]
    given = [*buffers, *agreed, *outer]
    ops = [program.ops[i] for i in sorted(needed(program.ops, [out], set(agreed)))]
    own = {*program.inputs}.difference(buffers)
    if not own.isdisjoint([out, *(var for op in ops for var in op.reads())]):
        return None

    def follow(*values: Any) -> Any:
        env = program.consts | dict(zip(given, values, strict=True))
        run_ops(ops, env)
        return read(env, out)

    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in given]
    return digest(jax.make_jaxpr(follow)(*shapes))


def _agrees(op: Op) -> bool:
    equation = op.equation
    return (
        equation is not None and equation.primitive.name in _AGREEING and _over_all(equation.params)
    )


def _is(operand: Any, own: set[Var]) -> bool:
    return isinstance(operand, Var) and operand in own


def _over_all(params: Mapping[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    return set(AXES) <= set(axes if isinstance(axes, tuple | list) else (axes,))
