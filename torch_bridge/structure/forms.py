"""The canonical form of some ops of a graph: what two blocks must share to be equal.

Values get numbers instead of names, sizes their expressions, parameters the names that they have
within their block. Two blocks with one form compute the same function of their inputs, parameters
and buffers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_bridge.dtypes import canonical
from torch_bridge.export.interpret import Op
from torch_bridge.export.trace import Trace
from torch_bridge.lower.refs import Ref
from torch_bridge.lower.wide_operators import Wide
from torch_bridge.module.names import Leaf


# Numbers that may differ between layers, by operator: where they stand. An array with a number for
# each layer takes their place, which these operators read as they do a number.
SCALARS = {
    "aten.add.Tensor": 1,
    "aten.sub.Tensor": 1,
    "aten.mul.Tensor": 1,
    "aten.mul.Scalar": 1,
    "aten.div.Tensor": 1,
    "aten.div.Scalar": 1,
    "aten.bernoulli.p": 1,
}


@dataclass(frozen=True)
class Form:
    """Some ops of a graph as a function.

    Attributes:
        ops: every op in comparable form.
        inputs: what comes from outside, in the order of first use: `("leaf", role)`,
            `("constant",)` or `("value",)`, each with dtype and shape.
        outside: the name of each input in the graph.
        index: the number of each value that the ops compute.
        updates: buffers that are written: `(role, number of the new value)`.
        leaves: every leaf that belongs to the blocks, used or not, by role, in comparable form.
        scalars: numbers that need not be equal, with the numbers of their ops.
    """

    ops: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outside: tuple[str, ...]
    index: Mapping[str, int]
    updates: tuple[Any, ...]
    leaves: Mapping[str, Any]
    scalars: tuple[tuple[int, float], ...]

    @property
    def body(self) -> Any:
        """What equal layers of a stack have in common."""
        return self.ops, self.inputs, self.updates, dict(self.leaves)


def form_of(trace: Trace, ops: Sequence[Op], owned: Mapping[str, Leaf]) -> Form:
    """The form of some ops.

    Args:
        trace: where they are from.
        ops: the ops, in order.
        owned: the leaves of the blocks that the ops are from, by role.
    """
    index = {op.name: number for number, op in enumerate(ops)}
    role_of = {leaf.name: role for role, leaf in owned.items()}
    inputs: dict[str, int] = {}
    described: list[Any] = []
    scalars: list[tuple[int, float]] = []

    def number_of(name: str) -> int:
        if name not in inputs:
            inputs[name] = len(inputs)
            described.append(_input(trace, role_of, name))
        return inputs[name]

    def arguments(op: Op) -> Any:
        position = SCALARS.get(op.operator, len(op.args))
        if position < len(op.args) and isinstance(op.args[position], float):
            scalars.append((index[op.name], op.args[position]))
            return plain((*op.args[:position], "a number", *op.args[position + 1 :]))
        return plain(op.args)

    def plain(value: Any) -> Any:
        if isinstance(value, Ref):
            known = trace.known[value.name]
            if known.size is not None:
                return ("size", str(known.size))
            if value.name in index:
                return ("own", index[value.name])
            return ("input", number_of(value.name))
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(plain, value))
        if isinstance(value, Mapping):
            return tuple((key, plain(item)) for key, item in value.items())
        return (type(value).__name__, repr(value))

    canonical = tuple(
        (
            op.operator,
            op.fn,
            arguments(op),
            plain(op.kwargs),
            op.draw is not None,
            trace.known[op.name].form,
        )
        for op in ops
    )
    updates = tuple(
        sorted(
            (role_of[leaf], index.get(value.name, -1) if isinstance(value, Ref) else -1)
            for leaf, value in trace.updates.items()
            if leaf in role_of
        )
    )
    leaves = {role: _leaf(leaf) for role, leaf in owned.items()}
    return Form(canonical, tuple(described), tuple(inputs), index, updates, leaves, tuple(scalars))


def _input(trace: Trace, role_of: Mapping[str, str], name: str) -> Any:
    form = trace.known[name].form
    if trace.leaves.get(name) in role_of:
        return ("leaf", role_of[trace.leaves[name]], form)
    if name in trace.constants:
        value = trace.constants[name]
        # What does not fit into 32 bits is no row of a stack, which JAX would cut.
        own = value.tobytes() if canonical(value.dtype) != value.dtype else b""
        return ("constant", value.dtype.name, value.shape, own)
    return ("value", form)


def _leaf(leaf: Leaf) -> Any:
    return (leaf.shape, str(leaf.dtype), leaf.is_param, leaf.persistent, leaf.frozen)


def difference(a: Form, b: Form) -> str:
    """In words, how the second block differs from the first."""
    if a.leaves != b.leaves:
        return _leaf_difference(a.leaves, b.leaves)
    for one, other in zip(a.ops, b.ops, strict=False):
        if one[0] != other[0]:
            return f"it computes {other[0]} where the first has {one[0]}"
        if one[2:4] != other[2:4]:
            return f"{one[0]} has other arguments: {_first(one[2:4], other[2:4])}"
        if one[1] != other[1] and one[5] == other[5]:
            if isinstance(one[1], Wide) or isinstance(other[1], Wide):
                return f"{one[0]} is computed in 64 bits in one of them only"
            return f"{one[0]} has another dtype to begin with"
        if one != other:
            return f"{one[0]} gives {_shown(other[5])} instead of {_shown(one[5])}"
    if len(a.ops) != len(b.ops):
        return f"it has {len(b.ops)} operators instead of {len(a.ops)}"
    for mine, other in zip(a.inputs, b.inputs, strict=False):
        if mine != other:
            return f"it reads {_shown(other[1:])} where the first reads {_shown(mine[1:])}"
    return "they update their buffers differently"


def _leaf_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    for role in [*a, *b]:
        if role not in b:
            return f"it has no `{role}`"
        if role not in a:
            return f"only it has `{role}`"
        if a[role] != b[role]:
            if a[role][0] != b[role][0]:
                return f"`{role}` is {b[role][0]} instead of {a[role][0]}"
            return f"`{role}` has another dtype, or is frozen in one of them only"
    return "their parameters are in another order"


def _first(a: Any, b: Any) -> str:
    """The first place where two nested tuples differ."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        for one, other in zip(a, b, strict=True):
            if one != other:
                return _first(one, other)
    return f"{_shown(b)} instead of {_shown(a)}"


def _shown(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
