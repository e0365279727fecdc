"""Runs a function whose weights are gathered where they are used, and its gradients reduced there.

A model that is not a chain reads all its weights as arguments. Gathered up front they would all be
alive at once. Here the function is traced with whole weights, and its program replayed: a weight is
gathered when the program comes to the use before its own, and tied to a value that is live there,
so that the compiler cannot gather everything at the start. In a backward pass, each gradient is
reduced as soon as it exists, tied likewise, so that whole gradients do not pile up either.

(XLA's GPU backend keeps to the ties. Its CPU backend drops them and schedules for concurrency.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fzero.programs.jaxprs import Program, Var, read
from fzero.tree import PyTree
from fzero.zero.float8_weights import Narrow, narrow_inputs, run_op


def gather_at_use(
    function: Callable[[list[Any]], PyTree],
    shapes: Sequence[jax.ShapeDtypeStruct],
    shards: Sequence[jax.Array],
    gather: Callable[[int, jax.Array], jax.Array],
    needs_gather: Sequence[bool],
    finish: Callable[[int, Any], Any] | None,
    narrow: Callable[[int, jax.Array], Narrow | None],
    differentiable: bool,
) -> PyTree:
    """`function([gather(0, shards[0]), ...])`, each weight gathered near its first use.

    Args:
        function: takes whole weights; may read other values of the surrounding trace.
        shapes: shapes of the whole weights.
        shards: what is kept of each weight.
        gather: the whole weight `i` from its shard.
        needs_gather: per weight, whether gathering it costs anything. Others are read at once.
        finish: in a backward pass, whose first outputs are the gradients of the weights: replaces
            the gradient of weight `i` as soon as it is computed.
        narrow: the whole weight `i` in 8 bits from its shard, if it may come so where nothing reads
            it in another way.
        differentiable: whether a user may differentiate what this computes.

    Returns:
        What the function returns, its gradients finished.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(list(shapes))
    program = Program(closed.jaxpr, closed.consts, differentiable)
    only = narrow_inputs(program, program.inputs)

    def fetch(i: int, shard: jax.Array) -> Any:
        found = narrow(i, shard) if program.inputs[i] in only else None
        return gather(i, shard) if found is None else found

    replay = _Replay(program, shards, fetch, needs_gather)
    num_grads = len(jax.tree.leaves(out[0])) if finish else 0
    return jax.tree.unflatten(jax.tree.structure(out), replay.run(finish, num_grads))


# How many operations after a gradient to look for the next use of a weight. A transformer block has
# about 100; beyond one, waiting orders nothing that matters.
_LOOK_AHEAD = 200


class _Replay:
    def __init__(
        self,
        program: Program,
        shards: Sequence[jax.Array],
        gather: Callable[[int, jax.Array], Any],
        needs_gather: Sequence[bool],
    ) -> None:
        self.program = program
        self.gather = gather
        self.weights = {var: i for i, var in enumerate(program.inputs)}
        self.shards = list(shards)
        self.env: dict[Var, Any] = dict(program.consts)
        for var, i in self.weights.items():
            if not needs_gather[i]:
                self.env[var] = gather(i, shards[i])
        self.last_use = self._last_uses()
        self.live: list[Var] = []  # computed values, oldest first

    def _last_uses(self) -> dict[Var, int]:
        uses: dict[Var, int] = {}
        for index, op in enumerate(self.program.ops):
            uses.update(dict.fromkeys(op.reads(), index))
        return uses

    def _first_uses(self) -> list[tuple[int, list[Var]]]:
        """In program order: at which operation which weights are first needed."""
        seen: set[Var] = set(self.env)
        points: list[tuple[int, list[Var]]] = []
        for index, op in enumerate(self.program.ops):
            new = [x for x in dict.fromkeys(op.reads()) if x in self.weights and x not in seen]
            if new:
                seen.update(new)
                points.append((index, new))
        rest = [x for x in dict.fromkeys(filter(_is_var, self.program.outputs))
                if x in self.weights and x not in seen]  # fmt: skip
        return [*points, (len(self.program.ops), rest)] if rest else points

    def run(self, finish: Callable[[int, Any], Any] | None, num_grads: int) -> list[Any]:
        points = self._first_uses()
        following = {now: then for (now, _), (_, then) in itertools.pairwise(points)}
        outputs = self.program.outputs
        gradients = {x: i for i, x in enumerate(outputs[:num_grads]) if _is_var(x)}
        done: dict[int, Any] = {}
        behind: int | None = None
        if points:
            self._fetch(points[0][1])
        for index, op in enumerate(self.program.ops):
            if index in following:
                self._fetch(following[index], self._anchor(index))
            values = run_op(op, [read(self.env, x) for x in op.operands])
            self.env.update(zip(op.results, values, strict=True))
            self.live.extend(op.results)
            for var in op.results:
                if finish and var in gradients:
                    self._tie(var, self._anchor(index + 1), done, behind)
                    behind = gradients[var]
                    done[behind] = finish(behind, self.env[var])
        for i, x in enumerate(outputs):
            if i not in done:
                value = read(self.env, x)
                done[i] = finish(i, value) if finish and i < num_grads else value
        return [done[i] for i in range(len(outputs))]

    def _anchor(self, index: int) -> Var | None:
        """A computed value read by operation `index` or one after it: the next to meet a weight."""
        self.live = [var for var in self.live if index <= self.last_use.get(var, -1)]
        live = set(self.live)
        for op in self.program.ops[index : index + _LOOK_AHEAD]:
            reads = list(op.reads())
            if any(x in self.weights for x in reads):
                found = [x for x in reads if x in live]
                if found:
                    return found[0]
        return self.live[-1] if self.live else None

    def _tie(
        self, gradient: Var, anchor: Var | None, done: dict[int, Any], behind: int | None
    ) -> None:
        """Makes what is computed next wait for a gradient and the reduction of the one before."""
        if anchor is None:
            return
        reduced = None if behind is None else done[behind]
        values = self.env[gradient], self.env[anchor], reduced
        self.env[gradient], self.env[anchor], reduced = jax.lax.optimization_barrier(values)
        if behind is not None:
            done[behind] = reduced

    def _fetch(self, weights: list[Var], anchor: Var | None = None) -> None:
        """Gathers weights, not before the anchor exists and not after it is used again."""
        shards = [self.shards[self.weights[var]] for var in weights]
        if anchor is not None:
            shards, self.env[anchor] = jax.lax.optimization_barrier((shards, self.env[anchor]))
        for var, shard in zip(weights, shards, strict=True):
            self.env[var] = self.gather(self.weights[var], shard)


def _is_var(operand: Any) -> bool:
    return isinstance(operand, Var)
