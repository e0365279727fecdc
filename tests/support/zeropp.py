"""8-bit blocks in numpy, written apart from the code under test, and trees of weights sent so."""

from __future__ import annotations

from typing import Any

import numpy as np

from fzero.sharding.split import Split


BLOCK = 256


def image(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A flat array as it comes back from 8-bit blocks, in float32."""
    wide = values.reshape(-1).astype(np.float32)
    found = np.empty_like(wide)
    for start in range(0, wide.size, BLOCK):
        own = wide[start : start + BLOCK]
        peak = np.abs(own).max()
        scale = peak * (np.float32(1) / np.float32(127)) if np.isfinite(peak) else np.float32("nan")
        steps = np.clip(np.round(own / (scale if scale != 0 else np.float32(1))), -127, 127)
        # Integers have one zero only.
        found[start : start + BLOCK] = (steps + np.float32(0)) * scale
    return found


def sent(split: Split, stored: np.ndarray[Any, Any], parts: int) -> np.ndarray[Any, Any]:
    """A stored leaf as devices see it that send each other 8-bit blocks of their shards."""
    if split.dim is None:
        return stored
    layers = list(stored) if split.stacked else [stored]
    dim = split.layer_dim
    assert dim is not None
    seen = [
        np.concatenate(
            [image(shard).reshape(shard.shape) for shard in np.split(layer, parts, dim)], dim
        )
        for layer in layers
    ]
    return np.stack(seen) if split.stacked else seen[0]
