"""A hyperparameter that changes from step to step, as data that a compiled step can look up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


# Bits of a positive int32.
_BITS = 31


@dataclass(frozen=True, eq=False)
class Rates:
    """Values of a hyperparameter by step: an optax schedule.

    Schedulers compute in Python's float64, one step from the last. A step on a device would round
    otherwise, and drift; so their values are kept, and looked up.

    Args:
        values: the first ones, float64.
        period: how many of the last `values` come again and again after them.
        factor: what they are multiplied by each time.
        every: optimizer steps for which one value holds.
        start: optimizer steps that the scheduler has made already.

    Example:
        >>> halved = Rates(np.array([8.0, 8.0]), period=2, factor=0.5)
        >>> [float(halved(step)) for step in range(6)]
        [8.0, 8.0, 4.0, 4.0, 2.0, 2.0]
    """

    values: np.ndarray[Any, np.dtype[np.float64]]
    period: int = 1
    factor: float = 1.0
    every: int = 1
    start: int = 0

    def __call__(self, count: Any) -> jax.Array:
        """The value after `count` optimizer steps."""
        index = jnp.asarray(count) // self.every
        beyond = index - (len(self.values) - 1)
        times = jnp.maximum((beyond + self.period - 1) // self.period, 0)
        value = jnp.asarray(self.values)[index - times * self.period]
        return value if self.factor == 1 else value * _power(self.factor, times)


def _power(base: float, exponent: jax.Array) -> jax.Array:
    """`base ** exponent` for an integer, to a rounding for every bit of it.

    The power of a rounded base would be wrong by as many roundings as the exponent says.
    """
    with np.errstate(over="ignore", under="ignore"):
        squares = np.float64(base) ** np.exp2(np.arange(_BITS))
        squares = squares.astype(jax.dtypes.canonicalize_dtype(np.float64))
    bits = (exponent >> jnp.arange(_BITS, dtype=exponent.dtype)) & 1
    return jnp.prod(jnp.where(bits == 1, squares, np.ones_like(squares)))
