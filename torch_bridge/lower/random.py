"""Randomness: a key goes in, one for each random node of the graph; torch's generator is not used.

The distributions are torch's, the streams are JAX's: the same key gives the same numbers.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import canonical, is_float, jax_dtype
from .features_last import Last, features, like, takes_last
from .registry import register_operator


def _always(*_: Any, **__: Any) -> bool:
    return True


def dropout_mask(key: Any, p: float, shape: Sequence[int]) -> jax.Array:
    """True where a value is kept, with probability `1 - p`."""
    return jax.random.bernoulli(key, 1.0 - p, tuple(shape))


def _dropout_draws(x: jax.Array, p: float, train: bool | None = True) -> bool:
    return train is not False and 0.0 < p < 1.0


@register_operator("aten.native_dropout.default", draws=_dropout_draws)
@takes_last
def native_dropout(
    x: jax.Array | Last, p: float, train: bool | None = True, key: Any = None
) -> tuple[Any, Any]:
    array, _ = features(x)
    if train is False or p == 0.0:
        return x, like(x, jnp.ones(array.shape, bool))
    if p == 1.0:
        return like(x, jnp.zeros_like(array)), like(x, jnp.zeros(array.shape, bool))
    keep = dropout_mask(key, p, array.shape)
    scale = jnp.asarray(1.0 / (1.0 - p), array.dtype)
    out = jnp.where(keep, array * scale, jnp.zeros((), array.dtype))
    return like(x, out), like(x, keep)


@register_operator("aten.dropout.default", draws=_dropout_draws)
@takes_last
def dropout(x: jax.Array | Last, p: float, train: bool | None = True, key: Any = None) -> Any:
    return native_dropout(x, p, train, key)[0]


@register_operator("aten.bernoulli.p", draws=_always)
def bernoulli_p(x: jax.Array, p: float = 0.5, generator: Any = None, key: Any = None) -> jax.Array:
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@register_operator("aten.bernoulli.default", draws=_always)
def bernoulli(x: jax.Array, generator: Any = None, key: Any = None) -> jax.Array:
    drawn = jax.random.bernoulli(key, jax.lax.stop_gradient(x), x.shape)
    return drawn.astype(x.dtype)


@register_operator("aten.rand.default", draws=_always)
def rand(size: Sequence[int], dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    return jax.random.uniform(key, tuple(size), jax_dtype(dtype))


@register_operator("aten.randn.default", draws=_always)
def randn(size: Sequence[int], dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    return jax.random.normal(key, tuple(size), jax_dtype(dtype))


@register_operator("aten.rand_like.default", draws=_always)
def rand_like(x: jax.Array, dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    return jax.random.uniform(key, x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@register_operator("aten.randn_like.default", draws=_always)
def randn_like(x: jax.Array, dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    return jax.random.normal(key, x.shape, x.dtype if dtype is None else jax_dtype(dtype))


@register_operator("aten.randint.low", draws=_always)
def randint(
    low: int, high: int, size: Sequence[int], dtype: Any = None, key: Any = None, **_: Any
) -> jax.Array:
    kind = canonical(np.int64) if dtype is None else jax_dtype(dtype)
    drawn = jax.random.randint(key, tuple(size), low, high, canonical(np.int64))
    return drawn.astype(kind) if is_float(kind) or kind != drawn.dtype else drawn


@register_operator("aten.randint.default", draws=_always)
def randint_high(high: int, size: Sequence[int], **kwargs: Any) -> jax.Array:
    return randint(0, high, size, **kwargs)


@register_operator("aten.randperm.default", draws=_always)
def randperm(n: int, dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    kind = canonical(np.int64) if dtype is None else jax_dtype(dtype)
    return jax.random.permutation(key, n).astype(kind)
