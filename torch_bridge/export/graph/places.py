"""Places that a tensor of one number says: `x[i]` reads an array by an array.

torch.export asks the tensor for its number, which no compiled program has. No size depends on it.
Once writes are values (`select_scatter`), what is read so is no view any more, and an index is the
same.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


_NUMBERS = ("aten.item.default", "aten._local_scalar_dense.default")
_READS = {"aten.select.int": (1, 2), "aten.select_scatter.default": (2, 3)}


def places_of_tensors(program: ExportedProgram) -> None:
    """Read and write by the tensor itself where its number says the place, in place.

    Args:
        program: a program in which no operator writes to what another one views.
    """
    graph = program.graph_module.graph
    done = [_by_tensor(node) for node in list(graph.nodes) if str(node.target) in _READS]
    if not any(done):
        return
    for node in reversed(list(graph.nodes)):
        if str(node.target) in _NUMBERS and not node.users:
            graph.erase_node(node)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not free_unbacked_symbols(value.shape):
            # Without the offset in memory, which followed from the number.
            node.meta = {**node.meta, "val": value.new_empty(value.shape)}
            node.meta.pop("unbacked_bindings", None)
    program.graph_module.recompile()


def _by_tensor(node: torch.fx.Node) -> bool:
    """Whether it was one."""
    dim_at, index_at = _READS[str(node.target)]
    if len(node.args) <= index_at:
        return False
    dim, number = node.args[dim_at], node.args[index_at]
    if not isinstance(number, torch.fx.Node) or str(number.target) not in _NUMBERS:
        return False
    x, place = node.args[0], number.args[0]
    assert isinstance(x, torch.fx.Node)
    assert isinstance(place, torch.fx.Node)
    assert isinstance(dim, int)
    if place.meta["val"].dtype is torch.uint8:
        return False  # a byte is a mask in PyTorch, and torch.export takes it for a place
    indices = [None] * (dim % x.meta["val"].ndim) + [place]
    if dim_at == 1:
        node.target, node.args = torch.ops.aten.index.Tensor, (x, indices)
    else:
        node.target, node.args = torch.ops.aten.index_put.default, (x, indices, node.args[1])
    node.kwargs = {}
    return True
