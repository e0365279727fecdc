"""Mixtures of transformers that go through no interface of its, while a module is exported.

Switch Transformers loops over the experts that some token has chosen, JetMoE cuts rows at counts
that it reads: both depend on data. The same is written here in the operators of
`experts.py`. Switch Transformers' router casts its own module to float32 when it is
called, which is written as a cast of what it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from torch_bridge.export.stand_ins.replacement import StandIn, imported, replaced


_SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers"
_JETMOE = "transformers.models.jetmoe.modeling_jetmoe"


@contextlib.contextmanager
def older_experts() -> Iterator[None]:
    """While a module is exported: these mixtures are this package's operators."""
    wanted = (
        (_SWITCH, "SwitchTransformersTop1Router", "forward", _switch_router),
        (_SWITCH, "SwitchTransformersExperts", "forward", _switch_experts),
        (_JETMOE, "JetMoeTopKGating", "forward", _jetmoe_choices),
        (_JETMOE, "JetMoeMoE", "forward", _jetmoe_experts),
        (_JETMOE, "JetMoeMoA", "map", _jetmoe_map),
        (_JETMOE, "JetMoeMoA", "reduce", _jetmoe_reduce),
    )
    chosen: list[StandIn] = []
    for module, name, function, stand_in in wanted:
        owner = imported(module, name)
        if owner is not None and function in vars(owner):
            chosen.append((owner, function, stand_in))
    with replaced(chosen):
        yield


def _mixture(
    x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, num: int,
    expert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Shapes: x `(S, I)`, chosen and gates `(S, K)`; a choice of `num` is no expert."""
    rows, own = torch.ops.torch_bridge.expert_rows(x, chosen)
    made: torch.Tensor = torch.ops.torch_bridge.expert_sum(expert(rows, own), x, chosen, gates, num)
    return made


def _dot(rows: torch.Tensor, weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.ops.torch_bridge.expert_dot(rows, weight, own, 2)
    return product


def _switch_router(self: Any, hidden_states: torch.Tensor) -> Any:
    """A one-hot choice, cut at the capacity of each row; its chance; the logits."""
    x = hidden_states.to(self.dtype)
    if self.training and self.jitter_noise > 0:  # in place, as there: in float32 experts see it
        x *= torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
    weight, bias = self.classifier.weight, self.classifier.bias
    bias = None if bias is None else bias.to(self.dtype)
    logits = F.linear(x, weight.to(self.dtype), bias)
    chances = logits.softmax(-1).to(hidden_states.dtype)
    chosen = F.one_hot(chances.argmax(-1), self.num_experts)
    within = chosen.cumsum(-2) <= self.expert_capacity
    return chosen * within, chances.max(-1, keepdim=True).values, logits


def _switch_experts(
    self: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor,
    routing_weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Shapes: hidden_states `(S, I)`, selected_experts `(S, 1, E)`: 1 at the expert, if any."""
    num = self.num_experts
    experts = [self[f"expert_{i}"] for i in range(num)]
    wi, wo = (torch.stack([getattr(e, name).weight for e in experts]) for name in ("wi", "wo"))

    def expert(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return _dot(experts[0].dropout(experts[0].act(_dot(rows, wi, own))), wo, own)

    none = selected_experts.sum(-1) == 0  # beyond its expert's capacity
    chosen = selected_experts.argmax(-1).masked_fill(none, num)
    return _mixture(hidden_states, chosen, routing_weights, num, expert)


def _jetmoe_choices(self: Any, hidden_states: torch.Tensor) -> Any:
    """Choices and gates instead of sorted rows and counts; logits are where they were."""
    logits = self.layer(hidden_states).float()
    top, chosen = logits.topk(self.top_k, dim=1)
    return chosen, torch.softmax(top, dim=1).type_as(hidden_states), None, None, logits


def _jetmoe_experts(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, *_ = self.router(x)

    def expert(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        a, b = _dot(rows, self.input_linear.weight, own).chunk(2, dim=-1)
        return _dot(self.activation(a) * b, self.output_linear.weight, own)

    made = _mixture(x, chosen, gates, self.input_linear.num_experts, expert)
    return made.view(layer_input.shape) + self.bias


def _jetmoe_map(self: Any, layer_input: torch.Tensor) -> Any:
    """Every token once for each of its experts, which attend by themselves."""
    rows, length, _ = layer_input.shape
    x = layer_input.reshape(-1, layer_input.shape[-1])
    chosen, gates, *_, logits = self.router(x)
    each, one = x.repeat_interleave(self.top_k, 0), torch.ones_like(gates).reshape(-1, 1)

    def expert(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return _dot(rows, self.input_linear.weight, own)

    made = _mixture(each, chosen.reshape(-1, 1), one, self.num_experts, expert)
    return made.view(rows, length, self.top_k, -1), logits, (chosen, gates)


def _jetmoe_reduce(self: Any, layer_input: torch.Tensor, topo_info: Any) -> torch.Tensor:
    rows, length, k, width = layer_input.shape
    chosen, gates = (x.reshape(-1, 1) for x in topo_info)

    def expert(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return _dot(rows, self.output_linear.weight, own)

    made = _mixture(layer_input.reshape(-1, width), chosen, gates, self.num_experts, expert)
    return made.view(rows, length, k, self.input_size).sum(2) + self.bias
