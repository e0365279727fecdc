"""`generate`: new tokens after prompts, from any state of a converted decoder."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jax.sharding import NamedSharding

from fzero.axes import PIPE
from fzero.errors import BatchError, CheckpointError, ConversionError, PlacementError
from fzero.sharding.relayout import TO_ONE_RANK
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState
from fzero.storage.tiers import require_on_device
from fzero.tree import named_leaves
from torch_bridge.converted import Converted
from torch_bridge.dtypes import canonical, is_float, jax_dtype
from torch_bridge.generation.decoder import Decoder
from torch_bridge.generation.programs import Drawn, Programs, Shape, batch_axes
from torch_bridge.generation.prompts import (
    Limits,
    Prompts,
    read_prompts,
    stop_array,
    warn_of_padding,
    warn_of_settings,
)
from torch_bridge.generation.sampling import GREEDY, Draw, Sampling, is_whole
from torch_bridge.module.names import Layout
from torch_bridge.statedict import require_shapes
from torch_bridge.structure.chain import links_merged
from torch_bridge.structure.stacked_names import Names


# Columns of prompts are a multiple of this: other lengths of prompts then rarely are other
# programs, and zeros in front of them cost little.
_COLUMNS = 16


@dataclass(frozen=True)
class Generated:
    """What `tb.generate` gives.

    Attributes:
        tokens: for each prompt its new tokens, int32, a stop token at the end included.
        prompts: the prompts themselves, likewise.
        stopped: for each, whether a stop token ended it.
    """

    tokens: tuple[np.ndarray[Any, Any], ...]
    prompts: tuple[np.ndarray[Any, Any], ...]
    stopped: tuple[bool, ...]

    @property
    def sequences(self) -> tuple[np.ndarray[Any, Any], ...]:
        """Prompts with what follows them."""
        pairs = zip(self.prompts, self.tokens, strict=True)
        return tuple(np.concatenate(pair) for pair in pairs)


def generate(
    converted: Converted,
    state_or_params: Any,
    prompts: Any,
    max_new_tokens: int = 64,
    *,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] | None = None,
    dtype: Any = None,
) -> Generated:
    """New tokens after each prompt, as transformers' `generate` gives them.

    The module is traced again through its own code for a key-value cache, once for each size of
    batch and prompt; then prefill and decode are two compiled programs. Parameters are read where
    they lie: of a sharded state every layer is gathered where it is used, rows of the batch and of
    the cache are divided over the devices.

    Args:
        converted: a decoder of transformers, from `tb.convert`.
        state_or_params: a state of it, or a dict of parameters as `converted.params`.
        prompts: sequences of token numbers of any lengths, or one array `(B, T)`.
        max_new_tokens: how many tokens follow a prompt at most.
        sampling: how they are taken from the logits; the likeliest by default.
        stop: tokens that end a row. None: the module's own (`generation_config.eos_token_id`).
        dtype: what to compute in, instead of the module's own dtype, such as `"bfloat16"`.

    Returns:
        The new tokens of each prompt. A row's do not depend on what else is in the batch but for
        rounding, and for its number where a seed is shared.

    Raises:
        ConversionError: the module has no cache of keys and values that can be traced; named.
        BatchError: a prompt is empty, too long for the module's positions, or has a token that is
            not in its vocabulary.
        PlacementError: a leaf is parked, or the state is spread over a pipeline.
        StateConsumedError: the state was given to a step.

    Example:
        >>> import torch, transformers, torch_bridge as tb
        >>> config = transformers.GPT2Config(
        ...     n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=32, eos_token_id=None)
        >>> module = transformers.GPT2LMHeadModel(config)
        >>> converted = tb.convert(module, torch.zeros(2, 4, dtype=torch.long), train=False)
        >>> found = tb.generate(converted, converted.params, [[3, 1], [5]], max_new_tokens=4)
        >>> [len(tokens) for tokens in found.tokens]
        [4, 4]

    Source: transformers' GenerationMixin.generate with do_sample=False, and its logits processors
    for temperature, top-k and top-p.
    """
    if not isinstance(converted, Converted):
        raise ConversionError(
            f"generate: expected what tb.convert gave, got a {type(converted).__name__}"
        )
    if not (is_whole(max_new_tokens) and max_new_tokens >= 1):
        raise BatchError(
            f"generate: max_new_tokens={max_new_tokens!r}: expected a whole number, 1 or more"
        )
    if not isinstance(sampling, Sampling):
        raise BatchError(
            f"generate: sampling={sampling!r}: expected a tb.Sampling(temperature=...)"
        )
    state = _read_state(converted, state_or_params)
    dtype = None if dtype is None else _computed(dtype)
    decoder = _decoder(converted, dtype)
    limits = Limits.of(decoder.module)
    mesh = _mesh(state)
    _require_own(converted, state, state_or_params)
    shards = math.prod(mesh.shape[axis] for axis in batch_axes(mesh)) if mesh else 1
    read = read_prompts(prompts, max_new_tokens, limits, shards, _COLUMNS)
    stops = stop_array(stop, decoder.module, limits.vocabulary)
    warn_of_settings(decoder.module)
    warn_of_padding(decoder.module, read)
    rows, columns = read.ids.shape
    shape = Shape(rows, columns, max_new_tokens, Draw.of(sampling), mesh)
    programs = _programs(decoder, shape, converted)
    drawn = _drawn(sampling, read, stops)
    tokens, cache = programs.prefill(state, read.ids, read.pads, drawn)
    out = np.asarray(tokens)[:, None]
    if max_new_tokens > 1:
        filling = np.arange(rows) >= read.num
        out = np.asarray(programs.decode(state, cache, tokens, read.pads, drawn, filling)[0])
    return _generated(out, read, stops)


def _drawn(sampling: Sampling, read: Prompts, stops: np.ndarray[Any, Any]) -> Drawn:
    keys = sampling.keys(read.num)
    keys = np.concatenate([keys, np.zeros((len(read.ids) - read.num, *keys.shape[1:]), keys.dtype)])
    numbers = np.float32(sampling.temperature), np.float32(sampling.top_p)
    return Drawn(keys, numbers, stops)


def _generated(out: np.ndarray[Any, Any], read: Prompts, stops: np.ndarray[Any, Any]) -> Generated:
    ends = np.isin(out, stops)
    tokens, given = [], []
    for row in range(read.num):
        length = int(np.argmax(ends[row])) + 1 if ends[row].any() else out.shape[1]
        tokens.append(out[row, :length])
        given.append(read.ids[row, read.pads[row] :])
    stopped = tuple(bool(row.any()) for row in ends[: read.num])
    return Generated(tuple(tokens), tuple(given), stopped)


def _read_state(converted: Converted, given: Any) -> dict[str, Any]:
    """Parameters and buffers of a state, in one dict."""
    if isinstance(given, Mapping):
        params, buffers = given, converted.buffers
    else:
        params, buffers = given.params, given.buffers
        if isinstance(given, TrainState):
            require_alive(given, "generate")
    require_on_device(named_leaves({"params": params, "buffers": buffers}), "generate")
    return {**links_merged(params), **links_merged(buffers)}


def _require_own(converted: Converted, state: Mapping[str, Any], given: Any) -> None:
    """Refuse the parameters of another model."""
    own = converted.params.keys() | converted.buffers.keys()
    if state.keys() != own:
        raise CheckpointError(
            "generate: expected the parameters and buffers of the conversion, but"
            f" {sorted(state.keys() ^ own)[:4]} are of one of the two alone"
        )
    params = {name: state[name] for name in converted.params}
    require_shapes(converted, params, getattr(given, "padded", None), "generate")


def _mesh(state: Mapping[str, Any]) -> Any:
    """The devices that a state is on; None: one, or the host's memory.

    Raises:
        PlacementError: they are not the same for all leaves.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in state.values()]
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding)}
    if len(meshes) > 1 or any(PIPE in mesh.axis_names for mesh in meshes):
        raise PlacementError(
            f"generate: the layers are spread over the ranks of a pipeline; {TO_ONE_RANK}"
        )
    mesh = next(iter(meshes), None)
    return None if mesh is None or mesh.size == 1 else mesh


def _computed(dtype: Any) -> np.dtype[Any]:
    """What to compute in, as numpy, JAX or torch name it."""
    try:
        found = jax_dtype(dtype) if isinstance(dtype, torch.dtype) else canonical(dtype)
    except TypeError:
        found = np.dtype(bool)
    if not is_float(found) or found.itemsize < 2:
        raise ConversionError(
            f"generate: dtype={dtype!r}: expected one of floats, as 'bfloat16' or torch.float16"
        )
    return found


def _leaves(names: Names, layout: Layout, dtype: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of the module as it reads it: without padding, in what it computes in."""
    found: dict[str, Any] = {}
    values = names.unstack(state)
    for leaf in layout.leaves:
        if leaf.name not in values:
            continue
        value = values[leaf.name][leaf.cut]
        own = jax_dtype(leaf.dtype)
        floats = leaf.dtype.is_floating_point
        found[leaf.name] = value.astype(dtype if dtype and leaf.is_param and floats else own)
    return found


# What was traced of each conversion, by dtype. It holds nothing of the conversion itself.
_DECODERS: weakref.WeakKeyDictionary[Converted, dict[Any, Decoder]] = weakref.WeakKeyDictionary()


def _decoder(converted: Converted, dtype: Any) -> Decoder:
    own = _DECODERS.setdefault(converted, {})
    if dtype not in own:
        own[dtype] = Decoder(converted._graphs.again, dtype)
    return own[dtype]


def _programs(decoder: Decoder, shape: Shape, converted: Converted) -> Programs:
    if shape not in decoder.programs:
        leaves = partial(_leaves, converted.names, converted.layout, decoder.dtype)
        decoder.programs[shape] = Programs(decoder, shape, leaves)
    return decoder.programs[shape]
