"""Inference mode as a region under `no_grad`, in which nothing switches gradients on again.

torch.export keeps no trace of it. What PyTorch computes there has no gradient, whatever
`enable_grad` says.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_bridge.export.stand_ins.replacement import StandIn


def inference_as_no_grad() -> tuple[StandIn, ...]:
    """What stands for inference mode and for what switches gradients, in one export."""
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
