"""A traced program as a number: equal where two processes traced the same."""

from __future__ import annotations

import enum
from typing import Any

import jax
import numpy as np
import xxhash

from fzero.compat import is_key, run_equation


Axes = tuple[tuple[str, int], ...]

# Operations whose derivative is a function of its own, which no parameter shows.
_RULED = ("custom_jvp_call", "custom_vjp_call")
# What parameters of operations say the same in every process; functions, meshes and sets do not.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic)


def digest(closed: Any) -> str:
    """A hash of operations, of what they read, of their numbers and of constants.

    Derivatives of one's own (`jax.custom_vjp`, `jax.custom_jvp`) are traced for it, once each: they
    are in no program until somebody differentiates.

    Args:
        closed: what `jax.make_jaxpr` returns.

    Returns:
        16 hexadecimal digits, the same in every process and on every machine.

    Example:
        >>> import jax.numpy as jnp
        >>> one, same, other = (
        ...     digest(jax.make_jaxpr(lambda x, rate=rate: rate * jnp.sin(x))(1.0))
        ...     for rate in (0.1, 0.1, 0.2))
        >>> one == same, one == other
        (True, False)
    """
    found = xxhash.xxh3_64()
    _program(found, closed, ())
    return found.hexdigest()


def _program(found: xxhash.xxh3_64, closed: Any, axes: Axes | None) -> None:
    """`axes` are those that collectives may name, with their sizes; `None`: rules are left out."""
    jaxpr = getattr(closed, "jaxpr", closed)
    for const in getattr(closed, "consts", ()):
        _constant(found, const)
    numbers = {var: n for n, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    for eqn in jaxpr.eqns:
        _text(found, eqn.primitive.name)
        inner = axes
        if axes is not None and eqn.primitive.name == "shard_map":
            inner = tuple({**dict(axes), **eqn.params["mesh"].shape}.items())
        for name in sorted(eqn.params):
            _text(found, name)
            _parameter(found, eqn.params[name], inner)
        if axes is not None and eqn.primitive.name in _RULED:
            _rule(found, eqn, axes)
        for operand in eqn.invars:
            if hasattr(operand, "val"):  # a number in the program's text
                _constant(found, operand.val)
            else:
                _text(found, numbers[operand])
        for var in eqn.outvars:
            numbers[var] = len(numbers)
            _text(found, *(str(getattr(var.aval, what, "")) for what in ("shape", "dtype")))
    for var in jaxpr.outvars:
        if hasattr(var, "val"):
            _constant(found, var.val)
        else:
            _text(found, numbers[var])


def _rule(found: xxhash.xxh3_64, eqn: Any, axes: Axes) -> None:
    """The derivative of an operation; what it calls is hashed without its own, which may be it."""

    def back(*values: Any) -> Any:
        outputs, pull = jax.vjp(lambda *xs: run_equation(eqn, xs, ()), *values)
        return pull([_ones(x) for x in outputs])

    try:
        with jax.numpy_dtype_promotion("standard"):
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            traced = jax.make_jaxpr(back, axis_env=axes)(*shapes)
    except Exception:  # it takes more than a mesh's names, or has no derivative
        return
    _program(found, traced, None)


def _ones(like: Any) -> Any:
    """A cotangent."""
    if jax.numpy.issubdtype(like.dtype, jax.numpy.inexact):
        return jax.numpy.ones_like(like)
    return np.zeros(like.shape, jax.dtypes.float0)


def _parameter(found: xxhash.xxh3_64, value: Any, axes: Axes | None) -> None:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        _program(found, value, axes)
    elif isinstance(value, enum.Enum):
        _text(found, str(value))
    elif isinstance(value, tuple | list):
        _text(found, len(value))
        for one in value:
            _parameter(found, one, axes)
    elif isinstance(value, _PLAIN):
        _text(found, repr(value))


def _text(found: xxhash.xxh3_64, *values: Any) -> None:
    found.update(f"{values}".encode())


def _constant(found: xxhash.xxh3_64, value: Any) -> None:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return
    if isinstance(value, jax.Array) and is_key(value):
        value = jax.random.key_data(value)
    found.update(np.ascontiguousarray(np.asarray(value)).tobytes())
