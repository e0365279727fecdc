"""The numbered children of one module in one graph: which of them are equal layers.

A layer is one child or some in a row. Layers are equal if their ops have one form (`forms`), if
each takes from the one before it what the others take from theirs, and if nothing else reads what
is within them. Such layers are a `Loop`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from torch_bridge.dtypes import canonical
from torch_bridge.export.interpret import Op
from torch_bridge.export.trace import Trace
from torch_bridge.lower.refs import Ref, refs
from torch_bridge.module.names import Layout, Leaf
from torch_bridge.structure.forms import SCALARS, Form, difference, form_of
from torch_bridge.structure.loops import Loop, alone
from torch_bridge.structure.stacked_names import BlockStack, join, stacked_leaves


class _NotEqual(Exception):
    """Why a stack ends."""


class Children:
    """The children of one module in one mode's graph.

    Some of them in a row, given by their numbers, are a layer.

    Args:
        trace: the graph.
        layout: the leaves of the whole module.
        path: the module that holds the children.
        classes: the class of each child, by number.
    """

    def __init__(self, trace: Trace, layout: Layout, path: str, classes: Mapping[int, str]) -> None:
        self.trace, self.layout = trace, layout
        self.path, self.classes = path, classes
        self.owner = _owners(trace, path, classes)
        self.positions: dict[int, list[int]] = {}  # of each child's ops
        for position, op in enumerate(trace.ops):
            if op.name in self.owner:
                self.positions.setdefault(self.owner[op.name], []).append(position)
        # A layer is looked at once for each stack that it might be part of.
        self.form = cache(self._form)
        self.ops = cache(self._ops)
        self.owned = cache(self._owned)

    def grow(self, numbers: Sequence[int], period: int) -> tuple[int, str]:
        """How many equal layers the blocks begin with, and why not more."""
        layers = [
            tuple(numbers[k * period : (k + 1) * period]) for k in range(len(numbers) // period)
        ]
        num, reason = 0, ""
        try:
            for k in range(len(layers)):
                self._check_layer(layers, k)
                if k:
                    self._check_uses(layers, k - 1)
                self._check_wiring(layers, k)
                num = k + 1
        except _NotEqual as why:
            reason = str(why)
        while num > 1 and not self._ends_well(layers[:num]):
            num, reason = num - 1, reason or "a value of the last block is used that none hands on"
        return num, reason

    def _check_layer(self, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether layer k is equal to the first, but for where its values come from."""
        numbers = layers[k]
        name = join(self.path, numbers[0])
        begin = layers[0][0] + k * len(numbers)
        if numbers != tuple(range(begin, begin + len(numbers))):
            raise _NotEqual(f"block {numbers[0]} does not follow the one before it")
        if k and [self.classes[n] for n in numbers] != [self.classes[n] for n in layers[0]]:
            raise _NotEqual(f"{name} is a {self.classes[numbers[0]].rpartition('.')[2]}")
        owned, problem = self.owned(numbers)
        if problem:
            raise _NotEqual(problem)
        form = self.form(numbers)
        if not form.ops:
            raise _NotEqual(f"{name} computes nothing")
        if any(number < 0 for _, number in form.updates):
            raise _NotEqual(f"a buffer of {name} is updated outside of it")
        inside = {op.name for op in self.ops(numbers)}
        leaves = {leaf.name for leaf in owned.values()}
        for placeholder, leaf in self.trace.leaves.items():
            users = self.trace.users.get(placeholder, ())
            outside = not inside.issuperset(users) or placeholder in self.trace.outputs
            if leaf in leaves and outside:
                raise _NotEqual(f"`{leaf}` is used outside of its block")
        first = self.form(layers[0])
        if form.body != first.body:
            raise _NotEqual(f"{name}: {difference(first, form)} (compared with {layers[0][0]})")

    def _check_wiring(self, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether layer k reads from outside what the others do."""
        first, form = self.form(layers[0]), self.form(layers[k])
        name = join(self.path, layers[k][0])
        for value in form.outside:
            number = self.owner.get(value)
            if number is not None and number > layers[k][-1]:
                raise _NotEqual(f"{name} reads a value of a later block")
            if not isinstance(self.trace.known[value].form[0], str):
                raise _NotEqual(f"{name} takes a list of values from another block")
        if k == 0:
            return
        wires = self._wires(layers, k)
        if wires != self._wires(layers, 1):
            raise _NotEqual(f"{name} reads other values than the blocks before it")
        for wire, *values in zip(wires, first.outside, form.outside, strict=True):
            if isinstance(wire, str) and wire != values[0]:
                raise _NotEqual(f"{name} reads other values than block {layers[0][0]}")
        for wire, *values in zip(wires, first.outside, form.outside, strict=True):
            if isinstance(wire, int) and not self.trace.graph.wide.isdisjoint(values):
                before = join(self.path, layers[k - 1][-1])
                raise _NotEqual(f"{before} hands on a value of 64 bits")

    def _wires(self, layers: list[tuple[int, ...]], k: int) -> list[int | str | None]:
        """Where layer k > 0 gets each input from.

        From an op of the layer before it, by number; from a value that all layers read, by name;
        None: a constant or a leaf, of which each layer has its own.
        """
        before = self.form(layers[k - 1])
        leaves = {leaf.name for leaf in self.owned(layers[k])[0].values()}
        return [
            None
            if value in self.trace.constants or self.trace.leaves.get(value) in leaves
            else before.index.get(value, value)
            for value in self.form(layers[k]).outside
        ]

    def _check_uses(self, layers: list[tuple[int, ...]], k: int) -> None:
        """Whether a layer's values are read by the next one only, so that the stack may go on."""
        leaks = self._leaks(layers[k], layers[k + 1])
        if leaks:
            raise _NotEqual(
                f"`{leaks[0]}` of {join(self.path, layers[k][-1])} is returned, or used by others"
                " than the block after it"
            )

    def _leaks(self, numbers: tuple[int, ...], following: tuple[int, ...] = ()) -> list[str]:
        """Values of a layer that are used outside of it and of the next one."""
        inside = {op.name for op in (*self.ops(numbers), *self.ops(following))}
        leaves = {leaf.name for leaf in self.owned(numbers)[0].values()}
        updates = [value for leaf, value in self.trace.updates.items() if leaf not in leaves]
        outside = self.trace.outputs.union(refs(updates))
        return [
            op.name
            for op in self.ops(numbers)
            if op.name in outside or not inside.issuperset(self.trace.users.get(op.name, ()))
        ]

    def _ends_well(self, layers: list[tuple[int, ...]]) -> bool:
        """Whether all that is used of the last layer is what layers hand on."""
        handed_on = self._wires(layers, 1)
        index = self.form(layers[-1]).index
        return all(index[name] in handed_on for name in self._leaks(layers[-1]))

    def loop(self, stack: BlockStack) -> Loop:
        """A stack as a loop."""
        layers = [
            tuple(range(n, n + stack.period)) for n in range(stack.first, stack.stop, stack.period)
        ]
        ops, form = [self.ops(numbers) for numbers in layers], self.form(layers[0])
        body, scanned = self._scanned(layers)
        wires = self._wires(layers, 1)
        carry = [(i, wire) for i, wire in enumerate(wires) if isinstance(wire, int)]
        stacked = {one.leaves[0].name: one.name for one in stacked_leaves(self.layout, [stack])}
        leaf_of = {value: self.trace.leaves.get(value, "") for value in form.outside}
        return Loop(
            stack,
            frozenset(op.name for layer in ops for op in layer),
            body,
            tuple((form.outside[i], body[op].name) for i, op in carry),
            {ops[-1][op].name: at for at, (_, op) in enumerate(carry)},
            tuple(v for v, wire in zip(form.outside, wires, strict=True) if isinstance(wire, str)),
            {value: stacked[leaf] for value, leaf in leaf_of.items() if leaf in stacked},
            {stacked[k]: new.name for k, new in self.trace.updates.items() if k in stacked},
            scanned,
        )

    def _scanned(
        self, layers: list[tuple[int, ...]]
    ) -> tuple[tuple[Op, ...], dict[str, np.ndarray[Any, Any]]]:
        """The first layer's ops, and the numbers and constants in which others differ."""
        forms = [self.form(numbers) for numbers in layers]
        body = list(alone(self.ops(layers[0])))
        scanned: dict[str, np.ndarray[Any, Any]] = {}
        for same in zip(*(form.scalars for form in forms), strict=True):
            (number, _), numbers = same[0], [value for _, value in same]
            if len(set(numbers)) > 1:
                op, at = body[number], SCALARS[body[number].operator]
                name = f"{op.name}.number"
                scanned[name] = np.asarray(numbers, canonical(np.float64))
                args = (*op.args[:at], Ref(name), *op.args[at + 1 :])
                body[number] = replace(op, args=args)
        for names in zip(*(form.outside for form in forms), strict=True):
            if names[0] in self.trace.constants:
                rows = [self.trace.constants[name] for name in names]
                if any(row.tobytes() != rows[0].tobytes() for row in rows):
                    scanned[names[0]] = np.stack(rows)
        return tuple(body), scanned

    def _ops(self, numbers: tuple[int, ...]) -> tuple[Op, ...]:
        """The ops of some blocks, in order."""
        placed = sorted(at for number in numbers for at in self.positions.get(number, ()))
        return tuple(self.trace.ops[position] for position in placed)

    def _form(self, numbers: tuple[int, ...]) -> Form:
        return form_of(self.trace, self.ops(numbers), self.owned(numbers)[0])

    def _owned(self, numbers: tuple[int, ...]) -> tuple[dict[str, Leaf], str]:
        """The leaves of some blocks by role; or what keeps them from being stacked."""
        found: dict[str, Leaf] = {}
        for at, number in enumerate(numbers):
            prefix = join(self.path, number) + "."
            for leaf in self.layout.leaves:
                inside = [name for name in leaf.names if name.startswith(prefix)]
                if inside and len(inside) < len(leaf.names):
                    other = next(name for name in leaf.names if name not in inside)
                    return {}, f"`{inside[0]}` is tied to `{other}`"
                if inside:
                    roles = [name.removeprefix(prefix) for name in leaf.names]
                    found[f"{at}:{'='.join(roles)}"] = leaf
        return found, ""


def _owners(trace: Trace, path: str, classes: Mapping[int, str]) -> dict[str, int]:
    """The block of each value that belongs to one.

    What the containing module computes between two blocks belongs to the earlier one.
    """
    block_of = {join(path, number): number for number in classes}
    owner: dict[str, int] = {}
    after: dict[str, int] = {}  # of other values: the last block that they depend on
    for op in trace.ops:
        own = [block_of[p] for p, _ in trace.known[op.name].modules if p in block_of]
        if own:
            owner[op.name] = own[0]
            continue
        seen = (owner.get(r, after.get(r, -1)) for r in refs((op.args, op.kwargs)))
        after[op.name] = max(seen, default=-1)
    needed: set[str] = set()
    between: dict[str, int] = {}
    for op in reversed(trace.ops):
        if op.name in owner or op.name in needed:
            needed.update(refs((op.args, op.kwargs)))
        if op.name not in owner and op.name in needed and after[op.name] >= 0:
            between[op.name] = after[op.name]
    return owner | between
