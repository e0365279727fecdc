"""Names of stacked leaves: one leaf of shape `(L, ...)` for each parameter of L equal layers.

`transformer.h.*.attn.c_attn.weight` stands for that parameter of every block of `transformer.h`.
Where a stack holds only some of the blocks, or several of them form one of its layers, the blocks
are given as Python would slice them: `encoder.block.[1:12]`, `model.layers.[0:26:2]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fzero.sharding.lazy_array import LazyArray, Stacked
from torch_bridge.module.names import Layout, Leaf


@dataclass(frozen=True)
class BlockStack:
    """Blocks in a row that are equal but for the values of their parameters.

    Attributes:
        container: path of the module that holds the blocks, such as `transformer.h`.
        first: number of the first block.
        num: number of layers of the stack.
        period: how many blocks make one layer; block `first + period` is equal to block `first`.
        whole: whether these are all blocks of the container.
    """

    container: str
    first: int
    num: int
    period: int
    whole: bool

    @property
    def stop(self) -> int:
        """One past the number of the last block."""
        return self.first + self.num * self.period

    @property
    def name(self) -> str:
        """What the stack is called in a chain."""
        own = self.container or "blocks"
        return own if self.whole else f"{own}[{self.first}:{self.stop}]"

    def block(self, layer: int, offset: int) -> str:
        """Path of a block, by its layer and its offset in that."""
        return join(self.container, self.first + layer * self.period + offset)

    def starred(self, offset: int) -> str:
        """The common path of the blocks at one offset of all layers."""
        if self.period > 1:
            blocks = f"[{self.first + offset}:{self.stop}:{self.period}]"
        else:
            blocks = "*" if self.whole else f"[{self.first}:{self.stop}]"
        return join(self.container, blocks)


@dataclass(frozen=True)
class StackedLeaf:
    """One leaf of a stack: shape `(num, *shape of the block's own)`.

    Attributes:
        name: its name, such as `transformer.h.*.ln_1.weight`.
        leaves: the module's own leaves that it holds, in the order of the layers.
        stack: the blocks that they are of.
    """

    name: str
    leaves: tuple[Leaf, ...]
    stack: BlockStack

    @property
    def is_param(self) -> bool:
        return self.leaves[0].is_param

    @property
    def frozen(self) -> bool:
        return self.leaves[0].frozen


def stacked_leaves(layout: Layout, stacks: Sequence[BlockStack]) -> tuple[StackedLeaf, ...]:
    """The leaves of some stacks, in the order of the layout."""
    by_name = {leaf.name: leaf for leaf in layout.leaves}
    found: list[StackedLeaf] = []
    for leaf in layout.leaves:
        for stack in stacks:
            for offset in range(stack.period):
                prefix = stack.block(0, offset) + "."
                if leaf.name.startswith(prefix):
                    rest = leaf.name.removeprefix(prefix)
                    own = [by_name[f"{stack.block(k, offset)}.{rest}"] for k in range(stack.num)]
                    found.append(StackedLeaf(f"{stack.starred(offset)}.{rest}", tuple(own), stack))
    return tuple(found)


@dataclass(frozen=True)
class Row:
    """One layer of a stacked array, taken out and brought to the host when it is looked at."""

    whole: Any
    layer: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.whole[self.layer], dtype=dtype)


@dataclass(frozen=True)
class Names:
    """How a module's leaves lie in the params and buffers of its conversion.

    Attributes:
        stacked: every stacked leaf; all other leaves are there under their own names.
    """

    stacked: tuple[StackedLeaf, ...] = ()

    def row_of(self) -> dict[str, tuple[str, int]]:
        """For each leaf that is kept in a stack, by name: the stacked leaf and the layer."""
        return {
            leaf.name: (one.name, layer)
            for one in self.stacked
            for layer, leaf in enumerate(one.leaves)
        }

    def of_entries(self, of_leaf: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of leaves, such as a dtype, by their own names and those of stacks."""
        first = {one.name: one.leaves[0].name for one in self.stacked}
        found = {name: of_leaf[leaf] for name, leaf in first.items() if leaf in of_leaf}
        return {**of_leaf, **found}

    def stack(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays by the module's own leaf names, as they lie in the conversion."""
        row, starts = self.row_of(), {one.leaves[0].name: one for one in self.stacked}
        out: dict[str, Any] = {}
        for name, value in values.items():
            if name not in row:
                out[name] = value
            elif name in starts:
                rows = [values[leaf.name] for leaf in starts[name].leaves]
                out[starts[name].name] = _joined(rows)
        return out

    def unstack(
        self, values: Mapping[str, Any], row: Callable[[Any, int], Any] | None = None
    ) -> dict[str, Any]:
        """What lies in a conversion, by the module's own leaf names; rows too many are left out.

        Args:
            values: arrays by entry.
            row: how to take a layer out of a stacked one, such as `Row`, which does so later.
        """
        row = row or _row
        stacked = {one.name: one for one in self.stacked}
        out: dict[str, Any] = {}
        for name, value in values.items():
            if name in stacked:
                own = enumerate(stacked[name].leaves)
                out.update({leaf.name: row(value, layer) for layer, leaf in own})
            else:
                out[name] = value
        return out

    def frozen(self, layout: Layout) -> frozenset[str]:
        """Names of leaves, as they lie in a conversion, that no step changes."""
        inside = self.row_of()
        alone = {leaf.name for leaf in layout.leaves if leaf.frozen and leaf.name not in inside}
        return frozenset(alone | {one.name for one in self.stacked if one.frozen})


def _row(value: Any, layer: int) -> Any:
    """One layer of a stacked value; of one that is read later, what is read then."""
    return value.rows[layer] if isinstance(value, Stacked) else value[layer]


def _joined(rows: list[Any]) -> Any:
    if any(isinstance(row, LazyArray) for row in rows):
        return Stacked(rows)
    if not all(isinstance(row, np.ndarray) for row in rows):
        return jnp.stack(rows)
    joined = np.stack(rows)
    joined.flags.writeable = False
    return joined


def join(*words: str | int) -> str:
    """A path of a module; the root's own is empty."""
    return ".".join(str(word) for word in words if word != "")
