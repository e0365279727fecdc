"""Writes into fresh tensors become new values, where nothing else can see the difference.

`scores += bias` after `scores = q @ k` needs no decomposing of the whole graph, which takes as long
as tracing it. Everything that is not plainly of this kind (views, buffers, arguments, operators
that may return their input) is left to torch's own functionalisation.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from torch_bridge.lower import find_lowering


# Operators whose result is always memory of its own, whatever their arguments are.
_FRESH = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default", "matmul.default", "mm.default", "bmm.default", "addmm.default",
        "baddbmm.default", "conv1d.default", "conv2d.default", "conv3d.default",
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "rsub.Scalar", "neg.default",
        "embedding.default", "softmax.int", "layer_norm.default", "sqrt.default", "exp.default",
        "tanh.default", "sigmoid.default", "gelu.default", "silu.default", "relu.default",
        "clone.default", "cat.default", "stack.default", "index.Tensor", "where.self",
        "masked_fill.Scalar", "index_put.default", "copy.default", "lift_fresh_copy.default",
        "sum.dim_IntList", "mean.dim", "cumsum.default", "pow.Tensor_Scalar",
        "zeros.default", "ones.default", "full.default", "zeros_like.default", "ones_like.default",
        "empty.memory_format", "empty_like.default", "full_like.default", "new_zeros.default",
        "arange.default", "arange.start", "arange.start_step",
        "topk.default", "sort.default", "max.dim", "min.dim",
    )
)  # fmt: skip


# They return their argument itself if they are not active, although their schema does not say so.
_DROPOUTS = frozenset(
    f"aten.{name}.default"
    for name in ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
)


def remove_hidden_aliases(graph_module: torch.fx.GraphModule) -> None:
    """Remove operators that return their argument itself, in place.

    torch decomposes an inactive dropout to a copy, so that a later write into its result would no
    longer reach the argument as it does in PyTorch.

    Args:
        graph_module: a graph as traced.
    """
    for node in list(graph_module.graph.nodes):
        if _returns_its_argument(node):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def cast_what_is_copied(graph_module: torch.fx.GraphModule) -> None:
    """Give what is copied into a tensor that tensor's dtype, in place.

    `copy_` casts. PyTorch's functionalisation puts the value itself in the place of a buffer that
    it was copied into as a whole: what reads the buffer later would read another dtype.

    Args:
        graph_module: a graph as traced, with those of its branches.
    """
    for child in graph_module.modules():
        if not isinstance(child, torch.fx.GraphModule):
            continue
        for node in list(child.graph.nodes):
            if str(node.target) != "aten.copy_.default":
                continue
            into, value = (argument.meta["val"] for argument in node.args[:2])
            if into.dtype == value.dtype:
                continue
            with child.graph.inserting_before(node):
                cast = child.graph.call_function(
                    torch.ops.aten._to_copy.default, (node.args[1],), {"dtype": into.dtype}
                )
            cast.meta = {**node.meta, "val": value.to(into.dtype)}
            node.replace_input_with(node.args[1], cast)
        child.recompile()


def _returns_its_argument(node: torch.fx.Node) -> bool:
    if str(node.target) == "aten.type_as.default":
        source: Any = node.args[0]
        return bool(source.meta["val"].dtype == node.meta["val"].dtype)
    if str(node.target) not in _DROPOUTS:
        return False
    _, p, train = node.args
    return train is False or bool(p == 0)


def replace_fresh_writes(graph_module: torch.fx.GraphModule) -> None:
    """Replace in-place operators on fresh tensors by their functional forms, in place.

    Args:
        graph_module: a graph as traced; uses after a write refer to the write, as export leaves
            them.
    """
    graph = graph_module.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        functional = _functional_form(node)
        if functional is not None and _is_private(node, order) and _keeps_dtype(node):
            node.target = functional
            # What was `add_` is an operator like any other now, and fresh in turn.
    graph_module.recompile()


def _functional_form(node: torch.fx.Node) -> Any:
    """The operator that returns what this one writes, if there is a lowering for it."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    name = schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None or not name.endswith("_") or name.endswith("__"):
        return None
    # By their arguments: `pow_.Scalar` is `pow.Tensor_Scalar`, and `x.polygamma_(n)` is
    # `polygamma(n, x)`.
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    same = [one for one in overloads if _arguments(one._schema) == _arguments(schema)]
    return next((one for one in same if find_lowering(str(one)) is not None), None)


def _arguments(schema: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema.arguments]


def _is_private(node: torch.fx.Node, order: dict[torch.fx.Node, int]) -> bool:
    """Whether the value written to is fresh, and read before the write only, and never viewed."""
    target = node.args[0] if node.args else None
    if not isinstance(target, torch.fx.Node) or not _is_fresh(target):
        return False
    return all(
        user is node or (order[user] < order[node] and str(user.target) in _FRESH)
        for user in target.users
    )


def _is_fresh(node: torch.fx.Node) -> bool:
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return str(source.target) in _FRESH
    return str(node.target) in _FRESH


# What they return is bool, whatever they are given; written in place it has the target's dtype.
_TRUTHS = tuple(
    f"aten.{name}_."
    for name in ("gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal",
                 "less_equal", "not_equal", "logical_not", "logical_and", "logical_or",
                 "logical_xor")
)  # fmt: skip


def _keeps_dtype(node: torch.fx.Node) -> bool:
    """Whether the functional form gives the dtype that the target has: it may promote."""
    values = [
        a.meta.get("val") if isinstance(a, torch.fx.Node) else a
        for a in (*node.args, *node.kwargs.values())
    ]
    target: Any = values[0]
    if str(node.target).startswith(_TRUTHS) and target.dtype is not torch.bool:
        return False
    for value in values[1:]:
        if isinstance(value, torch.Tensor) and value.dtype != target.dtype:
            return str(node.target).startswith(("aten.masked_fill", "aten.index_put"))
        if isinstance(value, float | complex) and not target.dtype.is_floating_point:
            return False
    return True
