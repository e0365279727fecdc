"""Which operators of a graph write, and into what memory.

What shares memory is read from the tensors that torch.export noted for every value: parts (`chunk`,
`unbind`, iteration) and operators that give an argument back (`atleast_2d`) show it as views do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as torch_pytree


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


def forget_failed_calls(program: ExportedProgram) -> None:
    """Take out calls that raised: where a `try` caught that, they stand there without a value.

    Args:
        program: as traced; changed in place.
    """
    graph = program.graph_module.graph
    for node in reversed(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        gives = schema is not None and bool(schema.returns)
        if gives and node.meta.get("val") is None and not node.users:
            graph.erase_node(node)


def writes(node: torch.fx.Node) -> bool:
    """Whether an operator writes into an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors an operator writes into: its first argument mostly, `out=`, or a list's."""
    return [] if not writes(node) else _tensors([one for one, is_out in _given(node) if is_out])


def read_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What an operator is given beside the tensors it writes into."""
    return _tensors([one for one, is_out in _given(node) if not is_out])


def _given(node: torch.fx.Node) -> Iterator[tuple[Any, bool]]:
    """Each argument, and whether it is written to."""
    named = {argument.name: argument for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    given = [*zip(named, node.args, strict=False), *node.kwargs.items()]
    for name, value in given:
        yield value, named[name].is_write


def _tensors(values: Any) -> list[torch.fx.Node]:
    return [one for one in torch_pytree.tree_leaves(values) if isinstance(one, torch.fx.Node)]


def storages(node: torch.fx.Node) -> set[int]:
    """What tells the memory of a value, or of the several that an operator returns."""
    leaves = torch_pytree.tree_leaves(node.meta.get("val"))
    whole = [_unmapped(one) for one in leaves if isinstance(one, torch.Tensor)]
    strided = (one for one in whole if one.layout is torch.strided)
    return {StorageWeakRef(one.untyped_storage()).cdata for one in strided}


def _unmapped(value: torch.Tensor) -> torch.Tensor:
    """What a tensor within `torch.vmap` is a row of: that one has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A value, the views that led to it, and the value whose memory they all are in, last."""
    found, own = [node], storages(node)
    while own:
        given = (one for one in found[-1].all_input_nodes if not own.isdisjoint(storages(one)))
        if (current := next(given, None)) is None:
            break
        found.append(current)
    return found


def memory_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The value whose memory an in-place operator writes to, last, and the views that led to it."""
    found = written_by(node)
    return chain(found[0]) if found else []
