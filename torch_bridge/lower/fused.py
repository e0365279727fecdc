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
        mask: which keys are seen besides, or what is added to scores, as PyTorch takes it. One for
            each head (a bias) is none that is fused.

    Returns:
        `(B, H, T, E)`, or None.
    """
    if query.ndim != 4:
        return None
    if mask is not None:
        if pattern.causal or mask.ndim > 4 or (mask.ndim > 2 and mask.shape[-3] > 1):
            return None
        rows = mask.shape[0] if mask.ndim == 4 else 1
        mask = jnp.broadcast_to(mask, (rows, 1, query.shape[-2], key.shape[-2]))
    given = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    window = None if pattern.window is None else pattern.window - 1
    out = fused.fused_attention(
        *given, causal=pattern.causal, window=window, scale=scale, mask=mask
    )
    return None if out is None else jnp.swapaxes(out, 1, 2)
