"""What torch knew about every value of an exported graph: module, dtype, symbolic shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch

from torch_bridge.export.interpret import Graph, Op
from torch_bridge.export.mode import Mode
from torch_bridge.lower.refs import refs
from torch_bridge.module.names import Layout


# `x.block@1` is the second call of `x.block`.
_CALL = re.compile(r"@\d+$")
_NO_MODULE = "_empty_nn_module"


@dataclass(frozen=True)
class Known:
    """One value of the graph.

    Attributes:
        modules: `(path, class)` of the modules that were running, outermost first.
        form: dtype and symbolic shape, comparable; nested for operators with several results.
        size: the expression of a size or of a number made from sizes; None: a tensor.
    """

    modules: tuple[tuple[str, str], ...]
    form: Any
    size: Any = None


@dataclass(frozen=True)
class Trace:
    """One mode's graph with what is known about its values.

    Attributes:
        graph: the ops.
        known: by name, every node of the graph.
        leaves: placeholder of each parameter and buffer -> the leaf's name.
        constants: placeholder of each constant -> its value.
        leaf_names: any name of a parameter or buffer -> its leaf's name.
        free_sizes: the symbols that are sizes of an argument.
    """

    graph: Graph
    known: Mapping[str, Known]
    leaves: Mapping[str, str]
    constants: Mapping[str, np.ndarray[Any, Any]]
    leaf_names: Mapping[str, str]
    free_sizes: frozenset[Any]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops that compute tensors; sizes are known from the inputs' shapes."""
        return tuple(s for s in self.graph.ops if self.known[s.name].size is None)

    @cached_property
    def outputs(self) -> frozenset[str]:
        """Names of the values that are returned."""
        return frozenset(refs(self.graph.outputs))

    @cached_property
    def updates(self) -> Mapping[str, Any]:
        """The new value of each buffer that is written, by the leaf's name."""
        return {self.leaf_names[name]: value for name, value in self.graph.mutations.items()}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """For each value, the ops that read it."""
        found: dict[str, list[str]] = {}
        for op in self.ops:
            for name in dict.fromkeys(refs((op.args, op.kwargs))):
                found.setdefault(name, []).append(op.name)
        return {name: tuple(users) for name, users in found.items()}


def trace(program: torch.export.ExportedProgram, mode: Mode, layout: Layout) -> Trace:
    """The trace of one mode.

    Args:
        program: the decomposed program.
        mode: what was made of it.
        layout: the module's leaves.
    """
    known = {node.name: _known(node) for node in program.graph.nodes}
    names = {name: leaf.name for name, leaf in layout.leaf_of().items()}
    leaves = {**mode.params, **mode.buffers}
    free = frozenset(
        size for shape in mode.shapes.shapes for size in shape if isinstance(size, sympy.Symbol)
    )
    return Trace(mode.graph, known, leaves, mode.constants, names, free)


def _known(node: torch.fx.Node) -> Known:
    stack = node.meta.get("nn_module_stack") or {}
    modules = tuple(
        (_CALL.sub("", path), str(kind))
        for path, kind in stack.values()
        if not path.startswith(_NO_MODULE)
    )
    value = node.meta.get("val")
    return Known(modules, _form(value), _size(value))


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(str(_expression(n)) for n in value.shape))
    if isinstance(value, list | tuple):
        return tuple(_form(item) for item in value)
    return str(_expression(value))


def _size(value: Any) -> Any:
    symbolic = torch.SymInt | torch.SymFloat | torch.SymBool
    if isinstance(value, symbolic | int | float | bool):
        return _expression(value)
    return None


def _expression(value: Any) -> Any:
    node = getattr(value, "node", None)
    return value if node is None else node.expr
