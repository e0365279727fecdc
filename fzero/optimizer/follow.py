"""Following the layers of stacks through a program: what each of its values is.

In one program a stack's layers are written out, in the other they are on a dim of arrays. Each
operation on such an array is undone for one layer: what it does to that is the term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fzero.optimizer.operations import frozen
from fzero.optimizer.terms import OWN, Ref, Shape, Terms, is_reduction
from fzero.programs.jaxprs import Op, Program, Var, is_elementwise


@dataclass(frozen=True)
class TermValue:
    """What a value of a program is.

    Args:
        term: its term; for an array with layers, that of one of them.
        layer: the layer that it is of, where it is of one.
        stack: the stack whose layers it has on a dim.
        dim: that dim.
        inner: elements of each layer on that dim, where it has others in it (0: none).
        rows: what that dim counts.
    """

    term: int
    layer: tuple[str, int] | None = None
    stack: str | None = None
    dim: int = 0
    inner: int = 0
    rows: int = 0

    def at(self, dim: int, inner: int = 0) -> TermValue:
        """The same with its layers elsewhere."""
        return replace(self, dim=dim, inner=inner)


class _Mixes(Exception):
    """An operation that looks at several layers at once."""


class Follow:
    """Works out what the values of programs are.

    Args:
        terms: all terms.

    Attributes:
        mixing: for terms of operations that mix layers, their names.
        sums: terms that were added up over rows, with the stack and the kind of sum.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.mixing: dict[int, str] = {}
        self.sums: list[tuple[int, str, str]] = []

    def run(self, program: Program, inputs: Sequence[TermValue]) -> list[TermValue]:
        """What the outputs of a program are, given its inputs."""
        env: dict[Var, TermValue] = dict(zip(program.inputs, inputs, strict=True))
        for var, const in program.consts.items():
            env[var] = self.constant(const)
        for op in program.ops:
            operands = [self._read(env, x) for x in op.operands]
            env.update(zip(op.results, self._op(op, operands), strict=True))
        return [self._read(env, x) for x in program.outputs]

    def constant(self, value: Any) -> TermValue:
        """A constant."""
        shape = tuple(getattr(value, "shape", ()))
        key = "constant", frozen(value)
        if shape == () and _is_number(value) and not np.isnan(value):
            key = "literal", float(value)
        return TermValue(self.terms.of(key, shape))

    def _read(self, env: dict[Var, TermValue], x: Any) -> TermValue:
        return env[x] if isinstance(x, Var) else self.constant(x)

    def _op(self, op: Op, operands: list[TermValue]) -> list[TermValue]:
        if op.equation is None or op.equation.primitive.name == "optimization_barrier":
            return operands
        if op.equation.primitive.name == "cond":
            return self._cond(op, operands)
        try:
            return self._many(op, operands) if any(v.stack for v in operands) else (
                self._plain(op, operands)
            )  # fmt: skip
        except _Mixes:
            return self._mixed(op, operands)

    def _mixed(self, op: Op, operands: Sequence[TermValue]) -> list[TermValue]:
        name, out = op.equation.primitive.name, []
        for number, var in enumerate(op.results):
            key = ("mixed", name, number, tuple(operands))
            term = self.terms.of(key, tuple(var.aval.shape))
            self.mixing[term] = name
            out.append(TermValue(term))
        return out

    def _cond(self, op: Op, operands: list[TermValue]) -> list[TermValue]:
        """Each result is one of its branches' results, by the number that chooses."""
        index, *rest = operands
        branches = [
            self.run(Program(branch.jaxpr, branch.consts), rest)
            for branch in op.equation.params["branches"]
        ]
        out = []
        for var, choices in zip(op.results, zip(*branches, strict=True), strict=True):
            if len(set(choices)) == 1:
                out.append(choices[0])
                continue
            try:
                out.append(self._elementwise(("cond",), [index, *choices], tuple(var.aval.shape)))
            except _Mixes:
                out += self._mixed(op, operands)[:1]
        return out

    # One layer, or none

    def _refs(self, values: Sequence[TermValue]) -> tuple[list[Ref], tuple[str, int] | None]:
        """Values as parts of a term, and the one layer that they are of."""
        found = {v.layer for v in values} - {None}
        # Also of one layer, if what is beside it names layers: a sum over some, and the next one.
        if len(found) > 1 or (found and any(self.terms.names_layers(v.term) for v in values)):
            return [(v.term, v.layer) for v in values], None
        return [(v.term, OWN if v.layer else None) for v in values], next(iter(found), None)

    def _plain(self, op: Op, operands: Sequence[TermValue]) -> list[TermValue]:
        refs, layer = self._refs(operands)
        shapes = [tuple(var.aval.shape) for var in op.results]
        params = op.equation.params
        return [
            self._value(self._apply(op.equation.primitive.name, params, n, refs, shape), layer)
            for n, shape in enumerate(shapes)
        ]

    def _value(self, ref: Ref, layer: tuple[str, int] | None) -> TermValue:
        if ref[1] is None:
            return TermValue(ref[0])
        return TermValue(ref[0], layer if ref[1] == OWN else ref[1])  # type: ignore[arg-type]

    def _apply(self, name: str, params: Any, number: int, refs: list[Ref], shape: Shape) -> Ref:
        terms = self.terms
        if is_reduction(name):
            return terms.reduce(name, params["axes"], refs[0])
        if name in ("reshape", "squeeze"):
            return terms.reshape(refs[0], shape)
        if name == "broadcast_in_dim":
            return terms.broadcast(refs[0], shape, tuple(params["broadcast_dimensions"]))
        if name == "dot_general":
            return terms.dot(params, refs, shape)
        return terms.operation(name, frozen(params), number, refs, shape)

    # All layers of a stack at once

    def _many(self, op: Op, operands: Sequence[TermValue]) -> list[TermValue]:
        name, params = op.equation.primitive.name, op.equation.params
        shape = tuple(op.results[0].aval.shape)
        first = tuple(getattr(op.equation.invars[0].aval, "shape", ()))
        if is_elementwise(name, first, shape) or name in ("add_any",):
            return [self._elementwise((name, frozen(params), 0), operands, shape)]
        if name == "dot_general":
            return [self._inner_product(params, operands, shape)]
        if len(operands) > 1:
            raise _Mixes
        (value,) = operands
        if is_reduction(name):
            return [self._reduce(name, params["axes"], value)]
        if name in ("reshape", "squeeze"):
            return [self._reshape(value, tuple(op.equation.invars[0].aval.shape), shape)]
        if name == "broadcast_in_dim":
            return [self._broadcast(value, shape, tuple(params["broadcast_dimensions"]))]
        if name == "transpose":
            return [self._transpose(value, tuple(params["permutation"]))]
        raise _Mixes

    def _elementwise(self, key: Any, operands: Sequence[TermValue], shape: Shape) -> TermValue:
        many = {(v.stack, v.dim, v.inner, v.rows) for v in operands if v.stack}
        if not many:
            refs, layer = self._refs(operands)
            return self._value(self.terms.elementwise(key, refs, shape), layer)
        if len(many) > 1 or any(v.layer for v in operands):
            raise _Mixes
        like = next(v for v in operands if v.stack)
        items: list[Ref] = []
        for value in operands:
            ref = self._ref(value)
            if not value.stack and self.terms.shapes[value.term] != ():
                scalar = self.terms.source(ref, "full")
                if scalar is None:
                    raise _Mixes
                ref = scalar
            items.append(ref)
        return replace(like, term=self.terms.elementwise(key, items, self._own(like, shape))[0])

    def _ref(self, value: TermValue) -> Ref:
        """How a term reads a value: of one layer, if it has layers."""
        return value.term, self.terms.own(value.stack)

    def _own(self, value: TermValue, shape: Shape) -> Shape:
        """One layer's part of a shape with layers where a value has them."""
        middle = (value.inner,) if value.inner else ()
        return (*shape[: value.dim], *middle, *shape[value.dim + 1 :])

    def _reduce(self, name: str, axes: Sequence[int], value: TermValue) -> TermValue:
        dim, inner = value.dim, value.inner
        own = [a - (a > dim and not inner) for a in axes if a != dim or inner]
        term, _ = self.terms.reduce(name, own, self._ref(value))
        if dim not in axes:
            return replace(value, term=term).at(dim - sum(a < dim for a in axes), inner)
        stack = str(value.stack)
        self.sums.append((term, stack, name))
        shape = self.terms.shapes[term]
        return TermValue(self.terms.bag(name, [(term, self.terms.every(stack))], shape)[0])

    def _reshape(self, value: TermValue, was: Shape, shape: Shape) -> TermValue:
        before, rows = math.prod(was[: value.dim]), value.rows
        for dim, size in enumerate(shape):
            if math.prod(shape[:dim]) != before or size % rows or (size == 1 != rows):
                continue
            moved = value.at(dim, 0 if size == rows else size // rows)
            own = self._own(moved, shape)
            return replace(moved, term=self.terms.reshape(self._ref(value), own)[0])
        raise _Mixes

    def _broadcast(self, value: TermValue, shape: Shape, dims: tuple[int, ...]) -> TermValue:
        if value.inner or shape[dims[value.dim]] != value.rows:
            raise _Mixes
        moved = value.at(dims[value.dim])
        own = tuple(d - (d > moved.dim) for d in dims if d != moved.dim)
        ref = self.terms.broadcast(self._ref(value), self._own(moved, shape), own)
        return replace(moved, term=ref[0])

    def _transpose(self, value: TermValue, permutation: tuple[int, ...]) -> TermValue:
        if value.inner:
            raise _Mixes
        own = tuple(p - (p > value.dim) for p in permutation if p != value.dim)
        was = self.terms.shapes[value.term]
        shape = tuple(was[p] for p in own)
        key = "transpose", frozen({"permutation": own}), 0
        ref = self.terms.made(key, [self._ref(value)], shape)
        return replace(value, term=ref[0]).at(permutation.index(value.dim))

    def _inner_product(self, params: Any, operands: Sequence[TermValue], shape: Shape) -> TermValue:
        """Of two arrays as vectors: the sum of those of their layers."""
        one, other = operands
        (left, right), (batch, _) = params["dimension_numbers"]
        alike = (one.stack, one.dim, one.inner) == (other.stack, other.dim, other.inner)
        every = tuple(left) == tuple(right) == tuple(range(len(left)))
        if not alike or batch or shape != () or not every:
            raise _Mixes
        product = self.terms.elementwise(
            ("mul", (), 0), [self._ref(one), self._ref(other)], self.terms.shapes[one.term]
        )
        dims = range(len(left) - (not one.inner))
        term, _ = self.terms.reduce("reduce_sum", dims, product)
        stack = str(one.stack)
        self.sums.append((term, stack, "reduce_sum"))
        return TermValue(self.terms.bag("reduce_sum", [(term, self.terms.every(stack))], ())[0])


def _is_number(value: Any) -> bool:
    return not hasattr(value, "dtype") or getattr(value.dtype, "kind", "V") in "biuf"


def program_of(closed: Any) -> Program:
    """A traced function's program."""
    return Program(closed.jaxpr, closed.consts)
