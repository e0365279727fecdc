"""Repeated blocks: which modules of a list compute the same function, one after the other.

Blocks are the children of a `ModuleList` or `Sequential`, found by the module paths that torch
recorded. Each block's part of the graph is brought into a canonical form (`forms`); a run of equal
ones, whose values are handed from each to the next, can be rolled into a loop. Runs of a period
are found as well: in Gemma 2 every second block is equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch_bridge.export.interpret import Instruction
from torch_bridge.export.trace import Trace
from torch_bridge.lower.refs import refs
from torch_bridge.module.names import Layout, Leaf
from torch_bridge.structure.forms import Form, difference, form_of
from torch_bridge.structure.stacked import Run


# Fewer equal layers stay as they are: a loop would save little time in compiling, and its
# parameters would lose the names of their blocks.
MIN_LAYERS = 3
# Blocks to a layer. Gemma 3 repeats five blocks of one kind and one of another.
MAX_PERIOD = 8
# Single operators are no blocks, however often they are repeated.
_TORCH = "torch.nn.modules."


@dataclass(frozen=True)
class Unrolled:
    """Blocks that are computed one by one.

    Attributes:
        path: the block, or the module that holds the blocks.
        reason: why.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class Blocks:
    """What became of a module's repeated blocks; `print` shows it.

    Attributes:
        stacks: runs of equal blocks, each one loop over stacked parameters.
        unrolled: blocks outside of them, with the reason.

    Example:
        >>> print(Blocks((Run("h", 0, 12, 1, True),), (Unrolled("head.0", "another class"),)))
        h: blocks 0 to 11 as 12 layers
        head.0: not rolled: another class
    """

    stacks: tuple[Run, ...] = ()
    unrolled: tuple[Unrolled, ...] = ()

    def __str__(self) -> str:
        lines = []
        for run in self.stacks:
            each = f" of {run.period} blocks" if run.period > 1 else ""
            name = run.container or "(root)"
            lines.append(f"{name}: blocks {run.first} to {run.stop - 1} as {run.num} layers{each}")
        lines += [f"{one.path}: not rolled: {one.reason}" for one in self.unrolled]
        return "\n".join(lines) or "no repeated blocks"


@dataclass(frozen=True)
class Layers:
    """A run's layers in one mode's graph.

    Attributes:
        steps: the instructions of each layer, in order.
        form: the form of the first.
        carry: for each value that is handed on: its slot, and the number of the step that gives it.
        scalars: numbers that differ between layers: the step's number, and one for each layer.
        constants: constants that differ: the placeholder in each layer, by that in the first.
    """

    steps: tuple[tuple[Instruction, ...], ...]
    form: Form
    carry: tuple[tuple[int, int], ...]
    scalars: Mapping[int, tuple[float, ...]]
    constants: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class FoundRun:
    """A run with its layers in each mode's graph."""

    run: Run
    layers: Mapping[bool, Layers]


class _Stop(Exception):
    """Why a run cannot go on."""


def find_runs(
    traces: Mapping[bool, Trace], layout: Layout, min_layers: int
) -> tuple[list[FoundRun], list[Unrolled]]:
    """All runs of equal blocks, the outermost ones where blocks hold blocks.

    Args:
        traces: the graph of each mode; blocks must be equal in both.
        layout: the module's leaves.
        min_layers: the fewest layers that are rolled.

    Returns:
        The runs in the order in which they are computed, and the blocks outside of them.
    """
    found: list[FoundRun] = []
    unrolled: list[Unrolled] = []
    for path, members in _containers(traces).items():
        if any(_inside(path, one.run) for one in found):
            continue
        search = Search(traces, layout, path, members)
        runs, rest = search.runs(min_layers)
        found += [
            FoundRun(run, {mode: search.layers(mode, run) for mode in traces}) for run in runs
        ]
        unrolled += rest
    mode, any_trace = next(iter(traces.items()))
    position = {step.name: number for number, step in enumerate(any_trace.steps)}
    found.sort(key=lambda one: position[one.layers[mode].steps[0][0].name])
    return found, _outermost(unrolled, [one.run for one in found])


def _inside(path: str, run: Run) -> bool:
    blocks = (run.block(k, place) for k in range(run.num) for place in range(run.period))
    return any(path.startswith(block + ".") for block in blocks)


def _outermost(unrolled: list[Unrolled], runs: Sequence[Run]) -> list[Unrolled]:
    """Without what lies within a block that is rolled."""
    return [one for one in unrolled if not any(_inside(one.path, run) for run in runs)]


def _containers(traces: Mapping[bool, Trace]) -> dict[str, dict[int, str]]:
    """Modules with numbered children, outermost first: each child's number and class."""
    found: dict[str, dict[int, str]] = {}
    composite: set[str] = set()
    for trace in traces.values():
        for step in trace.steps:
            paths = trace.known[step.name].modules
            for path, kind in paths:
                parent, _, name = path.rpartition(".")
                if name.isdigit():
                    found.setdefault(parent, {})[int(name)] = kind
            composite.update(
                path for path, _ in paths if any(p.startswith(f"{path}.") for p, _ in paths)
            )

    def is_block(parent: str, number: int, kind: str) -> bool:
        path = f"{parent}.{number}" if parent else str(number)
        return path in composite or not kind.startswith(_TORCH)

    kept = {
        parent: dict(sorted(members.items()))
        for parent, members in found.items()
        if sum(is_block(parent, n, kind) for n, kind in members.items()) > 1
    }
    return dict(sorted(kept.items(), key=lambda item: item[0].count(".") + bool(item[0])))


class Search:
    """Looks for runs among the children of one module."""

    def __init__(
        self, traces: Mapping[bool, Trace], layout: Layout, path: str, members: Mapping[int, str]
    ) -> None:
        self.traces = traces
        self.layout = layout
        self.path = path
        self.members = members
        self.owners = {mode: _owners(t, path, members) for mode, t in traces.items()}
        self.blocks = {mode: self._by_block(mode) for mode in traces}
        self.form = cache(self._form)  # blocks are looked at once for each period that is tried
        self.owned = cache(self._owned)

    def runs(self, min_layers: int) -> tuple[list[Run], list[Unrolled]]:
        """The longest runs from left to right, and the blocks between them."""
        numbers = list(self.members)
        runs: list[Run] = []
        rest: list[Unrolled] = []
        start = 0
        while start < len(numbers):
            best = None
            for period in range(1, min(MAX_PERIOD, (len(numbers) - start) // min_layers) + 1):
                num, _ = self.grow(numbers[start:], period)
                if num >= min_layers and (best is None or num * period > best.num * best.period):
                    whole = num * period == len(numbers)
                    best = Run(self.path, numbers[start], num, period, whole)
            if best is not None:
                runs.append(best)
                start += best.num * best.period
                continue
            if self._may_repeat(numbers, start):
                rest.append(
                    Unrolled(_join(self.path, numbers[start]), self._reason(numbers, start))
                )
            start += 1
        return runs, rest if runs else self._as_one(rest, numbers, min_layers)

    def _may_repeat(self, numbers: Sequence[int], start: int) -> bool:
        kind = self.members[numbers[start]]
        return sum(self.members[n] == kind for n in numbers) > 1

    def _as_one(
        self, rest: list[Unrolled], numbers: Sequence[int], min_layers: int
    ) -> list[Unrolled]:
        """One reason for a module of which nothing was rolled; none where there is little to."""
        if len(numbers) < min_layers or not rest:
            return []
        return [Unrolled(self.path or "(root)", rest[0].reason)]

    def _reason(self, numbers: Sequence[int], start: int) -> str:
        num, reason = self.grow(numbers[start:], 1)
        if start + num >= len(numbers):
            num, reason = self.grow(numbers[max(start - 1, 0) :], 1)
        return reason or f"only {num} equal blocks in a row"

    def grow(self, numbers: Sequence[int], period: int) -> tuple[int, str]:
        """How many equal layers the blocks begin with, and why not more."""
        counts = [self._grow(mode, numbers, period) for mode in self.traces]
        return min(counts, key=lambda found: found[0])

    def _grow(self, mode: bool, numbers: Sequence[int], period: int) -> tuple[int, str]:
        most = len(numbers) // period
        layers = [tuple(numbers[k * period : (k + 1) * period]) for k in range(most)]
        num, reason = 0, ""
        try:
            for k in range(most):
                self._check_layer(mode, layers, k)
                if k:
                    self._check_uses(mode, layers, k - 1)
                self._check_wiring(mode, layers, k)
                num = k + 1
        except _Stop as stop:
            reason = str(stop)
        while num > 1 and not self._ends_well(mode, layers[:num]):
            num, reason = num - 1, reason or "a value of the last block is used that none hands on"
        return num, reason

    def _check_layer(self, mode: bool, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether layer k is equal to the first, apart from where its values come from."""
        numbers = layers[k]
        name = _join(self.path, numbers[0])
        if numbers != tuple(n + k * len(numbers) for n in layers[0]) or (
            numbers != tuple(range(numbers[0], numbers[0] + len(numbers)))
        ):
            raise _Stop(f"block {numbers[0]} does not follow the one before it")
        if k and [self.members[n] for n in numbers] != [self.members[n] for n in layers[0]]:
            raise _Stop(f"{name} is a {self.members[numbers[0]].rpartition('.')[2]}")
        leaves, problem = self.owned(numbers)
        if problem:
            raise _Stop(problem)
        form = self.form(mode, numbers)
        if not form.steps:
            raise _Stop(f"{name} computes nothing")
        if any(number < 0 for _, number in form.updates):
            raise _Stop(f"a buffer of {name} is updated outside of it")
        own = {step.name for step in self.steps(mode, numbers)}
        trace = self.traces[mode]
        names = {leaf.name for leaf in leaves.values()}
        for placeholder, leaf in trace.leaves.items():
            users = trace.users.get(placeholder, ())
            if leaf in names and (not own.issuperset(users) or placeholder in trace.outputs):
                raise _Stop(f"`{leaf}` is used outside of its block")
        first = self.form(mode, layers[0])
        if form.body != first.body:
            raise _Stop(f"{name}: {difference(first, form)} (compared with {layers[0][0]})")

    def _check_wiring(self, mode: bool, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether layer k reads from outside what the others do."""
        first, own = self.form(mode, layers[0]), self.form(mode, layers[k])
        owner = self.owners[mode]
        name = _join(self.path, layers[k][0])
        for value in own.outside:
            number = owner.get(value)
            if number is not None and number > layers[k][-1]:
                raise _Stop(f"{name} reads a value of a later block")
            if not isinstance(self.traces[mode].known[value].form[0], str):
                raise _Stop(f"{name} takes a list of values from another block")
        if k == 0:
            return
        wires = self.wires(mode, layers, k)
        if wires != self.wires(mode, layers, 1):
            raise _Stop(f"{name} reads other values than the blocks before it")
        for wire, value in zip(wires, first.outside, strict=True):
            if wire != "" and isinstance(wire, str) and wire != value:
                raise _Stop(f"{name} reads other values than block {layers[0][0]}")
        wide = self.traces[mode].graph.wide
        for wire, *values in zip(wires, first.outside, own.outside, strict=True):
            if isinstance(wire, int) and not wide.isdisjoint(values):
                raise _Stop(f"{_join(self.path, layers[k - 1][-1])} hands on a value of 64 bits")

    def _is_own(self, mode: bool, value: str, numbers: tuple[int, ...]) -> bool:
        """Whether a value is a constant or a leaf of the blocks, of which each has its own."""
        trace = self.traces[mode]
        leaves, _ = self.owned(numbers)
        owned = {leaf.name for leaf in leaves.values()}
        return value in trace.constants or trace.leaves.get(value) in owned

    def wires(self, mode: bool, layers: list[tuple[int, ...]], k: int) -> list[int | str]:
        """Where layer k > 0 gets each slot from: a step of the layer before it, or a value."""
        before, own = self.form(mode, layers[k - 1]), self.form(mode, layers[k])
        wires: list[int | str] = []
        for value in own.outside:
            if self._is_own(mode, value, layers[k]):
                wires.append("")
            else:
                wires.append(before.index.get(value, value))
        return wires

    def _check_uses(self, mode: bool, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether a layer's values are read by the next one only, so that the run may go on."""
        leaks = self._leaks(mode, layers[k], layers[k + 1])
        if leaks:
            raise _Stop(
                f"`{leaks[0]}` of {_join(self.path, layers[k][-1])} is returned, or used by others"
                " than the block after it"
            )

    def _leaks(
        self, mode: bool, numbers: tuple[int, ...], following: tuple[int, ...] = ()
    ) -> list[str]:
        """Values of a layer that are used outside of it and of the next one."""
        trace = self.traces[mode]
        inside = {s.name for s in self.steps(mode, numbers)}
        inside |= {s.name for s in self.steps(mode, following)}
        leaves, _ = self.owned(numbers)
        owned = {leaf.name for leaf in leaves.values()}
        written = {
            name for leaf, value in trace.updates.items() if leaf not in owned
            for name in refs(value)
        }  # fmt: skip
        return [
            s.name
            for s in self.steps(mode, numbers)
            if s.name in trace.outputs
            or s.name in written
            or not inside.issuperset(trace.users.get(s.name, ()))
        ]

    def _ends_well(self, mode: bool, layers: list[tuple[int, ...]]) -> bool:
        """Whether all that is used of the last layer is what layers hand on."""
        handed = {wire for wire in self.wires(mode, layers, 1) if isinstance(wire, int)}
        index = self.form(mode, layers[-1]).index
        return all(index[name] in handed for name in self._leaks(mode, layers[-1]))

    def layers(self, mode: bool, run: Run) -> Layers:
        """The layers of a run that was found."""
        first = run.first
        layers = [
            tuple(range(first + k * run.period, first + (k + 1) * run.period))
            for k in range(run.num)
        ]
        wires = self.wires(mode, layers, 1)
        carry = tuple((slot, wire) for slot, wire in enumerate(wires) if isinstance(wire, int))
        steps = tuple(self.steps(mode, numbers) for numbers in layers)
        forms = [self.form(mode, numbers) for numbers in layers]
        trace = self.traces[mode]
        scalars = {
            step: tuple(form.scalars[place][1] for form in forms)
            for place, (step, _) in enumerate(forms[0].scalars)
        }
        constants = {
            value: tuple(form.outside[slot] for form in forms)
            for slot, value in enumerate(forms[0].outside)
            if value in trace.constants
        }
        return Layers(
            steps,
            forms[0],
            carry,
            {step: values for step, values in scalars.items() if len(set(values)) > 1},
            {value: own for value, own in constants.items() if len(set(own)) > 1},
        )

    def steps(self, mode: bool, numbers: tuple[int, ...]) -> tuple[Instruction, ...]:
        """The steps of some blocks, in order."""
        blocks = self.blocks[mode]
        placed = sorted(position for number in numbers for position in blocks.get(number, ()))
        return tuple(self.traces[mode].steps[position] for position in placed)

    def _by_block(self, mode: bool) -> dict[int, list[int]]:
        """Positions of each block's steps."""
        found: dict[int, list[int]] = {}
        for position, step in enumerate(self.traces[mode].steps):
            if step.name in self.owners[mode]:
                found.setdefault(self.owners[mode][step.name], []).append(position)
        return found

    def _form(self, mode: bool, numbers: tuple[int, ...]) -> Form:
        leaves, _ = self.owned(numbers)
        return form_of(self.traces[mode], self.steps(mode, numbers), leaves)

    def _owned(self, numbers: tuple[int, ...]) -> tuple[dict[str, Leaf], str]:
        """The leaves of some blocks by role; or what keeps them from being stacked."""
        found: dict[str, Leaf] = {}
        for place, number in enumerate(numbers):
            prefix = _join(self.path, number) + "."
            for leaf in self.layout.leaves:
                inside = [name for name in leaf.names if name.startswith(prefix)]
                if inside and len(inside) < len(leaf.names):
                    other = next(name for name in leaf.names if name not in inside)
                    return {}, f"`{inside[0]}` is tied to `{other}`"
                if inside:
                    roles = [name.removeprefix(prefix) for name in leaf.names]
                    found[f"{place}:{'='.join(roles)}"] = leaf
        return found, ""


def _owners(trace: Trace, path: str, members: Mapping[int, str]) -> dict[str, int]:
    """The block of each value that belongs to one.

    What the containing module computes between two blocks belongs to the earlier one.
    """
    block_of = {_join(path, number): number for number in members}
    owner: dict[str, int] = {}
    after: dict[str, int] = {}  # of other values: the last block that they depend on
    for step in trace.steps:
        own = [block_of[p] for p, _ in trace.known[step.name].modules if p in block_of]
        if own:
            owner[step.name] = own[0]
            continue
        seen = (owner.get(r, after.get(r, -1)) for r in refs((step.args, step.kwargs)))
        after[step.name] = max(seen, default=-1)
    needed: set[str] = set()
    between: dict[str, int] = {}
    for step in reversed(trace.steps):
        if step.name in owner or step.name in needed:
            needed.update(refs((step.args, step.kwargs)))
        if step.name not in owner and step.name in needed and after[step.name] >= 0:
            between[step.name] = after[step.name]
    return owner | between


def _join(path: str, number: int) -> str:
    return f"{path}.{number}" if path else str(number)
