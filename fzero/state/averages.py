"""Exponential moving averages of parameters: where they begin, and how a step moves them.

They are a state class like the others (`TrainState.ema`, laid out by `Blueprint.ema`): one leaf for
each parameter that is trained. `fzero.state.selection` reads a model's parameters from them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fzero.sharding.split import map_splits
from fzero.tree import PyTree


def start(splits: PyTree, params: PyTree) -> PyTree:
    """Averages that begin at parameters (inside jit); `None` for no splits.

    Args:
        splits: a `Split` for each average.
        params: trained parameters in their own shapes.
    """
    if splits is None:
        return None

    # Arrays of their own: both are given away by steps.
    return map_splits(lambda split, leaf: jnp.copy(leaf.astype(split.dtype)), splits, params)


def moved(averages: PyTree, params: PyTree, decay: float | None) -> PyTree:
    """Averages after a step that gave these parameters; `None` where there are none.

    Both are trees of trained parameters, in the same shapes.

    Source: torch.optim.swa_utils.get_ema_multi_avg_fn.
    """
    if averages is None:
        return None
    assert decay is not None
    take = 1.0 - decay
    # Not `a * decay + p * take`: of two products a compiler may fuse either one with the sum.
    return jax.tree.map(lambda a, p: a + (p.astype(a.dtype) - a) * take, averages, params)
