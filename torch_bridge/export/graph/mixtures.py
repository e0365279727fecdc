"""Mixtures of experts in a graph: all ops of one as one op, a function that travels.

Between `expert_rows` and `expert_sum` (`expert_sum_within` a capacity; `experts.py`) lies what
experts compute of a row, with their own weights (read by `expert_dot` and `expert_each`) and
perhaps with some that all share. As one op it is `fz.experts` of that function: on an `expert`
axis the rows travel to their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from fzero.exchange.expert_products import Grouped
from fzero.exchange.experts import experts
from torch_bridge.lower.experts import alone
from torch_bridge.lower.refs import Ref, fill, refs


ROWS = "torch_bridge.expert_rows.default"
SUMS = ("torch_bridge.expert_sum.default", "torch_bridge.expert_sum_within.default")
# Which argument of these is a weight of the experts' own.
_OWN = {"torch_bridge.expert_dot.default": 1, "torch_bridge.expert_each.default": 0}


@dataclass(frozen=True)
class Inner:
    """One op of experts' function; values are numbered, so that equal functions are equal."""

    name: str
    fn: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts as a function of tokens, choices, their weights and what it reads.

    Attributes:
        ops: what experts compute of the value `rows`, with that of `own` as the grouping.
        out: the value that they give.
        own: for each value that it reads, whether experts have their own of it.
        num: how many experts there are.
        capacity: see `fz.experts`.
    """

    ops: tuple[Inner, ...]
    out: str
    own: tuple[bool, ...]
    num: int
    capacity: float | None

    def __call__(self, x: Any, chosen: Any, gates: Any, count: Any, *read: Any) -> Any:
        """The tokens' results; with a capacity also `count`, to which what it dropped is added."""
        weights = {
            f"read {i}": value if own else jnp.broadcast_to(value, (self.num, *value.shape))
            for i, (value, own) in enumerate(zip(read, self.own, strict=True))
        }
        out, dropped = experts(self.apply, weights, x, chosen, gates, capacity=self.capacity)
        if self.capacity is None:
            return out
        return out, count + jnp.stack([dropped, jnp.float32(chosen.size)])

    def apply(self, own: Grouped, weights: Mapping[str, Any], rows: jax.Array) -> jax.Array:
        """What experts give for rows that are sorted by expert."""
        values: dict[str, Any] = {"rows": (rows, own)}
        for i, mine in enumerate(self.own):
            values[f"read {i}"] = weights[f"read {i}"] if mine else weights[f"read {i}"][0]
        for op in self.ops:
            values[op.name] = op.fn(*fill(op.args, values), **fill(op.kwargs, values))
        found: jax.Array = values[self.out]
        return found


def with_mixtures(ops: Sequence[Any], nodes: Sequence[torch.fx.Node]) -> tuple[Any, ...]:
    """A graph's ops, with all that belong to a mixture of experts as one.

    Args:
        ops: the ops.
        nodes: the graph's nodes.
    """
    values = {node.name: node.meta.get("val") for node in nodes}
    returned = {x.name for node in nodes if node.op == "output" for x in node.all_input_nodes}
    readers: dict[str, set[str]] = {}
    for op in ops:
        for name in refs((op.args, op.kwargs)):
            readers.setdefault(name, set()).add(op.name)
    gone: set[str] = set()
    made: dict[str, Any] = {}
    for index, first in enumerate(ops):
        if first.operator != ROWS:
            continue
        inner, last = _inside(ops[index:])
        names = {op.name for op in inner}
        closed = last is not None and all(
            readers.get(name, set()) <= names | {last.name} and name not in returned
            for name in names
        )
        found = _mixture(inner, last, values) if closed else None
        if found is not None:
            gone |= names
            made[found.name] = found
    return tuple(made.get(op.name, op) for op in ops if op.name not in gone)


def _inside(ops: Sequence[Any]) -> tuple[list[Any], Any]:
    """The ops that depend on the first one, up to the sum that ends them."""
    inner: list[Any] = [ops[0]]
    names = {ops[0].name}
    for op in ops[1:]:
        if names.isdisjoint(refs((op.args, op.kwargs))):
            continue
        if op.operator in SUMS:
            return inner, op
        inner.append(op)
        names.add(op.name)
    return inner, None


def _mixture(inner: Sequence[Any], last: Any, values: Mapping[str, Any]) -> Any:
    """One op instead of those of a mixture; None: its function does not travel."""
    number = {op.name: f"op {i}" for i, op in enumerate(inner)} | {inner[0].name: "rows"}
    read: dict[str, None] = {}
    own: set[str] = set()
    shared: set[str] = set()
    for op in inner[1:]:
        mine = op.args[_OWN[op.operator]] if op.operator in _OWN else None
        given = [name for name in refs((op.args, op.kwargs)) if name not in number]
        read.update(dict.fromkeys(given))
        own.update(name for name in given if mine == Ref(name))
        shared.update(name for name in given if mine != Ref(name))
    tensors = all(isinstance(values.get(name), torch.Tensor) for name in read)
    plain = all(op.fn is alone for op in (inner[0], last))  # and not in 64 bits
    if own & shared or not tensors or not plain or any(op.draw is not None for op in inner):
        return None
    names = number | {name: f"read {i}" for i, name in enumerate(read)}
    told = tuple(
        Inner(names[op.name], op.fn, _named(op.args, names), _named(op.kwargs, names))
        for op in inner[1:]
    )
    rows, x, chosen, gates, num, *limit = last.args
    capacity, count = limit or (None, None)
    mine = tuple(name in own for name in read)
    mixture = Mixture(told, names[rows.name], mine, num, capacity)
    dropped = dict.fromkeys(name for op in (*inner, last) for name in op.drop)
    return replace(
        last,
        fn=mixture,
        args=(x, chosen, gates, count, *map(Ref, read)),
        drop=tuple(name for name in dropped if name not in number),
    )


def _named(template: Any, names: Mapping[str, str]) -> Any:
    return fill(template, {name: Ref(new) for name, new in names.items()})
