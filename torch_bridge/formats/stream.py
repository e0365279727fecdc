"""`stream`: the tensors of a state one after the other, for engines that serve the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal

import jax
import numpy as np
import torch
from jax.sharding import SingleDeviceSharding

from fzero.errors import ConversionError
from fzero.plan import Plan
from torch_bridge.converted import Converted
from torch_bridge.formats.adapters import merged_content
from torch_bridge.formats.content import Checkpoint
from torch_bridge.module.adapters import pick
from torch_bridge.module.names import Leaf
from torch_bridge.module.weights import to_torch
from torch_bridge.sequential import ConvertedSequential
from torch_bridge.statedict import saved_dtype, state_leaves
from torch_bridge.structure.stacked_names import Row


def stream(
    converted: Converted | ConvertedSequential,
    state_or_params: Any,
    plan: Plan | None = None,
    *,
    which: Literal["all", "adapter", "merged"] | None = None,
    name: str | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as `tb.state_dict` has them, one at a time.

    This is what the `load_weights` of vLLM and SGLang take. Each tensor is gathered on one device
    when it is asked for, and nothing else with it: of a sharded state there is never a whole copy.
    On a device that PyTorch knows it is handed over by dlpack, without the host. Then a tensor that
    lay whole on its device already is the state's own memory: copy it, do not write to it.

    Args:
        converted: the module that the state was made from.
        state_or_params: as for `tb.state_dict`.
        plan: the state's plan; needed in a pipeline.
        which: "all" tensors of the module; an "adapter" alone, under the names of PEFT's files; or
            "merged": under the names of the module without adapters, with what they add in its
            weights (on the host). By default the adapter where there is one, else all.
        name: which adapter, where there are several.

    Returns:
        An iterator of pairs. Tied names come one after the other with one tensor.

    Raises:
        ConversionError: no such adapter.
        CheckpointError, PlacementError, StateConsumedError: as for `tb.state_dict`, at once, before
            the first pair.

    Example:
        >>> import torch, torch_bridge as tb
        >>> converted = tb.convert(torch.nn.Linear(3, 2), torch.zeros(4, 3))
        >>> [(name, tuple(tensor.shape)) for name, tensor in stream(converted, converted.params)]
        [('weight', (2, 3)), ('bias', (2,))]
    """
    adapters = getattr(converted, "adapters", {})
    which = which or ("adapter" if adapters else "all")
    if which not in ("all", "adapter", "merged"):
        raise ConversionError(f'stream: which={which!r}: expected "all", "adapter" or "merged"')
    if which != "all" and isinstance(converted, ConvertedSequential):
        raise ConversionError(
            f"stream: which={which!r}: a tb.sequential has no adapters: give which='all'"
        )
    if which == "merged":
        assert isinstance(converted, Converted)
        content = merged_content(converted, state_or_params, plan, name)
        return _merged(content)
    leaves = state_leaves(converted, state_or_params, plan, "stream")
    if which == "adapter":
        keys = pick(adapters, name, "stream").keys
        own = {leaf.name: (leaf, value) for leaf, value in leaves if leaf.name in keys}
        return _pairs([((keys[name],), *own[name]) for name in keys])
    order = set(converted.layout.order)
    named = ((tuple(n for n in leaf.names if n in order), leaf, value) for leaf, value in leaves)
    return _pairs(list(named))


def _merged(content: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for key, lazy in content.tensors.items():
        tensor = lazy.tensor()
        yield key, tensor
        for alias, kept in content.ties.items():
            if kept == key:
                yield alias, tensor


def _pairs(
    found: Sequence[tuple[tuple[str, ...], Leaf, Any]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for names, leaf, value in found:
        tensor = shared_tensor(leaf, value)
        for name in names:
            yield name, tensor
        del tensor  # before the next one is gathered


def shared_tensor(leaf: Leaf, value: Any) -> torch.Tensor:
    """A leaf as a tensor on one device, by dlpack where PyTorch knows that device.

    Args:
        leaf: what it is.
        value: an array, perhaps sharded and longer than the leaf, or a row of a stacked one.
    """
    dtype = saved_dtype(leaf, value)
    array = value.whole[value.layer] if isinstance(value, Row) else value
    if not isinstance(array, jax.Array):
        return to_torch(np.asarray(array)[leaf.cut], dtype)
    sharding = array.sharding
    if len(sharding.device_set) > 1:
        device = min(sharding.device_set, key=attrgetter("id"))
        array = jax.device_put(array, SingleDeviceSharding(device))
    if array.shape != leaf.shape:
        array = array[leaf.cut]
    if not _shared(next(iter(array.devices()))):
        return to_torch(np.asarray(array), dtype)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor.to(dtype)


def _shared(device: jax.Device) -> bool:
    return bool(
        device.platform == "cpu" or (device.platform == "gpu" and torch.cuda.is_available())
    )
