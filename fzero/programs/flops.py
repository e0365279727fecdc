"""Floating-point operations of a traced function: its matrix products and convolutions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fzero.programs.jaxprs import inner_jaxprs


if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


def flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Floating-point operations of the matrix products and convolutions in a jaxpr.

    A multiplication and an addition count as two. Calls are followed; a scan counts as often as it
    loops, a `cond` as its most expensive branch, a `while` once, because nobody knows.

    Args:
        jaxpr: what `jax.make_jaxpr` returns.

    Returns:
        The number of operations; elementwise work, reductions and gathers count nothing.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> flops(jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 5))))
        60
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_equation_flops(equation) for equation in inner.eqns)


def _equation_flops(equation: Any) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "conv_general_dilated":
        return _conv_flops(equation)
    if name == "cond":
        return max(flops(branch) for branch in params["branches"])
    times = int(params["length"]) if name == "scan" else 1
    return times * sum(flops(inner) for inner in inner_jaxprs(equation))


def _dot_flops(equation: Any) -> int:
    """Two operations per output element and contracted element."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)


def _conv_flops(equation: Any) -> int:
    """Two operations per output element and tap; a tap is a kernel element of one output feature.

    The kernel's input dim is already that of one group.
    """
    kernel = equation.invars[1].aval.shape
    taps = math.prod(kernel) // kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(equation.outvars[0].aval.shape) * taps
