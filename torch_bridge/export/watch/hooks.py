"""Gradients that PyTorch changes on their way: hooks, and regions in inference mode.

torch.export keeps operators only. A hook that scales or masks a gradient would be gone, so it is
refused; a region in inference mode, which has no gradients, is traced as one under `no_grad`.
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
from torch_bridge.export.replacement import StandIn, replaced


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
    """While a module is exported: hooks on tensors raise, inference mode is `no_grad`."""
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
        with replaced(_inference_as_no_grad()):
            yield
    finally:
        torch.Tensor.register_hook = register  # type: ignore[method-assign]


def _inference_as_no_grad() -> tuple[StandIn, ...]:
    """Inference mode as a region under `no_grad`, in which nothing switches gradients on again.

    What PyTorch computes there has no gradient, whatever `enable_grad` says.
    """
    entered: list[tuple[bool, bool]] = []  # for each region: its mode, and what was on before it

    def allowed(mode: bool) -> bool:
        return mode and not (entered and entered[-1][0])

    def enter_region(self: Any) -> None:
        entered.append((self.mode, torch.is_grad_enabled()))
        torch._C._set_grad_enabled(not self.mode)

    def leave_region(self: Any, *_: Any) -> None:
        torch._C._set_grad_enabled(entered.pop()[1])

    def switch_on(self: Any) -> None:
        self.prev = torch.is_grad_enabled()
        torch._C._set_grad_enabled(allowed(True))

    def make(self: Any, mode: bool) -> None:
        self.prev, self.mode = torch.is_grad_enabled(), mode
        torch._C._set_grad_enabled(allowed(mode))

    def switch(self: Any) -> None:
        torch._C._set_grad_enabled(allowed(self.mode))

    return (
        (torch.inference_mode, "__enter__", enter_region),
        (torch.inference_mode, "__exit__", leave_region),
        (torch.enable_grad, "__enter__", switch_on),
        (torch.set_grad_enabled, "__init__", make),
        (torch.set_grad_enabled, "__enter__", switch),
    )
