"""Control flow: `torch.cond`, `scan`, `while_loop` and `map`, whose branches and bodies are graphs.

A graph comes as a function of arrays that gives a list of them (`Nested` in export/interpret.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_bridge.lower.no_gradient import without_gradient
from torch_bridge.lower.registry import register_operator


Body = Callable[..., Sequence[Any]]


@register_operator("cond")
def cond(predicate: Any, true: Body, false: Body, operands: Sequence[Any] = ()) -> list[Any]:
    chosen = jnp.reshape(jnp.asarray(predicate), ())
    branches = (lambda: tuple(true(*operands)), lambda: tuple(false(*operands)))
    return list(jax.lax.cond(chosen, *branches))


@register_operator("scan")
def scan(
    combine: Body, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    """`combine(*carry, *row, *more)` gives the next carry and a row of each result."""
    start = tuple(map(jnp.asarray, init))

    def step(carry: Any, row: Any) -> Any:
        out = combine(*carry, *row, *more)
        return _like(start, out), tuple(out[len(start) :])

    carry, rows = jax.lax.scan(step, start, tuple(xs))
    return [*carry, *rows]


@register_operator("map_impl")
def map_rows(body: Body, xs: Sequence[Any], more: Sequence[Any] = ()) -> list[Any]:
    return list(jax.lax.map(lambda row: tuple(body(*row, *more)), tuple(xs)))


@register_operator("while_loop")
def while_loop(
    goes_on: Body, body: Body, carried: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    """A loop whose number of turns depends on values: it has no gradient."""
    start = tuple(_once(x) for x in carried)
    fixed = [_once(x) for x in more]

    def test(carry: Any) -> Any:
        found: Any = goes_on(*carry, *fixed)
        return jnp.reshape(found[0] if isinstance(found, list | tuple) else found, ())

    return list(jax.lax.while_loop(test, lambda carry: _like(start, body(*carry, *fixed)), start))


def _like(start: Sequence[Any], out: Sequence[Any]) -> tuple[Any, ...]:
    """What is carried on, in the dtypes in which it began."""
    return tuple(jnp.asarray(x).astype(c.dtype) for c, x in zip(start, out, strict=False))


def _once(x: Any) -> jax.Array:
    """What goes into a loop that has no way back."""
    array = jnp.asarray(x)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return without_gradient(
        array,
        "a gradient goes through torch.while_loop: how often it turns depends on values, and"
        " XLA keeps a fixed number of steps for the way back. Use torch's scan with a bound and"
        " torch.where, or .detach() what goes in.",
    )
