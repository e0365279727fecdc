"""Mixtures of transformers that go through no interface: Switch Transformers and JetMoE."""

from __future__ import annotations

import itertools
import types
from typing import Any

import pytest
import torch
import transformers
from parity import check_parity
from torch import nn
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoA, JetMoeMoE
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

from torch_bridge.export.stand_ins.older_experts import _switch_router


WIDTH, EXPERTS = 8, 4
JETMOE = transformers.JetMoeConfig(
    hidden_size=WIDTH, intermediate_size=6, num_local_experts=EXPERTS, num_experts_per_tok=2,
    kv_channels=4, num_key_value_heads=2,
)  # fmt: skip


class Attention(nn.Module):
    """As JetMoE's attention: experts make each query, and later take what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = JetMoeMoA(JETMOE)

    def forward(self, x: torch.Tensor) -> Any:
        queries, logits, chosen = self.experts.map(x)
        return self.experts.reduce(torch.tanh(queries), chosen), logits


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def rows(number: int) -> torch.Tensor:
    return torch.randn(number, 6, WIDTH, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("capacity", [2, 6])
def test_switch_transformers(capacity: int) -> None:
    config = transformers.SwitchTransformersConfig(
        d_model=WIDTH, d_ff=6, num_experts=EXPERTS, expert_capacity=capacity, dropout_rate=0.0,
        router_jitter_noise=0.0,
    )  # fmt: skip
    module = drawn(SwitchTransformersSparseMLP(config))
    left_out = (module(rows(3)) == 0).all(-1).sum()
    assert (left_out > 0) == (capacity < 6)
    check_parity(module, rows(2), other_args=(rows(3),), train=True)


@pytest.mark.parametrize("kind", [Attention, lambda: JetMoeMoE(JETMOE)], ids=["attention", "mlp"])
def test_jetmoe(kind: Any) -> None:
    check_parity(drawn(kind()), rows(2), other_args=(rows(3),), train=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jitter_reaches_experts_in_float32_alone(dtype):
    """As there: it is drawn into the router's own input, which in 16 bits is a copy."""
    router = types.SimpleNamespace(
        dtype=torch.float32, training=True, jitter_noise=0.5, num_experts=3, expert_capacity=4,
        classifier=torch.nn.Linear(4, 3, bias=False),
    )  # fmt: skip
    x = torch.ones(2, 5, 4, dtype=dtype)
    _switch_router(router, x)
    assert bool((x != 1).any()) is (dtype is torch.float32)


@pytest.mark.parametrize("capacity", [None, 0.8])
def test_what_experts_are_traced_as_runs_in_pytorch_as_well(capacity: float | None) -> None:
    """Number 3 is no expert (0 to 2 are), and a capacity leaves out who comes late."""
    ops, num, x = torch.ops.torch_bridge, 3, torch.randn(5, 4)
    chosen = torch.tensor([[0, 1], [1, 3], [2, 1], [1, 0], [3, 1]])
    weight, bias, gates = torch.randn(num, 2, 4), torch.randn(num, 2), torch.rand(5, 2)
    rows, own = ops.expert_rows(x, chosen)
    for into, matrices in ((2, weight), (1, weight.mT.contiguous())):
        made = ops.expert_dot(rows, matrices, own, into) + ops.expert_each(bias, own)
        given, count = (made, x, chosen, gates, num), torch.zeros(2)
        if capacity is None:
            out = ops.expert_sum(*given)
        else:
            out, count = ops.expert_sum_within(*given, capacity, count)
        expected, taken, left_out = torch.zeros(5, 2), [0] * num, 0
        for token, choice in itertools.product(range(5), range(2)):
            expert = int(chosen[token, choice])
            if expert == num:
                continue
            if capacity is not None and taken[expert] == 3:  # 0.8 * 5 * 2 / 3, rounded up
                left_out += 1
                continue
            taken[expert] += 1
            own_value = x[token] @ weight[expert].T + bias[expert]
            expected[token] += gates[token, choice] * own_value
        torch.testing.assert_close(out, expected)
        if capacity is not None:
            assert left_out == 2
            assert count.tolist() == [left_out, chosen.numel()]


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1], [1, 0, 0]])])
def test_a_balance_loss_run_in_pytorch_is_that_of_transformers(mask: Any) -> None:
    logits = tuple(torch.randn(2, 6, EXPERTS).unbind())
    expected = load_balancing_loss_func(logits, EXPERTS, 2, mask)
    found = torch.ops.torch_bridge.balance_loss(list(logits), 2, mask)
    torch.testing.assert_close(found, expected)
