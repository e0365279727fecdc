"""What XLA's partitioner computes wrongly, kept from it."""

from __future__ import annotations

from collections.abc import Collection

import jax
from jax.sharding import PartitionSpec

from fzero.axes import free_axes


def undivided(x: jax.Array, dims: Collection[int]) -> jax.Array:
    """A value of which some dims are not divided over the axes of a plan.

    Args:
        x: the value.
        dims: counted from the first, or from behind.
    """
    if not free_axes():
        return x
    whole = {dim % x.ndim for dim in dims}
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if dim in whole else free for dim in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)
