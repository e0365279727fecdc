"""Rows of all devices, within a loss: what compares rows with each other needs them."""

from __future__ import annotations

import contextvars
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fzero.axes import AXES
from fzero.compat import set_within
from fzero.errors import BatchError
from fzero.tree import PyTree, named_leaves


# What `checkpoint_name` calls a value that is the same on all devices that share rows out.
AGREED = "fzero.agreed"


def row_axes() -> tuple[str, ...]:
    """The mesh axes that rows are spread over where this is traced; none outside of steps."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in AXES if axis in manual)


# How many rows a device has, and how many all have, where a loss is traced without devices.
_TOLD: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("told", default=None)


def told_rows(own: int, every: int) -> AbstractContextManager[None]:
    """Outside of steps `all_rows` gives so many rows, and `own_rows`: a program shows whose it has.

    Args:
        own: rows of a device.
        every: those of all; more.
    """
    return set_within(_TOLD, (own, every))


# Where it is noted that a program that is being traced has the rows of all.
_NOTED: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("noted", default=None)


def noted(found: list[bool]) -> AbstractContextManager[None]:
    """While this is open, a use of `all_rows` is noted in a list."""
    return set_within(_NOTED, found)


def all_rows(rows: PyTree) -> PyTree:
    """The rows of all devices, in the order of the batch, on each of them.

    A loss sees the rows of one device. One that compares rows with each other (contrastive losses,
    statistics of a batch) takes those of all first, and is from there on what it is on one device:
    the same loss, with the same gradient, whatever the plan. With several microbatches the rows are
    those of one of them.

    Args:
        rows: an array `(rows, ...)`, or a pytree of them.

    Returns:
        Arrays `(devices * rows, ...)`; outside of steps, what was given.

    Raises:
        BatchError: a leaf has no rows.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> def loss(p, buffers, batch, rng, train):
        ...     image, text = fz.all_rows((batch["image"] @ p["w"], batch["text"]))
        ...     scores = image @ text.T
        ...     labels = jnp.arange(len(scores))
        ...     return optax.losses.softmax_cross_entropy_with_integer_labels(
        ...         scores, labels).mean(), buffers, {}
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((3, 2))}, {}), loss)
        >>> plan = fz.Plan(data=1)
        >>> batch = {"image": np.ones((4, 3), np.float32), "text": np.ones((4, 2), np.float32)}
        >>> state = fz.init(model, None, plan)
        >>> print(f"{float(fz.eval_step(model, plan)(state, batch)['loss']):.4f}")  # log(4)
        1.3863

    Source: jax.lax.all_gather, whose derivative is a reduce-scatter.
    """
    axes, told, found = row_axes(), _TOLD.get(), _NOTED.get()
    _require_rows(rows, "all_rows")
    if found is not None:
        found.append(True)

    def gathered(leaf: Any) -> jax.Array:
        if axes:
            whole = jax.lax.all_gather(leaf, axes, tiled=True)
        else:
            shape = leaf.shape if told is None else (told[1], *leaf.shape[1:])
            whole = jnp.broadcast_to(leaf if told is None else leaf[:1], shape)
        return checkpoint_name(whole, AGREED)

    return jax.tree.map(gathered, rows)


def own_rows(rows: PyTree) -> PyTree:
    """Of the rows of all devices those of this one: the inverse of `all_rows`.

    For a loss of a device's rows beside those of all, which takes less memory and time than that of
    all rows on each device: `scores = image @ fz.all_rows(text).T` has the labels
    `fz.own_rows(jnp.arange(scores.shape[1]))`.

    Args:
        rows: an array `(devices * rows, ...)`, or a pytree of them.

    Returns:
        Arrays `(rows, ...)`; outside of steps, what was given.

    Raises:
        BatchError: a leaf has no rows, or a number that the devices do not divide.
    """
    axes, told = row_axes(), _TOLD.get()
    num = jax.lax.axis_size(axes) if axes else 1
    _require_rows(rows, "own_rows", num)

    def own(leaf: Any) -> jax.Array:
        size = leaf.shape[0] // num if axes or told is None else told[0]
        first = jax.lax.axis_index(axes) * size if axes else 0
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(leaf), first, size)

    return jax.tree.map(own, rows)


def _require_rows(rows: PyTree, name: str, num: int = 1) -> None:
    for path, leaf in named_leaves(rows):
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] % num:
            where = f"{name}: {path}" if path else name
            of = f", a multiple of {num} devices" if num > 1 else ""
            got = f"{leaf.dtype}{list(shape)}" if hasattr(leaf, "dtype") else repr(leaf)
            raise BatchError(
                f"{where}: expected an array with a row for each example{of}, got {got}"
            )
