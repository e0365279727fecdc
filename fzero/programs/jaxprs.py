"""Programs as lists of operations: a jaxpr, its calls inlined, to be cut, ordered and replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fzero import compat


# What `jax.checkpoint` is called in a jaxpr, by version.
CHECKPOINTS = frozenset(("checkpoint", "remat", "remat2"))

# Calls that bring a derivative of their own, which replaying their body would lose.
_OWN_DERIVATIVES = frozenset(("custom_jvp_call", "custom_vjp_call"))
# Calls whose body may be replayed in place, once differentiation is over.
_CALLS = CHECKPOINTS | _OWN_DERIVATIVES | frozenset(("jit", "pjit", "closed_call", "core_call"))

# Functions jitted under a name that begins so stay one operation of a program.
_STEPS = "fzero_scaled"


# Each element of the result depends on the same element of the operands alone.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy
    copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square
    optimization_barrier or pow reduce_precision rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)


def is_elementwise(name: str, operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operation works on each element alone, given its first operand's shape."""
    # Bits as a number of another width are more elements, or fewer.
    return name in ELEMENTWISE or (name == "bitcast_convert_type" and operand == result)


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Every jaxpr among an equation's parameters, whatever the primitive calls it."""
    for value in equation.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(item, "eqns"):
                yield getattr(item, "jaxpr", item)


class Var:
    """A value of a flattened program (jaxpr variables repeat when a call is inlined twice).

    Args:
        aval: its shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any) -> None:
        self.aval = aval


@dataclass(frozen=True)
class Op:
    """One operation.

    Args:
        equation: the jaxpr's equation, or `None` for an optimization barrier.
        operands: what it reads: `Var`s and constants.
        results: what it computes.
        scope: names (`jax.named_scope`, modules) around the calls that it was inlined from.
    """

    equation: Any
    operands: list[Any]
    results: list[Var]
    scope: tuple[Any, ...] = ()

    def run(self, values: list[Any]) -> list[Any]:
        """Applies the operation to values."""
        if self.equation is None:
            return list(jax.lax.optimization_barrier(values))
        return compat.run_equation(self.equation, values, self.scope)

    def reads(self) -> Iterable[Var]:
        """The variables among the operands."""
        return (x for x in self.operands if isinstance(x, Var))


class Program:
    """A jaxpr with its calls inlined.

    Args:
        jaxpr: the jaxpr.
        consts: values of its constants.
        differentiable: whether what is replayed may be differentiated: calls that bring a
            derivative of their own then stay one operation.
    """

    def __init__(self, jaxpr: Any, consts: Iterable[Any], differentiable: bool = False) -> None:
        self._calls = _CALLS - _OWN_DERIVATIVES if differentiable else _CALLS
        self.ops: list[Op] = []
        env: dict[Any, Any] = {var: Var(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)}
        self.consts: dict[Var, Any] = {
            env[var]: value for var, value in zip(jaxpr.constvars, consts, strict=True)
        }
        self.inputs: list[Var] = [env[var] for var in jaxpr.invars]
        self._inline(jaxpr, env, ())
        self.outputs = [_operand(env, atom) for atom in jaxpr.outvars]

    def _inline(self, jaxpr: Any, env: dict[Any, Any], names: tuple[Any, ...]) -> None:
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
            whole = str(equation.params.get("name", "")).startswith(_STEPS)
            if equation.primitive.name not in self._calls or body is None or whole:
                results = [Var(var.aval) for var in equation.outvars]
                self.ops.append(Op(equation, operands, results, names))
                env.update(zip(equation.outvars, results, strict=True))
                continue
            operands = self._fenced(equation, operands)
            consts = list(getattr(body, "consts", ()))
            inner = getattr(body, "jaxpr", body)
            scope: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
            scope.update(zip(inner.invars, operands, strict=True))
            self._inline(inner, scope, (*names, equation.source_info.name_stack))
            outputs = [_operand(scope, atom) for atom in inner.outvars]
            env.update(zip(equation.outvars, outputs, strict=True))

    def _fenced(self, equation: Any, operands: list[Any]) -> list[Any]:
        """Operands of a call, behind a barrier where a checkpoint computes again what it reads."""
        wanted = equation.params.get("prevent_cse", False)
        if not wanted or not equation.params.get("differentiated", True):
            return operands
        behind = wanted if isinstance(wanted, tuple) else (wanted,) * len(operands)
        found = [Var(var.aval) if b else x
                 for var, x, b in zip(equation.invars, operands, behind, strict=True)]  # fmt: skip
        fences = [i for i, b in enumerate(behind) if b]
        if fences:
            self.ops.append(Op(None, [operands[i] for i in fences], [found[i] for i in fences]))
        return found


def _operand(env: dict[Any, Any], atom: Any) -> Any:
    from jax.extend.core import Literal

    return atom.val if isinstance(atom, Literal) else env[atom]


def needed(ops: Sequence[Op], outputs: Iterable[Any], given: Collection[Var] = ()) -> set[int]:
    """Which operations it takes to compute some outputs, where some values are there already."""
    wanted = {x for x in outputs if isinstance(x, Var) and x not in given}
    found: set[int] = set()
    for index in range(len(ops) - 1, -1, -1):
        if wanted.isdisjoint(ops[index].results):
            continue
        found.add(index)
        wanted.update(x for x in ops[index].reads() if x not in given)
    return found


def run_ops(ops: Iterable[Op], env: dict[Var, Any]) -> None:
    """Runs operations in order; `env` has the values that they read, and gets what they give."""
    for op in ops:
        values = op.run([read(env, x) for x in op.operands])
        env.update(zip(op.results, values, strict=True))


def read(env: dict[Var, Any], operand: Any) -> Any:
    """The value of an operand."""
    return env[operand] if isinstance(operand, Var) else operand


def has_checkpoint(jaxpr: Any) -> bool:
    """Whether a program says itself what to keep of some of it: `jax.checkpoint`, anywhere."""
    return _has(jaxpr, lambda equation: equation.primitive.name in CHECKPOINTS)


def has_complex(jaxpr: Any) -> bool:
    """Whether a program computes complex numbers, anywhere."""
    return _has(
        jaxpr,
        lambda equation: any(
            jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.complexfloating)
            for var in (*equation.invars, *equation.outvars)
        ),
    )


def _has(jaxpr: Any, holds: Callable[[Any], bool]) -> bool:
    return any(
        holds(equation) or any(_has(inner, holds) for inner in inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )
