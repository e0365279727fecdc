"""The graphs of a decoder with its cache: one for each size of a call, traced when it first comes.

Sizes are fixed in them. A call of one token is another graph than one of many anyhow, and XLA
compiles for fixed sizes: nothing is won by free ones.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import torch

from fzero.errors import ConversionError
from torch_bridge.dtypes import jax_dtype, torch_dtype
from torch_bridge.export.export import export_program
from torch_bridge.export.interpret import missing_operators, refuse_data_dependent, refuse_missing
from torch_bridge.export.mode import Mode, build_mode
from torch_bridge.generation.key_value_cache import (
    KEYS,
    VALUES,
    Sizes,
    Spot,
    decoder_in,
    find_spots,
    refuse_others,
    with_cache,
)
from torch_bridge.module.copied import without_weights
from torch_bridge.module.names import Layout, read_layout
from torch_bridge.module.signature import CallForm
from torch_bridge.structure.retrace import Again


Cache = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Traced:
    """One call of a decoder, block by block.

    Attributes:
        mode: its graph.
        layout: the module's leaves, those of the cache among them.
        caches: their names.
    """

    mode: Mode
    layout: Layout
    caches: frozenset[str]

    def __call__(
        self, leaves: Mapping[str, Any], cache: Cache, inputs: tuple[Any, ...]
    ) -> tuple[Any, Cache]:
        """Logits `(B, V)` and the new cache.

        Args:
            leaves: parameters and buffers, by leaf name.
            cache: what `empty` gives, or an earlier call.
            inputs: ids `(B, T)`, mask `(B, keys seen)`, positions `(B, T)`, the start.
        """
        names = ("ids", "mask", "positions", "start")
        values = self.mode.bind_inputs(list(zip(names, inputs, strict=True)))
        values |= self.mode.constants
        for placeholder, name in self.mode.params.items():
            values[placeholder] = leaves[name]
        for placeholder, name in self.mode.buffers.items():
            value = cache[name] if name in self.caches else leaves[name]
            wanted = self.mode.buffer_dtypes.get(name, value.dtype)
            values[placeholder] = value.astype(wanted)
        (logits,), new = self.mode.graph.run(values, None)
        return logits, {**cache, **{name: new[name] for name in self.caches if name in new}}


class Decoder:
    """A converted decoder with its cache, in one dtype.

    Args:
        again: the conversion's copy of the module.
        dtype: what its parameters are in; None: their own.

    Attributes:
        programs: what was compiled of it, by shape.

    Raises:
        ConversionError: it has no cache of keys and values; named.
    """

    def __init__(self, again: Again, dtype: Any = None) -> None:
        if again.module is None:
            raise ConversionError(f"generate: {again.problem}")
        refuse_others(again.module)
        self._module, self.dtype = again.module, dtype
        self.programs: dict[Any, Any] = {}
        self._lock = threading.Lock()
        self._found: dict[Sizes, Traced] = {}

    @property
    def module(self) -> Any:
        """The decoder, without its weights; of one with PEFT's adapters, that within."""
        return decoder_in(self._module)

    @cached_property
    def spots(self) -> tuple[Spot, ...]:
        """Where its cache is."""
        return find_spots(self._copy())

    def _copy(self) -> torch.nn.Module:
        return without_weights(self._module, self.dtype and torch_dtype(self.dtype))

    def empty(self, sizes: Sizes) -> Cache:
        """A cache that holds nothing."""
        made: Cache = {}
        for spot in self.spots:
            for name, (heads, size) in ((KEYS, spot.keys), (VALUES, spot.values)):
                shape = sizes.rows, heads, sizes.length, size
                made[f"{spot.module}.{name}"] = jnp.zeros(shape, jax_dtype(spot.dtype))
        return made

    def call(self, sizes: Sizes) -> Traced:
        """The graph of a call of these sizes."""
        with self._lock:
            if sizes not in self._found:
                self._found[sizes] = self._trace(sizes)
            return self._found[sizes]

    def _trace(self, sizes: Sizes) -> Traced:
        module = with_cache(self._copy(), self.spots, sizes)
        ids = torch.zeros(sizes.rows, sizes.new, dtype=torch.long)
        mask = torch.ones(sizes.rows, sizes.seen, dtype=torch.long)
        args = ids, mask, torch.zeros_like(ids), torch.tensor(0)
        program = export_program(module, args, {}, False, 0, False, ("none",))
        refuse_data_dependent(program)
        refuse_missing([missing_operators(program)])
        layout = read_layout(module)
        call = CallForm.of(module, args, {}, program.call_spec.in_spec)
        mode = build_mode(program, layout, call)
        if mode.graph.num_draws:
            raise ConversionError(
                f"generate: {type(module).__name__} draws random numbers in its eval forward:"
                " draw them in __init__, and keep them in a buffer (register_buffer)"
            )
        caches = frozenset(self.empty(Sizes(0, 0, 0, True)))
        return Traced(mode, layout, caches)
