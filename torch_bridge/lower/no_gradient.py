"""Values through which no gradient may go."""

from __future__ import annotations

from typing import Any

import jax

from fzero.errors import ConversionError


def without_gradient(x: jax.Array, why: str) -> jax.Array:
    """The array itself.

    Args:
        x: an array of any shape and dtype.
        why: what is said where it is differentiated: where that is, and what to do.

    Raises:
        ConversionError: a gradient would go through it.

    Example:
        >>> import jax.numpy as jnp
        >>> float(without_gradient(jnp.float32(2), "no gradient here"))
        2.0
    """

    @jax.custom_jvp
    def same(x: jax.Array) -> jax.Array:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise ConversionError(why)

    return same(x)
