"""Operations of traced programs: what each is, as a value, and what it costs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from fzero.programs.jaxprs import ELEMENTWISE, Op, inner_jaxprs
from fzero.tree import is_plain


# Cheap beside a product of matrices: they read and write what they are given.
_LIGHT = ELEMENTWISE | frozenset(
    """
    argmax argmin broadcast_in_dim concatenate cumlogsumexp cummax cummin cumprod cumsum iota pad
    random_bits random_fold_in random_seed random_split random_unwrap random_wrap reduce_and
    reduce_max reduce_min reduce_or reduce_prod reduce_sum reshape rev slice
    squeeze threefry2x32 transpose
    """.split()  # noqa: SIM905
)


def frozen(value: Any) -> Hashable:
    """An operation's parameters (or a constant) as a value that is equal for equal ones."""
    from jax.extend import core

    if isinstance(value, Mapping):
        return tuple(sorted((str(name), frozen(item)) for name, item in value.items()))
    if isinstance(value, core.ClosedJaxpr):
        return str(value.jaxpr), tuple(map(frozen, value.consts))
    if isinstance(value, core.Jaxpr):
        return str(value)
    if isinstance(value, tuple | list):
        return tuple(map(frozen, value))
    if isinstance(value, np.ndarray | np.generic | jax.Array) and is_plain(value):
        if isinstance(value, jax.core.Tracer):
            return id(value)
        array = np.asarray(value)
        return array.shape, str(array.dtype), array.tobytes()
    if isinstance(value, float) and value != value:
        return "nan"  # which equals nothing, not even itself
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value if isinstance(value, Hashable) else id(value)


def is_heavy(op: Op) -> bool:
    """Whether an operation costs more than reading its operands: products of matrices, factors."""
    return op.equation is not None and _heavy(op.equation)


def _heavy(equation: Any) -> bool:
    inner = list(inner_jaxprs(equation))
    if inner:
        return any(_heavy(e) for body in inner for e in body.eqns)
    name = equation.primitive.name
    if name == "dot_general":
        return len(equation.outvars[0].aval.shape) > 1
    return name not in _LIGHT
