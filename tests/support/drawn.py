"""Initial values of tests' models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def drawn(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Numbers of variance 1 that a key gives, each of a hash of its place.

    Those of `jax.random.normal` are most of what an `init` takes to compile, three to four times
    as long as these: a tenth of a test that trains a tiny model.
    """
    places = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(0x9E3779B1)
    for word in jax.random.key_data(key).ravel():
        places = (places ^ word) * jnp.uint32(0x85EBCA6B)
        places ^= places >> 15
    bits = (places * jnp.uint32(0xC2B2AE35)) ^ (places >> 13)
    # Uniform: whole numbers times a constant round alike in every program.
    return bits.astype(jnp.int32).astype(jnp.float32).reshape(shape) * (math.sqrt(3) / 2**31)
