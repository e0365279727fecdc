"""Operators in 64 bits while JAX holds 32: whole numbers that may not fit, and float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.lower.features_last import in_order
from torch_bridge.lower.no_gradient import without_gradient


@dataclass(frozen=True)
class Wide:
    """An operator that is computed in 64 bits, whatever `jax_enable_x64` says.

    Attributes:
        fn: its lowering.
        takes: for each leaf of its arguments the dtype that PyTorch has there, where that is of 64
            bits, or where a gradient of float64 would go to it; else None.
        keeps: for each leaf of its result whether it stays in 64 bits; others fit into 32.
        taught: whether a gradient may go through it.
        where: its module and line, for messages.
    """

    fn: Callable[..., Any]
    takes: tuple[str | None, ...]
    keeps: tuple[bool, ...]
    taught: bool
    where: str = field(compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            leaves, form = jax.tree.flatten(in_order_all((args, kwargs)))
            given = [self._widened(*pair) for pair in zip(leaves, self.takes, strict=True)]
            args, kwargs = jax.tree.unflatten(form, given)
            found, form = jax.tree.flatten(in_order(self.fn(*args, **kwargs)))
            kept = zip(found, self.keeps, strict=True)
            return jax.tree.unflatten(
                form, [self._wide(x) if keep else narrowed(x) for x, keep in kept]
            )

    def _wide(self, x: Any) -> Any:
        taught = self.taught and np.dtype(x.dtype).kind in "fc"
        return _no_gradient(x, self.where) if taught else x

    def _widened(self, x: Any, dtype: str | None) -> Any:
        if dtype is None or not hasattr(x, "dtype"):
            return x
        if np.dtype(dtype).kind not in "iu":
            x = jnp.asarray(x)
            same = _no_gradient(x, self.where) if self.taught else jax.lax.stop_gradient(x)
            return same.astype(dtype)
        return jnp.asarray(x).astype(dtype)


def in_order_all(tree: Any) -> Any:
    """Arguments of a call with every value as torch has it."""
    args, kwargs = tree
    return tuple(map(in_order, args)), {name: in_order(x) for name, x in kwargs.items()}


_FLOATS = (np.dtype(np.float64), np.dtype(np.complex128))


def narrowed(x: Any) -> Any:
    """A 64-bit array in 32 bits; whole numbers outside go to the nearest one that fits."""
    dtype = np.dtype(x.dtype)
    if dtype.itemsize == 8 and dtype.kind in "iu":
        limits = np.iinfo(f"{dtype.kind}4")
        return jnp.clip(x, limits.min, limits.max).astype(limits.dtype)
    return x.astype(f"{dtype.kind}{dtype.itemsize // 2}") if dtype in _FLOATS else x


@dataclass(frozen=True)
class Saturated:
    """An operator whose 64-bit arguments are indices: none that is valid is beyond 32 bits."""

    fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(_fitted, in_order_all((args, kwargs)))
        return self.fn(*args, **kwargs)


def _fitted(x: Any) -> Any:
    return narrowed(x) if isinstance(x, jax.Array | np.ndarray) else x


def _no_gradient(x: jax.Array, where: str) -> jax.Array:
    """The array; a gradient that would go through it is refused."""
    return without_gradient(
        x,
        f"a gradient goes through float64, in {where}: JAX has it only with"
        " jax.config.update('jax_enable_x64', True); or compute there in float32",
    )
