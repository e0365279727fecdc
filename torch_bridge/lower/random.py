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

from torch_bridge.dtypes import canonical, is_float, jax_dtype
from torch_bridge.lower.features_last import Last, features, like, takes_last
from torch_bridge.lower.registry import register_operator
from torch_bridge.lower.rounding import sum_dtype


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


@register_operator("aten.poisson.default", draws=_always)
def poisson(x: jax.Array, generator: Any = None, key: Any = None) -> jax.Array:
    return jax.random.poisson(key, jax.lax.stop_gradient(x)).astype(x.dtype)


@register_operator("aten._standard_gamma.default", draws=_always)
def standard_gamma(x: jax.Array, generator: Any = None, key: Any = None) -> jax.Array:
    return jax.random.gamma(key, x.astype(sum_dtype(x))).astype(x.dtype)


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


@register_operator("aten.randint_like.default", draws=_always)
def randint_like(x: jax.Array, high: int, dtype: Any = None, **kwargs: Any) -> jax.Array:
    return randint_like_low(x, 0, high, dtype, **kwargs)


@register_operator("aten.randint_like.low_dtype", draws=_always)
def randint_like_low(
    x: jax.Array, low: int, high: int, dtype: Any = None, key: Any = None, **_: Any
) -> jax.Array:
    drawn = randint(low, high, x.shape, dtype, key)
    return drawn.astype(x.dtype) if dtype is None else drawn


@register_operator("aten.randperm.default", draws=_always)
def randperm(n: int, dtype: Any = None, key: Any = None, **_: Any) -> jax.Array:
    kind = canonical(np.int64) if dtype is None else jax_dtype(dtype)
    return jax.random.permutation(key, n).astype(kind)


@register_operator(
    "aten.normal.Tensor_Tensor", "aten.normal.Tensor_float", "aten.normal.float_Tensor",
    draws=_always,
)  # fmt: skip
def normal(mean: Any, std: Any = 1.0, generator: Any = None, key: Any = None) -> jax.Array:
    like = mean if hasattr(mean, "dtype") else std
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std))
    return jax.random.normal(key, shape, like.dtype) * std + mean


@register_operator("aten.normal.float_float", draws=_always)
def normal_of_size(
    mean: float, std: float, size: Sequence[int], dtype: Any = None, key: Any = None, **_: Any
) -> jax.Array:
    return jax.random.normal(key, tuple(size), jax_dtype(dtype)) * std + mean


@register_operator("aten.normal_functional.default", draws=_always)
def normal_like(
    x: jax.Array, mean: float = 0.0, std: float = 1.0, generator: Any = None, key: Any = None
) -> jax.Array:
    return jax.random.normal(key, x.shape, x.dtype) * std + mean


@register_operator("aten.uniform.default", draws=_always)
def uniform(
    x: jax.Array, low: float = 0.0, high: float = 1.0, generator: Any = None, key: Any = None
) -> jax.Array:
    return jax.random.uniform(key, x.shape, x.dtype, low, high)


@register_operator("aten.exponential.default", draws=_always)
def exponential(
    x: jax.Array, lambd: float = 1.0, generator: Any = None, key: Any = None
) -> jax.Array:
    return jax.random.exponential(key, x.shape, x.dtype) / lambd


@register_operator("aten.cauchy.default", draws=_always)
def cauchy(
    x: jax.Array, median: float = 0.0, sigma: float = 1.0, generator: Any = None, key: Any = None
) -> jax.Array:
    return jax.random.cauchy(key, x.shape, x.dtype) * sigma + median


@register_operator("aten.log_normal.default", draws=_always)
def log_normal(
    x: jax.Array, mean: float = 1.0, std: float = 2.0, generator: Any = None, key: Any = None
) -> jax.Array:
    return jnp.exp(jax.random.normal(key, x.shape, x.dtype) * std + mean)


@register_operator("aten.geometric.default", draws=_always)
def geometric(x: jax.Array, p: float, generator: Any = None, key: Any = None) -> jax.Array:
    return jax.random.geometric(key, p, x.shape).astype(x.dtype)


@register_operator("aten.multinomial.default", draws=_always)
def multinomial(
    weights: jax.Array, num_samples: int, replacement: bool = False, generator: Any = None,
    key: Any = None,
) -> jax.Array:  # fmt: skip
    """Indices of rows drawn by weight. Shapes: weights `(..., n)`, result `(..., num_samples)`."""
    logits = jnp.log(jax.lax.stop_gradient(weights))
    rows = weights.shape[:-1]
    if replacement:
        drawn = jax.random.categorical(key, logits, shape=(num_samples, *rows))
        return jnp.moveaxis(drawn, 0, -1).astype(canonical(np.int64))
    # The largest of logits with Gumbel noise are a sample without replacement.
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return jax.lax.top_k(noisy, num_samples)[1].astype(canonical(np.int64))


@register_operator(
    "aten.rrelu.default",
    draws=lambda x, lower=0.125, upper=1 / 3, training=False, *_, **__: bool(training),
)
def rrelu(
    x: jax.Array, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    generator: Any = None, key: Any = None,
) -> jax.Array:  # fmt: skip
    if training:
        slope = jax.random.uniform(key, x.shape, x.dtype, lower, upper)
    else:
        slope = jnp.asarray((lower + upper) / 2, x.dtype)
    return jnp.where(x > 0, x, x * slope)


@register_operator(
    "aten.rrelu_with_noise_functional.default",
    draws=lambda x, noise, lower=0.125, upper=1 / 3, training=False, *_, **__: bool(training),
)
def rrelu_with_noise(
    x: jax.Array, noise: Any, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    generator: Any = None, key: Any = None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    return rrelu(x, lower, upper, training, key=key), noise
