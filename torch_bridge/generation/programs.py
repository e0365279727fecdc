"""Prefill and decode, each one compiled program; the cache goes from one into the other.

Decode is a loop on the device, over tokens: nothing comes to the host before the last one. The
cache lies as the batch does, divided over the devices that share the rows; parameters are taken in
whatever sharding they have, and gathered where they are used.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (parts of jax.numpy have no types, or are typed as Any)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fzero.axes import AXES
from torch_bridge.generation.decoder import Cache, Decoder
from torch_bridge.generation.key_value_cache import Sizes
from torch_bridge.generation.sampling import Draw


@dataclass(frozen=True)
class Shape:
    """What programs are compiled for.

    Args:
        rows: prompts, those included that fill up.
        prompt: columns of the prompts.
        new: tokens that follow.
        draw: how they are taken.
        mesh: the devices; None: one.
    """

    rows: int
    prompt: int
    new: int
    draw: Draw
    mesh: Any

    @property
    def prefill(self) -> Sizes:
        """The call with the prompts."""
        return Sizes(self.rows, self.prompt, self.prompt + self.new, True)

    @property
    def decode(self) -> Sizes:
        """The calls with one token of each row."""
        return Sizes(self.rows, 1, self.prompt + self.new, False)


@dataclass(frozen=True)
class Drawn:
    """Arguments of both programs besides the prompts.

    Args:
        keys: bits of a key for each row.
        numbers: temperature and top-p.
        stops: tokens that end a row, `(K,)`.
    """

    keys: Any
    numbers: Any
    stops: Any


jax.tree_util.register_dataclass(Drawn, ["keys", "numbers", "stops"], [])

# `leaves(state)`: every leaf by name, as the module reads it, within a program.
Leaves = Callable[[Any], dict[str, Any]]


class Programs:
    """The two programs of one shape.

    Args:
        decoder: what runs.
        shape: of what.
        leaves: gives the leaves of a state.
    """

    def __init__(self, decoder: Decoder, shape: Shape, leaves: Leaves) -> None:
        self.decoder, self.shape, self.leaves = decoder, shape, leaves
        sizes = (shape.prefill, shape.decode) if shape.new > 1 else (shape.prefill,)
        self._calls = {one: decoder.call(one) for one in sizes}

    @cached_property
    def prefill(self) -> Any:
        """`(state, ids, pads, drawn) -> (tokens, cache)`: the first new token of each row."""
        return jax.jit(self._prefill)

    @cached_property
    def decode(self) -> Any:
        """`(state, cache, tokens, pads, drawn, done) -> (tokens (B, new), cache)`."""
        return jax.jit(self._decode, donate_argnums=(1,))

    def _prefill(self, state: Any, ids: Any, pads: Any, drawn: Drawn) -> Any:
        shape = self.shape
        ids, pads = self._by_row(ids), self._by_row(pads)
        columns = jnp.arange(shape.prompt)
        mask = (columns >= pads[:, None]).astype(np.int32)
        positions = jnp.maximum(columns - pads[:, None], 0).astype(np.int32)
        cache = jax.tree.map(self._by_row, self.decoder.empty(shape.prefill))
        leaves = self.leaves(state)
        logits, cache = self._run(shape.prefill, leaves, cache, (ids, mask, positions, 0))
        tokens = shape.draw(logits, drawn.keys, shape.prompt - pads, drawn.numbers)
        return self._by_row(tokens), jax.tree.map(self._by_row, cache)

    def _decode(
        self, state: Any, cache: Cache, tokens: Any, pads: Any, drawn: Drawn, done: Any
    ) -> Any:
        shape = self.shape
        pads = self._by_row(pads)
        columns = jnp.arange(shape.prompt + shape.new)
        out = jnp.zeros((shape.rows, shape.new), np.int32).at[:, 0].set(tokens)
        done = done | _among(tokens, drawn.stops)
        leaves = self.leaves(state)  # taken apart once, and not for every token

        def goes_on(carry: Any) -> Any:
            number, _, _, done, _ = carry
            return (number < shape.new) & ~jnp.all(done)

        def step(carry: Any) -> Any:
            number, tokens, out, done, cache = carry
            start = shape.prompt + number - 1  # the column of `tokens`
            seen = (columns >= pads[:, None]) & (columns <= start)
            inputs = (tokens[:, None], seen.astype(np.int32), (start - pads)[:, None], start)
            logits, cache = self._run(shape.decode, leaves, cache, inputs)
            tokens = shape.draw(logits, drawn.keys, start + 1 - pads, drawn.numbers)
            out = jax.lax.dynamic_update_slice_in_dim(out, tokens[:, None], number, 1)
            cache = jax.tree.map(self._by_row, cache)
            return number + 1, tokens, out, done | _among(tokens, drawn.stops), cache

        carry = (jnp.int32(1), tokens, out, done, jax.tree.map(self._by_row, cache))
        _, _, out, _, cache = jax.lax.while_loop(goes_on, step, carry)
        return out, cache  # the memory that was given

    def _run(
        self, sizes: Sizes, leaves: dict[str, Any], cache: Cache, inputs: tuple[Any, ...]
    ) -> Any:
        whole = {name: self._whole(leaf) for name, leaf in leaves.items()}
        return self._calls[sizes](whole, cache, inputs)

    def _by_row(self, x: Any) -> Any:
        """Divided by rows over the devices that share them."""
        return self._laid(x, batch_axes(self.shape.mesh))

    def _whole(self, x: Any) -> Any:
        return self._laid(x, None)

    def _laid(self, x: Any, first: Any) -> Any:
        mesh = self.shape.mesh
        if mesh is None:
            return x
        spec = PartitionSpec(first) if first else PartitionSpec()
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that share the rows of a batch."""
    return () if mesh is None else tuple(axis for axis in AXES if axis in mesh.axis_names)


def _among(tokens: Any, stops: Any) -> Any:
    return jnp.any(tokens[:, None] == stops, -1)
