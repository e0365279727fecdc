"""How a division of features goes through a graph: from products that make them to ones that add.

A product with a weight may be divided by its columns: each device computes some of the features.
Elementwise work, views that keep heads apart and attention leave each device with its own, until a
product adds them up by its rows (Megatron's pairs). Which products can be divided is found by
supposing that all can, and following their features; what stops a division (`Stop`) says whose
features came there. `divide.py` takes those back and follows all again, until nothing stops.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node


@dataclass(frozen=True)
class Along:
    """That a value lies divided along one of its dims.

    Attributes:
        dim: which.
        parts: how many parts it may be divided into: heads, or features.
        sources: weights whose features these are, or slices of some that are cut.
        heads: whether features have been taken apart into heads.
    """

    dim: int
    parts: int
    sources: frozenset[str]
    heads: bool = False

    def free(self, ndim: int) -> bool:
        """Whether what meets it may be sliced: one row of it for each head, and no features."""
        return self.heads and self.dim + 1 < ndim


@dataclass(frozen=True)
class Weight:
    """A value that is a parameter: its leaf, and which dim of that each of its dims is."""

    leaf: str
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class Cut:
    """One dim of a leaf that is divided.

    Attributes:
        dim: which.
        parts: as in `Along`.
        how: in a word.
        sources: whose features these are, where it has none of its own.
    """

    dim: int
    parts: int
    how: str
    sources: frozenset[str] = frozenset()


class Stop(Exception):
    """Divided features cannot go on; `cut`: they could be gathered here, and are sliced."""

    def __init__(self, sources: frozenset[str], why: str, cut: bool = False) -> None:
        super().__init__(why)
        self.sources, self.why, self.cut = sources, why, cut


@dataclass
class DimUses:
    """What following a graph has found.

    Attributes:
        cuts: by leaf, how each use of it is divided.
        stops: by source, why it is not divided, and whether its output is cut.
        parts: by source, how many parts all uses of its features allow.
        experts: weights of a mixture's experts, and which of their dims counts these.
    """

    cuts: dict[str, set[Cut]] = field(default_factory=dict)
    stops: dict[str, tuple[str, bool]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    experts: dict[str, int] = field(default_factory=dict)

    def cut(self, leaf: str, cut: Cut) -> None:
        self.cuts.setdefault(leaf, set()).add(cut)


@dataclass
class Walk:
    """One pass over a graph.

    Attributes:
        leaves: the leaf of each parameter's placeholder.
        tokens: placeholders of integers that a call gives.
        refused: sources that are not divided.
        gathered: weights among them whose output is divided, and gathered to be cut in pieces.
        found: what came out.
    """

    leaves: Mapping[str, str]
    tokens: frozenset[str]
    refused: frozenset[str]
    gathered: frozenset[str]
    found: DimUses = field(default_factory=DimUses)
    values: dict[Node, Any] = field(default_factory=dict)
    ids: set[Node] = field(default_factory=set)
    widths: dict[str, int] = field(default_factory=dict)

    def run(self, graph: Graph, rule_of: Callable[[Node], Callable[[Walk, Node], Any]]) -> DimUses:
        """Follows all nodes in order, each by its rule."""
        for node in graph.nodes:
            try:
                value = rule_of(node)(self, node)
            except Stop as stop:
                value = None
                for source in stop.sources:
                    self.found.stops.setdefault(source, (stop.why, stop.cut))
            self.values[node] = value
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, Along):
                    for source in one.sources:
                        had = self.found.parts.get(source, 0)
                        self.found.parts[source] = math.gcd(had, one.parts)
        return self.found

    def of(self, value: Any) -> Any:
        """What is known of a value: `Along`, `Weight`, several of them, or None."""
        return self.values.get(value) if isinstance(value, Node) else None

    def along(self, value: Any) -> Along | None:
        """How a value lies, if it is divided."""
        found = self.of(value)
        return found if isinstance(found, Along) else None

    def product(self, node: Node, x: Any, weight: Any, bias: Any, last: bool) -> Along | None:
        """A product with a weight; `last` says that its input features are the weight's last dim.

        Raises:
            Stop: the input is divided otherwise than along its features.
        """
        tag, own = self.along(x), self.of(weight)
        if not isinstance(own, Weight) or len(own.dims) != 2 or None in own.dims:
            if tag is not None:
                raise Stop(tag.sources, "its output goes into a product with no weight")
            return None
        into, out = (1, 0) if last else (0, 1)
        width, read = sizes(weight)[out], sizes(x)[-1]
        if tag is not None:
            if tag.dim + 1 < len(sizes(x)):
                return replace(tag, dim=tag.dim + len(sizes(node)) - len(sizes(x)))  # per head
            least = min([width, *(self.widths[s] for s in tag.sources if s in self.widths)])
            if not tag.heads and read < least:
                raise Stop(tag.sources, "it narrows features: little to divide")
            self.found.cut(own.leaf, Cut(_dim(own, into), tag.parts, "rows"))
            return None
        source, how = own.leaf, "columns"
        self.widths[source] = read
        if source in self.refused:
            if source not in self.gathered or 2 * width < read:
                return None  # (a few features are not worth a collective)
            source, how = f"gathered {source}", "columns, gathered"
        if how == "columns" and width > read and _returned(node):
            how = "vocabulary"
        self.found.cut(own.leaf, Cut(_dim(own, out), width, how))
        added = self.of(bias)
        if isinstance(added, Weight) and added.dims == (0,):
            self.found.cut(added.leaf, Cut(0, width, "with its columns", frozenset({source})))
        if source in self.refused:
            return None
        return Along(len(sizes(node)) - 1, width, frozenset({source}))

    def returned(self, node: Node) -> None:
        """What a graph returns: only a vocabulary may be divided there."""
        for value in node.all_input_nodes:
            tag = self.along(value)
            for source in frozenset() if tag is None else tag.sources:
                hows = {cut.how for cut in self.found.cuts.get(source, ())}
                if hows != {"vocabulary"}:
                    self.found.stops.setdefault(source, ("its output is returned", False))


# What an operator makes of what is known of its operands.
Rule = Callable[[Walk, Node], Any]


def sizes(value: Any) -> tuple[int, ...]:
    """A tensor's sizes in the example."""
    return tuple(_hint(n) for n in value.meta["val"].shape)


def is_tensor(value: Any) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def kind_of(node: Node) -> str:
    """The name of a node's operator, without its library and overload."""
    return str(node.target).removeprefix("aten.").removeprefix("torch_bridge.").partition(".")[0]


def _hint(n: Any) -> int:
    node = getattr(n, "node", None)
    return int(n if node is None else node.hint)


def _dim(weight: Weight, dim: int) -> int:
    found = weight.dims[dim]
    assert found is not None
    return found


def _returned(node: Node) -> bool:
    """Whether a value is returned, but for casts and elementwise work with numbers."""
    for user in node.users:
        if user.op == "output":
            return True
        alone = sum(is_tensor(x) for x in user.all_input_nodes) == 1
        if alone and is_tensor(user) and sizes(user) == sizes(node) and _returned(user):
            return True
    return False
