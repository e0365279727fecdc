"""The dtype that PyTorch takes where a forward says none, where that is not float32."""

from __future__ import annotations

from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.export.origins import module_path, source_line


def say_default_dtype(graph_module: torch.fx.GraphModule) -> None:
    """Writes the default dtype where a graph makes tensors of it; of whole numbers it is refused.

    Args:
        graph_module: a graph as traced, under the default dtype that it was traced with.

    Raises:
        ConversionError: an operator makes whole numbers floats of the default dtype, which here
            become float32; named with its line.
    """
    default = torch.get_default_dtype()
    if default not in (torch.bfloat16, torch.float16):
        return
    for node in graph_module.graph.nodes:
        made = node.op == "call_function" and _is_of(default, node.meta.get("val"))
        if not made or _says_a_dtype(node):
            continue
        given = [one.meta.get("val") for one in node.all_input_nodes]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if any(one.is_floating_point() or one.is_complex() for one in tensors):
            continue
        if "dtype" in _arguments(node):
            node.kwargs = {**node.kwargs, "dtype": default}
        elif tensors:
            raise ConversionError(
                f"{node.target} in {module_path(node)} ({source_line(node)}) makes {default},"
                " torch's default dtype, of whole numbers, which is float32 in a converted graph:"
                f" write .to({default}) before, or torch.set_default_dtype(torch.float32) around"
                " tb.convert"
            )
    graph_module.recompile()


def _is_of(dtype: torch.dtype, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _arguments(node: torch.fx.Node) -> list[str]:
    schema = getattr(node.target, "_schema", None)
    return [argument.name for argument in schema.arguments] if schema else []


def _says_a_dtype(node: torch.fx.Node) -> bool:
    given = dict(zip(_arguments(node), node.args, strict=False)) | dict(node.kwargs)
    return given.get("dtype") is not None
