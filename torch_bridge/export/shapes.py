"""Sizes a converted graph accepts: what torch.export kept symbolic, fixed, or assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fzero.errors import ConversionError


class SizeError(ConversionError):
    """A graph was not made for these sizes; another trace of the module may be."""


Dim = Any  # an int, or a sympy expression of the sizes that are free


@dataclass(frozen=True)
class ShapeRules:
    """Symbolic sizes of all inputs together with the conditions the trace relied on."""

    paths: tuple[str, ...]
    shapes: tuple[tuple[Dim, ...], ...]
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    guards: tuple[sympy.Expr, ...]

    def fixed(self) -> list[str]:
        """The dims that take one size only."""
        return [
            f"`{path}` dim {dim}"
            for path, shape in zip(self.paths, self.shapes, strict=True)
            for dim, size in enumerate(shape)
            if isinstance(size, int)
        ]

    def check(self, shapes: Sequence[tuple[int, ...]]) -> dict[sympy.Symbol, int]:
        """Refuse sizes for which the graph was not traced.

        Args:
            shapes: the shape of each tensor argument, in graph order.

        Returns:
            What the free sizes are.

        Raises:
            SizeError: says which dim of which argument, and what to do.
            ConversionError: an argument has another number of dims.
        """
        values: dict[sympy.Symbol, int] = {}
        later: list[tuple[str, int, sympy.Expr, int]] = []
        for path, expected, got in zip(self.paths, self.shapes, shapes, strict=True):
            if len(expected) != len(got):
                raise ConversionError(
                    f"argument `{path}`: expected {len(expected)} dims as in the example, "
                    f"got shape {tuple(got)}"
                )
            for dim, (want, size) in enumerate(zip(expected, got, strict=True)):
                if isinstance(want, sympy.Symbol):
                    if values.setdefault(want, size) != size:
                        raise SizeError(_tied(path, dim, values[want], size))
                else:
                    later.append((path, dim, want, size))
        for path, dim, want, size in later:
            number = want if isinstance(want, int) else int(want.subs(values))
            if number != size:
                raise SizeError(_fixed(path, dim, number, size))
        self._check_conditions(values)
        return values

    def _check_conditions(self, values: Mapping[sympy.Symbol, int]) -> None:
        for symbol, size in values.items():
            low, high = self.ranges.get(symbol, (0, None))
            if size < low or (high is not None and size > high):
                limit = f"from {low}" + (f" to {high}" if high is not None else " up")
                raise SizeError(
                    f"{self._describe(symbol)} has size {size}, but the module was traced for "
                    f"sizes {limit}."
                )
        for guard in self.guards:
            if guard.free_symbols <= values.keys() and not bool(guard.subs(values)):
                sizes = ", ".join(f"{self._describe(s)} = {values[s]}" for s in guard.free_symbols)
                raise SizeError(
                    f"the module takes another path through its Python code for these sizes "
                    f"({sizes}); the graph holds only where {guard}."
                )

    def _describe(self, symbol: sympy.Symbol) -> str:
        for path, shape in zip(self.paths, self.shapes, strict=True):
            for dim, size in enumerate(shape):
                if size == symbol:
                    return f"argument `{path}` dim {dim}"
        return str(symbol)


def _fixed(path: str, dim: int, want: int, got: int) -> str:
    return (
        f"argument `{path}` dim {dim}: expected {want}, got {got}. The module ties this size to "
        "its example."
    )


def _tied(path: str, dim: int, want: int, got: int) -> str:
    return f"argument `{path}` dim {dim}: expected {want} like the dims it goes with, got {got}"


def shape_rules(
    program: torch.export.ExportedProgram, paths: Sequence[str], names: Sequence[str]
) -> ShapeRules:
    """Read the rules off an exported program.

    Args:
        program: the decomposed program.
        paths: how to call each tensor argument in messages.
        names: its placeholder's name in the graph.

    Returns:
        Rules that can be checked without torch's symbolic machinery.
    """
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    shapes: list[tuple[Dim, ...]] = []
    guards: tuple[sympy.Expr, ...] = ()
    for name in names:
        fake: Any = values[name]
        shapes.append(tuple(as_dim(size) for size in fake.shape))
        environment = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
        if environment is not None:
            guards = tuple(guard.expr for guard in environment.guards)
    ranges = {
        symbol: (_finite(limits.lower) or 0, _finite(limits.upper))
        for symbol, limits in program.range_constraints.items()
    }
    return ShapeRules(tuple(paths), tuple(shapes), ranges, guards)


def same_rules(a: torch.export.ExportedProgram, b: torch.export.ExportedProgram) -> bool:
    """Whether two exports of one module, for the same example, hold for the same sizes."""
    one, other = _all_rules(a), _all_rules(b)
    same = one.shapes == other.shapes and one.ranges == other.ranges
    return same and set(one.guards) == set(other.guards)


def _all_rules(program: torch.export.ExportedProgram) -> ShapeRules:
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = [n.name for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]
    return shape_rules(program, names, names)


def as_dim(size: Any) -> Dim:
    """A size of a traced tensor: a number, or an expression of the free sizes."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return int(size)


def _finite(bound: Any) -> int | None:
    # torch writes "no upper limit" as its own infinity, or as the largest int64.
    return int(bound) if getattr(bound, "is_Integer", False) and int(bound) < 2**62 else None


def unbacked(value: Any) -> bool:
    """Whether a node's value has a size that depends on the data."""
    items = value if isinstance(value, tuple | list) else (value,)
    return any(
        isinstance(item, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)
        and bool(free_unbacked_symbols(item))
        for item in items
    )
