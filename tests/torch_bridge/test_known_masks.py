"""Indices by masks that a forward makes of sizes: their places are known while it is traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.linspace(-1, 1, 12).reshape(4, 3)
OTHER = torch.linspace(-2, 1, 15).reshape(5, 3)


class Similar(nn.Module):
    """What a function makes of the products of all rows with one another."""

    def __init__(self, picked: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.layer, self.picked = nn.Linear(3, 3), picked

    def forward(self, x: Any) -> Any:
        h = self.layer(x)
        return self.picked(h @ h.T, h.shape[0])


def _in_place(sim: Any, n: int) -> Any:
    mask = torch.ones_like(sim, dtype=torch.bool)
    whole = mask | mask
    mask.fill_diagonal_(False)
    return sim[mask].view(n, -1) * sim[mask ^ whole][:, None]


def _shared(sim: Any, n: int) -> Any:
    mask = torch.tril(sim.new_ones(n, n)).to(torch.bool).T
    for _ in range(24):
        mask = mask & mask
    return sim[mask]


PICKED = {
    "all but oneself": lambda sim, n: sim[~torch.eye(n, dtype=torch.bool)].view(n, -1).logsumexp(1),
    "a triangle": lambda sim, n: sim[torch.triu(torch.ones(n, n, dtype=torch.bool), 1)],
    "written in place": _in_place,
    "of one another, often": _shared,
    "selected": lambda sim, n: torch.masked_select(sim[None], ~torch.eye(n, dtype=torch.bool)),
    "rows": lambda sim, n: sim[(torch.arange(n) % 2 == 0) & (torch.arange(n) > 0)],
    "beside another": lambda sim, n: sim[torch.arange(n) > 1, torch.tensor([1])],
    "of a known one": lambda sim, n: sim[:, torch.arange(n)[torch.arange(n) > 1]],
    "literal": lambda sim, n: sim[:3, :3][:, torch.tensor([True, False, True])],
}
BY_DAY = ("all but oneself", "written in place", "of one another, often", "selected")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.nightly] * (x not in BY_DAY)) for x in PICKED]
)
def test_a_mask_of_sizes_picks_what_it_does_in_torch(name: str) -> None:
    """Of the example's rows, and of others, for which the module is traced again."""
    module = Similar(PICKED[name])
    converted = tb.convert(module, X)
    for rows in (X, OTHER):
        assert tb.parity(module, converted, rows).agrees


def _of_values(sim: Any, n: int) -> Any:
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[0] = sim[0] > 0
    return sim[mask]


def _seen_through_a_view(sim: Any, n: int) -> Any:
    mask = torch.ones(n, n, dtype=torch.bool)
    mask.diagonal().logical_not_()
    return sim[mask]


@pytest.mark.parametrize(
    "picked",
    [
        _of_values,
        _seen_through_a_view,
        lambda sim, n: sim[(sim > 0).to(torch.bool)],
        lambda sim, n: sim[sim.new_full((n, n), sim[0, 0].detach()) > 0],
        lambda sim, n: sim[torch.eye(n, dtype=torch.bool) & (sim > 0)],
    ],
)
def test_a_mask_of_values_is_refused(picked: Any) -> None:
    """So is one that was written to in another way than is followed."""
    with pytest.raises(ConversionError, match="depends on tensor values"):
        tb.convert(Similar(picked), X)


def test_a_size_that_is_fixed_leaves_the_others_free() -> None:
    """A try that fails leaves no marks on the example, by which the next one would go."""

    class EverySecond(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[:, torch.arange(x.shape[1]) % 2 == 0]

    example = X.clone()
    converted = tb.convert(EverySecond(), example)
    assert converted.fixed_dims() == ("`x` dim 1",)
    assert not vars(example)
    assert tb.parity(EverySecond(), converted, OTHER).agrees
