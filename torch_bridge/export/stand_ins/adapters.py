"""LoHa and LoKr of PEFT in what torch.export can trace, while a module is exported.

They ask Python whether an adapter counts in this call, and LoHa has the gradient of its weight by
hand, in a `torch.autograd.Function`. (That of convolutions in Tucker form is not the gradient of
its forward, so it stays, and is refused.)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_bridge.export.stand_ins.replacement import StandIn, imported, replaced


_LOHA, _LOKR = "peft.tuners.loha.layer", "peft.tuners.lokr.layer"
# A number is drawn for each call of such a layer: above `module_dropout` the adapter counts.
_LAYERS = ((_LOHA, "LoHaLayer"), (_LOKR, "LoKrLayer"))
_WEIGHT = "make_weight"


@contextlib.contextmanager
def adapter_stand_ins() -> Iterator[None]:
    """While a module is exported: LoHa and LoKr choose with a tensor whether an adapter counts."""
    chosen: list[StandIn] = []
    for module, name in _LAYERS:
        layer = imported(module, name)
        if layer is not None and "forward" in vars(layer):
            chosen.append((layer, "forward", _chosen_by_a_tensor(vars(layer)["forward"])))
    if imported(_LOHA, _WEIGHT) is not None:
        chosen.append((sys.modules[_LOHA], _WEIGHT, _weight))
    with replaced(chosen):
        yield


def _weight(
    w1a: torch.Tensor, w1b: torch.Tensor, w2a: torch.Tensor, w2b: torch.Tensor, scale: Any
) -> torch.Tensor:
    return ((w1a @ w1b) * (w2a @ w2b)) * scale


def _chosen_by_a_tensor(own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.training or self.disable_adapters or self.merged:  # nothing is drawn then
            plain: torch.Tensor = own(self, x, *args, **kwargs)
            return plain
        result = self.base_layer(x, *args, **kwargs)
        for adapter in self.active_adapters:
            if adapter not in self._available_adapters:
                continue
            added = self._get_delta_activations(adapter, x, *args, **kwargs)
            share = self.module_dropout[adapter]
            if share > 0:
                added = torch.where(torch.rand(1) > share, added, torch.zeros_like(added))
            result = result + added
        whole: torch.Tensor = result.to(x.dtype)
        return whole

    return forward
