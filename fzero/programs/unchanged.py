"""Whether a program hands on what it was given: through calls, checkpoints and loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fzero.compat import scan_operands
from fzero.programs.jaxprs import Op, Program, Var


if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr


def unchanged(closed: ClosedJaxpr) -> list[bool]:
    """Whether each output is the input of its own place.

    Args:
        closed: a program with as many outputs as inputs, or fewer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def swapped_twice(x, y):
        ...     return jax.jit(lambda x: x.T)(x.T), y + 0
        >>> unchanged(jax.make_jaxpr(swapped_twice)(jnp.ones((2, 3)), 1.0))
        [True, False]
    """
    origins = _origins(closed.jaxpr, closed.consts)
    return [origin == place for place, origin in enumerate(origins)]


def _origins(jaxpr: Jaxpr, consts: Any) -> list[int | None]:
    """Which input each output is, if any."""
    program = Program(jaxpr, consts)
    makers = {made: (op, place) for op in program.ops for place, made in enumerate(op.results)}
    inputs = {var: place for place, var in enumerate(program.inputs)}
    return [_origin(var, makers, inputs) for var in program.outputs]


def _origin(var: Any, makers: dict[Var, tuple[Op, int]], inputs: dict[Var, int]) -> int | None:
    shape = getattr(var.aval, "shape", ()) if isinstance(var, Var) else ()
    straight = list(range(len(shape)))
    # A loop over another dim than the first moves that one there, and back afterwards.
    dims = straight
    while isinstance(var, Var) and var not in inputs:
        if var not in makers:
            return None  # a constant
        op, place = makers[var]
        if op.equation is not None and op.equation.primitive.name == "transpose":
            dims = [op.equation.params["permutation"][dim] for dim in dims]
            place = 0
        elif op.equation is not None:
            handed = _handed_on(op.equation, place)
            if handed is None:
                return None
            place = handed
        var = op.operands[place]
    return inputs[var] if isinstance(var, Var) and dims == straight else None


def _handed_on(equation: Any, place: int) -> int | None:
    """Which operand a loop's result is, where every turn gives it as it came."""
    if equation.primitive.name != "scan":
        return None
    body = equation.params["jaxpr"]
    inner = _origins(body.jaxpr, body.consts)[place]
    if inner is None:
        return None
    _, carried, cut = scan_operands(equation, range(len(equation.invars)))
    # What is carried is the same if it is its own; what is stacked, if it was divided.
    alike = inner == carried[place] if place < len(carried) else inner in cut
    return inner if alike else None
