"""What a module is exported with: its example's tensors, and no surroundings that export loses."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_pytree

from fzero.errors import ConversionError
from torch_bridge.module.weights import to_torch


@torch.inference_mode(False)
def example_tensors(example: Any) -> Any:
    """An example with tensors for its arrays, none of which is two arguments.

    torch.export takes one tensor for one argument, wherever it stands.

    Raises:
        ConversionError: a sparse tensor, on which some exports end the process.
    """
    seen: set[int] = set()

    def own(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, torch.Tensor):
            return to_torch(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is not torch.strided:
            raise ConversionError(
                f"argument `{_named(path)}` has layout {leaf.layout}, which JAX has no"
                " form for: give .to_dense(), or indices and values and compute with index_add"
            )
        known = id(leaf) in seen or leaf.is_inference()
        seen.add(id(leaf))
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if known else leaf

    return torch_pytree.tree_map_with_path(own, example)


def _named(path: Any) -> str:
    """A leaf of `(args, kwargs)` as messages name it."""
    return ("args", "kwargs")[path[0].idx] + torch_pytree.keystr(path[1:])


def refuse_untraceable(module: torch.nn.Module) -> None:
    """Refuse what torch.export would leave things out of.

    Raises:
        ConversionError: a scripted or exported module, autocast around the conversion, or tensors
            of inference mode.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConversionError(
            f"a scripted {module.original_name} has no Python that torch.export could trace;"
            " convert the module that was scripted"
        )
    if isinstance(module, torch.fx.GraphModule) and "train" in vars(module):
        raise ConversionError(
            "a module that torch.export made has one mode and no other; convert the module that was"
            " exported"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ConversionError(
            "tb.convert within torch.autocast: torch.export would leave it out. Convert outside of"
            " it, with fz.Plan(precision=...) for the precision; or enter it in the forward"
        )
    named = (*module.named_parameters(), *module.named_buffers())
    made = [(name, tensor) for name, tensor in named if not torch.nn.parameter.is_lazy(tensor)]
    if frozen := [name for name, tensor in made if tensor.is_inference()]:
        raise ConversionError(
            f"`{frozen[0]}` was made within torch.inference_mode, and can have no gradient: make"
            " the module outside of it, or within torch.no_grad"
        )
