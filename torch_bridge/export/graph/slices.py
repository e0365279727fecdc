"""Slices in one spelling: equal blocks may slice alike and be traced differently.

A size that becomes fixed while a module is traced stands in the first block as a symbol and in
later ones as a number, and `x[..., :n]` there has slices of whole dims as well.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.export.shapes import as_dim


_SLICE, _ALIAS = "aten.slice.Tensor", "aten.alias.default"


def tidy_slices(graph_module: torch.fx.GraphModule) -> None:
    """Remove slices that take everything, and write the others with numbers where sizes are fixed.

    Args:
        graph_module: as traced; changed in place.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) not in (_SLICE, _ALIAS):
            continue
        source, dim, start, end, step = _arguments(node)
        # An alias is what PyTorch makes of a slice that it knows to be whole.
        whole = str(node.target) == _ALIAS or (_shape(node) == _shape(source) and step == 1)
        if whole and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif str(node.target) == _SLICE:
            node.args, node.kwargs = (source, dim, start, end, step), {}
    graph_module.recompile()


def _arguments(node: torch.fx.Node) -> tuple[Any, ...]:
    names = ("self", "dim", "start", "end", "step")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    start, end = _number(given.get("start")), _number(given.get("end"))
    return (
        given["self"],
        given.get("dim", 0),
        0 if start is None else start,
        end,
        given.get("step", 1),
    )


def _number(value: Any) -> Any:
    """A size as a number, if it is fixed by now."""
    if not isinstance(value, torch.fx.Node):
        return value
    size = as_dim(value.meta["val"])
    return size if isinstance(size, int) else value


def _shape(node: torch.fx.Node) -> list[Any]:
    return [as_dim(size) for size in node.meta["val"].shape]
