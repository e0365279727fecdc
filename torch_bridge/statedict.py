"""A state on its way back to torch: names, ties and dtypes as the module had them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from fzero.errors import CheckpointError
from fzero.offload.tiers import require_on_device
from fzero.state import TrainState, require_alive
from fzero.tree import named_leaves

from .convert import Converted
from .layout import Leaf
from .sequential import ConvertedSequential
from .weights import to_host, to_torch


def state_dict(
    converted: Converted | ConvertedSequential, state_or_params: Any
) -> dict[str, torch.Tensor]:
    """All entries of the module's `state_dict`, with the values of a state.

    Args:
        converted: the module or chain that the state was made from.
        state_or_params: a `TrainState` (anything with `.params` and `.buffers`), or a dict of
            parameters, in which case the buffers are the module's initial ones. Leaves may be
            sharded, and longer than their logical shape along a dim (padding is cut off).

    Returns:
        Tensors that share no memory with the state, in the module's own order. Tied names hold
        one and the same tensor; non-persistent buffers are left out. Floating-point leaves keep
        the dtype they have in the state, integers get the module's dtype back.

    Raises:
        CheckpointError: a leaf is missing, or does not have the shape it must have.
        PlacementError: a leaf is parked on the host or on disk.
        StateConsumedError: the state was given to a step.

    Example:
        >>> from torch_bridge import convert
        >>> converted = convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> {k: tuple(v.shape) for k, v in state_dict(converted, converted.params).items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    if isinstance(state_or_params, Mapping):
        params, buffers = state_or_params, converted.buffers
    else:
        params, buffers = state_or_params.params, state_or_params.buffers
        if isinstance(state_or_params, TrainState):
            require_alive(state_or_params, "state_dict")
    require_on_device(named_leaves({"params": params, "buffers": buffers}), "state_dict")
    if isinstance(converted, ConvertedSequential):
        params, buffers = converted.by_name(params), converted.by_name(buffers)
    leaf_of = converted.layout.leaf_of()
    made: dict[str, torch.Tensor] = {}
    out: dict[str, torch.Tensor] = {}
    for name in converted.layout.order:
        leaf = leaf_of[name]
        if leaf.name not in made:
            source: Any = params if leaf.is_param else buffers
            if leaf.name not in source:
                kind = "params" if leaf.is_param else "buffers"
                raise CheckpointError(f"the state's {kind} have no `{leaf.name}`")
            made[leaf.name] = _leaf_tensor(leaf, source[leaf.name])
        out[name] = made[leaf.name]
    return out


def _leaf_tensor(leaf: Leaf, value: Any) -> torch.Tensor:
    logical = leaf.shape
    stored = tuple(value.shape)
    if len(stored) != len(logical) or any(s < n for s, n in zip(stored, logical, strict=True)):
        raise CheckpointError(f"`{leaf.name}`: expected shape {logical}, got {stored}")
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise CheckpointError(
            f"`{leaf.name}` lives partly on other processes' devices; gather it first "
            "(jax.experimental.multihost_utils.process_allgather)"
        )
    cut = np.asarray(value)[tuple(slice(n) for n in logical)]
    keeps = leaf.dtype.is_floating_point or leaf.dtype.is_complex
    return to_torch(cut, None if keeps else leaf.dtype)


def load_state_dict(
    converted: Converted | ConvertedSequential, mapping: Mapping[str, Any], strict: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a `state_dict` as `(params, buffers)` of a converted module.

    Args:
        converted: the module or chain that the values are for.
        mapping: tensors (or arrays) by `state_dict` name. A tied tensor may be there under one of
            its names or under several with equal values.
        strict: refuse missing and unexpected names and other dtypes. With False, what is missing
            keeps the module's initial value, unexpected names are ignored and dtypes are cast.
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
    params, buffers = _initial(converted)
    problems: list[str] = []
    leaf_of = converted.layout.leaf_of()
    if strict:
        problems += [f"unexpected: `{name}`" for name in mapping if name not in leaf_of]
    for leaf in converted.layout.leaves:
        present = [name for name in leaf.names if name in mapping]
        if not present:
            if strict and leaf.persistent:
                problems.append(f"missing: `{leaf.name}`")
            continue
        target = params if leaf.is_param else buffers
        found = _read_leaf(leaf, {name: mapping[name] for name in present}, strict, problems)
        if found is not None:
            target[leaf.name] = found
    if problems:
        raise CheckpointError(
            f"the state_dict does not fit the module in {len(problems)} place(s):\n  "
            + "\n  ".join(problems)
            + "\nstrict=False accepts missing and unexpected names and casts dtypes."
        )
    if isinstance(converted, ConvertedSequential):
        return converted.by_layer(params, buffers)
    return params, buffers


def _initial(converted: Converted | ConvertedSequential) -> tuple[dict[str, Any], dict[str, Any]]:
    """Initial values by leaf name."""
    if isinstance(converted, ConvertedSequential):
        return converted.by_name(converted.params), converted.by_name(converted.buffers)
    return dict(converted.params), dict(converted.buffers)


def _read_leaf(
    leaf: Leaf, given: Mapping[str, Any], strict: bool, problems: list[str]
) -> np.ndarray[Any, Any] | None:
    tensors = {name: _tensor(value) for name, value in given.items()}
    name, tensor = next(iter(tensors.items()))
    before = len(problems)
    for other_name, other in tensors.items():
        if tuple(other.shape) != leaf.shape:
            problems.append(f"shape: `{other_name}` is {tuple(other.shape)}, expected {leaf.shape}")
        elif strict and other.dtype != leaf.dtype:
            problems.append(f"dtype: `{other_name}` is {other.dtype}, expected {leaf.dtype}")
        elif other is not tensor and not _same_bits(other, tensor):
            problems.append(f"tied: `{name}` and `{other_name}` are one weight but differ")
    if len(problems) > before:
        return None
    try:
        return to_host(tensor.to(leaf.dtype))
    except (OverflowError, TypeError) as error:
        problems.append(f"value: `{name}`: {error}")
        return None


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else to_torch(value)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0 or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()):
        return True
    raw = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(raw[0], raw[1])  # bits, so that NaN equals itself
