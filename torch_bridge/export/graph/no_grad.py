"""`no_grad` regions: their contents in the graph around them, with the gradient cut by `detach`.

Decomposing would inline a region and forget that no gradient passes through it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram

from torch_bridge.export.graph.memory import read_by, writes, written_by
from torch_bridge.export.graph.sides import mark_as_without_gradient


def inline_no_grad(program: ExportedProgram) -> None:
    """Replace every region of a program, in place.

    Args:
        program: as traced, before it is decomposed.
    """
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            _inline_grad_regions(graph_module)


def _inline_grad_regions(graph_module: torch.fx.GraphModule) -> None:
    graph = graph_module.graph
    # Regions may hold regions: go on until none is left.
    while regions := [n for n in graph.nodes if _is_region(n)]:
        for node in regions:
            _inline_one(graph_module, node)
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _is_region(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.higher_order.wrap_with_set_grad_enabled


def _inline_one(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    graph = graph_module.graph
    enabled, body_ref, *operands = node.args
    body = graph_module.get_submodule(str(body_ref.target))  # type: ignore[union-attr]
    assert isinstance(body, torch.fx.GraphModule)
    mapping: dict[torch.fx.Node, Any] = {}
    results: Any = None
    remaining = iter(operands)
    made: set[Any] = set()  # by the region itself: without gradient
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                mapping[inner] = next(remaining)
            elif inner.op == "output":
                results = torch.fx.map_arg(inner.args[0], lambda n: mapping[n])
            elif inner.op == "get_attr":
                mapping[inner] = _adopt(graph_module, body, inner)
                if not enabled:
                    _mark_bodies(getattr(graph_module, mapping[inner].target))
            else:
                copied = graph.node_copy(inner, lambda n: mapping[n])
                mapping[inner] = copied
                if not enabled:
                    _detach_what_is_written(graph, copied)
                    mark_as_without_gradient(copied)
                    made.add(copied)
        if not enabled:
            results = tuple(_leaving(graph, r, made) for r in results)
    for user in list(node.users):  # regions return tuples, read with getitem
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _adopt(graph_module: torch.fx.GraphModule, body: torch.fx.GraphModule, inner: Any) -> Any:
    """Copy an attribute (a nested region's body, a constant) of an inlined body to the outside."""
    name = f"_inlined_{len(list(graph_module.named_children()))}_{inner.target}".replace(".", "_")
    value = body
    for word in str(inner.target).split("."):
        value = getattr(value, word)
    setattr(graph_module, name, value)
    made = graph_module.graph.get_attr(name)
    made.meta = dict(inner.meta)
    return made


def _mark_bodies(body: Any) -> None:
    """Note of all operators of a body within `no_grad`, of `torch.autocast` say, that they are."""
    if isinstance(body, torch.fx.GraphModule):
        for graph_module in body.modules():
            if isinstance(graph_module, torch.fx.GraphModule):
                for node in graph_module.graph.nodes:
                    if node.op == "call_function":
                        mark_as_without_gradient(node)


def _leaving(graph: torch.fx.Graph, value: Any, made: set[Any]) -> Any:
    """What the graph around a region reads of it: without a gradient, but for what came in.

    `.float()` of a float32 tensor is that tensor. torch.export then takes all that is done with it
    later, outside of the region too, for uses of what the operator returned.
    """
    found, written = value, None
    while found in made and (given := _returned_argument(found)) is not None:
        written = written or (found if writes(found) else None)  # later uses are those of a write
        found = given
    return _detached(graph, value) if found in made else written or found


def _returned_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of an operator that, called as it was, returns that very tensor."""
    number = None
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if written := written_by(node):
        return written[0]
    if node.target is operator.getitem:
        node, number = node.args  # type: ignore[assignment]
    # (What holds graphs of its own, a branch or a loop, returns none of its arguments.)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if not any(isinstance(arg.meta.get("val"), torch.Tensor) for arg in node.all_input_nodes):
        return None  # a new tensor, of a size that may be free (`torch.zeros(x.shape[0], 3)`)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    with torch.no_grad():
        out = node.target(*args, **kwargs)
    out = out if number is None else out[number]
    same = (arg for arg in node.all_input_nodes if arg.meta.get("val") is out)
    return next(same, None)


def _detached(graph: torch.fx.Graph, value: Any) -> Any:
    if not isinstance(value, torch.fx.Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return value
    made = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta = dict(value.meta)
    return made


def _detach_what_is_written(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Inside no_grad, what an in-place operator writes into a tensor carries no gradient."""
    if not writes(node):
        return
    into = written_by(node)
    with graph.inserting_before(node):
        for given in read_by(node):
            if given not in into:  # (`x.add_(x)`: refused where x has a gradient that is read)
                node.replace_input_with(given, _detached(graph, given))
