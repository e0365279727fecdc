"""Adam's moments by parameter name: what optimizers of PyTorch, DeepSpeed and optax have in common.

Every reader and writer of optimizer state speaks `Moments`. Its values may be read lazily: out of
files by byte range, or off the devices one leaf at a time, so that nobody holds all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fzero.sharding.lazy_array import LazyArray


Array = np.ndarray[Any, Any] | LazyArray


@dataclass(frozen=True)
class Moments:
    """The state of Adam or AdamW.

    Args:
        step: updates done, as bias correction counts them.
        exp_avg: running mean of the gradient by `state_dict` name of the parameter, in the shape
            of the parameter. A tied parameter is there once, under any of its names.
        exp_avg_sq: running mean of its square, for the same names.
    """

    step: int
    exp_avg: Mapping[str, Array]
    exp_avg_sq: Mapping[str, Array]
