"""Optimizers whose arithmetic in optax is not torch's.

optax computes `1 - b**t` in float32, which for b = 0.999 is off by 1e-5 in the first steps; torch
in float64. optax adds `eps` elsewhere in Adagrad and RAdam, and takes the maximum of AMSGrad after
the bias correction. State is kept in optax's own types wherever it means the same.

Source: the `_single_tensor_*` functions of torch.optim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fzero.errors import ConversionError
from fzero.tree import path_name
from torch_bridge.optim.rates import Rates


# Below this length, RAdam's running variance is that of too few gradients to divide by.
_RADAM_LENGTH = 5.0


class ScaleByAdamaxState(NamedTuple):
    """State of Adamax: `nu` is a running maximum."""

    count: Any
    mu: Any
    nu: Any


class ScaleByNadamState(NamedTuple):
    """State of NAdam: Adam's, and the product of all momenta so far."""

    count: Any
    mu: Any
    nu: Any
    mu_product: Any


class ScaleByRadamState(NamedTuple):
    """State of RAdam: Adam's, which mean the same in no other optimizer."""

    count: Any
    mu: Any
    nu: Any


def scale_by_adam(
    b1: Any, b2: float, eps: float, amsgrad: bool = False
) -> optax.GradientTransformation:
    """Adam and AMSGrad; `b1` may be a traced scalar."""

    def init(params: Any) -> Any:
        state = optax.ScaleByAdamState(_zero(), _zeros(params), _zeros(params))
        return optax.ScaleByAmsgradState(*state, _zeros(params)) if amsgrad else state

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count, mu, nu = _moments(grads, state, b1, b2)
        kept = optax.ScaleByAdamState(count, mu, nu)
        if amsgrad:
            nu = jax.tree.map(jnp.maximum, state.nu_max, nu)
            kept = optax.ScaleByAmsgradState(*kept, nu)
        first, second = _remaining(b1, count), jnp.sqrt(_remaining(b2, count))

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            return (m / _as(first, m)) / (jnp.sqrt(v) / _as(second, v) + eps)

        return jax.tree.map(scaled, mu, nu), kept

    return optax.GradientTransformation(init, update)


def scale_by_nadam(
    b1: float, b2: float, eps: float, momentum_decay: float
) -> optax.GradientTransformation:
    """NAdam: Adam that looks one step of momentum ahead."""

    def init(params: Any) -> ScaleByNadamState:
        one = jnp.ones((), jnp.float32)
        return ScaleByNadamState(_zero(), _zeros(params), _zeros(params), one)

    def momentum(count: jax.Array) -> jax.Array:
        exponent = count.astype(jnp.float32) * (momentum_decay * math.log(0.96))
        return b1 * (1.0 - 0.5 * jnp.exp(exponent))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByNadamState]:
        count, mu, nu = _moments(grads, state, b1, b2)
        now, after = momentum(count), momentum(count + 1)
        product = state.mu_product * now
        of_grad = (1.0 - now) / (1.0 - product)
        of_mean = after / (1.0 - product * after)
        second = _remaining(b2, count)

        def scaled(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            denominator = jnp.sqrt(v / _as(second, v)) + eps
            return _as(of_grad, g) * g / denominator + _as(of_mean, m) * m / denominator

        new = ScaleByNadamState(count, mu, nu, product)
        return jax.tree.map(scaled, grads, mu, nu), new

    return optax.GradientTransformation(init, update)


def scale_by_radam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """RAdam: Adam that divides by the running variance once it is one of enough gradients."""
    rectify = Rates(_rectifications(b2))

    def init(params: Any) -> ScaleByRadamState:
        return ScaleByRadamState(_zero(), _zeros(params), _zeros(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByRadamState]:
        count, mu, nu = _moments(grads, state, b1, b2)
        first, second = _remaining(b1, count), jnp.sqrt(_remaining(b2, count))
        factor = rectify(count - 1)

        def scaled(m: jax.Array, v: jax.Array) -> jax.Array:
            mean = m / _as(first, m)
            divided = mean * (_as(second, v) / (jnp.sqrt(v) + eps)) * _as(factor, m)
            return jnp.where(factor > 0, divided, mean)

        return jax.tree.map(scaled, mu, nu), ScaleByRadamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _rectifications(b2: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """RAdam's factor for steps 1, 2, ... until it stays 1; 0 where it does not divide.

    The length is a difference of two numbers near `2 / (1 - b2)`: float32 would decide otherwise.
    """
    longest = 2 / (1 - b2) - 1
    if longest <= _RADAM_LENGTH:
        return np.zeros(1)
    # b2**t is below float32's last bit when t ln b2 = -30, with room for the factor t.
    step = np.arange(1, math.ceil(30 / -math.log(b2)) + 1, dtype=np.float64)
    length = longest - 2 * step * b2**step / (1 - b2**step)
    top = (length - 4) * (length - 2) * longest
    bottom = (longest - 4) * (longest - 2) * length
    enough = length > _RADAM_LENGTH
    return np.where(enough, np.sqrt(np.where(enough, top / bottom, 0.0)), 0.0)


def scale_by_adamax(b1: Any, b2: float, eps: float) -> optax.GradientTransformation:
    """Adamax: Adam with the largest gradient so far, fading, in place of the variance."""

    def init(params: Any) -> ScaleByAdamaxState:
        return ScaleByAdamaxState(_zero(), _zeros(params), _zeros(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, ScaleByAdamaxState]:
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda m, g: _lerp(m, g, b1), state.mu, grads)
        nu = jax.tree.map(lambda n, g: jnp.maximum(b2 * n, jnp.abs(g) + eps), state.nu, grads)
        first = _remaining(b1, count)
        scaled = jax.tree.map(lambda m, n: m / _as(first, m) / n, mu, nu)
        return scaled, ScaleByAdamaxState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_adagrad(initial: float, eps: float) -> optax.GradientTransformation:
    """Adagrad, which adds `eps` to the root."""

    def init(params: Any) -> optax.ScaleByRssState:
        return optax.ScaleByRssState(jax.tree.map(lambda p: jnp.full_like(p, initial), params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByRssState]:
        sums = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, grads)
        scaled = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), grads, sums)
        return scaled, optax.ScaleByRssState(sums)

    return optax.GradientTransformation(init, update)


def scale_by_muon(
    momentum: float,
    nesterov: bool,
    coefficients: tuple[float, float, float],
    eps: float,
    steps: int,
    adjust: str | None,
) -> optax.GradientTransformation:
    """Muon: momentum of matrices, orthogonalised in bfloat16, as torch does it.

    Raises:
        ConversionError: (when called) a parameter is no matrix.
    """

    def init(params: Any) -> optax.TraceState:
        return optax.TraceState(_zeros(params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, optax.TraceState]:
        means = jax.tree.map(lambda m, g: _lerp(m, g, momentum), state.trace, grads)
        ahead = means
        if nesterov:
            ahead = jax.tree.map(lambda m, g: m - (m - g) * (1 - momentum), means, grads)

        def scaled(path: Any, x: jax.Array) -> jax.Array:
            if x.ndim != 2:
                raise ConversionError(
                    f"optimizer Muon: {path_name(path)} has shape {x.shape}; expected a matrix."
                    " Give it other parameters in a group of AdamW"
                )
            flat = orthogonal(x, coefficients, eps, steps).astype(x.dtype)
            return flat * _muon_rate(adjust, x.shape)

        return jax.tree_util.tree_map_with_path(scaled, ahead), optax.TraceState(means)

    return optax.GradientTransformation(init, update)


def orthogonal(
    x: jax.Array, coefficients: tuple[float, float, float], eps: float, steps: int
) -> jax.Array:
    """A matrix with its singular values near one, by Newton-Schulz iterations in bfloat16.

    Each product is added up in float32 and rounded once, with what is added to it, as by
    `torch.addmm`.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(wide * wide)).astype(jnp.bfloat16)
    x = x / jnp.maximum(norm, jnp.asarray(eps, jnp.bfloat16))

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    for _ in range(steps):
        gram = product(x, x.T).astype(jnp.bfloat16)
        factor = b * gram.astype(jnp.float32) + c * product(gram, gram)
        moved = product(factor.astype(jnp.bfloat16), x)
        x = (a * x.astype(jnp.float32) + moved).astype(jnp.bfloat16)
    return x.T if tall else x


def _muon_rate(adjust: str | None, shape: tuple[int, ...]) -> float:
    """What a matrix's rate is multiplied by, so that the size of its update fits its shape."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(shape))
    return math.sqrt(max(1.0, shape[0] / shape[1]))


def _zero() -> jax.Array:
    return jnp.zeros((), jnp.int32)


def _zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params)


def _moments(grads: Any, state: Any, b1: Any, b2: float) -> tuple[jax.Array, Any, Any]:
    """Adam's count and moments after another gradient."""
    mu = jax.tree.map(lambda m, g: _lerp(m, g, b1), state.mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * (g * g), state.nu, grads)
    return optax.safe_increment(state.count), mu, nu


def _lerp(mean: jax.Array, grad: jax.Array, decay: Any) -> jax.Array:
    return mean + (grad - mean) * (1 - decay)


def _remaining(decay: Any, count: jax.Array) -> jax.Array:
    """`1 - decay ** count`, as exact in float32 as it can be."""
    if isinstance(decay, float | int):
        log: Any = math.log(decay) if decay else -math.inf
    else:
        log = jnp.log(decay)
    return -jnp.expm1(count.astype(jnp.float32) * log)


def _as(value: jax.Array, like: jax.Array) -> jax.Array:
    return value.astype(like.dtype)
