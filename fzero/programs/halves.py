"""A backward pass in two halves: the input's gradient first, the weights' gradients later.

Zero-bubble schedules fill idle time with weight gradients. The backward pass is traced whole and
its operations divided: what the input's gradient takes is run at once; the rest waits, with exactly
the values that it reads. Nothing is computed twice, so the halves cost what the whole does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fzero.programs.jaxprs import Op, Program, Var, needed, read, run_ops
from fzero.tree import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Rest:
    """The second half, without its values.

    Args:
        ops: operations, in order.
        reads: what they read from the first half.
        weights: the inputs that are weights.
        grads: what they give.
    """

    ops: tuple[Op, ...]
    reads: tuple[Var, ...]
    weights: tuple[Var, ...]
    grads: tuple[Any, ...]

    def run(self, values: Sequence[jax.Array], weights: Sequence[jax.Array]) -> list[jax.Array]:
        """The gradients of the weights."""
        env: dict[Var, Any] = dict(zip(self.weights, weights, strict=True))
        env.update(zip(self.reads, values, strict=True))
        run_ops(self.ops, env)
        return [read(env, x) for x in self.grads]


def first_half(
    function: Callable[[list[Any]], tuple[list[Any], PyTree]],
    weights: Sequence[Any],
    apart: Callable[[Callable[[], PyTree]], PyTree],
) -> tuple[PyTree, list[Any], Rest]:
    """Runs what `function(weights) -> (gradients, others)` takes to give the others.

    Args:
        function: a backward pass; it may read other values of the surrounding trace.
        weights: its arguments.
        apart: how to run a half, so that it is compiled alike in every program.

    Returns:
        `(others, values, rest)`: `rest.run(values, weights)` gives the gradients.
    """
    closed, (grads, others) = jax.make_jaxpr(function, return_shape=True)(list(weights))
    program = Program(closed.jaxpr, closed.consts)
    count = len(jax.tree.leaves(grads))
    late, now = program.outputs[:count], program.outputs[count:]
    given: dict[Var, Any] = dict(program.consts)
    given.update(zip(program.inputs, weights, strict=True))

    first = needed(program.ops, now)
    second = needed(program.ops, late) - first
    ops = tuple(op for i, op in enumerate(program.ops) if i in second)
    made = {var for op in ops for var in op.results}
    wanted = [x for op in ops for x in op.reads()]
    wanted += [x for x in late if isinstance(x, Var)]
    inputs = set(program.inputs)
    reads = tuple(x for x in dict.fromkeys(wanted) if x not in made and x not in inputs)
    rest = Rest(ops, reads, tuple(program.inputs), tuple(late))
    computed = [x for x in reads if x not in given]

    def run() -> tuple[list[Any], list[Any]]:
        env = dict(given)
        run_ops([op for i, op in enumerate(program.ops) if i in first], env)
        return [read(env, x) for x in now], [env[x] for x in computed]

    out, values = apart(run) if first else run()
    given.update(zip(computed, values, strict=True))
    found = jax.tree.unflatten(jax.tree.structure(others), out)
    return found, [given[x] for x in reads], rest


def unfenced(values: Sequence[Any], fenced: PyTree, before: PyTree) -> list[Any]:
    """Values that only passed a fence as they were before it: nobody need copy them."""
    pairs = zip(jax.tree.leaves(fenced), jax.tree.leaves(before), strict=True)
    own = {id(after): leaf for after, leaf in pairs}
    return [own.get(id(value), value) for value in values]
