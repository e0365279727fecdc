"""How values of a loss grow with the number of rows, of which devices have their shares.

A sum over rows is twice as large of twice the rows, a mean is not. A loss that is a plain number
counts as a mean; were it a sum, the mean of the devices' sums would be a share of that of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fzero.programs.jaxprs import Op, Program, Var


# Growth of the result is that of the operands, the largest where they differ.
_KEEP = frozenset(
    """
    abs add add_any broadcast_in_dim concatenate convert_element_type copy cumsum dynamic_slice
    expand_dims gather imag max min name neg optimization_barrier pad real reduce_max reduce_min
    reduce_precision reshape rev select_n sharding_constraint slice sort squeeze stack
    stop_gradient sub transpose
    """.split()  # noqa: SIM905
)


# Of larger numbers float32 does not tell whether they are multiples of so many rows.
MOST = 1e5


class Growth:
    """The power of the number of rows that each value of a program grows with.

    Args:
        program: a loss, traced with a number of rows.
        rows: that number: a prime that no other dim is a multiple of, so that a constant which is
            one is known to be a number of rows.
        known: the power of inputs: 0 for parameters and rows.
    """

    def __init__(self, program: Program, rows: int, known: Mapping[Any, int]) -> None:
        self._rows = rows
        self._of: dict[Any, int | None] = dict(known)
        # What follows from an input, and the operation that added to a sum what is none.
        self._moves, self._mixed = set[Any](program.inputs), dict[Any, Op]()
        for var, value in program.consts.items():
            self._of[var] = self._constant(value)
        for op in program.ops:
            power = self._power(op)
            self._of.update(dict.fromkeys(op.results, power))
            if not self._moves.isdisjoint(op.reads()):
                self._moves.update(op.results)
            before = [self._mixed[x] for x in op.reads() if x in self._mixed]
            for blamed in [op] if self._mixes(op) else before[:1]:
                self._mixed.update(dict.fromkeys(op.results, blamed))

    def __call__(self, value: Any) -> int | None:
        """The power of a value or constant; `None` where it is not known."""
        return self._of.get(value) if isinstance(value, Var) else self._constant(value)

    def mixed(self, value: Any) -> Op | None:
        """The operation that added to a sum over rows what does not grow with them, if one did."""
        return self._mixed.get(value) if isinstance(value, Var) else None

    def _mixes(self, op: Op) -> bool:
        name = "" if op.equation is None else op.equation.primitive.name
        powers = [self(x) for x in op.operands]
        free = any(p == 0 and x in self._moves for p, x in zip(powers, op.operands, strict=True)
                   if isinstance(x, Var))  # fmt: skip
        return name in ("add", "add_any", "sub") and 1 in powers and free

    def _constant(self, value: Any) -> int | None:
        """1 for a number of rows, or that of their elements; -1 for one by that; else 0."""
        given = np.asarray(getattr(value, "val", value))
        if not np.issubdtype(given.dtype, np.number) or not given.size:
            return 0
        if given.size > 1:
            return None
        number = float(np.abs(given.reshape(())))
        if not number or not math.isfinite(number):
            return 0
        times = max(number, 1 / number) / self._rows
        if times > MOST:
            return None
        counts = round(times) > 0 and math.isclose(times, round(times), rel_tol=1e-6)
        return (1 if number > 1 else -1) if counts else 0

    def _power(self, op: Op) -> int | None:
        name = "" if op.equation is None else op.equation.primitive.name
        powers = [self(x) for x in op.operands]
        if name in ("gather", "dynamic_slice"):  # places say which, and not how much
            powers = powers[:1]
        elif name == "select_n":
            powers = powers[1:]
        if None in powers:
            return None
        known = [power for power in powers if power is not None]
        if name == "mul":
            return sum(known)
        if name == "div":
            return known[0] - known[1]
        if name in ("reduce_sum", "dot_general"):
            return sum(known) + self._summed(op)
        if name in ("integer_pow", "square"):
            return known[0] * int(op.equation.params.get("y", 2))
        if not name or name in _KEEP:
            return max(known, default=0)
        return None if any(known) else 0  # a function of what does not grow

    def _summed(self, op: Op) -> int:
        """1 if an operation sums over rows."""
        within = any(self._has(x) for x in op.operands)
        return int(within and not any(map(self._has, op.results)))

    def _has(self, value: Any) -> bool:
        size = math.prod(value.aval.shape) if isinstance(value, Var) else np.size(value)
        return size > 0 and size % self._rows == 0
