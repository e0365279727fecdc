"""Floats as 8-bit integers, block by block, each block with a scale of its own.

Symmetric: a block's largest magnitude becomes 127, so zero stays zero and signs are kept. The bytes
of a row's scales travel behind its integers, so that one collective carries both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


# Elements per scale. Fewer follow the values more closely; 4 bytes for 256 cost 1.6 %.
BLOCK = 256
_LARGEST = np.float32(127)
_SCALE_BYTES = 4


def encoded_bytes(size: int) -> int:
    """Bytes of a row of `size` elements: one each, and four per block begun.

    Example:
        >>> encoded_bytes(256), encoded_bytes(257)
        (260, 265)
    """
    return size + _SCALE_BYTES * -(-size // BLOCK)


def encode(rows: jax.Array) -> jax.Array:
    """Rows of floats as rows of bytes.

    Nothing non-finite is lost: where a block has a NaN or an infinity, all of it comes back as NaN.
    Blocks below float32's smallest normal numbers come back as zeros.

    Args:
        rows: shape `(rows, size)`, any float dtype.

    Returns:
        int8 of shape `(rows, encoded_bytes(size))`.

    Example:
        >>> import jax.numpy as jnp
        >>> decode(encode(jnp.array([[127.0, -3.2, 0.0]])), 3)
        Array([[127.,  -3.,   0.]], dtype=float32)

    Source: ZeRO++, arXiv:2306.10209, section 3.1 (block-based quantization).
    """
    num, size = rows.shape
    blocks = _blocks(rows.astype(jnp.float32))
    peak = jnp.max(jnp.abs(blocks), axis=-1)
    scale = peak * (1 / _LARGEST)
    scale = jnp.where(jnp.isfinite(peak), scale, jnp.float32(jnp.nan))
    values = jnp.round(blocks / jnp.where(scale == 0, jnp.float32(1), scale)[..., None])
    values = jnp.clip(values, -_LARGEST, _LARGEST).astype(jnp.int8).reshape(num, -1)[:, :size]
    scales = jax.lax.bitcast_convert_type(scale, jnp.int8).reshape(num, -1)
    return jnp.concatenate([values, scales], axis=1)


def decode(rows: jax.Array, size: int) -> jax.Array:
    """Rows of floats from `encode`'s bytes: float32 of shape `(rows, size)`."""
    num = rows.shape[0]
    scale = jax.lax.bitcast_convert_type(rows[:, size:].reshape(num, -1, _SCALE_BYTES), jnp.float32)
    blocks = _blocks(rows[:, :size]).astype(jnp.float32) * scale[..., None]
    return blocks.reshape(num, -1)[:, :size]


def _blocks(rows: jax.Array) -> jax.Array:
    """Rows cut into blocks, the last one filled up with zeros: `(rows, blocks, BLOCK)`."""
    num, size = rows.shape
    return jnp.pad(rows, ((0, 0), (0, -size % BLOCK))).reshape(num, -1, BLOCK)
