"""Adapters of a state: taken out, put in, merged into the weights that they update."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fzero.errors import CheckpointError, StateError
from fzero.plan import Plan
from fzero.sharding.lazy_array import LazyArray
from fzero.sharding.relayout import copy_leaf
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState
from fzero.tree import shape_at
from torch_bridge.converted import Converted
from torch_bridge.formats.adapters import by_key, merged_content, plain_adapter, update_of, wide
from torch_bridge.formats.peft import fitted, read_fitting
from torch_bridge.module.adapters import base_name, pick
from torch_bridge.module.lazy_tensor import in_memory
from torch_bridge.statedict import homes_of, state_leaves
from torch_bridge.structure.chain import links_merged


def adapter(
    converted: Converted, state_or_params: Any, plan: Plan | None = None, name: str | None = None
) -> dict[str, torch.Tensor]:
    """The adapter of a state alone, under the names that PEFT's files have.

    Args:
        converted: a module with adapters: of `tb.lora`, or converted from one of PEFT.
        state_or_params: as for `tb.state_dict`.
        plan: likewise.
        name: which adapter, where there are several.

    Returns:
        Tensors that share no memory with the state.

    Raises:
        ConversionError: no such adapter.
        CheckpointError, PlacementError, StateConsumedError: as for `tb.state_dict`.

    Example:
        >>> import torch, torch_bridge as tb
        >>> adapted = tb.lora(tb.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)),
        ...                              torch.zeros(2, 3)), rank=1)
        >>> sorted(adapter(adapted, adapted.params))
        ['base_model.model.0.lora_A.weight', 'base_model.model.0.lora_B.weight']
    """
    found = pick(converted.adapters, name, "adapter")
    return {key: t.tensor() for key, t in by_key(converted, found, state_or_params, plan).items()}


def with_adapter(
    converted: Converted,
    state: TrainState,
    source: str | os.PathLike[str] | Mapping[str, Any],
    plan: Plan | None = None,
    name: str | None = None,
) -> TrainState:
    """A state with another adapter over the same base: no weight of the base is copied.

    So any number of adapters are evaluated over one base. Averages (`Plan(ema=)`) begin anew, at
    the adapter. The optimizer's state stays as it is: `fz.with_optimizer` gives a new one for
    training on.

    Args:
        converted: a module with adapters.
        state: a state of it; it stays usable.
        source: a folder that PEFT or `tb.save(..., to="peft")` wrote, or tensors as `tb.adapter`
            gives them.
        plan: the state's plan; needed in a pipeline.
        name: which of the module's adapters is replaced, where there are several.

    Raises:
        ConversionError: no such adapter.
        CheckpointError: it does not fit: another base, other targets, another rank.
        StateConsumedError: the state was given to a step.
        StateError: it holds gradients of the adapter that goes (`fz.accumulate_step`).

    Example:
        >>> import torch, torch_bridge as tb
        >>> adapted = tb.lora(tb.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)),
        ...                              torch.zeros(2, 3)), rank=1)
        >>> import fzero as fz
        >>> model = adapted.model(lambda forward, batch: forward(batch).sum())
        >>> state = fz.init(model, None, fz.Plan(data=1))
        >>> tensors = {name: value + 1 for name, value in tb.adapter(adapted, state).items()}
        >>> other = with_adapter(adapted, state, tensors)
        >>> other.params["0.base_layer.weight"] is state.params["0.base_layer.weight"]
        True
    """
    require_alive(state, "with_adapter")
    if state.grads is not None:
        raise StateError(
            "with_adapter: an accumulation is in progress (state.grads), of the adapter that goes;"
            " finish it with train_step, or drop it with state.replace(grads=None)"
        )
    if not isinstance(source, str | os.PathLike | Mapping):
        raise CheckpointError(
            f"with_adapter: source={source!r}: expected a folder, or tensors as tb.adapter gives"
        )
    found = pick(converted.adapters, name, "with_adapter")
    shapes = {leaf.name: leaf.shape for leaf in converted.layout.leaves}
    from_file = not isinstance(source, Mapping)
    where = str(source) if from_file else "with_adapter"
    given: Mapping[str, Any] = read_fitting(source, found) if from_file else source  # type: ignore[arg-type, assignment]
    values = {leaf: _readable(x) for leaf, x in fitted(found, shapes, given, where).items()}
    entries = converted.names.stack(values)
    homes = homes_of(converted, plan, state)

    def put(link: str, key: str, old: Any) -> Any:
        if key not in entries or old is None:  # (frozen leaves have no average)
            return old
        return copy_leaf(entries[key], shape_at(old, old.sharding), homes.get(link))

    def put_all(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            link: {key: put(link, key, old) for key, old in value.items()}
            if isinstance(value, Mapping)
            else put("", link, value)
            for link, value in tree.items()
        }

    params = put_all(state.params)
    known = links_merged(params)
    lost = [key for key in entries if key not in known]
    if lost:
        raise CheckpointError(f"with_adapter: the state's params have no `{lost[0]}`")
    return state.replace(params=params, ema=state.ema and put_all(state.ema))


def _readable(value: Any) -> Any:
    if isinstance(value, LazyArray):
        return value
    return np.asarray(value) if not isinstance(value, torch.Tensor) else in_memory("", value)


def merge(
    converted: Converted, state_or_params: Any, plan: Plan | None = None, name: str | None = None
) -> dict[str, torch.Tensor]:
    """The `state_dict` of the module without adapters, with what they add in its weights.

    `W + scaling * B @ A`, computed in float32 and rounded once into the weight's dtype.

    Args:
        converted: a module with adapters.
        state_or_params: as for `tb.state_dict`.
        plan: likewise.
        name: which adapter, where there are several.

    Returns:
        Tensors under the base's own names, for `module.load_state_dict`, or
        `tb.load_state_dict(converted.base, ...)`. `tb.save(..., merge=True)` writes the same.

    Raises:
        ConversionError: no such adapter, or it is more than low-rank updates of linear layers.
        CheckpointError, PlacementError, StateConsumedError: as for `tb.state_dict`.

    Example:
        >>> import torch, torch_bridge as tb
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2))
        >>> adapted = tb.lora(tb.convert(net, torch.zeros(2, 3)), rank=1)
        >>> merged = merge(adapted, adapted.params)
        >>> list(merged), bool((merged["0.weight"] == net[0].weight).all())
        (['0.weight', '0.bias'], True)
    """
    content = merged_content(converted, state_or_params, plan, name)
    tensors = {key: tensor.tensor() for key, tensor in content.tensors.items()}
    tensors |= {alias: tensors[kept] for alias, kept in content.ties.items()}
    order = (base_name(n) for n in converted.layout.order)
    return {key: tensors[key] for key in order if key in tensors}


def unmerge(
    converted: Converted, merged: Mapping[str, torch.Tensor], state_or_params: Any,
    plan: Plan | None = None, name: str | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What `merge` was given: a `state_dict` of the base without what an adapter added.

    Exact to the rounding of the weights' dtype, in which the sum was kept.

    Args:
        converted: a module with adapters.
        merged: as `merge` gives it.
        state_or_params: the adapter, in anything that `merge` takes.
        plan: likewise.
        name: likewise.

    Raises:
        CheckpointError: `merged` has no such weights.

    Example:
        >>> import torch, torch_bridge as tb
        >>> adapted = tb.lora(tb.convert(torch.nn.Sequential(torch.nn.Linear(3, 2)),
        ...                              torch.zeros(2, 3)), rank=1)
        >>> merged = tb.merge(adapted, adapted.params)
        >>> sorted(unmerge(adapted, merged, adapted.params))
        ['0.bias', '0.weight']
    """
    found = plain_adapter(converted, name, "unmerge")
    values = {leaf.name: (leaf, v) for leaf, v in state_leaves(
        converted, state_or_params, plan, "unmerge")}  # fmt: skip
    out = dict(merged)
    for target in found.targets:
        leaf = values[target.weight][0]
        names = [base_name(alias) for alias in leaf.names]
        have = [alias for alias in names if alias in merged]
        if not have or tuple(merged[have[0]].shape) != leaf.shape:
            raise CheckpointError(f"unmerge: expected `{names[0]}` of shape {leaf.shape}")
        whole = merged[have[0]]
        less = (wide(whole) - update_of(target, values)).to(whole.dtype)
        out.update(dict.fromkeys(have, less))
    return out
