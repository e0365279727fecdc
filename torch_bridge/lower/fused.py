"""PyTorch's attention by cuDNN's fused kernel (`fzero.exchange.fused`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange import fused
from torch_bridge.lower.masks import Pattern


def fused_attention(
    query: Any, key: Any, value: Any, pattern: Pattern, scale: float, mask: Any = None
) -> jax.Array | None:
    """Attention by cuDNN, where the program that is traced is for a GPU and cuDNN can do it.

    Args:
        query: `(B, H, T, E)`.
        key: `(B, K, S, E)`, H a multiple of K.
        value: likewise.
        pattern: which keys are seen.
        scale: of the scores.
        mask: which keys are seen besides, or what is added to scores, as PyTorch takes it: for all
            heads, or for each (a bias).

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
    given = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    window = None if pattern.window is None else pattern.window - 1
    out = fused.fused_attention(
        *given, causal=pattern.causal, window=window, scale=scale, mask=mask
    )
    return None if out is None else jnp.swapaxes(out, 1, 2)
