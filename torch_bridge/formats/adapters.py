"""An adapter of a state, and a state with an adapter merged, as contents of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fzero.errors import CheckpointError, warn
from fzero.plan import Plan
from torch_bridge.converted import Converted
from torch_bridge.formats.content import Checkpoint
from torch_bridge.formats.state import lazy_leaf
from torch_bridge.module.adapters import BASE, Adapter, Target, base_name, pick
from torch_bridge.module.lazy_tensor import LazyTensor
from torch_bridge.module.names import Leaf
from torch_bridge.statedict import leaf_tensor, saved_dtype, state_leaves


def adapter_content(
    converted: Converted, state_or_params: Any, plan: Plan | None, name: str | None
) -> tuple[Adapter, dict[str, LazyTensor]]:
    """An adapter of a state and its tensors by leaf name, each copied when it is read."""
    found = pick(converted.adapters, name, "save")
    tensors = by_key(converted, found, state_or_params, plan)
    return found, {leaf: tensors[key] for leaf, key in found.keys.items()}


def by_key(
    converted: Converted, found: Adapter, state_or_params: Any, plan: Plan | None
) -> dict[str, LazyTensor]:
    """The tensors of an adapter by their names in PEFT's files, each copied when it is read."""
    _require_all_trained(converted, found)
    own = {}
    for leaf, value in state_leaves(converted, state_or_params, plan, "adapter"):
        if leaf.name in found.keys:
            own[found.keys[leaf.name]] = lazy_leaf(leaf.name, leaf, value)
    return {key: own[key] for key in found.keys.values()}


def _require_all_trained(converted: Converted, found: Adapter) -> None:
    """Refuse an adapter whose file would hold less than what is trained."""
    known = {leaf for one in converted.adapters.values() for leaf in one.keys}
    leaves = converted.layout.leaves
    lost = [x.name for x in leaves if x.is_param and not x.frozen and x.name not in known]
    if lost or not found.keys:
        kind = found.config.get("peft_type")
        names = ", ".join(f"`{name}`" for name in lost[:3]) or "all that is trained"
        raise CheckpointError(
            f"adapter {found.name!r} ({kind}): an adapter's file as it is written here (LoRA's"
            f" factors, modules_to_save, biases of bias=) would leave out {names}. Save the whole"
            ' state (without to="peft"), load it into the module (tb.load_into) and save that with'
            " its save_pretrained; or freeze what is not to be trained"
        )


def merged_content(
    converted: Converted, state_or_params: Any, plan: Plan | None, name: str | None
) -> Checkpoint:
    """`merge` as the content of a checkpoint; each tensor is made when it is read."""
    found = plain_adapter(converted, name, "merge")
    leaves = state_leaves(converted, state_or_params, plan, "merge")
    values = {leaf.name: (leaf, value) for leaf, value in leaves}
    targets = {target.weight: target for target in found.targets}
    _warn_of_ties([leaf for leaf, _ in leaves if leaf.name in targets], found.name)
    own = {
        leaf for one in converted.adapters.values() for leaf in one.keys if leaf not in one.of_base
    }
    tensors: dict[str, LazyTensor] = {}
    ties: dict[str, str] = {}
    order = set(converted.layout.order)
    for leaf, value in leaves:
        if leaf.name in own:
            continue
        kept = base_name(leaf.saved_name if leaf.saved_name in order else leaf.name)
        tensors[kept] = _merged(leaf, value, targets.get(leaf.name), values)
        ties.update({base_name(n): kept for n in leaf.names if n in order and base_name(n) != kept})
    return Checkpoint("", "state", tensors, ties=ties)


def _warn_of_ties(updated: Sequence[Leaf], name: str) -> None:
    """Say that a weight is read without the update, too, as a tied embedding is."""
    for leaf in updated:
        here = next((alias for alias in leaf.names if BASE in f".{alias}"), leaf.name)
        others = [base_name(alias) for alias in leaf.names if BASE not in f".{alias}"]
        if others:
            warn(
                f"merge: adapter {name!r} updates `{base_name(here)}`, which is tied to {others},"
                " where it adds nothing: a model with the sum in the one weight of both"
                " computes something else than the model with the adapter. Keep the adapter beside"
                " the model, or train one for a model that is not tied (tie_word_embeddings=False)"
            )


def _merged(leaf: Leaf, value: Any, target: Target | None, values: Any) -> LazyTensor:
    if target is None and leaf.dense is None:
        return lazy_leaf(leaf.name, leaf, value)
    dtype = leaf.dense.dtype if leaf.dense else saved_dtype(leaf, value)

    def fetch(at: Any) -> torch.Tensor:
        kept = leaf_tensor(leaf, value)
        whole = leaf.dense.tensor(kept) if leaf.dense else wide(kept)
        return (whole if target is None else whole + update_of(target, values))[at]

    shape = leaf.dense.shape if leaf.dense else leaf.shape
    summed = torch.promote_types(dtype, torch.float32)
    return LazyTensor(base_name(leaf.name), summed, shape, fetch, "merge").cast(dtype)


def update_of(target: Target, values: Mapping[str, tuple[Leaf, Any]]) -> torch.Tensor:
    """What an adapter adds to a weight, in at least 32 bits."""
    down, up = (wide(leaf_tensor(*values[name])) for name in (target.down, target.up))
    product = (up @ down) * target.scaling
    return product.T if target.transposed else product


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in at least 32 bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def plain_adapter(converted: Converted, name: str | None, operation: str) -> Adapter:
    """An adapter that can be merged.

    Raises:
        ConversionError: no such adapter.
        CheckpointError: it is more than low-rank updates of linear layers, or they have forwards
            of their own.
    """
    found = pick(converted.adapters, name, operation)
    if found.shaped:
        raise CheckpointError(
            f"{operation}: adapter {found.name!r} updates {list(found.shaped[:5])}, of which each"
            " computes something else than x @ weight.T + bias (a forward of its own, or a weight"
            " that is a parametrization's): with the sum in its weight the model would compute"
            " something else. Keep the adapter beside it"
        )
    if not found.plain:
        raise CheckpointError(
            f"{operation}: adapter {found.name!r} is more than low-rank updates of linear layers"
            " (DoRA, embeddings, biases, modules_to_save, or merged already). Save it"
            ' (tb.save(folder, converted, state, to="peft")) and merge it with peft:'
            " PeftModel.from_pretrained(module, folder).merge_and_unload()"
        )
    return found
