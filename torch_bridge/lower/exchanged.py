"""Attention of sequences that a plan divides over devices (`Plan(context=)`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fzero.exchange.attention import attention, divided_sequences
from torch_bridge.lower.masks import Pattern


def exchanged_attention(
    query: Any, key: Any, value: Any, pattern: Pattern, scale: float
) -> jax.Array | None:
    """Attention that exchanges keys and values, where sequences are divided and it can.

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
    given = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    window = None if pattern.window is None else pattern.window - 1
    out = attention(*given, causal=pattern.causal, window=window, scale=scale)
    return jnp.swapaxes(out, 1, 2)
