"""Regions without gradients, as torch.export keeps them.

It keeps no trace of inference mode: that is a region under `no_grad`, in which nothing switches
gradients on again, as what PyTorch computes there has none whatever `enable_grad` says. And it
forgets `no_grad` within `torch.autocast`: it is shown each region with the autocast begun anew in
it, which is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_bridge.export.stand_ins.replacement import StandIn


def regions_without_gradients() -> tuple[StandIn, ...]:
    """What stands for inference mode and for what switches gradients, in one export."""
    entered: list[tuple[bool, bool]] = []  # for each region: its mode, and what was on before it
    casts: list[Any] = []  # that are open
    own: Any = torch.autocast
    enter_cast, leave_cast = own.__enter__, own.__exit__

    def allow(mode: bool) -> None:
        if mode == torch.is_grad_enabled():
            return
        with _entered_and_left():
            for cast in reversed(casts):
                leave_cast(cast, None, None, None)
        torch._C._set_grad_enabled(mode)
        for cast in casts:
            enter_cast(cast)

    def begin_cast(self: Any) -> Any:
        casts.append(self)
        return enter_cast(self)

    def end_cast(self: Any, *error: Any) -> Any:
        casts.pop()
        return leave_cast(self, *error)

    def allowed(mode: bool) -> bool:
        return mode and not (entered and entered[-1][0])

    def enter_region(self: Any) -> None:
        entered.append((self.mode, torch.is_grad_enabled()))
        allow(not self.mode)

    def leave_region(self: Any, *_: Any) -> None:
        allow(entered.pop()[1])

    def switch_on(self: Any) -> None:
        self.prev = torch.is_grad_enabled()
        allow(allowed(True))

    def make(self: Any, mode: bool) -> None:
        self.prev, self.mode = torch.is_grad_enabled(), mode
        allow(allowed(mode))

    def back(self: Any, *_: Any) -> None:
        allow(self.prev)

    def switch(self: Any) -> None:
        allow(allowed(self.mode))

    return (
        (torch.inference_mode, "__enter__", enter_region),
        (torch.inference_mode, "__exit__", leave_region),
        (torch.enable_grad, "__enter__", switch_on),
        (torch.enable_grad, "__exit__", back),
        (torch.set_grad_enabled, "__init__", make),
        (torch.set_grad_enabled, "__enter__", switch),
        (torch.set_grad_enabled, "__exit__", back),
        (torch.autocast, "__enter__", begin_cast),
        (torch.autocast, "__exit__", end_cast),
    )


@contextlib.contextmanager
def _entered_and_left() -> Iterator[None]:
    """What leaves casts that were open when a trace ended says so."""
    try:
        yield
    except IndexError as error:
        raise RuntimeError("autocast must exit where it is entered") from error
