"""Batches: checked before anything is compiled, then laid out over the devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.errors import BatchError
from fzero.plan import AXES
from fzero.tree import PyTree, named_leaves, shape_of


def check_batch(batch: PyTree, parts: int, microbatches: int) -> None:
    """Checks a global batch; a pytree of arrays with one leading dim of examples in common.

    Args:
        batch: the batch.
        parts: devices it is spread over.
        microbatches: pieces that each device's rows are cut into.

    Raises:
        BatchError: a leaf is no array or a scalar, or leading dims differ or do not divide.
    """
    leaves = named_leaves(batch)
    if not leaves:
        raise BatchError("batch: expected a pytree of arrays, got one without leaves")
    for path, leaf in leaves:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise BatchError(
                f"batch: {path or 'it'} is a {type(leaf).__name__}: expected an array"
                " (use np.asarray)"
            )
        if not leaf.shape:
            raise BatchError(
                f"batch: {path or 'it'} is a scalar: every leaf needs a leading dim of examples"
            )
    rows = {path: leaf.shape[0] for path, leaf in leaves}
    if len(set(rows.values())) > 1:
        raise BatchError(f"batch: leaves have different numbers of examples (dim 0): {rows}")
    size = next(iter(rows.values()))
    if size == 0 or size % (parts * microbatches):
        raise BatchError(
            f"batch: {size} examples cannot be split evenly over {parts} devices x {microbatches}"
            f" microbatches; expected a positive multiple of {parts * microbatches}. Pad the batch"
            " and leave the padding out of the loss's fz.Mean count"
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Examples spread over all devices, replica-major."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def place_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Lays a global batch out over the devices; what already lies there is not copied.

    With several processes every process passes the same global batch and keeps its own rows.
    Host arrays are copied first: steps run asynchronously, and a loader that refills its buffer
    must not change a batch under way.
    """
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:
        own = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)
        return jax.device_put(own, sharding)

    def place(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        host = np.asarray(leaf)
        shape = shape_of(host)
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index].astype(shape.dtype), dtype=shape.dtype
        )

    return jax.tree.map(place, batch)


def constrain_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """A traced batch, its rows over all devices."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(jnp.asarray(x), sharding), batch)


def abstract_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """Shapes of a batch with their sharding, from arrays or from shapes."""
    sharding = batch_sharding(mesh)

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = shape_of(leaf)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(abstract, batch)
