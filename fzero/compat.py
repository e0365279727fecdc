"""Every edge between jax versions (0.10, and 0.11 from Python 3.12 on), and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(grid: np.ndarray[Any, Any], axes: Sequence[str]) -> Mesh:
    """A mesh whose axes are `Auto`.

    `jax.make_mesh` gives `Explicit` axes since 0.9, under which third-party model code that was
    written for automatic sharding raises `ShardingTypeError`.
    """
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key array (`jax.random.key`)."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
