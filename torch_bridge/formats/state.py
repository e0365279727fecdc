"""A training state as the content of a checkpoint, read off the devices leaf by leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fzero.errors import CheckpointError, warn
from fzero.plan import Plan
from fzero.state.train_state import TrainState
from torch_bridge.converted import Converted
from torch_bridge.dtypes import torch_dtype
from torch_bridge.formats.content import Checkpoint, Optimizer
from torch_bridge.module.lazy_tensor import LazyTensor
from torch_bridge.module.names import Leaf
from torch_bridge.module.weights import to_torch
from torch_bridge.moments import holds_adam, moments_of, num_waiting, other_state
from torch_bridge.sequential import ConvertedSequential
from torch_bridge.statedict import leaf_tensor, saved_dtype, state_leaves


def state_content(
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    optimizer: bool | None,
    plan: Plan | None,
    masters: bool,
) -> Checkpoint:
    """What a checkpoint of a state holds.

    Args:
        converted: the module or chain that the state was made from.
        state_or_params: as for `state_dict`.
        optimizer: whether Adam's moments come along; None: if there are any. Other optimizers have
            no common form.
        plan: as for `state_dict`.
        masters: write float32 masters as they are, not the 16 bits that a step makes of them.

    Returns:
        Tensors under the names that transformers keeps, further names as ties; each is copied to
        the host when it is read.

    Raises:
        CheckpointError, PlacementError, StateConsumedError: as for `state_dict` and `moments_of`.
    """
    tensors: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    order = set(converted.layout.order)
    for leaf, value in state_leaves(converted, state_or_params, plan, "save"):
        names = [name for name in leaf.names if name in order]
        kept = leaf.saved_name if leaf.saved_name in names else names[0]
        learns = leaf.is_param and not leaf.frozen
        tensors[kept] = lazy_leaf(kept, leaf, value, masters and learns)
        ties.update({name: kept for name in names if name != kept})
    if not isinstance(state_or_params, TrainState):
        if optimizer:
            raise CheckpointError("save: optimizer=True needs a TrainState, not parameters alone")
        return Checkpoint("", "state", tensors, ties=ties)
    opt_state = state_or_params.opt_state
    wanted = holds_adam(opt_state) if optimizer is None else optimizer
    others = "" if optimizer is False else other_state(converted, opt_state, beside=True)
    if others and wanted:
        raise CheckpointError(
            f"save: {others}: not of Adam, whose moments are all that PyTorch's formats have of an"
            " optimizer here. Keep the state with fz.save, or write the weights alone:"
            " optimizer=False"
        )
    if others:
        warn(
            f"save: {others}: not of Adam, so that the file has the weights alone, and a training"
            " that goes on from it starts its optimizer afresh. fz.save keeps all; optimizer=False"
            " says that this is meant"
        )
    if wanted and (waiting := num_waiting(opt_state)):
        warn(
            f"save: gradients wait in optax.MultiSteps for its next update ({waiting} so far):"
            " PyTorch's formats have no place for them, and a training that goes on from the file"
            " does without. Save after an update, or keep the state with fz.save"
        )
    return Checkpoint(
        "", "state", tensors, ties=ties,
        optimizer=_optimizer(converted, opt_state) if wanted else None,
        extra={"step": int(state_or_params.step)},
    )  # fmt: skip


def lazy_leaf(name: str, leaf: Leaf, value: Any, master: bool = False) -> LazyTensor:
    """A value of a state as a tensor that is copied when it is read; a master as it is kept."""
    dtype = torch_dtype(value.dtype) if master else saved_dtype(leaf, value)
    return LazyTensor(name, dtype, leaf.shape, lambda at: leaf_tensor(leaf, value, dtype)[at])


def _optimizer(converted: Converted | ConvertedSequential, opt_state: Any) -> Optimizer:
    moments = moments_of(converted, opt_state)
    leaves = {leaf.name: leaf for leaf in converted.layout.leaves}

    def lazy(name: str, values: Any) -> LazyTensor:
        # PyTorch's optimizers keep moments in the parameter's dtype or in float32.
        dtype = torch.promote_types(leaves[name].dtype, torch.float32)
        return LazyTensor(
            name, dtype, leaves[name].shape,
            lambda index: to_torch(np.asarray(values[name]), dtype)[index],
        )  # fmt: skip

    return Optimizer(
        moments.step,
        {name: lazy(name, moments.exp_avg) for name in moments.exp_avg},
        {name: lazy(name, moments.exp_avg_sq) for name in moments.exp_avg_sq},
    )
