"""Matrices in 8 bits with scales by their largest values."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

# Below this largest value, scales would overflow.
_SMALLEST = 1e-12
# What a parameter's scaling is called in a traced program: a step that is found, not inlined.
WHOLE = "fzero_scaled_whole"


class Scaled(NamedTuple):
    """A matrix in 8 bits, and what it was divided by: [1, 1], or a row or column of such."""

    bits: jax.Array
    unit: jax.Array

    @staticmethod
    def of(matrix: jax.Array, dim: int, dtype: Any, recipe: str) -> Scaled:
        """A matrix that will be summed along `dim`, scaled to what 8 bits hold at most."""
        along = (0, 1) if recipe == "tensorwise" else (dim,)
        wide = matrix.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=along, keepdims=True, initial=0.0)
        return by_largest(wide, largest, dtype, powers=recipe == "rowwise")

    @property
    def T(self) -> Scaled:
        """The transposed matrix."""
        return Scaled(self.bits.T, self.unit.T)

    def times(self, other: Scaled, dtype: Any, exact: bool = False) -> jax.Array:
        """The product of two matrices, summed in float32 and rounded to `dtype`.

        Hopper's tensor cores add up products of 8 bits in fewer bits than float32 has, unless they
        are asked to be `exact`, which takes longer.
        """
        sums = jax.lax.dot_general(
            self.bits,
            other.bits,
            (((1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if exact else None,
            preferred_element_type=jnp.float32,
        )
        return (sums * self.unit * other.unit).astype(dtype)


def by_largest(wide: jax.Array, largest: jax.Array, dtype: Any, powers: bool = False) -> Scaled:
    """Float32 values in 8 bits, the largest of them at the end of the range.

    Args:
        wide: the values.
        largest: their largest magnitude, or those along some dims.
        dtype: that of 8 bits.
        powers: whether scales are powers of two.
    """
    most = float(jnp.finfo(dtype).max)
    scale = most / jnp.maximum(largest, _SMALLEST)
    if powers:
        # The power of two below: its bits without those of the fraction.
        bits = jax.lax.bitcast_convert_type(scale, jnp.int32) & 0x7F800000
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Scaled(jnp.clip(wide * scale, -most, most).astype(dtype), 1 / scale)


def _scaled_whole(matrix: jax.Array) -> Scaled:
    return Scaled.of(matrix, 0, E4M3, "tensorwise")


_scaled_whole.__name__ = WHOLE
_whole = jax.jit(_scaled_whole, inline=False)


def scaled_weight(matrix: jax.Array, dim: int, recipe: str) -> Scaled:
    """A parameter that will be summed along `dim`, in E4M3.

    With one scale for all of it, that is a step of its own (`WHOLE`): where parameters are kept in
    shards, what it gives can travel in place of the parameter.
    """
    return _whole(matrix) if recipe == "tensorwise" else Scaled.of(matrix, dim, E4M3, recipe)
