"""Whether a program of several runs of one function computes the same in each of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fzero.compat import key_bits
from fzero.programs.jaxprs import Op, Program, Var


if TYPE_CHECKING:
    from collections.abc import Iterable

    from jax.extend.core import ClosedJaxpr


# Where an object lies, in a program's text: two traces of one function differ in it.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def repeats(closed: ClosedJaxpr, num_inputs: int, num_outputs: int) -> bool:
    """Whether every run computes of its own inputs what the first computes of its.

    A run may read what an earlier one computed, as long as that is of no input: a table that is
    made once and kept.

    Args:
        closed: a program whose inputs, and whose outputs, are those of its runs, one run after
            the other.
        num_inputs: how many inputs each run has.
        num_outputs: and how many outputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def twice(x, y):
        ...     table = jnp.arange(3.0)
        ...     return x * table, y * table
        >>> def carried(x, y):
        ...     return x * 2, x * 2
        >>> [repeats(jax.make_jaxpr(f)(jnp.ones(3), jnp.ones(3)), 1, 1) for f in (twice, carried)]
        [True, False]
    """
    program = Program(closed.jaxpr, closed.consts, differentiable=True)
    num_inputs = max(num_inputs, 1)
    terms = _Terms(program.consts)
    for place, var in enumerate(program.inputs):
        terms.define(var, ("input", place % num_inputs), {place // num_inputs})
    for op in program.ops:
        terms.apply(op)
    first = [terms.number(x) for x in program.outputs[:num_outputs]]
    return all(
        terms.number(x) == first[place % num_outputs] and terms.runs(x) <= {place // num_outputs}
        for place, x in enumerate(program.outputs)
    )


class _Terms:
    """Values of a program as terms of its inputs: equal numbers, whichever run they are of.

    Args:
        consts: the program's constants.
    """

    def __init__(self, consts: dict[Var, Any]) -> None:
        self._known: dict[Any, int] = {}
        self._number: dict[Var, int] = {}
        self._runs: dict[Var, frozenset[int]] = {}
        for var, value in consts.items():
            self.define(var, _constant(value), ())

    def define(self, var: Var, term: Any, runs: Iterable[int]) -> None:
        """A value by what it is, and the runs whose inputs are in it."""
        self._number[var] = self._known.setdefault(term, len(self._known))
        self._runs[var] = frozenset(runs)

    def apply(self, op: Op) -> None:
        """What an operation computes."""
        term = (
            "barrier" if op.equation is None else op.equation.primitive.name,
            "" if op.equation is None else _text(op.equation.params),
            tuple(self.number(x) for x in op.operands),
        )
        runs = frozenset[int]().union(*(self.runs(x) for x in op.operands))
        for place, var in enumerate(op.results):
            self.define(var, (place, term), runs)

    def number(self, operand: Any) -> int:
        """The term that an operand is."""
        if isinstance(operand, Var):
            return self._number[operand]
        return self._known.setdefault(_constant(operand), len(self._known))

    def runs(self, operand: Any) -> frozenset[int]:
        """The runs whose inputs an operand is computed of."""
        return self._runs[operand] if isinstance(operand, Var) else frozenset()


def _text(params: dict[str, Any]) -> str:
    return _ADDRESS.sub("", str(sorted(params.items())))


def _constant(value: Any) -> Any:
    """What tells one constant from others: what it holds, where that is here."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return "traced", id(value)
    held = np.asarray(key_bits(value) if hasattr(value, "dtype") else value)
    return "constant", str(getattr(value, "dtype", type(value))), held.shape, held.tobytes()
