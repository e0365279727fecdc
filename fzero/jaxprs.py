"""Programs as lists of steps: a jaxpr with its calls inlined, to be cut, ordered and replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from fzero import compat


# Calls whose body may be replayed in place, once differentiation is over.
_CALLS = frozenset(
    ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2",
     "custom_jvp_call", "custom_vjp_call")
)  # fmt: skip


class Var:
    """A value of a flattened program (jaxpr variables repeat when a call is inlined twice).

    Args:
        aval: its shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass(frozen=True)
class Step:
    """One operation.

    Args:
        equation: the jaxpr's equation, or `None` for an optimization barrier.
        operands: what it reads: `Var`s and constants.
        results: what it computes.
    """

    equation: Any
    operands: list[Any]
    results: list[Var]

    def run(self, values: list[Any]) -> list[Any]:
        """Applies the operation to values."""
        if self.equation is None:
            return list(jax.lax.optimization_barrier(values))
        return compat.run_equation(self.equation, values)

    def reads(self) -> Iterable[Var]:
        """The variables among the operands."""
        return (x for x in self.operands if isinstance(x, Var))


class Program:
    """A jaxpr with its calls inlined.

    Args:
        jaxpr: the jaxpr.
        consts: values of its constants.
    """

    def __init__(self, jaxpr: Any, consts: Iterable[Any]) -> None:
        self.steps: list[Step] = []
        env: dict[Any, Any] = {var: Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self.consts: dict[Var, Any] = {
            env[var]: value for var, value in zip(jaxpr.constvars, consts, strict=True)
        }
        self.inputs: list[Var] = [env[var] for var in jaxpr.invars]
        self._inline(jaxpr, env)
        self.outputs = [_operand(env, atom) for atom in jaxpr.outvars]

    def _inline(self, jaxpr: Any, env: dict[Any, Any]) -> None:
        for equation in jaxpr.eqns:
            operands = [_operand(env, atom) for atom in equation.invars]
            body = next(
                (
                    equation.params[name]
                    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                    if equation.params.get(name) is not None
                ),
                None,
            )
            if equation.primitive.name not in _CALLS or body is None:
                results = [Var(var.aval) for var in equation.outvars]
                self.steps.append(Step(equation, operands, results))
                env.update(zip(equation.outvars, results, strict=True))
                continue
            if equation.params.get("prevent_cse"):
                fenced = [Var(var.aval) for var in equation.invars]
                self.steps.append(Step(None, operands, fenced))
                operands = list(fenced)
            consts = list(getattr(body, "consts", ()))
            inner = getattr(body, "jaxpr", body)
            scope: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
            scope.update(zip(inner.invars, operands, strict=True))
            self._inline(inner, scope)
            outputs = [_operand(scope, atom) for atom in inner.outvars]
            env.update(zip(equation.outvars, outputs, strict=True))


def _operand(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]
