"""What gradients reach in a module's graph, from its outputs.

PyTorch gives other parameters none, and its optimizers then leave them alone, weight decay
included. In JAX their gradient is zero, and decay would move them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from torch_bridge.export.interpret import Graph, Op
from torch_bridge.export.mode import Mode
from torch_bridge.lower.refs import refs


# Operators that PyTorch sends no gradient through: what they return has none.
_STOPS = re.compile(
    r"aten\.(all|any|arg(max|min|sort)|bincount|bitwise_\w+|bucketize|detach|eq|floor_divide|g[et]"
    r"|is(finite|inf|nan)|l[et]|logical_\w+|ne|new_\w+|nonzero_static|one_hot|searchsorted"
    r"|(empty|full|ones|rand|randint|randn|zeros)_like"
    r"|special_(airy_ai|\w*bessel_\w+|\w+_polynomial_\w))\."
)
_CASTS = ("aten._to_copy.", "aten.to.", "prims.convert_element_type.")


def reached_params(mode: Mode, outputs: Sequence[Any]) -> set[str]:
    """Names of the module's leaves that gradients of outputs of a graph reach, frozen ones too."""
    return {mode.params[n] for n in _reached_from(mode.graph, outputs) if n in mode.params}


def _reached_from(graph: Graph, outputs: Sequence[Any]) -> set[str]:
    """All values that outputs depend on with nothing between that stops gradients."""
    needed = set(refs(list(outputs)))
    for op in reversed(graph.ops):
        if op.name in needed and not _stops(op):
            needed.update(refs(op.args))
            needed.update(refs(op.kwargs))
    return needed


def _stops(op: Op) -> bool:
    """Whether what an op returns has no gradient: comparisons, whole numbers, shapes."""
    if op.operator.startswith(_CASTS):
        kinds = [x for x in (*op.args, *op.kwargs.values()) if isinstance(x, torch.dtype)]
        return any(not (kind.is_floating_point or kind.is_complex) for kind in kinds)
    return _STOPS.match(op.operator) is not None
