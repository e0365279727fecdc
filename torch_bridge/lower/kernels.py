"""PyTorch's attention by what `fzero.exchange` has: exchanged sequences, cuDNN's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange import cudnn
from fzero.exchange.attention import attention, divided_sequences
from torch_bridge.lower.masks import Pattern


def exchanged_attention(
    query: Any, key: Any, value: Any, pattern: Pattern, scale: float
) -> jax.Array | None:
    """Attention that exchanges keys and values, where a plan divides sequences over devices
    (`Plan(context=)`) and it can.

    What it cannot (a sequence and another, arrays of masks, dropout of scores) is computed as
    anywhere, with whole keys: slower, and the same.

    Args:
        query: `(B, H, T, E)`.
        key: `(B, K, S, E)`, H a multiple of K.
        value: likewise.
        pattern: which keys are seen.
        scale: of the scores.

    Returns:
        `(B, H, T, E)`, or None.
    """
    if not divided_sequences() or query.ndim != 4 or query.shape[-2] != key.shape[-2]:
        return None
    return _heads_last(attention, query, key, value, pattern, scale=scale)


def fused_attention(
    query: Any, key: Any, value: Any, pattern: Pattern, scale: float, mask: Any = None,
    lengths: Any = None,
) -> jax.Array | None:  # fmt: skip
    """Attention by cuDNN, where the program that is traced is for a GPU and cuDNN can do it.

    Args:
        query, key, value, pattern, scale: as for `exchanged_attention`.
        mask: which keys are seen besides, or what is added to scores, as PyTorch takes it: for all
            heads, or for each (a bias).
        lengths: int32 `(B)`, of each row's keys, where others are seen by nothing.

    Returns:
        `(B, H, T, E)`, or None.
    """
    if query.ndim != 4:
        return None
    if mask is not None:
        if pattern.causal or mask.ndim > 4:
            return None
        own = (*[1] * (4 - mask.ndim), *mask.shape)[:2]  # of rows and heads
        mask = jnp.broadcast_to(mask, (*own, query.shape[-2], key.shape[-2]))
    more = {"scale": scale, "mask": mask, "lengths": lengths}
    return _heads_last(cudnn.fused_attention, query, key, value, pattern, **more)


def _heads_last(
    call: Callable[..., Any], query: Any, key: Any, value: Any, pattern: Pattern, **more: Any
) -> jax.Array | None:
    """An attention of `(B, T, H, E)`, whose window leaves out the position itself."""
    given = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    window = None if pattern.window is None else pattern.window - 1
    out = call(*given, causal=pattern.causal, window=window, **more)
    return None if out is None else jnp.swapaxes(out, 1, 2)
