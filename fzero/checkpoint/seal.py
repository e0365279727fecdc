"""Whether the arrays of a checkpoint and what is written beside them were written together.

Both are folders. A copy that was cut off over an older one leaves those of two checkpoints, each
of them whole: parameters of one step with the data position of another. So the arrays say, as one
more of them, which metadata they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fzero.checkpoint.metadata import SUM, array_path, instead, read_meta
from fzero.errors import CheckpointError


# The array's key, and in metadata that there is one: earlier versions wrote none.
SEAL = "seal"


def seal_of(meta: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """What is written among the arrays for `metadata.sealed` metadata."""
    return np.asarray([meta[SUM]], np.uint32)


def read_matching(folder: Path, number: int) -> Mapping[str, Any]:
    """What was written beside the arrays of a checkpoint, and together with them.

    Raises:
        CheckpointError: it, or the arrays, cannot be read, or they are not of one checkpoint.
    """
    import tensorstore

    meta = read_meta(folder, number)
    if not meta.get(SEAL) or SUM not in meta:  # changed by hand, and meant to be
        return meta
    where = array_path(folder, number, SEAL, meta.get("parts", ()))
    try:
        found = tensorstore.open(where, open=True, read=True).result().read().result()
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"restore: the arrays of checkpoint {number} in {folder} cannot be read, or are not"
            f" those that its file meta/metadata was written with: {error}"
            f"{instead(folder, number)}"
        ) from error
    if not np.array_equal(found, seal_of(meta)):
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder} is put together of two: its file"
            f" meta/metadata (step {meta['step']}) belongs to other arrays. Copy it once more, as"
            f" a whole{instead(folder, number)}"
        )
    return meta
