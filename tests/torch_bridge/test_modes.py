"""Where train and eval differ in what operators are told of the mode alone, fewer traces do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


class DropsMore(nn.Module):
    """Attention that drops more from call to call, in whatever mode."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = itertools.count(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = x[None]
        return F.scaled_dot_product_attention(one, one, one, dropout_p=next(self.rates) / 100)[0]


def test_a_rate_that_changes_is_no_mode() -> None:
    with pytest.raises(ConversionError, match="depends on Python values that it changes itself"):
        tb.convert(DropsMore(), X)


class DropsByTurns(nn.Module):
    """Drops in every other call, in whatever mode."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.turns = itertools.cycle((first, not first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=next(self.turns))


class DropsAsRead(nn.Module):
    """Drops at rates that it reads from outside of Python, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.source, sink = os.pipe()
        os.write(sink, b"51" * 9)
        os.close(sink)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(
            x, int(os.read(self.source, 1)) / 10 if self.training else 0.0, self.training
        )


@pytest.mark.parametrize(
    "made",
    [partial(DropsByTurns, True), partial(DropsByTurns, False), DropsAsRead],
    ids=["on", "off", "read"],
)
def test_dropout_by_turns_is_not_taken_for_the_mode(made: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConversionError, match="depends on Python values that it changes itself"):
        tb.convert(made(), X)


class Modes(nn.Module):
    """Another function in each mode, though no operator says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 if self.training else x * 3.0


class Drops(nn.Module):
    """Is told of the mode by three operators.

    In training attention's kernel has another layout, too, dropout another rate, and the batch norm
    counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.norm = 0.5, nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self.rate if self.training else 0.0
        heads = F.dropout(self.norm(x), rate, self.training).unflatten(-1, (2, 2))
        heads = heads.transpose(0, 1)[None]
        found = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=rate)
        return found.transpose(1, 2).contiguous().flatten(-2)[0]


@pytest.mark.parametrize(("module", "traces"), [(nn.Linear(4, 4), 2), (Drops(), 3), (Modes(), 4)])
def test_modes_that_are_alike_are_traced_once_each(
    module: nn.Module, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the trace of one mode is the second call of the other one's."""
    export, count = torch.export.export, itertools.count(1)
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: (next(count), export(*a, **k))[1])
    converted = tb.convert(module, X)
    assert next(count) - 1 == traces
    for train in (True, False)[isinstance(module, Drops) :]:
        with torch.no_grad():
            want = module.train(train)(X)
        found = converted.apply(converted.params, converted.buffers, X.numpy(), train=train).output
        # Sums of four products of size 1, in whatever order each library adds them.
        np.testing.assert_allclose(found, want.numpy(), atol=5e-7)
