"""Parameters that every product reads in 8 bits, gathered in 8 bits.

A product in 8 bits scales its parameter by the largest value of all of it
(`fzero.float8.scaling.WHOLE`). Where the parameter is kept in shards, that value is the largest of
theirs: once it is agreed, each device can scale its own shard, and half the bytes travel. What
comes is, bit for bit, what scaling the gathered parameter gives. Whether nothing else reads a
parameter is seen in the traced program, which is then run with the scaled parameter in place of
that step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from fzero.errors import StateError
from fzero.float8.scaling import WHOLE
from fzero.programs.jaxprs import Op, Program, Var, read
from fzero.tree import PyTree


class Narrow(NamedTuple):
    """A whole parameter in 8 bits.

    Args:
        bits: its elements, scaled.
        unit: what they were divided by, a scalar.
    """

    bits: jax.Array
    unit: jax.Array


# Where each element goes hangs on no value: it may come before scaling or after.
_MOVEMENT = frozenset(("transpose", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "rev"))


def narrow_inputs(program: Program, inputs: Collection[Var]) -> set[Var]:
    """Those inputs that the program reads to scale the whole of them, and for nothing else."""
    origin = {var: var for var in inputs}
    found: set[Var] = set()
    refused = {x for x in program.outputs if isinstance(x, Var)}
    for op in program.ops:
        for at, var in enumerate(op.operands):
            if not isinstance(var, Var) or var not in origin:
                continue
            if _scales(op):
                found.add(origin[var])
            elif _moves(op) or _waits(op):
                origin[op.results[at]] = origin[var]
            else:
                refused.add(var)
    return found - {origin[var] for var in refused if var in origin}


def run_op(op: Op, values: list[Any]) -> list[Any]:
    """One operation of a program some of whose inputs are `Narrow`."""
    if not any(isinstance(value, Narrow) for value in values):
        return op.run(values)
    if _waits(op):
        return list(jax.lax.optimization_barrier(values))
    one: Narrow = values[0]
    if _scales(op):
        return [one.bits, one.unit.reshape(op.results[1].aval.shape)]
    if not _moves(op):
        raise StateError(f"a weight that came in 8 bits is read by {op.equation.primitive}")
    return [one._replace(bits=op.run([one.bits])[0])]


def with_narrow(
    function: Callable[[PyTree], PyTree], weights: PyTree, dtypes: Sequence[Any]
) -> Any:
    """`function(weights)`, where leaves of `weights` may be `Narrow`.

    Args:
        function: takes whole weights; may read other values of the surrounding trace.
        weights: the weights.
        dtypes: the dtype that each leaf has where it is not narrow.
    """
    leaves, treedef = jax.tree.flatten(weights, is_leaf=is_narrow)
    if not any(map(is_narrow, leaves)):
        return function(weights)
    shapes = [
        jax.ShapeDtypeStruct(leaf.bits.shape, dtype) if is_narrow(leaf) else leaf
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    program, out = traced(function, jax.tree.unflatten(treedef, shapes))
    env = program.consts | dict(zip(program.inputs, leaves, strict=True))
    for op in program.ops:
        values = run_op(op, [read(env, x) for x in op.operands])
        env.update(zip(op.results, values, strict=True))
    return jax.tree.unflatten(out, [read(env, x) for x in program.outputs])


def traced(function: Callable[[PyTree], PyTree], weights: PyTree) -> tuple[Program, Any]:
    """A function's program, and the structure of what it gives."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(weights)
    return Program(closed.jaxpr, closed.consts), jax.tree.structure(out)


def is_narrow(value: Any) -> bool:
    """Whether a value is a parameter in 8 bits."""
    return isinstance(value, Narrow)


def _scales(op: Op) -> bool:
    return op.equation is not None and op.equation.params.get("name") == WHOLE


def _waits(op: Op) -> bool:
    """Whether it is a barrier, such as a `jax.checkpoint` has before what it computes again."""
    return op.equation is None or op.equation.primitive.name == "optimization_barrier"


def _moves(op: Op) -> bool:
    return op.equation is not None and op.equation.primitive.name in _MOVEMENT
