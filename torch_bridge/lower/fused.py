"""cuDNN's fused attention: the scores of a row never leave the chip, hidden ones are not computed.

Everything about it is jax's to know (`jax.nn.dot_product_attention`): it is asked for the kernel,
and where it refuses (precision, head size, no cuDNN) there is none.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fzero import compat
from torch_bridge.lower.masks import Pattern


_HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def fused_attention(
    query: Any, key: Any, value: Any, pattern: Pattern, scale: float
) -> jax.Array | None:
    """Attention by cuDNN, where the program that is traced is for a GPU and cuDNN can do it.

    Args:
        query: `(B, H, T, E)`.
        key: `(B, K, S, E)`, H a multiple of K.
        value: likewise.
        pattern: which keys are seen.
        scale: of the scores.

    Returns:
        `(B, H, T, E)`, or None.
    """
    if query.ndim != 4 or query.dtype not in _HALF or compat.traced_platform() != "gpu":
        return None
    if pattern.causal and query.shape[-2] != key.shape[-2]:
        return None  # cuDNN does not say which corner it counts from
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=pattern.causal,
        local_window_size=None if pattern.window is None else (pattern.window - 1, 0),
        implementation="cudnn",
    )
    given = tuple(jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    try:
        jax.eval_shape(attend, *given)
    except (NotImplementedError, ValueError):  # shapes that it has no kernel for
        return None
    except RuntimeError as error:
        warnings.warn(
            f"no fused attention in this program for GPUs: {error} It multiplies the matrices one"
            " by one instead and holds all scores. Install cuDNN (nvidia-cudnn-cu13) to compile"
            " what runs where there is a GPU.",
            stacklevel=2,
        )
        return None
    return jnp.swapaxes(attend(*given), 1, 2)
