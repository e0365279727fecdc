"""Writes through `detach`, `.data` and what `no_grad` gives: with PyTorch's gradients, or refused.

Torch's functionalisation keeps one value for a memory, and a detached tensor is made of it anew
after each write: a gradient that was written through the detached one would be cut.
"""

from __future__ import annotations

import operator

import torch
from torch.export import ExportedProgram

from fzero.errors import ConversionError
from torch_bridge.export.graph.memory import chain, storages, written_by
from torch_bridge.export.graph.sides import (
    begins,
    detaches,
    has_gradient,
    in_memory,
    is_read,
    is_without_gradient,
    side_of,
    sides_of,
)
from torch_bridge.export.origins import module_path, source_line


def separate_detached(program: ExportedProgram) -> None:
    """Give detached tensors memory of their own where a gradient is written to it, in place.

    Args:
        program: as traced, its regions inlined, before it is decomposed.

    Raises:
        ConversionError: a write changes the values of a tensor whose gradient stays what it was,
            and that is used later: there is no such tensor in JAX.
    """
    _refuse_what_crosses(program)
    inputs, kept = set(program.graph_signature.user_inputs), _buffers(program)
    for graph_module in _in_use(program.graph_module):
        graph = graph_module.graph
        if graph_module is not program.graph_module:  # what a body is given may have a gradient
            given = [node for node in graph.nodes if node.op == "placeholder"]
            inputs = {node.name for node in given if not storages(node) <= kept}
        into = [(node, target) for node in graph.nodes for target in written_by(node)]
        for node, target in into:
            _refuse_values_without_their_gradient(node, target, inputs)
        *_, last = graph.nodes
        apart = [n for n in graph.nodes if detaches(n) and has_gradient(n, inputs, last)]
        if apart:
            _copy(graph, apart, into)
            graph_module.recompile()


def _refuse_what_crosses(program: ExportedProgram) -> None:
    """Refuses such writes where a body of `torch.autocast` has one side of a memory alone."""
    graphs, kept = [one.graph for one in _in_use(program.graph_module)], _buffers(program)
    begun = [
        {own for node in graph.nodes if begins(node) for own in storages(node)} for graph in graphs
    ]
    for number, graph in enumerate(graphs):
        elsewhere = set[int]().union(*(x for i, x in enumerate(begun) if i != number))
        for node in graph.nodes:
            for target in written_by(node):
                if storages(target) <= kept:
                    continue
                passed = chain(target)
                outside = number > 0 and passed[-1].op == "placeholder"
                under = is_without_gradient(node)
                if (outside and (under or any(map(begins, passed)))) or (
                    not under and not elsewhere.isdisjoint(storages(target))
                ):
                    raise ConversionError(
                        f"{node.target} in {module_path(node)} writes {_way(node, target)} a value,"
                        " and a body of torch.autocast stands between the write and that value, so"
                        f" that its gradient would be lost.\n  at: {source_line(node)}\n  Write"
                        " into a copy (.detach().clone()), or on that side of the autocast."
                    )


def _buffers(program: ExportedProgram) -> set[int]:
    """What tells the memory of buffers, which have no gradient to lose."""
    names = program.graph_signature.inputs_to_buffers
    nodes = (node for node in program.graph_module.graph.nodes if node.name in names)
    return {own for node in nodes for own in storages(node)}


def _in_use(root: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """A graph with its bodies, but for those that were inlined."""
    found = [root]
    for node in root.graph.nodes:
        if node.op == "get_attr":
            body = operator.attrgetter(str(node.target))(root)
            found += _in_use(body) if isinstance(body, torch.fx.GraphModule) else []
    return found


def _refuse_values_without_their_gradient(
    node: torch.fx.Node, target: torch.fx.Node, inputs: set[str]
) -> None:
    under = is_without_gradient(node)
    own = None if under else side_of(target)
    memory = storages(target)
    for side in sides_of(target):
        if side is own or not has_gradient(side, inputs, node):
            continue
        if is_read(in_memory(side, memory, side=True), after=node, by_gradients=True):
            raise ConversionError(
                f"{node.target} in {module_path(node)} writes {_way(node, target)} a value that "
                "has a gradient and is used later; torch's gradient would be that of the value "
                f"before the write.\n  at: {source_line(node)}\n  Write into a copy "
                "(.detach().clone()), or compute a new value."
            )


def _way(node: torch.fx.Node, target: torch.fx.Node) -> str:
    if is_without_gradient(node):
        return "under torch.no_grad() into"
    if any(map(detaches, chain(target))):
        return "through .detach(), .data or what torch.no_grad() gave into"
    return "into what shares its memory (.detach(), .data) with"


def _copy(
    graph: torch.fx.Graph,
    apart: list[torch.fx.Node],
    into: list[tuple[torch.fx.Node, torch.fx.Node]],
) -> None:
    """Copy detached tensors, and give values that others write to those that see them.

    Args:
        graph: changed in place.
        apart: the detached tensors, in order.
        into: each operator that writes, with a tensor that it writes into.
    """
    seen = [(node, _where_it_is_seen(node, target, apart)) for node, target in into]
    for node in apart:
        with graph.inserting_after(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        copy.args = (node,)  # its own, too
        for _, pairs in seen:
            for one in pairs:
                one[:] = [copy if given is node else given for given in one]
    for node, pairs in seen:
        with graph.inserting_before(node.next):
            for target, source in pairs:
                values = graph.call_function(torch.ops.aten.detach.default, (source,))
                values.meta = {**node.meta, "val": source.meta["val"]}
                copied = graph.call_function(torch.ops.aten.copy_.default, (target, values))
                copied.meta = {**node.meta, "val": target.meta["val"]}


def _where_it_is_seen(
    node: torch.fx.Node, target: torch.fx.Node, apart: list[torch.fx.Node]
) -> list[list[torch.fx.Node]]:
    """What is given the values of a write, and from where, in order: what the tensor was detached
    from, and then what was detached from that."""
    passed, memory = chain(target), storages(target)
    root, through = passed[-1], [one for one in passed if one in apart]
    found: list[list[torch.fx.Node]] = []
    for one in through:
        kept = root.op != "call_function"  # a buffer's values are read by the next call
        if kept or is_read(in_memory(root, memory, but=one), after=node, by_gradients=False):
            found.append([one.all_input_nodes[0], one])
    for one in apart:
        shares = one < node and one not in through and chain(one)[-1] is root
        if shares and is_read(in_memory(one, memory), after=node, by_gradients=False):
            found.append([one, one.all_input_nodes[0]])
    return found
