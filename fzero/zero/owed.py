"""Error feedback: what reductions of 8-bit blocks have not sent yet, as a part of the state.

Every device owes what was lost of its own gradients. All of it together is what the sum of all
gradients lacks so far; devices may take over each other's, but none may be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.plan import AXES, Plan
from fzero.tree import PyTree
from fzero.zero.partition import Split, map_splits


# A remainder is at most 1/254 of its block's largest number; bfloat16 keeps 8 more bits of it.
DTYPE = jnp.bfloat16


def error_shape(split: Split, devices: int) -> tuple[int, ...]:
    """Shape of what all devices owe of one split leaf: a row for each."""
    return (devices, *split.stored_shape)


def error_shapes(layout: PyTree, plan: Plan, mesh: Mesh) -> PyTree:
    """Shapes and shardings of what is owed; `None` for leaves that are reduced exactly.

    Args:
        layout: a `Split` per parameter.
        plan: the plan; without `reduce_dtype` there is no such tree.
        mesh: all devices.
    """
    if plan.reduce_dtype is None:
        return None
    sharding = NamedSharding(mesh, PartitionSpec(AXES))

    def shape(split: Split) -> jax.ShapeDtypeStruct | None:
        if split.dim is None:
            return None
        return jax.ShapeDtypeStruct(error_shape(split, mesh.size), DTYPE, sharding=sharding)

    return map_splits(shape, layout)


def nothing_owed(shapes: PyTree) -> PyTree:
    """Zeros."""
    return jax.tree.map(lambda to: jnp.zeros(to.shape, to.dtype), shapes)


@dataclass(frozen=True)
class Handover:
    """What is owed of one leaf, from one plan's devices to another's.

    The same number of devices keep each its own. Any other number owe equal parts of the sum.

    Args:
        old: how the leaf was split.
        new: how it is split now.
        was: devices that owe.
        now: devices that will.
    """

    old: Split
    new: Split
    was: int
    now: int

    @property
    def none(self) -> bool:
        """Whether both keep the same array."""
        return error_shape(self.old, self.was) == error_shape(self.new, self.now)

    def apply(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """All rows on the host."""
        rows: np.ndarray[Any, Any] = self._rows(value, np)
        return rows

    def place(self, value: jax.Array, to: Any) -> jax.Array:
        """All rows on the new devices, each with its own alone."""
        if self.none:
            return value if value.sharding == to.sharding else jax.device_put(value, to.sharding)
        if self.was == self.now:
            return jax.device_put(jax.jit(partial(self._rows, xp=jnp))(value), to.sharding)
        # One row travels, whole: that is what a gradient takes.
        whole = NamedSharding(to.sharding.mesh, PartitionSpec())
        row = jax.device_put(jax.jit(partial(self._share, xp=jnp))(value), whole)
        spread: Callable[[jax.Array], jax.Array] = jax.jit(
            lambda row: jnp.broadcast_to(row, to.shape), out_shardings=to.sharding
        )
        return spread(row)

    def _rows(self, value: Any, xp: Any) -> Any:
        if self.was == self.now:
            return self._padded(value, xp)
        return xp.broadcast_to(self._share(value, xp), error_shape(self.new, self.now))

    def _share(self, value: Any, xp: Any) -> Any:
        """One new device's row."""
        total = value.astype(np.float32).sum(0, keepdims=True)
        return self._padded((total / np.float32(self.now)).astype(DTYPE), xp)

    def _padded(self, rows: Any, xp: Any) -> Any:
        own = rows[(slice(None), *map(slice, self.old.shape))]
        widths = [(0, b - a) for a, b in zip(own.shape[1:], self.new.stored_shape, strict=True)]
        return xp.pad(own, [(0, 0), *widths])


def handed_over(error: PyTree, old: PyTree, new: PyTree, shapes: PyTree, was: int) -> PyTree:
    """What is owed under another plan.

    Args:
        error: as a state has it, or `None`.
        old: the layout of its parameters, a `Split` each.
        new: the new plan's.
        shapes: of the new plan's error, or `None`.
        was: devices that owe.

    Returns:
        A tree like `shapes`. What is owed of leaves that the new plan reduces exactly is dropped;
        what was reduced exactly owes nothing.
    """
    if shapes is None:
        return None

    def hand(a: Split, b: Split, to: Any, rows: Any = None) -> Any:
        if to is None:
            return None
        if rows is None:
            return placed_zeros(to)
        return Handover(a, b, was, to.shape[0]).place(rows, to)

    return map_splits(hand, old, new, shapes, *(() if error is None else (error,)))


def placed_zeros(to: Any) -> Any:
    """Zeros on their devices; `None` for `None`."""
    if to is None:
        return None
    return jax.jit(partial(nothing_owed, to), out_shardings=to.sharding)()


def error_bytes(split: Split) -> int:
    """Bytes that each device keeps of what it owes of one split leaf."""
    return math.prod(split.stored_shape) * np.dtype(DTYPE).itemsize
