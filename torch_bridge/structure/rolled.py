"""A graph whose equal blocks are loops: plain parts and loops in turns, as one chain.

Every part is a function of the values it reads, so that the same parts serve two callers: `run`
evaluates the whole graph inside any JAX function, with each loop a `jax.lax.scan`; `chain` makes
each part a link of a `fz.Sequential`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_bridge.dtypes import canonical
from torch_bridge.export.interpret import Instruction, evaluate
from torch_bridge.export.trace import Trace
from torch_bridge.lower.refs import Ref, fill, refs
from torch_bridge.structure.blocks import Layers
from torch_bridge.structure.forms import SCALARS
from torch_bridge.structure.stacked import Run, StackedLeaf


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Steps that are computed once."""

    steps: tuple[Instruction, ...]

    @property
    def num_layers(self) -> int:
        """How many layers it counts for when random keys are folded."""
        return 1

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """What it takes from before it."""
        own = {step.name for step in self.steps}
        found = (name for s in self.steps for name in refs((s.args, s.kwargs)))
        return tuple(dict.fromkeys(name for name in found if name not in own))

    def gives(self) -> tuple[str, ...]:
        """What it computes."""
        return tuple(step.name for step in self.steps)


@dataclass(frozen=True)
class Loop:
    """Equal layers as one.

    Attributes:
        run: the blocks.
        body: the steps of one layer, under the names that they have in the first.
        carry: what is handed on: the names of a layer's input and of the output that becomes the
            next one's.
        ends: values of the last layer that are read later, with their places in `carry`.
        shared: values from outside that every layer reads.
        leaves: the layer's own parameters and buffers: placeholder -> stacked leaf.
        updates: stacked buffers that are written, with their new values' names.
        scanned: constants and numbers that differ between layers, one row for each.
    """

    run: Run
    body: tuple[Instruction, ...]
    carry: tuple[tuple[str, str], ...]
    ends: Mapping[str, int]
    shared: tuple[str, ...]
    leaves: Mapping[str, str]
    updates: Mapping[str, str]
    scanned: Mapping[str, np.ndarray[Any, Any]]

    @property
    def num_layers(self) -> int:
        """How many layers it counts for when random keys are folded."""
        return self.run.num

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """What it takes from before it."""
        return tuple(dict.fromkeys((*(start for start, _ in self.carry), *self.shared)))

    def gives(self) -> tuple[str, ...]:
        """What it computes that is read later."""
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
class Rolled:
    """One mode's graph as parts and loops, beginning and ending with a part.

    Attributes:
        parts: in order; between two loops there is always a part, perhaps an empty one.
        outputs: the module's output leaves.
        updates: buffers outside of loops that are written, by leaf name.
        sizes: for each size that a step reads, its expression.
    """

    parts: tuple[Part | Loop, ...]
    outputs: tuple[Any, ...]
    updates: Mapping[str, Any]
    sizes: Mapping[str, Any]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The blocks of its loops, in order."""
        return tuple(part.run for part in self.parts if isinstance(part, Loop))

    def known_sizes(self, free: Mapping[Any, int]) -> dict[str, Any]:
        """Every size that a step reads, from the free ones."""
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
        for part in self.parts:
            if isinstance(part, Part):
                evaluate(part.steps, env, fold(rng, number))
            else:
                updates |= _scan(part, env, leaves, rng, number)
            number += part.num_layers
        updates |= fill(dict(self.updates), env)
        return fill(list(self.outputs), env), updates

    @property
    def written(self) -> frozenset[str]:
        """Names of the buffers that get new values."""
        loops = [part for part in self.parts if isinstance(part, Loop)]
        return frozenset(self.updates).union(*(loop.updates for loop in loops))

    def map_steps(self, change: Callable[[Instruction], Instruction]) -> Rolled:
        """The same graph with every step changed."""
        parts = tuple(
            replace(part, steps=tuple(map(change, part.steps)))
            if isinstance(part, Part)
            else replace(part, body=tuple(map(change, part.body)))
            for part in self.parts
        )
        return replace(self, parts=parts)


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

    carry, updates = jax.lax.scan(body, start, (stacked, jnp.arange(loop.run.num)))
    env.update({name: carry[place] for name, place in loop.ends.items()})
    return dict(updates)


def _number(size: Any, free: Mapping[Any, int]) -> Any:
    if not hasattr(size, "subs"):
        return size
    value = size.subs(free)
    if getattr(value, "is_Boolean", False):
        return bool(value)
    return int(value) if value.is_integer else float(value)


class NotAChain(Exception):
    """Which run does not follow the others.

    Args:
        run: the run.
        reason: why.
    """

    def __init__(self, run: Run, reason: str) -> None:
        super().__init__(reason)
        self.run = run


def roll(
    trace: Trace, runs: Sequence[tuple[Run, Layers]], stacked: Sequence[StackedLeaf]
) -> Rolled:
    """Divide a graph into parts and loops.

    Args:
        trace: the graph.
        runs: what becomes loops, in the order of the chain.
        stacked: the stacked leaves of all runs.

    Returns:
        A graph that gives the same values.

    Raises:
        NotAChain: a run needs values that depend on itself or on a later one.
    """
    loop_of = {
        step.name: number
        for number, (_, layers) in enumerate(runs)
        for layer in layers.steps
        for step in layer
    }
    place = _places(trace, runs, loop_of)
    parts: list[Part | Loop] = []
    for number in range(len(runs) + 1):
        steps = [s for s in trace.steps if s.name not in loop_of and place[s.name] == number]
        parts.append(Part(_alone(steps)))
        if number < len(runs):
            parts.append(_loop(trace, *runs[number], stacked))
    inside = {name for one in stacked for name in (leaf.name for leaf in one.leaves)}
    updates = {leaf: value for leaf, value in trace.updates.items() if leaf not in inside}
    used = {name for part in parts for name in _inner(part)}
    used |= set(refs((trace.graph.outputs, updates)))
    known = {name: trace.known[name].size for name in sorted(used) if name in trace.known}
    sizes = {name: size for name, size in known.items() if size is not None}
    rolled = Rolled(tuple(parts), trace.graph.outputs, updates, sizes)
    _check_sizes(trace, rolled, runs)
    return _with_ends(trace, rolled, runs)


def _inner(part: Part | Loop) -> list[str]:
    steps = part.steps if isinstance(part, Part) else part.body
    return [name for step in steps for name in refs((step.args, step.kwargs))]


def _check_sizes(trace: Trace, rolled: Rolled, runs: Sequence[tuple[Run, Layers]]) -> None:
    for size in rolled.sizes.values():
        if not trace.free_sizes.issuperset(getattr(size, "free_symbols", ())):
            raise NotAChain(runs[-1][0], f"the size {size} is not one of an argument")


def _places(
    trace: Trace, runs: Sequence[tuple[Run, Layers]], loop_of: Mapping[str, int]
) -> dict[str, int]:
    """Which part computes each step outside of loops: as late as its readers allow.

    A value then travels through as few layers as possible. What becomes of a buffer is computed
    early: beside what it is made of.
    """
    earliest: dict[str, int] = {}
    for step in trace.steps:
        needs = [
            loop_of[r] + 1 if r in loop_of else earliest.get(r, 0)
            for r in refs((step.args, step.kwargs))
        ]
        if step.name in loop_of:
            number = loop_of[step.name]
            if any(loop_of.get(r) != number and need > number for r, need in zip(
                refs((step.args, step.kwargs)), needs, strict=True)):  # fmt: skip
                raise NotAChain(
                    runs[number][0], f"{step.where} reads a value that depends on later blocks"
                )
        else:
            earliest[step.name] = max(needs, default=0)
    last = len(runs)
    latest: dict[str, int] = {}
    for step in reversed(trace.steps):
        if step.name in loop_of:
            continue
        users = [loop_of[u] if u in loop_of else latest[u] for u in trace.users.get(step.name, ())]
        if step.name in trace.outputs:
            users.append(last)
        latest[step.name] = min(users) if users else earliest[step.name]
    return latest


def _alone(steps: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Steps with random draws of their own numbers; nothing is dropped, which others may read."""
    draws = 0
    out = []
    for step in steps:
        own = None
        if step.draw is not None:
            own, draws = draws, draws + 1
        out.append(replace(step, draw=own, drop=()))
    return tuple(out)


def _loop(trace: Trace, run: Run, layers: Layers, stacked: Sequence[StackedLeaf]) -> Loop:
    form = layers.form
    body = list(_alone(layers.steps[0]))
    scanned: dict[str, np.ndarray[Any, Any]] = {}
    for number, numbers in layers.scalars.items():
        step, place = body[number], SCALARS[body[number].operator]
        scanned[f"{step.name}.number"] = np.asarray(numbers, canonical(np.float64))
        args = [*step.args[:place], Ref(f"{step.name}.number"), *step.args[place + 1 :]]
        body[number] = replace(step, args=tuple(args))
    for name, own in layers.constants.items():
        rows = [trace.constants[value] for value in own]
        if any(row.tobytes() != rows[0].tobytes() for row in rows):
            scanned[name] = np.stack(rows)
    carried = {slot for slot, _ in layers.carry}
    owned = {one.leaves[0].name: one.name for one in stacked if one.run == run}
    leaves: dict[str, str] = {}
    shared: list[str] = []
    for slot, value in enumerate(form.outside):
        if trace.leaves.get(value) in owned:
            leaves[value] = owned[trace.leaves[value]]
        elif slot not in carried and value not in trace.constants:
            shared.append(value)
    updates = {owned[leaf]: new.name for leaf, new in trace.updates.items() if leaf in owned}
    carry = tuple((form.outside[slot], body[step].name) for slot, step in layers.carry)
    return Loop(run, tuple(body), carry, {}, tuple(shared), leaves, updates, scanned)


def _with_ends(trace: Trace, rolled: Rolled, runs: Sequence[tuple[Run, Layers]]) -> Rolled:
    """Which values of each loop's last layer are read after it."""
    wanted = set(refs((rolled.outputs, rolled.updates)))
    parts = list(rolled.parts)
    for index in reversed(range(len(parts))):
        part = parts[index]
        if isinstance(part, Loop):
            _, layers = runs[index // 2]
            last = [step.name for step in layers.steps[-1]]
            places = {last[step]: place for place, (_, step) in enumerate(layers.carry)}
            ends = {name: place for name, place in places.items() if name in wanted}
            parts[index] = replace(part, ends=ends)
        wanted |= set(part.reads)
    return replace(rolled, parts=tuple(parts))
