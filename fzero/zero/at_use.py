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
from jax.extend import core

from fzero import compat
from fzero.tree import PyTree


# Calls whose body may be replayed in place; differentiation is over when a program is replayed.
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"))


def gather_at_use(
    function: Callable[[list[Any]], PyTree],
    shapes: Sequence[jax.ShapeDtypeStruct],
    shards: Sequence[jax.Array],
    gather: Callable[[int, jax.Array], jax.Array],
    needs_gather: Sequence[bool],
    finish: Callable[[int, Any], Any] | None = None,
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

    Returns:
        What the function returns, its gradients finished.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(list(shapes))
    replay = _Replay(_flatten(closed.jaxpr), list(closed.consts), shards, gather, needs_gather)
    return jax.tree.unflatten(jax.tree.structure(out), replay.run(finish, len(shards)))


# How many steps after a gradient to look for the next use of a weight. A transformer block has
# about 100; beyond one, waiting orders nothing that matters.
_LOOK_AHEAD = 200


class _Var:
    """A value of the flattened program (jaxpr variables repeat when a call is inlined twice)."""

    __slots__ = ()


class _Program:
    """A jaxpr with its calls inlined: equations over `_Var`s and constants."""

    def __init__(self) -> None:
        self.consts: list[_Var] = []
        self.inputs: list[_Var] = []
        # (equation or None for a barrier, operands, results)
        self.steps: list[tuple[Any, list[Any], list[_Var]]] = []
        self.outputs: list[Any] = []


def _flatten(jaxpr: Any) -> _Program:
    program = _Program()
    env: dict[Any, Any] = {}
    for variables, made in ((jaxpr.constvars, program.consts), (jaxpr.invars, program.inputs)):
        for variable in variables:
            env[variable] = _Var()
            made.append(env[variable])
    _inline(program, jaxpr, env)
    program.outputs = [_operand(env, atom) for atom in jaxpr.outvars]
    return program


def _operand(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def _inline(program: _Program, jaxpr: Any, env: dict[Any, Any]) -> None:
    for equation in jaxpr.eqns:
        operands = [_operand(env, atom) for atom in equation.invars]
        body = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name not in _CALLS or body is None:
            results = [_Var() for _ in equation.outvars]
            program.steps.append((equation, operands, results))
            env.update(zip(equation.outvars, results, strict=True))
            continue
        if equation.params.get("prevent_cse"):
            fenced: list[_Var] = [_Var() for _ in operands]
            program.steps.append((None, operands, fenced))
            operands = list(fenced)
        consts = list(getattr(body, "consts", ()))
        inner = getattr(body, "jaxpr", body)
        scope: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
        scope.update(zip(inner.invars, operands, strict=True))
        _inline(program, inner, scope)
        env.update(zip(equation.outvars, [_operand(scope, a) for a in inner.outvars], strict=True))


class _Replay:
    def __init__(
        self,
        program: _Program,
        consts: list[Any],
        shards: Sequence[jax.Array],
        gather: Callable[[int, jax.Array], jax.Array],
        needs_gather: Sequence[bool],
    ) -> None:
        self.program = program
        self.gather = gather
        self.weights = {var: i for i, var in enumerate(program.inputs)}
        self.shards = list(shards)
        self.env: dict[_Var, Any] = dict(zip(program.consts, consts, strict=True))
        for var, i in self.weights.items():
            if not needs_gather[i]:
                self.env[var] = gather(i, shards[i])
        self.last_use = self._last_uses()
        self.live: list[_Var] = []  # computed values, oldest first

    def _last_uses(self) -> dict[_Var, int]:
        uses: dict[_Var, int] = {}
        for index, (_, operands, _) in enumerate(self.program.steps):
            uses.update({x: index for x in operands if isinstance(x, _Var)})
        return uses

    def _first_uses(self) -> list[tuple[int, list[_Var]]]:
        """In program order: at which step which weights are first needed."""
        seen: set[_Var] = set(self.env)
        points: list[tuple[int, list[_Var]]] = []
        for index, (_, operands, _) in enumerate(self.program.steps):
            new = [x for x in dict.fromkeys(filter(_is_var, operands))
                   if x in self.weights and x not in seen]  # fmt: skip
            if new:
                seen.update(new)
                points.append((index, new))
        rest = [x for x in dict.fromkeys(filter(_is_var, self.program.outputs))
                if x in self.weights and x not in seen]  # fmt: skip
        return [*points, (len(self.program.steps), rest)] if rest else points

    def run(self, finish: Callable[[int, Any], Any] | None, num_weights: int) -> list[Any]:
        points = self._first_uses()
        following = {now: then for (now, _), (_, then) in itertools.pairwise(points)}
        outputs = self.program.outputs
        gradients = {x: i for i, x in enumerate(outputs[:num_weights]) if finish and _is_var(x)}
        done: dict[int, Any] = {}
        behind: int | None = None
        if points:
            self._fetch(points[0][1])
        for index, (equation, operands, results) in enumerate(self.program.steps):
            if index in following:
                self._fetch(following[index], self._anchor(index))
            values = [self._read(x) for x in operands]
            self.env.update(zip(results, self._bind(equation, values), strict=True))
            self.live.extend(results)
            for var in results:
                if finish and var in gradients:
                    self._tie(var, self._anchor(index + 1), done, behind)
                    behind = gradients[var]
                    done[behind] = finish(behind, self.env[var])
        for i, x in enumerate(outputs):
            if i not in done:
                value = self._read(x)
                done[i] = finish(i, value) if finish and i < num_weights else value
        return [done[i] for i in range(len(outputs))]

    def _anchor(self, index: int) -> _Var | None:
        """A computed value that step `index` or a later one reads: the next to meet a weight."""
        self.live = [var for var in self.live if index <= self.last_use.get(var, -1)]
        live = set(self.live)
        for _, operands, _ in self.program.steps[index : index + _LOOK_AHEAD]:
            if any(_is_var(x) and x in self.weights for x in operands):
                found = [x for x in operands if _is_var(x) and x in live]
                if found:
                    anchor: _Var = found[0]
                    return anchor
        return self.live[-1] if self.live else None

    def _tie(
        self, gradient: _Var, anchor: _Var | None, done: dict[int, Any], behind: int | None
    ) -> None:
        """Makes what is computed next wait for a gradient and the reduction of the one before."""
        if anchor is None:
            return
        reduced = None if behind is None else done[behind]
        values = self.env[gradient], self.env[anchor], reduced
        self.env[gradient], self.env[anchor], reduced = jax.lax.optimization_barrier(values)
        if behind is not None:
            done[behind] = reduced

    def _fetch(self, weights: list[_Var], anchor: _Var | None = None) -> None:
        """Gathers weights, not before the anchor exists and not after it is used again."""
        shards = [self.shards[self.weights[var]] for var in weights]
        if anchor is not None:
            shards, self.env[anchor] = jax.lax.optimization_barrier((shards, self.env[anchor]))
        for var, shard in zip(weights, shards, strict=True):
            self.env[var] = self.gather(self.weights[var], shard)

    def _read(self, operand: Any) -> Any:
        return self.env[operand] if isinstance(operand, _Var) else operand

    @staticmethod
    def _bind(equation: Any, values: list[Any]) -> list[Any]:
        if equation is None:
            return list(jax.lax.optimization_barrier(values))
        return compat.run_equation(equation, values)


def _is_var(operand: Any) -> bool:
    return isinstance(operand, _Var)
