"""Which operators of a graph write, and into what."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram


def name_all_users(program: ExportedProgram) -> None:
    """Note all users of each value: torch.export forgets some of what a no_grad region reads too.

    Args:
        program: as traced; changed in place.
    """
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            for node in graph_module.graph.nodes:
                for given in node.all_input_nodes:
                    given.users.setdefault(node)


def writes(node: torch.fx.Node) -> bool:
    """Whether an operator writes into an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def aliases(node: torch.fx.Node) -> bool:
    """Whether what an operator returns may be in the memory of its first argument."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    if not arguments or arguments[0].alias_info is None or not node.args:
        return False
    if str(node.target).startswith("aten.to."):
        named = dict(zip((argument.name for argument in arguments), node.args, strict=False))
        values = [getattr(x, "meta", {}).get("val") for x in (node.args[0], node)]
        kinds = {getattr(value, "dtype", None) for value in values}
        return len(kinds) == 1 and not {**named, **node.kwargs}.get("copy", False)
    return True


def memory_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The value whose memory an in-place operator writes to, last, and the views that led to it."""
    found: list[torch.fx.Node] = []
    current: Any = node.args[0] if node.args else None
    while isinstance(current, torch.fx.Node):
        found.append(current)
        current = current.args[0] if aliases(current) else None
    return found
