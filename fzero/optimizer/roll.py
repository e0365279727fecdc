"""Running a function of layers written out with all layers at once, wherever they are alike.

The function is traced with each layer as a value of its own. Operations are then numbered by what
they do to what, one layer's own values being told from those of none: those that have one number in
all layers of a stack are one operation on the stacked values (`jax.vmap` of it), which is run once.
The others (adding up norms of layers, say, or random numbers drawn for each) run as they are. So
the result is that of the layers written out by construction, and costs what a stack costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.optimizer.layers import (
    Layers,
    Rows,
    Scope,
    is_layers,
    last_step,
    numbered,
    stack_of,
)
from fzero.optimizer.operations import frozen, is_heavy
from fzero.programs.jaxprs import Op, Program, Var
from fzero.tree import PyTree


@dataclass(frozen=True, eq=False)
class _Source:
    """An argument: an array, with the layers of a stack on dim 0 or not."""

    value: Any
    stack: str | None = None
    rows: Rows | None = None


@dataclass(frozen=True, eq=False)
class _Input:
    """What the function sees of an argument: one layer, or all of it."""

    source: _Source
    layer: int | None = None

    def aval(self) -> jax.ShapeDtypeStruct:
        value = self.source.value
        return jax.ShapeDtypeStruct(
            value.shape if self.layer is None else value.shape[1:], value.dtype
        )


def layers_of(tree: PyTree, stacks: Mapping[str, Rows]) -> PyTree:
    """A tree of the parameters' structure, its stacked leaves taken apart: for `Rolled`."""

    def of(path: Any, leaf: Any) -> Any:
        stack = stack_of(path, stacks)
        return _inputs_of(leaf, stack, stacks, last_step(path))

    return jax.tree_util.tree_map_with_path(of, tree)


def _inputs_of(leaf: Any, stack: str | None, stacks: Mapping[str, Rows], last: Any = None) -> Any:
    if stack is None:
        return _Input(_Source(leaf))
    rows = stacks[stack].of_leaf(leaf)
    source = _Source(leaf, stack, rows)
    inputs = [_Input(source, number) for number in range(len(rows.order))]
    return Layers(stack, inputs, last)


def state_layers(state: PyTree, shapes: PyTree, stacks: Mapping[str, Rows]) -> PyTree:
    """An optimizer's state as for layers written out, from one with stacked leaves: for `Rolled`.

    Args:
        state: the state, as `Rolled` gives it.
        shapes: the shapes of that for layers written out.
        stacks: the stacks' rows.
    """
    leaves, tree = jax.tree.flatten(shapes)
    flat: list[Any] = [None] * len(leaves)

    def fill(node: Any, leaf: Any) -> None:
        if not is_layers(node):
            flat[node.at] = _Input(_Source(leaf))
            return
        for one, given in zip(
            node.layers, _inputs_of(leaf, node.stack, stacks).layers, strict=True
        ):
            flat[one.at] = given

    jax.tree.map(fill, numbered(shapes), state, is_leaf=is_layers)
    return jax.tree.unflatten(tree, flat)


# A stack and the rows of a leaf (leaves that visit the device in slabs have fewer); which layer.
Layer = tuple[tuple[str, Rows], int]


class Rolled:
    """A function traced for layers written out, to be run with them stacked.

    Args:
        function: the function.
        args: its arguments, from `layers_of` and `state_layers`.
    """

    def __init__(self, function: Callable[..., PyTree], *args: PyTree) -> None:
        self.inputs, tree = jax.tree.flatten(args)
        closed, self.out = jax.make_jaxpr(
            lambda *flat: function(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*[given.aval() for given in self.inputs])
        self.program = Program(closed.jaxpr, closed.consts)
        # For each value a number that says what it is, and the layer that it belongs to.
        self.known: dict[Var, tuple[int, Layer | None]] = {}
        self._numbers: dict[Any, int] = {}
        self._layers: dict[int, set[int]] = defaultdict(set)
        # Where results of so many layers lie.
        self.rows: dict[tuple[str | None, int], Rows] = {
            (p.source.stack, len(p.source.rows.order)): p.source.rows
            for p in self.inputs if p.source.rows is not None
        }  # fmt: skip
        self._number()

    def _number(self) -> None:
        for var, given in zip(self.program.inputs, self.inputs, strict=True):
            source = given.source
            layer: Layer | None = None
            if given.layer is not None:
                assert source.stack is not None
                assert source.rows is not None
                layer = (source.stack, source.rows), given.layer
            self._know(var, ("source", id(source)), layer)
        for var in self.program.consts:
            self._know(var, ("constant", id(var)), None)
        for op in self.program.ops:
            found = {self.known[x][1] for x in op.reads()} - {None}
            layer = found.pop() if len(found) == 1 else None
            if found:  # of several layers
                key: Any = id(op)
            else:
                key = (*_kind(op), tuple(map(self._operand, op.operands)))
            for number, var in enumerate(op.results):
                self._know(var, (key, number), layer)

    def _operand(self, x: Any) -> Any:
        if not isinstance(x, Var):
            return "literal", frozen(x), str(getattr(x, "dtype", type(x)))
        number, layer = self.known[x]
        return number, layer is not None

    def _know(self, var: Var, key: Any, layer: Layer | None) -> None:
        number = self._numbers.setdefault((key, layer and layer[0]), len(self._numbers))
        self.known[var] = number, layer
        if layer is not None:
            self._layers[number].add(layer[1])

    def _stacked(self, var: Any) -> bool:
        """Whether a value is one layer's of those that are computed together."""
        if not isinstance(var, Var):
            return False
        number, layer = self.known[var]
        if layer is None:
            return False
        (_, rows), _ = layer
        return len(self._layers[number]) == len(rows.order)

    def __call__(self, scope: Scope) -> PyTree:
        """Runs the function.

        Args:
            scope: says how values of stacks are divided over devices.

        Returns:
            Its results, `Layers` stacked along dim 0.
        """
        run = _RolledRun(self, scope)
        for op in self.program.ops:
            run.op(op)
        return jax.tree.map(run.result, numbered(self.out), is_leaf=is_layers)


def _kind(op: Op) -> tuple[Any, ...]:
    if op.equation is None:
        return ("optimization_barrier",)
    return op.equation.primitive.name, frozen(op.equation.params)


class _RolledRun:
    """One run of a rolled program: values so far."""

    def __init__(self, rolled: Rolled, scope: Scope) -> None:
        self.rolled, self.scope = rolled, scope
        self.single: dict[Var, Any] = dict(rolled.program.consts)
        self.stacks: dict[int, Any] = {}
        for var, given in zip(rolled.program.inputs, rolled.inputs, strict=True):
            if given.layer is None:
                self.single[var] = given.source.value
            else:
                self.stacks[rolled.known[var][0]] = given.source.value

    def op(self, op: Op) -> None:
        rolled = self.rolled
        if not op.results or not rolled._stacked(op.results[0]):
            values = [self.value(x) for x in op.operands]
            self.single.update(zip(op.results, op.run(values), strict=True))
            return
        numbers = [rolled.known[var][0] for var in op.results]
        if numbers[0] in self.stacks:
            return
        layer = rolled.known[op.results[0]][1]
        assert layer is not None
        own = [isinstance(x, Var) and rolled.known[x][1] is not None for x in op.operands]
        values = [
            self.stacks[rolled.known[x][0]] if mine else self.value(x)
            for x, mine in zip(op.operands, own, strict=True)
        ]
        heavy = is_heavy(op)
        if heavy:
            values = [
                self.scope.spread(layer[0][0], x) if mine else x
                for x, mine in zip(values, own, strict=True)
            ]
        out = jax.vmap(
            lambda *values: op.run(list(values)), in_axes=[0 if mine else None for mine in own]
        )(*values)
        if heavy:
            out = [self.scope.spread(layer[0][0], x) for x in out]
        self.stacks.update(zip(numbers, out, strict=True))

    def value(self, x: Any) -> Any:
        """A value by itself; a row of those that are computed together."""
        if not isinstance(x, Var):
            return x
        if x not in self.single:
            number, layer = self.rolled.known[x]
            assert layer is not None
            (_, rows), own = layer
            row = rows.order[own]
            self.single[x] = jax.lax.index_in_dim(self.stacks[number], row, 0, keepdims=False)
        return self.single[x]

    def result(self, node: Any) -> Any:
        """A result of the function; those of a leaf's layers as one array."""
        outputs = self.rolled.program.outputs
        if not is_layers(node):
            return jnp.asarray(self.value(outputs[node.at]), node.dtype)
        rows = self.rolled.rows[node.stack, len(node.layers)]
        found = [outputs[one.at] for one in node.layers]
        shape = (rows.num, *node.layers[0].shape)
        if self.rolled._stacked(found[0]) and self._in_order(found):
            value = self.stacks[self.rolled.known[found[0]][0]]
        elif len({self._identity(x) for x in found}) == 1:
            value = jnp.broadcast_to(jnp.asarray(self.value(found[0]), node.layers[0].dtype), shape)
        else:
            value = jnp.stack([self.value(x) for x in found])
            rows_at = np.zeros(rows.num, np.int32)
            rows_at[list(rows.order)] = range(len(rows.order))
            value = value if rows.order == tuple(range(rows.num)) else value[rows_at]
        if not rows.filled:
            return value
        own = rows.own().reshape(-1, *(1,) * (len(shape) - 1))
        return jnp.where(own, value, jnp.zeros((), value.dtype))

    def _in_order(self, found: list[Any]) -> bool:
        known = [self.rolled.known.get(x) if isinstance(x, Var) else None for x in found]
        first = known[0]
        assert first is not None
        assert first[1] is not None
        return known == [(first[0], (first[1][0], number)) for number in range(len(found))]

    def _identity(self, x: Any) -> Any:
        if not isinstance(x, Var):
            return frozen(x)
        number, layer = self.rolled.known[x]
        return number if layer is None else (number, layer)
