"""Values of shape `(N, C, *spatial)` that are held as `(N, *spatial, C)`.

torch has the features second. XLA computes convolutions with the features last, and for CPUs it
turns activations for most of them, and back. So a convolution's output stays as it was computed,
and what follows (normalisation, activations, sums, pooling) takes it as it is. Every other operator
gets the value in torch's order.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Last:
    """A value of shape `(N, C, *spatial)`.

    Attributes:
        held: the same as `(N, *spatial, C)`.
    """

    held: jax.Array

    def in_order(self) -> jax.Array:
        """The value as torch has it."""
        return jnp.moveaxis(self.held, -1, 1)


def features(x: jax.Array | Last) -> tuple[jax.Array, int]:
    """The array of a value, and which of its axes the features are."""
    return (x.held, x.held.ndim - 1) if isinstance(x, Last) else (x, min(1, x.ndim - 1))


def like(x: jax.Array | Last, out: jax.Array) -> Any:
    """A result that has its features where `x` has them."""
    return Last(out) if isinstance(x, Last) else out


def over(x: jax.Array | Last, dims: int) -> jax.Array | Last:
    """A value whose last `dims` dims an operator takes as the spatial ones.

    torch reads `(N, C, L)` as an image without a batch where the operator has two dims: then the
    value is as torch has it.
    """
    return x.in_order() if isinstance(x, Last) and x.held.ndim != dims + 2 else x


def in_order(tree: Any) -> Any:
    """Arguments or results with every value as torch has it."""
    if isinstance(tree, Last):
        return tree.in_order()
    if isinstance(tree, list | tuple) and any(isinstance(x, Last) for x in tree):
        return type(tree)(map(in_order, tree))
    return tree


_TAKES = "takes_features_last"


def takes_last(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose arguments may be `Last`."""
    setattr(fn, _TAKES, True)
    return fn


def elementwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of broadcast arrays compute with the features last."""

    @takes_last
    @functools.wraps(fn)
    def computed(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        dims = max((x.held.ndim for x in values if isinstance(x, Last)), default=0)
        if not dims:
            return fn(*args, **kwargs)
        if any(_rank(x) > dims or (isinstance(x, Last) and x.held.ndim < dims) for x in values):
            return fn(*map(in_order, args), **{n: in_order(x) for n, x in kwargs.items()})
        return Last(
            fn(*(_held(x, dims) for x in args), **{n: _held(x, dims) for n, x in kwargs.items()})
        )

    return computed


def _rank(x: Any) -> int:
    return int(getattr(x, "ndim", 0))


def _held(x: Any, dims: int) -> Any:
    if isinstance(x, Last):
        return x.held
    if not _rank(x):
        return x
    return jnp.moveaxis(jnp.reshape(x, (*(1,) * (dims - x.ndim), *x.shape)), 1, -1)


def takes(fn: Callable[..., Any]) -> bool:
    """Whether a function's arguments may be `Last`."""
    return fn is operator.getitem or getattr(fn, _TAKES, False)


def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function's result; its arguments are in torch's order unless it takes others."""
    if takes(fn):
        return fn(*args, **kwargs)
    return fn(*map(in_order, args), **{name: in_order(x) for name, x in kwargs.items()})
