"""Which values of an exported graph may not fit into the 32 bits that JAX holds for 64.

Every whole number of 64 bits gets a range, from what is known without running the graph: arguments
fit into 32 bits (a call refuses others), sizes are below 2**29, `arange` ends where it ends. What
has no rule here may be any number, so a rule that is missing costs time and nothing else: an op
whose result may not fit is computed in 64 bits (`lower/wide_operators.py`), and so is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from torch.export.graph_signature import InputKind, OutputKind

from fzero.errors import ConversionError
from torch_bridge.dtypes import canonical, numpy_dtype, x64_enabled
from torch_bridge.export.graph.float64 import (
    WIDE_FLOATS,
    is_float64,
    only_moved,
    operator_name,
    with_gradient,
)
from torch_bridge.export.graph.range_rules import ALL, INDEX, SIZE, Range, hull, rule_of
from torch_bridge.export.graph.steps import constants_before_a_step
from torch_bridge.export.origins import source_line
from torch_bridge.lower.refs import Ref
from torch_bridge.lower.sizes import python_function
from torch_bridge.lower.wide_operators import Saturated, Wide
from torch_bridge.module.weights import to_numpy


Fn = Callable[..., Any]


INT32 = (-(2**31), 2**31 - 1)
# A buffer that a forward writes is a counter or a statistic: far from the end of its dtype.
_COUNTED = (-(2**30), 2**30)
_GROWN = 2**36  # what is added to it now and then stays below
# Operators that read indices: those that exist are below 2**31.
_INDEXING = ("aten.embedding", "aten.gather", "aten.index", "aten.scatter", "aten.take",
             "aten.one_hot", "aten.nll_loss", "aten.cross_entropy", "aten.put")  # fmt: skip
_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)
_NARROW_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)
_WHOLE = (torch.int64, torch.uint64)
# Operators that compute with a number beside whole numbers.
_ARITHMETIC = frozenset((
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "eq", "ne", "lt",
    "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "bitwise_and",
    "bitwise_or", "bitwise_xor", "where", "masked_fill", "fill",
))  # fmt: skip


@dataclass
class Ranges:
    """What is known of a program's 64-bit values; nothing is wide where JAX has 64 bits.

    Attributes:
        of: the range of each whole number, by node; a tuple for operators with several results.
        wide: nodes with a value that is held in 64 bits.
        taught: nodes through which a gradient of what is returned may go.
        before_steps: nodes of constants whose last bit decides.
    """

    of: dict[torch.fx.Node, Any] = field(default_factory=dict)
    wide: set[torch.fx.Node] = field(default_factory=set)
    taught: set[torch.fx.Node] = field(default_factory=set)
    before_steps: set[torch.fx.Node] = field(default_factory=set)

    def computed(self, node: torch.fx.Node) -> bool:
        """Whether a node has to be computed in 64 bits."""
        if python_function(node.target) is not None:
            return False
        held = any(source in self.wide for source in node.all_input_nodes)
        known = held or node in self.wide or _with_large_number(node) or _wide_within(node)
        return known or _of_bits(node)

    def lowered(self, node: torch.fx.Node, fn: Fn, template: Any, where: str) -> Fn:
        """The lowering of a node, in 64 bits where it has to be.

        Args:
            node: the node.
            fn: its lowering.
            template: its arguments as a tree, with one leaf for each value that comes.
            where: its module and line, for messages.
        """
        if not self.computed(node):
            return fn
        if node not in self.wide and str(node.target).startswith(_INDEXING):
            return Saturated(fn)
        dtypes = {source.name: source.meta.get("val") for source in node.all_input_nodes}
        leaves = [dtypes.get(x.name) if isinstance(x, Ref) else None for x in
                  jax.tree.leaves(template)]  # fmt: skip
        keeps = tuple(keep and node in self.wide for keep in self.keeps(node))
        # A gradient is refused at what float64 is made of, and not within: there, an op that
        # differentiates has left the 64 bits behind.
        made = any(_dtype(x) in WIDE_FLOATS for x in _leaves(node.meta.get("val")))
        known = _WIDE + _NARROW_FLOATS if made and node in self.taught else _WIDE
        kinds = (_dtype(x) for x in leaves)
        takes = tuple(numpy_dtype(kind).name if kind in known else None for kind in kinds)
        return Wide(fn, takes, keeps, node in self.taught, where)

    def keeps(self, node: torch.fx.Node) -> tuple[bool, ...]:
        """For each tensor of a node's result, whether it is held in 64 bits."""
        values = _leaves(node.meta.get("val"))
        known = _leaves(self.of.get(node, ALL), len(values))
        return tuple(map(_is_wide, values, known))


def find_ranges(program: torch.export.ExportedProgram) -> Ranges:
    """The ranges of a program's values.

    Raises:
        ConversionError: an argument or constant of float64 enters a computation in float64, or a
            buffer may grow beyond 32 bits.
    """
    found = Ranges(before_steps=constants_before_a_step(program))
    if x64_enabled():
        return found
    outputs = program.graph_signature.output_specs
    written = {str(s.target): s.arg.name for s in outputs if s.kind is OutputKind.BUFFER_MUTATION}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    moved = only_moved(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            found.of[node] = _given(program, specs.get(node.name), written, node.meta.get("val"))
            if _cut_constant(program, specs.get(node.name)) and node not in moved:
                found.wide.add(node)
        elif node.op == "call_function":
            found.of[node] = _computed(found.of, node)
            new = node.name in written.values()
            if new and node.meta["val"].dtype in _WHOLE:
                found.of[node] = _counted(found.of[node], program, node)
            if any(found.keeps(node)) and node not in moved and not new:
                found.wide.add(node)
                _refuse_cut(specs, node)
    found.taught |= with_gradient(program)
    return found


def _counted(known: Range, program: torch.export.ExportedProgram, node: torch.fx.Node) -> Range:
    """The range of a buffer's new value.

    Raises:
        ConversionError: it grows beyond 32 bits.
    """
    most = max(map(abs, known))
    if known != ALL and most > _GROWN:
        names = (s.target for s in program.graph_signature.output_specs if s.arg.name == node.name)
        raise ConversionError(
            f"the buffer `{next(names)}` may grow beyond 32 bits: "
            "jax.config.update('jax_enable_x64', True), or keep it in torch.int32"
        )
    return _COUNTED if most > _COUNTED[1] else known


def _cut_constant(program: torch.export.ExportedProgram, spec: Any) -> bool:
    """Whether an input is a constant that is another one in 32 bits."""
    if spec is None or spec.kind is not InputKind.CONSTANT_TENSOR:
        return False
    constant = program.constants[str(spec.target)]
    if constant.dtype not in _WIDE or constant.is_meta or constant.layout is not torch.strided:
        return False
    exact = to_numpy(constant)
    with np.errstate(over="ignore"):  # of what float32 does not reach
        held = exact.astype(canonical(exact.dtype))
    return not np.array_equal(held, exact, equal_nan=held.dtype.kind in "fc")


def _refuse_cut(specs: Mapping[str, Any], node: torch.fx.Node) -> None:
    """Refuse float64 that is computed from arguments and leaves, which are held in 32 bits."""
    if not is_float64(node):
        return
    for source in node.all_input_nodes:
        spec = specs.get(source.name)
        if spec is None or spec.kind is InputKind.CONSTANT_TENSOR:
            continue
        if is_float64(source):
            raise ConversionError(
                f"{node.target} computes in float64 with "
                f"`{spec.target or source.name}`, which JAX holds in 32 bits"
                f"\n  at: {source_line(node)}\n  Say jax.config.update('jax_enable_x64', True), or"
                " give and compute float32."
            )


def _given(
    program: torch.export.ExportedProgram, spec: Any, written: Mapping[str, str], value: Any
) -> Range:
    """The range of an argument, parameter, buffer or constant."""
    if not isinstance(value, torch.Tensor):
        return SIZE
    if spec is not None and spec.kind is InputKind.CONSTANT_TENSOR:
        constant = program.constants[str(spec.target)]
        if constant.dtype in _WHOLE and not constant.is_meta and constant.layout is torch.strided:
            exact = to_numpy(constant)
            return (int(exact.min()), int(exact.max())) if exact.size else (0, 0)
    if spec is not None and spec.target in written:
        return _COUNTED
    return _of_dtype(value.dtype, INT32)


def _computed(known: Mapping[torch.fx.Node, Any], node: torch.fx.Node) -> Any:
    """The range of what a node computes: one for a tensor, a tuple for several."""
    value = node.meta.get("val")

    def range_of(argument: Any) -> Range | None:
        if isinstance(argument, torch.fx.Node):
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                found = known.get(argument, ALL)
                return found if _is_range(found) else hull(*found)
            return _number(value)
        if isinstance(argument, list | tuple):
            return hull(*map(range_of, argument))
        return _number(argument)

    if python_function(node.target) is not None:
        if isinstance(value, torch.Tensor):  # picked from a tuple
            source: Any = node.args[0]
            found = known.get(source, ALL)
            picked = found if _is_range(found) else found[node.args[1]]
            return _of_dtype(value.dtype, picked)
        return SIZE
    rule = rule_of(str(node.target).removeprefix("aten."))
    results = _leaves(value)
    made: Any = INDEX if _with_indices(results) else ALL
    if rule is not None:
        try:
            made = rule(node, range_of)
        except (IndexError, TypeError, KeyError):  # an overload with other arguments
            made = ALL
    ranges = [_of_dtype(x.dtype, r) if isinstance(x, torch.Tensor) else SIZE
              for x, r in zip(results, _leaves(made, len(results)), strict=True)]  # fmt: skip
    return tuple(ranges) if isinstance(value, list | tuple) else (ranges or [SIZE])[0]


def _with_indices(results: list[Any]) -> bool:
    """Whether whole numbers are beside a result of floats (pooling): they say where it is from."""
    first = results[0] if len(results) > 1 else None
    return isinstance(first, torch.Tensor) and first.is_floating_point()


def _number(value: Any) -> Range | None:
    if isinstance(value, bool | int):
        return int(value), int(value)
    if isinstance(value, torch.SymInt):
        return SIZE
    return None if value is None else ALL


def _of_dtype(dtype: torch.dtype, wide: Range) -> Range:
    """The range of a dtype; of the 64-bit ones, what is said of the value."""
    if dtype in _WHOLE:
        return wide if wide[0] >= ALL[0] and wide[1] <= ALL[1] else ALL
    if dtype is torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return ALL
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _is_range(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(x, int) for x in value)


def _leaves(value: Any, count: int | None = None) -> list[Any]:
    if count is not None:
        return [value] * count if _is_range(value) else list(value)
    return list(value) if isinstance(value, list | tuple) else [value]


def _wide_within(node: torch.fx.Node) -> bool:
    """Whether a graph that a node runs computes in 64 bits: of loops no ranges are known."""
    for source in node.all_input_nodes:
        if source.op != "get_attr":
            continue
        body: Any = getattr(node.graph.owning_module, str(source.target))
        ops = [inner for inner in body.graph.nodes if inner.op == "call_function"]
        values = [x for inner in ops for x in _leaves(inner.meta.get("val"))]
        if any(isinstance(x, torch.Tensor) and x.dtype in _WIDE for x in values):
            return True
    return False


def _of_bits(node: torch.fx.Node) -> bool:
    """Whether the bits of 64 are read as another dtype."""
    values = (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes))
    return str(node.target) == "aten.view.dtype" and any(_dtype(x) in _WIDE for x in values)


def _with_large_number(node: torch.fx.Node) -> bool:
    """Whether whole numbers of 64 bits meet a number that 32 bits do not hold."""
    if operator_name(node) not in _ARITHMETIC:
        return False
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int)]
    if all(INT32[0] <= x <= INT32[1] for x in numbers):
        return False
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return any(isinstance(x, torch.Tensor) and x.dtype in _WHOLE for x in values)


def _dtype(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_wide(value: Any, known: Range) -> bool:
    if _dtype(value) not in _WIDE:
        return False
    return value.dtype in WIDE_FLOATS or known[0] < INT32[0] or known[1] > INT32[1]
