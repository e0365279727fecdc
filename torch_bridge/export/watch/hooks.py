"""Gradients that PyTorch changes on their way: hooks.

torch.export keeps operators only. A hook that scales or masks a gradient would be gone, so it is
refused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from fzero.errors import ConversionError


_REMEDY = (
    "torch.export would leave it out, and gradients in JAX would silently differ. Scale or mask"
    " gradients in the optimizer (optax.masked, optax.scale), freeze with requires_grad=False, or"
    " write it as a torch.autograd.Function with a rule (torch_bridge.register_function)"
)


def refuse_hooks(module: torch.nn.Module) -> None:
    """Refuse hooks on the gradients of a module, its submodules and its parameters.

    Raises:
        ConversionError: says what has them.
    """
    found = [
        f"submodule `{path or '(root)'}` has a backward hook"
        for path, m in module.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    ]
    found += [
        f"parameter `{name}` has a gradient hook"
        for name, p in module.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        found.append("every module has a backward hook (register_module_full_backward_hook)")
    if found:
        shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise ConversionError(f"{shown}. {_REMEDY}")


@contextlib.contextmanager
def watch_gradients() -> Iterator[None]:
    """While a module is exported: hooks on tensors raise."""
    register = torch.Tensor.register_hook
    exporting = threading.get_ident()

    def refuse(self: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() != exporting:  # another thread trains meanwhile
            return register(self, hook)  # type: ignore[no-untyped-call]
        frame = sys._getframe(1)
        raise ConversionError(
            f"the forward registers a gradient hook (Tensor.register_hook).\n  at: File"
            f' "{frame.f_code.co_filename}", line {frame.f_lineno}\n  {_REMEDY}'
        )

    torch.Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]
