"""A state on its way back to torch: names, ties and dtypes as the module had them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from fzero.errors import CheckpointError, warn
from fzero.plan import Plan
from fzero.sharding.homes import cut_into_stages
from fzero.sharding.lazy_array import Index
from fzero.sharding.relayout import TO_ONE_RANK, over_ranks
from fzero.sharding.split import Home
from fzero.state.require import require_alive, wrong_rows
from fzero.state.selection import read_from
from fzero.state.train_state import TrainState
from fzero.storage.tiers import require_on_device
from fzero.tree import named_leaves
from fzero.weight_records import Quantized, impossible
from torch_bridge.converted import Converted
from torch_bridge.dtypes import torch_dtype
from torch_bridge.module.lazy_tensor import LazyTensor, in_memory
from torch_bridge.module.misfits import misfits, most_begin_with, refuse_misfits, tell_left_out
from torch_bridge.module.names import Leaf
from torch_bridge.module.quantisers import refuse_quantised
from torch_bridge.module.weights import to_host, to_torch
from torch_bridge.module.wrappers import module_names
from torch_bridge.sequential import ConvertedSequential
from torch_bridge.structure.chain import links_merged
from torch_bridge.structure.stacked_names import Row


_16_BITS = (torch.bfloat16, torch.float16)


def state_dict(
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    plan: Plan | None = None,
    *,
    which: str = "params",
) -> dict[str, torch.Tensor]:
    """All entries of the module's `state_dict`, with the values of a state.

    Args:
        converted: the module or chain that the state was made from.
        state_or_params: a `TrainState` (anything with `.params` and `.buffers`), or a dict of
            parameters, in which case the buffers are the module's initial ones. Leaves may be
            sharded, and longer than their logical shape along a dim (padding is cut off).
        plan: the state's plan; needed in a pipeline, to put the layers of cut stacks in order.
        which: of a `TrainState`, the `params` or their moving averages (`ema`).

    Returns:
        Tensors that share no memory with the state, in the module's own order. Tied names hold
        one and the same tensor; non-persistent buffers are left out. Floating-point leaves keep
        the dtype they have in the state, but for float32 masters, which get the module's 16 bits
        back, as integers get the module's dtype.

    Raises:
        CheckpointError: a leaf is missing, does not have the shape it must have, or is spread over
            a pipeline and no plan was given.
        PlacementError: a leaf is parked on the host or on disk.
        StateConsumedError: the state was given to a step.

    Example:
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> {k: tuple(v.shape) for k, v in state_dict(converted, converted.params).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    made: dict[str, torch.Tensor] = {}
    state_or_params = read_from(state_or_params, which, "state_dict")
    for leaf, value in state_leaves(converted, state_or_params, plan, "state_dict"):
        made.update(dict.fromkeys(leaf.names, leaf_tensor(leaf, value)))
    return {name: made[name] for name in converted.layout.order}


def state_leaves(
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    plan: Plan | None,
    operation: str,
) -> list[tuple[Leaf, Any]]:
    """Every leaf that a `state_dict` has, with its value in a state.

    Args and Raises as for `state_dict`.
    """
    if others := converted.layout.written_otherwise:
        raise CheckpointError(
            f"{operation}: a hook of the module's state_dict(), or one of its own, renames or"
            f" changes {list(others[:4])}, and is not run here. Write the values into the module"
            " with tb.load_into(module, state), and call its state_dict()"
        )
    if isinstance(state_or_params, Mapping):
        params, buffers = state_or_params, converted.buffers
    elif not hasattr(state_or_params, "params"):
        raise CheckpointError(
            f"{operation}: expected a state or its params, got a {type(state_or_params).__name__}"
        )
    else:
        params, buffers = state_or_params.params, state_or_params.buffers
        if isinstance(state_or_params, TrainState):
            require_alive(state_or_params, operation)
    require_on_device(named_leaves({"params": params, "buffers": buffers}), operation)
    homes = homes_of(converted, plan, state_or_params)
    params, buffers = (_in_order(tree, homes) for tree in (params, buffers))
    require_shapes(converted, params, getattr(state_or_params, "padded", None), operation)
    require_shapes(converted, buffers, (), operation)
    params, buffers = (_by_leaf(converted, tree) for tree in (params, buffers))
    persistent = set(converted.layout.order)
    found: list[tuple[Leaf, Any]] = []
    for leaf in converted.layout.leaves:
        if persistent.isdisjoint(leaf.names):
            continue
        source: Any = params if leaf.is_param else buffers
        if leaf.name not in source:
            kind = "params" if leaf.is_param else "buffers"
            raise CheckpointError(f"the state's {kind} have no `{leaf.name}`")
        value = source[leaf.name]
        stored = tuple(value.shape)
        fits = len(stored) == len(leaf.shape)
        if not fits or any(s < n for s, n in zip(stored, leaf.shape, strict=True)):
            raise CheckpointError(f"`{leaf.name}`: expected shape {leaf.shape}, got {stored}")
        whole = value.whole if isinstance(value, Row) else value
        whole = whole.whole if isinstance(whole, _Layers) else whole
        if isinstance(whole, jax.Array) and not has_whole(whole):
            raise CheckpointError(
                f"`{leaf.name}` lives partly on other processes' devices; gather it first "
                "(jax.experimental.multihost_utils.process_allgather)"
            )
        found.append((leaf, value))
    return found


def require_shapes(
    converted: Converted | ConvertedSequential, tree: Any, padded: Any, operation: str
) -> None:
    """Raises `CheckpointError` unless leaves are the conversion's, or longer by padding alone.

    Args:
        converted: the module; of a chain of modules the shapes are looked at leaf by leaf.
        tree: params or buffers, as they lie in a state.
        padded: the state's own `(path, shape)` of what is filled up, or None; whatever else is
            longer has to end in zeros.
        operation: who asks.
    """
    if isinstance(converted, ConvertedSequential):
        return
    shapes = {leaf.name: leaf.shape for leaf in converted.layout.leaves}
    for one in converted.names.stacked:
        shapes[one.name] = (len(one.leaves), *shapes[one.leaves[0].name])
    own = {path.rpartition("/")[2]: shape for path, shape in padded or ()}
    for name, value in links_merged(tree).items():
        stored, wanted = tuple(value.shape), shapes.get(name)
        if wanted is None or stored == wanted:
            continue
        known = own.get(name)
        if known is not None:
            fits = len(known) == len(stored) == len(wanted) and all(
                w in (s, k) for s, w, k in zip(stored, wanted, known, strict=True)
            )
        else:  # params alone, or averages, which are divided where parameters are whole
            fits = len(stored) == len(wanted) and all(
                s >= w for s, w in zip(stored, wanted, strict=True)
            )
            fits = fits and ends_in_zeros(value, wanted)
        if not fits:
            got = own.get(name, stored)
            raise CheckpointError(
                f"{operation}: `{name}`: expected shape {wanted}, got {tuple(got)}: it is another"
                " model's. Give the conversion that the state was made from"
            )


def ends_in_zeros(value: Any, shape: Sequence[int]) -> bool:
    """Whether all of an array that is longer than a shape is padding; believed if it is elsewhere.

    Args:
        value: as long in each dim, or longer.
        shape: what it may be filled up from.
    """
    on_device = isinstance(value, jax.Array)  # (of one that was given away others say so)
    if isinstance(value, _Layers) or (on_device and (value.is_deleted() or not has_whole(value))):
        return True
    ends = (value[(*[slice(None)] * dim, slice(size, None))] for dim, size in enumerate(shape))
    return not any(np.any(np.asarray(end)) for end in ends)


@dataclass(frozen=True)
class _Layers:
    """A cut stack's leaf with its layers in order, each taken out when it is asked for."""

    whole: Any
    order: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.order), *self.whole.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    def __getitem__(self, layer: int) -> Any:
        return self.whole[int(self.order[layer])]


def has_whole(array: jax.Array) -> bool:
    """Whether this process holds all of an array."""
    copies = array.is_fully_replicated and array.addressable_shards
    return array.is_fully_addressable or bool(copies)


def _by_leaf(converted: Converted | ConvertedSequential, tree: Any) -> dict[str, Any]:
    """Params or buffers by the module's own leaves; rows of stacked ones are not copied yet."""
    if isinstance(converted, ConvertedSequential):
        return converted.by_name(tree)
    return converted.names.unstack(links_merged(tree), Row)


def homes_of(
    converted: Converted | ConvertedSequential, plan: Plan | None, state: Any
) -> Mapping[str, Home]:
    """Where a pipeline keeps the leaves of each link.

    Raises:
        CheckpointError: the state is not one of the plan.
    """
    if plan is None or plan.pipe == 1 or isinstance(converted, ConvertedSequential):
        return {}
    # Where a chain is cut does not depend on its loss.
    stages = cut_into_stages(converted.model(lambda forward, batch: None), plan)
    if isinstance(state, TrainState) and (wrong := wrong_rows(state, stages.rows)):
        raise CheckpointError("the state is not one of this plan: " + "; ".join(wrong))
    return stages.homes


def _in_order(tree: Mapping[str, Any], homes: Mapping[str, Home]) -> dict[str, Any]:
    """Params or buffers with the layers of every stack in order."""

    def restored(link: str, name: str, leaf: Any) -> Any:
        if over_ranks(leaf) and link not in homes:
            raise CheckpointError(
                f"the layers of `{name}` are spread over the ranks of a pipeline: pass the state's"
                f" plan as well, or {TO_ONE_RANK}"
            )
        home = homes.get(link)
        return _Layers(leaf, home.order) if home is not None and home.rows else leaf

    return {
        key: {name: restored(key, name, leaf) for name, leaf in value.items()}
        if isinstance(value, Mapping)
        else restored("", key, value)
        for key, value in tree.items()
    }


def leaf_tensor(leaf: Leaf, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A kept value as a tensor of its own, without padding, by default as it is saved."""
    return to_torch(np.asarray(value)[leaf.cut], dtype or saved_dtype(leaf, value))


def saved_dtype(leaf: Leaf, value: Any) -> torch.dtype:
    """The dtype in which a value is saved: floats keep their own, others get the module's.

    So do float32 masters of 16 bits: what a step computes with are these rounded.
    """
    found = torch_dtype(value.dtype)
    narrow = leaf.dtype in _16_BITS
    keeps = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return found if keeps and not (narrow and found == torch.float32) else leaf.dtype


def load_state_dict(
    converted: Converted | ConvertedSequential, mapping: Mapping[str, Any], strict: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a `state_dict` as `(params, buffers)` of a converted module.

    Args:
        converted: the module or chain that the values are for.
        mapping: tensors (or arrays) by `state_dict` name. A tied tensor may be there under one of
            its names or under several with equal values.
        strict: refuse missing and unexpected names and other dtypes. With False, what is missing
            keeps the module's initial value, unexpected names are ignored (a warning names both)
            and dtypes are cast.
            Other shapes and contradicting ties are refused either way.

    Returns:
        `(params, buffers)` as read-only host arrays in the module's dtypes, copied, in the
        structure of `converted.params` and `converted.buffers`.

    Raises:
        CheckpointError: lists everything that does not fit.

    Example:
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> params, buffers = load_state_dict(converted, torch.nn.Linear(3, 2).state_dict())
        >>> sorted(params), buffers
        (['bias', 'weight'], {})
    """
    lazy = {name: in_memory(name, _tensor(value)) for name, value in mapping.items()}
    found = fit_leaves(converted, lazy, strict=strict, cast=not strict)
    params, buffers = converted.by_initial()
    problems: list[str] = []
    for leaf in converted.layout.leaves:
        if leaf.name not in found:
            continue
        try:
            value = to_host(found[leaf.name].tensor())
        except (OverflowError, TypeError) as error:
            problems.append(f"value: `{leaf.name}`: {error}")
            continue
        (params if leaf.is_param else buffers)[leaf.name] = value
    refuse_misfits(problems)
    return converted.by_layer(params, buffers)


def missing_names(converted: Converted | ConvertedSequential, tensors: Mapping[str, Any]) -> bool:
    """Whether some of a module's leaves are in no tensor, by name."""
    there = set(module_names(tensors, converted.layout.leaf_of()).values())
    return any(leaf.expected and there.isdisjoint(leaf.names) for leaf in converted.layout.leaves)


def fit_leaves(
    converted: Converted | ConvertedSequential,
    tensors: Mapping[str, LazyTensor],
    strict: bool,
    cast: bool,
    masters: bool = False,
    wide: bool = False,
) -> dict[str, LazyTensor]:
    """Which tensor is which leaf of a converted module, in the leaf's dtype; none is read yet.

    Args:
        converted: the module or chain.
        tensors: by `state_dict` name. Tied ones are compared, where several are there.
        strict: refuse missing and unexpected names, else warn of them; batch norm's count of
            batches, which older files do not have, keeps its value, as in PyTorch, and names that
            the module's own library leaves out of such files are left out.
        cast: accept other dtypes.
        masters: give parameters of 16 bits that have float32 masters as these: as they are in the
            checkpoint, or widened.
        wide: take float32 for 16 bits, as of formats that have nothing else.

    Returns:
        A tensor by leaf name, for those that are there.

    Raises:
        CheckpointError: lists everything that does not fit.
    """
    if hooked := converted.layout.read_otherwise:
        warn(
            f"{', '.join(hooked[:4])}: its own code in load_state_dict is not run here: values are"
            " taken as they are. Where it changes more than names, load them into the module, and"
            " convert that"
        )
    problems: list[str] = []
    found: dict[str, LazyTensor] = {}
    leaf_of = converted.layout.leaf_of()
    adapters = converted.adapters.values() if isinstance(converted, Converted) else ()
    added = {name for one in adapters for name in one.keys if name not in one.of_base}
    inner = module_names(tensors, leaf_of)
    tensors = {own: tensors[name] for name, own in inner.items()}
    refuse_quantised(tensors, leaf_of)
    kept: list[str] = []
    unused = [name for name in tensors if not (name in leaf_of or converted.layout.ignores(name))]
    if strict:
        problems += [f"unexpected: `{name}`" for name in unused]
    for leaf in converted.layout.leaves:
        given = {n: _in_blocks(leaf, tensors[n]) for n in leaf.names if n in tensors}
        if given:
            widened = masters and _has_master(converted, leaf)
            rounded = wide and leaf.dtype in _16_BITS
            problems += misfits(leaf, given, cast, widened or rounded)
            first = next(iter(given.values()))
            found[leaf.name] = first.cast(torch.float32 if widened else leaf.dtype)
        elif strict and leaf.expected:
            problems.append(f"missing: `{leaf.name}`")
        elif leaf.expected and leaf.name not in added:
            kept.append(leaf.name)
    if leaf_of and not (found or problems):
        names = f", such as `{next(iter(tensors))}`," if tensors else " (there are none)"
        own = next(iter(leaf_of))
        problems.append(f"none of its names{names} is one of the module's, such as `{own}`")
    before = most_begin_with(tensors, leaf_of)
    refuse_misfits(problems, "cast=True" if masters else "strict=False", before)
    if not strict:
        tell_left_out(kept, unused, before)
    return found


def _in_blocks(leaf: Leaf, tensor: LazyTensor) -> LazyTensor:
    """What a file has of a leaf that is kept in blocks, as blocks; of others as it is.

    A weight in 16 or 32 bits is quantised as it is read; blocks are looked at.
    """
    if leaf.dense is None:
        return tensor
    if tensor.torch_dtype == leaf.dtype and tensor.shape == leaf.shape:
        return _checked(tensor)
    if tensor.shape != leaf.dense.shape or not tensor.torch_dtype.is_floating_point:
        return tensor
    records = Quantized(tensor, leaf.dense.to)
    return LazyTensor(
        tensor.name, leaf.dtype, leaf.shape, lambda at: torch.from_numpy(records.read(at)),
        tensor.file,
    )  # fmt: skip


def _checked(records: LazyTensor) -> LazyTensor:
    """The same blocks; an error where one is none that could have been written."""

    def fetch(index: Index) -> torch.Tensor:
        rows, columns = index
        found = records.tensor((rows, slice(0, records.shape[1])))
        wrong = impossible(found.numpy())
        if wrong.size:
            raise CheckpointError(
                f"{records.file}: `{records.name}`: expected blocks with scales of 0 or more, but"
                f" that of block {rows.start + int(wrong[0])} is negative or not finite"
                f" ({wrong.size} such): the file is damaged, or its weights were not finite"
            )
        return found[:, columns]

    return dataclasses.replace(records, fetch=fetch)


def _has_master(converted: Converted | ConvertedSequential, leaf: Leaf) -> bool:
    """Whether a training state has a parameter of 16 bits as float32."""
    learns = leaf.is_param and not leaf.frozen
    return converted.masters and learns and leaf.dtype in _16_BITS


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else to_torch(value)
