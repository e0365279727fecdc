"""What is trained: functions plus initial values. No array is ever kept inside a model function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


PyTree = Any
InitFn = Callable[[jax.Array], tuple[PyTree, PyTree]]
LossFn = Callable[..., tuple[Any, PyTree, dict[str, Any]]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A mean kept as its two sums, so that it stays exact over microbatches and devices."""

    total: jax.Array
    count: jax.Array


@dataclass(frozen=True)
class Model:
    """`init(rng) -> (params, buffers)` (or the pair itself) and `loss(params, buffers, batch, rng, train)`."""

    init: InitFn | tuple[PyTree, PyTree]
    loss: LossFn
