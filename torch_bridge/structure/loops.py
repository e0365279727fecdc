"""A graph whose equal blocks are loops: straight parts and loops in turns, as one chain.

Every part is a function of the values it reads, so that the same parts serve two callers: `run`
evaluates the whole graph inside any JAX function, with each loop a `jax.lax.scan`; `chain` makes
each part a link of a `fz.Sequential`. `blocks` finds the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.export.interpret import Op, evaluate
from torch_bridge.export.trace import Trace
from torch_bridge.lower.refs import fill, refs
from torch_bridge.structure.stacked_names import BlockStack, Names


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Straight:
    """Ops outside of loops, which are computed once."""

    ops: tuple[Op, ...]

    @property
    def num_layers(self) -> int:
        """How many layers it counts for when random keys are folded."""
        return 1

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """What it takes from before it."""
        own = {op.name for op in self.ops}
        found = (name for s in self.ops for name in refs((s.args, s.kwargs)))
        return tuple(dict.fromkeys(name for name in found if name not in own))

    def gives(self) -> tuple[str, ...]:
        """What it computes."""
        return tuple(op.name for op in self.ops)


@dataclass(frozen=True)
class Loop:
    """Equal layers as one.

    Attributes:
        stack: the blocks.
        covers: names of the ops that it computes, of all layers.
        body: the ops of one layer, under the names that they have in the first.
        carry: what is handed on: the names of a layer's input and of the output that becomes the
            next one's.
        ends: what the last layer hands on, by its name there, with its index in `carry`.
        shared: values from outside that every layer reads.
        leaves: the layer's own parameters and buffers: placeholder -> stacked leaf.
        updates: stacked buffers that are written, with their new values' names.
        scanned: constants and numbers that differ between layers, one row for each.
    """

    stack: BlockStack
    covers: frozenset[str]
    body: tuple[Op, ...]
    carry: tuple[tuple[str, str], ...]
    ends: Mapping[str, int]
    shared: tuple[str, ...]
    leaves: Mapping[str, str]
    updates: Mapping[str, str]
    scanned: Mapping[str, np.ndarray[Any, Any]]

    @property
    def num_layers(self) -> int:
        """How many layers it counts for when random keys are folded."""
        return self.stack.num

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """What it takes from before it."""
        return tuple(dict.fromkeys((*(start for start, _ in self.carry), *self.shared)))

    def gives(self) -> tuple[str, ...]:
        """What it computes that may be read later."""
        return tuple(self.ends)

    def layer(
        self,
        number: Any,
        carry: Sequence[Any],
        shared: Values,
        leaves: Values,
        fixed: Values,
        key: Any,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """One layer: what it hands on, and its new buffers.

        Args:
            number: which layer it is, from 0.
            carry: what the layer before it hands on.
            shared: values of `shared`.
            leaves: the layer's own rows of the stacked leaves.
            fixed: constants and sizes.
            key: the layer's random key.
        """
        values = {**fixed, **shared}
        values.update({name: jnp.asarray(rows)[number] for name, rows in self.scanned.items()})
        values.update({name: leaves[leaf] for name, leaf in self.leaves.items()})
        values.update({name: x for (name, _), x in zip(self.carry, carry, strict=True)})
        evaluate(self.body, values, key)
        # In another precision than the example's, a layer may widen what it was given.
        out = tuple(
            values[name].astype(x.dtype) for (_, name), x in zip(self.carry, carry, strict=True)
        )
        return out, {leaf: values[name] for leaf, name in self.updates.items()}


@dataclass(frozen=True)
class LoopedGraph:
    """One mode's graph as straight members and loops, beginning and ending with a straight one.

    Attributes:
        members: in order; between two loops there is always a straight one, perhaps an empty one.
        outputs: the module's output leaves.
        updates: buffers outside of loops that are written, by leaf name.
        sizes: for each size that an op reads, its expression.
    """

    members: tuple[Straight | Loop, ...]
    outputs: tuple[Any, ...]
    updates: Mapping[str, Any]
    sizes: Mapping[str, Any]

    @property
    def stacks(self) -> tuple[BlockStack, ...]:
        """The blocks of its loops, in order."""
        return tuple(member.stack for member in self.members if isinstance(member, Loop))

    def known_sizes(self, free: Mapping[Any, int]) -> dict[str, Any]:
        """Every size that an op reads, from the free ones."""
        return {name: _number(size, free) for name, size in self.sizes.items()}

    def run(self, values: Values, leaves: Values, rng: Any) -> tuple[list[Any], dict[str, Any]]:
        """Evaluate the graph, each loop as a scan.

        Args:
            values: a value for each placeholder and size.
            leaves: the stacked leaves.
            rng: a key, from which each layer's is folded; may be None where nothing draws.

        Returns:
            The output leaves, and the new values of the buffers that are written, by leaf name.
        """
        env = dict(values)
        updates: dict[str, Any] = {}
        number = 0
        for member in self.members:
            if isinstance(member, Straight):
                evaluate(member.ops, env, fold(rng, number))
            else:
                updates |= _scan(member, env, leaves, rng, number)
            number += member.num_layers
        updates |= fill(dict(self.updates), env)
        return fill(list(self.outputs), env), updates

    @property
    def written(self) -> frozenset[str]:
        """Names of the buffers that get new values."""
        loops = [member for member in self.members if isinstance(member, Loop)]
        return frozenset(self.updates).union(*(loop.updates for loop in loops))

    def map_ops(self, change: Callable[[Op], Op]) -> LoopedGraph:
        """The same graph with every op changed."""
        members = tuple(
            replace(member, ops=tuple(map(change, member.ops)))
            if isinstance(member, Straight)
            else replace(member, body=tuple(map(change, member.body)))
            for member in self.members
        )
        return replace(self, members=members)


def fold(rng: Any, number: Any) -> Any:
    """The key of a layer."""
    return None if rng is None else jax.random.fold_in(rng, number)


def _scan(loop: Loop, env: dict[str, Any], leaves: Values, rng: Any, number: int) -> dict[str, Any]:
    """Run a loop; its results are added to `env`, and its new buffers returned."""
    stacked = {leaf: leaves[leaf] for leaf in loop.leaves.values()}
    shared = {name: env[name] for name in loop.shared}
    start = tuple(jnp.asarray(env[name]) for name, _ in loop.carry)

    def body(carry: Any, xs: Any) -> tuple[Any, Any]:
        own, k = xs
        return loop.layer(k, carry, shared, own, env, fold(rng, number + k))

    carry, updates = jax.lax.scan(body, start, (stacked, jnp.arange(loop.stack.num)))
    env.update({name: carry[position] for name, position in loop.ends.items()})
    return dict(updates)


def _number(size: Any, free: Mapping[Any, int]) -> Any:
    if not hasattr(size, "subs"):
        return size
    value = size.subs(free)
    if getattr(value, "is_Boolean", False):
        return bool(value)
    return int(value) if value.is_integer else float(value)


class NotAChain(Exception):
    """Which stack does not follow the others.

    Args:
        stack: the stack.
        reason: why.
    """

    def __init__(self, stack: BlockStack, reason: str) -> None:
        super().__init__(reason)
        self.stack = stack


def roll(trace: Trace, loops: Sequence[Loop], names: Names) -> LoopedGraph:
    """Put loops into the place of their ops.

    Args:
        trace: the graph.
        loops: in the order of the chain.
        names: the stacked leaves of all of them.

    Returns:
        A graph that gives the same values.

    Raises:
        NotAChain: a loop needs values that depend on itself or on a later one.
    """
    member_of = _members(trace, loops)
    members: list[Straight | Loop] = []
    for number in range(len(loops) + 1):
        within = loops[number].covers if number < len(loops) else frozenset()
        ops = [s for s in trace.ops if member_of[s.name] == number and s.name not in within]
        members += [Straight(alone(ops)), *loops[number : number + 1]]
    inside = names.row_of()
    updates = {leaf: value for leaf, value in trace.updates.items() if leaf not in inside}
    used = set(refs((trace.graph.outputs, updates)))
    for member in members:
        inner = member.ops if isinstance(member, Straight) else member.body
        used.update(refs([(op.args, op.kwargs) for op in inner]))
    known = {name: trace.known[name].size for name in sorted(used) if name in trace.known}
    sizes = {name: size for name, size in known.items() if size is not None}
    for size in sizes.values():
        if not trace.free_sizes.issuperset(getattr(size, "free_symbols", ())):
            raise NotAChain(loops[-1].stack, f"the size {size} is not one of an argument")
    return LoopedGraph(tuple(members), trace.graph.outputs, updates, sizes)


def _members(trace: Trace, loops: Sequence[Loop]) -> dict[str, int]:
    """Which loop computes each op, or which straight: as late as its readers allow.

    A value then travels through as few layers as possible. What becomes of a buffer is computed
    early: beside what it is made of.
    """
    loop_of = {name: number for number, loop in enumerate(loops) for name in loop.covers}
    earliest: dict[str, int] = {}  # the first member that may read a value
    for op in trace.ops:
        number = loop_of.get(op.name)
        outside = [
            name
            for name in refs((op.args, op.kwargs))
            if number is None or loop_of.get(name) != number
        ]
        earliest[op.name] = max((earliest.get(name, 0) for name in outside), default=0)
        if number is not None:
            if earliest[op.name] > number:
                reason = f"{op.where} reads a value that depends on later blocks"
                raise NotAChain(loops[number].stack, reason)
            earliest[op.name] = number + 1
    latest = dict(loop_of)
    for op in reversed(trace.ops):
        if op.name in loop_of:
            continue
        users = [latest[user] for user in trace.users.get(op.name, ())]
        if op.name in trace.outputs:
            users.append(len(loops))
        latest[op.name] = min(users, default=earliest[op.name])
    return latest


def alone(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Steps with random draws of their own numbers; nothing is dropped, which others may read."""
    draws = itertools.count()
    return tuple(replace(op, draw=None if op.draw is None else next(draws), drop=()) for op in ops)
