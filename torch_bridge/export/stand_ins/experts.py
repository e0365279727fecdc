"""Mixtures of experts as a few operators, while a module is exported.

transformers hands every mixture of experts to one interface, by the tokens, the experts that each
has chosen and their weights. What a graph shows of the usual implementations (sorting, counting,
products, sorting back; a loop over experts) depends on data or on the version; so another
implementation stands there, of which `mixtures.py` finds the function of the experts again.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fzero.errors import warn
from torch_bridge.export.stand_ins.capacity import within_capacity
from torch_bridge.export.stand_ins.replacement import (
    StandIn,
    imported,
    replaced,
    transformers_modules,
)


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
# Implementations of the same numbers; others (8 bits) have weights of their own kind.
_SAME = (None, "eager", "grouped_mm", "batched_mm")
_INTERFACE = "transformers.integrations.moe"
_BALANCE = "load_balancing_loss_func"
# Arguments of Switch Transformers' loss, a mean over rows of what each row gives by itself: over
# several devices it is what it was.
_BY_ROWS = ["router_probs", "expert_indices"]


class OwnLossWarning(UserWarning):
    """A loss of a module's own that is not the same on several devices as on one."""


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_bridge::{name}", shape, lib=_LIBRARY)


def _order(chosen: torch.Tensor) -> torch.Tensor:
    return torch.sort(chosen.reshape(-1), stable=True)[1]


def _rows(x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = _order(chosen)
    return x[order // chosen.shape[-1]], chosen.reshape(-1)[order].to(torch.int32)


def _rows_shape(x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num = chosen.shape[0] * chosen.shape[1]
    return x.new_empty((num, x.shape[-1])), chosen.new_empty((num,), dtype=torch.int32)


def _dot(rows: torch.Tensor, weight: torch.Tensor, own: torch.Tensor, into: int) -> torch.Tensor:
    matrices = weight if into == 1 else weight.mT
    out = rows.new_zeros((rows.shape[0], matrices.shape[-1]), dtype=weight.dtype)
    for number, matrix in enumerate(matrices):
        out[own == number] = rows[own == number].to(weight.dtype) @ matrix
    return out


def _dot_shape(rows: torch.Tensor, weight: torch.Tensor, own: Any, into: int) -> torch.Tensor:
    return weight.new_empty((rows.shape[0], weight.shape[3 - into]))


def _each(values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return values[own.clamp(max=values.shape[0] - 1)]


def _each_shape(values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return values.new_empty((own.shape[0], *values.shape[1:]))


def _sum(
    rows: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, num: int
) -> torch.Tensor:
    order = _order(chosen)
    weighted = rows * gates.reshape(-1)[order][:, None]
    weighted = weighted * (chosen.reshape(-1)[order] < num)[:, None]
    out = torch.empty_like(weighted)
    out[order] = weighted
    return out.reshape(*chosen.shape, -1).sum(1).to(x.dtype)


def _sum_shape(
    rows: torch.Tensor, x: torch.Tensor, chosen: Any, gates: Any, num: int
) -> torch.Tensor:
    return x.new_empty((x.shape[0], rows.shape[-1]))


def _sum_within(
    rows: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, num: int,
    capacity: float, count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    of = chosen.reshape(-1)
    ones = torch.nn.functional.one_hot(of.clamp(0, num), num + 1)
    position = torch.gather(ones.cumsum(0) - ones, 1, of.clamp(0, num)[:, None])[:, 0]
    kept = (of < num) & (position < math.ceil(capacity * of.shape[0] / num))
    within = torch.where(kept.reshape(chosen.shape), gates, 0.0)
    more = torch.stack([(of < num).sum() - kept.sum(), torch.tensor(of.shape[0])])
    return _sum(rows, x, chosen, within, num), count + more.to(count.dtype)


def _sum_within_shape(
    rows: torch.Tensor, x: torch.Tensor, chosen: Any, gates: Any, num: int, capacity: float,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _sum_shape(rows, x, chosen, gates, num), count.new_empty(count.shape)


def _balance(logits: Sequence[torch.Tensor], k: int, counted: torch.Tensor | None) -> torch.Tensor:
    chances = torch.cat([layer.float() for layer in logits]).softmax(-1)
    ones = torch.ones(logits[0].shape[0]) if counted is None else counted.reshape(-1).float()
    weight = ones.repeat(len(logits))[:, None]
    used = torch.zeros_like(chances).scatter(1, chances.topk(k)[1], 1.0)
    shares = (used * weight).sum(0) * (chances * weight).sum(0)
    return chances.shape[-1] * shares.sum() / weight.sum() ** 2


def _balance_shape(logits: Sequence[torch.Tensor], k: int, counted: Any) -> torch.Tensor:
    return logits[0].new_empty((), dtype=torch.float32)


_define("expert_rows(Tensor x, Tensor chosen) -> (Tensor, Tensor)", _rows, _rows_shape)
_define("expert_dot(Tensor rows, Tensor weight, Tensor own, int into) -> Tensor", _dot, _dot_shape)
_define("expert_each(Tensor values, Tensor own) -> Tensor", _each, _each_shape)
_define(
    "expert_sum(Tensor rows, Tensor x, Tensor chosen, Tensor gates, int num) -> Tensor",
    _sum,
    _sum_shape,
)
_define(
    "expert_sum_within(Tensor rows, Tensor x, Tensor chosen, Tensor gates, int num, float capacity,"
    " Tensor count) -> (Tensor, Tensor)",
    _sum_within,
    _sum_within_shape,
)
_define("balance_loss(Tensor[] logits, int k, Tensor? counted) -> Tensor", _balance, _balance_shape)


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers' own implementations compute, with the attributes that they read."""
    ops, gated = torch.ops.torch_bridge, getattr(self, "has_gate", True)
    rows, own = ops.expert_rows(hidden_states, top_k_index)

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        into = 1 if getattr(self, "is_transposed", False) else 2
        out = ops.expert_dot(rows, weight, own, into)
        bias = getattr(self, f"{name}_bias") if getattr(self, "has_bias", False) else None
        return out if bias is None else out + ops.expert_each(bias, own)

    hidden = product(rows, "gate_up_proj" if gated else "up_proj")
    out = product(self._apply_gate(hidden) if gated else self.act_fn(hidden), "down_proj")
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    given = out, hidden_states, top_k_index, top_k_weights, self.down_proj.shape[0]
    within = within_capacity(*given) if self.training else None
    return ops.expert_sum(*given) if within is None else within


def _balance_loss(
    gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
) -> Any:
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return 0
    return torch.ops.torch_bridge.balance_loss(list(gate_logits), top_k, attention_mask)


@contextlib.contextmanager
def experts_stand_ins() -> Iterator[None]:
    """While a module is exported: mixtures of transformers are traced as this package's operators.

    So is their load-balancing loss, which is then one over the tokens of all devices.
    """
    chosen: list[StandIn] = []
    found = imported(_INTERFACE, "ExpertsInterface")
    if found is not None:
        given = found.get_interface

        def interface(self: Any, implementation: Any, default: Any) -> Any:
            return _experts if implementation in _SAME else given(self, implementation, default)

        chosen.append((found, "get_interface", interface))
    wanted = list(inspect.signature(_balance_loss).parameters)
    for module in transformers_modules():
        own = vars(module).get(_BALANCE)
        names = [] if own is None else list(inspect.signature(own).parameters)
        if own is not None and names != _BY_ROWS:
            instead = _balance_loss if names == wanted else _said(module.__name__, own)
            chosen.append((module, _BALANCE, instead))
    with replaced(chosen):
        yield


def _said(module: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """A loss that is kept, as its arguments are not those of the usual one: it is no mean."""

    def balance_loss(*args: Any, **kwargs: Any) -> Any:
        warn(
            f"the load-balancing loss of {module} is its own, a product of means over tokens: over"
            " several devices or microbatches it is the mean of each one's, which is not that of"
            " all tokens. For that of all, leave output_router_logits out and add fz.balance_loss"
            " of the router's logits to your loss",
            OwnLossWarning,
        )
        return own(*args, **kwargs)

    return balance_loss
