"""`no_grad` regions: their contents in the graph around them, with the gradient cut by `detach`.

Decomposing would inline a region and forget that no gradient passes through it. And a write through
`detach` or `.data`, which autograd does not see, would cut the gradient of what it is written into.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram

from fzero.errors import ConversionError
from torch_bridge.export.graph.memory import aliases, memory_of, writes
from torch_bridge.export.origins import module_path, source_line


def inline_no_grad(program: ExportedProgram) -> None:
    """Replace every region of a program, in place.

    Args:
        program: as traced, before it is decomposed.

    Raises:
        ConversionError: a region writes into a value that has a gradient; torch then remembers
            the gradient of the value before.
    """
    inputs = set(program.graph_signature.user_inputs)
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            _inline_grad_regions(graph_module, inputs)


def refuse_detached_writes(program: ExportedProgram) -> None:
    """Refuse writes through `detach` into a value that is used later and has a gradient.

    Args:
        program: as traced, before its regions are inlined: they are made with `detach`.

    Raises:
        ConversionError: there is such a write.
    """
    inputs = set(program.graph_signature.user_inputs)
    for graph_module in program.graph_module.modules():
        if isinstance(graph_module, torch.fx.GraphModule):
            order = {node: number for number, node in enumerate(graph_module.graph.nodes)}
            for node in order:
                if writes(node) and node.target._schema.arguments[0].is_write:
                    _refuse_detached_write(node, inputs, order)


def _refuse_detached_write(
    node: torch.fx.Node, inputs: set[Any], order: dict[torch.fx.Node, int]
) -> None:
    passed = memory_of(node)
    if not any(map(_detaches, passed)) or not _has_gradient(passed[-1], inputs, node):
        return
    seen, pending = set(), [passed[-1]]  # the value and its views, as far as they have a gradient
    while pending:
        current = pending.pop()
        size = isinstance(current.meta.get("val"), int | torch.SymInt)
        if current in seen or _detaches(current) or size:
            continue
        seen.add(current)
        if current is not passed[-1] and order[current] > order[node]:
            raise ConversionError(
                f"{node.target} in {module_path(node)} writes through .detach() or .data into a "
                "value that has a gradient and is used later; torch's gradient would be that of "
                f"the value before the write.\n  at: {source_line(node)}\n  Write into a copy "
                "(.detach().clone()), or compute a new value."
            )
        if current is passed[-1] or aliases(current):
            pending += current.users


def _detaches(node: torch.fx.Node) -> bool:
    return str(node.target) == "aten.detach.default"


def _inline_grad_regions(graph_module: torch.fx.GraphModule, inputs: set[Any]) -> None:
    graph = graph_module.graph
    # Regions may hold regions: go on until none is left.
    while regions := [n for n in graph.nodes if _is_region(n)]:
        for node in regions:
            _inline_one(graph_module, node, inputs)
    for node in [n for n in graph.nodes if n.op == "get_attr" and not n.users]:
        graph.erase_node(node)
    graph.lint()
    graph_module.recompile()


def _is_region(node: torch.fx.Node) -> bool:
    return node.target is torch.ops.higher_order.wrap_with_set_grad_enabled


def _inline_one(graph_module: torch.fx.GraphModule, node: torch.fx.Node, inputs: set[Any]) -> None:
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
            else:
                copied = graph.node_copy(inner, lambda n: mapping[n])
                mapping[inner] = copied
                if not enabled:
                    _detach_written(graph, copied, inputs, made)
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


def _leaving(graph: torch.fx.Graph, value: Any, made: set[Any]) -> Any:
    """What the graph around a region reads of it: without a gradient, but for what came in.

    `.float()` of a float32 tensor is that tensor. torch.export then takes all that is done with it
    later, outside of the region too, for uses of what the operator returned.
    """
    found = value
    while found in made and (given := _returned_argument(found)) is not None:
        found = given
    return _detached(graph, value) if found in made else found


def _returned_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of an operator that, called as it was, returns that very tensor."""
    number = None
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.target is operator.getitem:
        node, number = node.args  # type: ignore[assignment]
    # (What holds graphs of its own, a branch or a loop, returns none of its arguments.)
    if not isinstance(node.target, torch._ops.OpOverload) or writes(node):
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


def _detach_written(
    graph: torch.fx.Graph, node: torch.fx.Node, inputs: set[Any], made: set[Any]
) -> None:
    """Inside no_grad, what an in-place operator writes into a tensor carries no gradient."""
    if not writes(node):
        return
    memory = memory_of(node)
    if memory and memory[-1] not in made and _has_gradient(memory[-1], inputs, node):
        raise ConversionError(
            f"{node.target} in {module_path(node)} writes under torch.no_grad() into a value that "
            "has a gradient; torch's gradient would be that of the value before the write.\n"
            f"  at: {source_line(node)}\n  Write into a copy (.detach().clone()), or compute a new "
            "value."
        )
    with graph.inserting_before(node):
        node.args = (node.args[0], *(_detached(graph, a) for a in node.args[1:]))


def _has_gradient(node: torch.fx.Node, inputs: set[Any], at: torch.fx.Node) -> bool:
    """Whether a parameter or an argument of the module reaches a value by differentiable ops.

    Args:
        node: the value.
        inputs: names of the module's arguments.
        at: an operator; what is written into the value's memory before it counts.
    """
    seen: set[torch.fx.Node] = set()
    pending = [node]
    # A module's own tensors may be written to (what becomes of parameters is decided later).
    if node.op == "placeholder" and node.name not in inputs:
        return False
    while pending:
        current = pending.pop()
        value = current.meta.get("val")
        without = _is_region(current) and not current.args[0]
        number = isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
        if current in seen or _detaches(current) or without or number:
            continue
        seen.add(current)
        pending += _written_before(current, at)
        if _is_new(current):
            continue
        if isinstance(value, torch.Tensor) and not (
            value.is_floating_point() or value.is_complex()
        ):
            continue
        if isinstance(value, torch.Tensor) and current.op == "placeholder":
            differentiable = value.requires_grad or current.name in inputs
            if differentiable:
                return True
        pending.extend(current.all_input_nodes)
    return False


def _is_new(node: torch.fx.Node) -> bool:
    """Whether an operator takes no more than size, dtype and device of what it is given."""
    name = str(node.target)
    return name.startswith("aten.new_") or name.partition("_like.")[0] != name


def _written_before(node: torch.fx.Node, at: torch.fx.Node) -> list[torch.fx.Node]:
    """What operators write into a value, or a view of it, before one of them."""
    found, pending = [], [node]
    while pending:
        for user in pending.pop().users:
            if user < at and memory_of(user)[-1:] == [node]:
                pending += [user] if aliases(user) else []
                found += user.all_input_nodes[1:] if writes(user) else []
    return found
