"""How evenly a router uses its experts, over the tokens of all devices."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fzero.errors import PlanError
from fzero.exchange.rows import AGREED, row_axes


def balance_loss(
    logits: jax.Array | Sequence[jax.Array], k: int, counted: jax.Array | None = None
) -> jax.Array:
    """The loss that keeps experts evenly used: 1 for each choice of a token if they are.

    It is the number of experts times the sum over them of the share of tokens that chose one times
    its mean probability. Both are means over a microbatch's tokens on all devices, so that the loss
    and its gradient are those of one device. A loss function adds it for every token that it
    counts: `fz.Mean(total + 0.01 * balance * count, count)`.

    Args:
        logits: a router's `(..., experts)`, or those of several layers, which are taken together.
        k: experts of a token.
        counted: bool `(...)`: which tokens count; all by default.

    Returns:
        A float32 scalar.

    Raises:
        PlanError: shapes do not fit each other.

    Example:
        >>> import jax.numpy as jnp, fzero as fz
        >>> float(fz.balance_loss(jnp.eye(4) * 1e-6, k=1))
        1.0

    Source: Fedus et al., Switch Transformer, arXiv:2101.03961, equations 4 to 6; for several
        choices, transformers' `load_balancing_loss_func`.
    """
    layers = [logits] if isinstance(logits, jax.Array) else list(logits)
    shape = layers[0].shape if layers else ()
    if not shape or any(x.shape != shape for x in layers) or not 1 <= k <= shape[-1]:
        raise PlanError(
            f"balance_loss: expected logits (..., experts), alike in all layers, and k of at most"
            f" as many; got {[x.shape for x in layers]} and k={k!r}"
        )
    if counted is not None and counted.shape != shape[:-1]:
        raise PlanError(f"balance_loss: counted is {counted.shape}: expected {shape[:-1]}")
    weight = jnp.ones(shape[:-1], jnp.float32) if counted is None else counted.astype(jnp.float32)
    axes = tuple(range(len(shape) - 1))
    used, chance = jnp.zeros((2, shape[-1]), jnp.float32)
    for one in layers:
        chances = jax.nn.softmax(one.astype(jnp.float32), axis=-1)
        _, chosen = jax.lax.top_k(chances, k)
        picked = jnp.sum(jax.nn.one_hot(chosen, shape[-1], dtype=jnp.float32), axis=-2)
        used = used + jnp.sum(picked * weight[..., None], axis=axes)
        chance = chance + jnp.sum(chances * weight[..., None], axis=axes)
    sums = used, chance, jnp.sum(weight) * len(layers)
    over = row_axes()
    used, chance, count = jax.lax.psum(sums, over) if over else sums
    balance = shape[-1] * jnp.sum(used * chance) / jnp.maximum(count, 1) ** 2
    return checkpoint_name(balance, AGREED)
