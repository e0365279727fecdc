"""Writes through `detach`, `.data` and what `no_grad` gives: with PyTorch's gradients, or refused.

Torch's functionalisation keeps one value for a memory, and a detached tensor is made of it anew
after each write: a gradient that was written through the detached one would be cut.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from fzero.errors import ConversionError
from torch_bridge.export.graph.memory import chain, storages, written_by
from torch_bridge.export.graph.sides import (
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
    inputs = set(program.graph_signature.user_inputs)
    for graph_module in program.graph_module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        graph = graph_module.graph
        into = [(node, target) for node in graph.nodes for target in written_by(node)]
        for node, target in into:
            _refuse_values_without_their_gradient(node, target, inputs)
        *_, last = graph.nodes
        apart = [n for n in graph.nodes if detaches(n) and has_gradient(n, inputs, last)]
        if apart:
            _copy(graph, apart, into)
            graph_module.recompile()


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
