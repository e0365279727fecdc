"""Whole numbers of 64 bits and indices outside: refused, or seen; never cut or clamped."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

import torch_bridge as tb
from fzero.errors import ConversionError


class Fn(torch.nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: torch.Tensor) -> Any:
        return self.fn(*args)


BIG = torch.tensor([2**40 + 7, 5])


@pytest.mark.parametrize("given", [BIG, BIG.numpy()], ids=["torch", "numpy"])
def test_numbers_that_do_not_fit_are_refused_by_name(given: Any) -> None:
    converted = tb.convert(Fn(lambda x: x % 1000), torch.tensor([1, 2]), train=False)
    assert converted(torch.tensor([2**31 - 1, -(2**31)])).tolist() == [647, 352]
    with pytest.raises(
        ConversionError, match=r"argument `args\[0\]`: 5 to 1099511627783 do not fit"
    ):
        converted(given)


TABLE = torch.arange(5.0) * 10
READS = {
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i),
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x[:, None])[:, 0],
}


@pytest.mark.parametrize("name", READS)
def test_indices_outside_read_nan(name: str) -> None:
    converted = tb.convert(Fn(READS[name]), TABLE, torch.tensor([0, 1]), train=False)
    found = np.asarray(converted(TABLE, torch.tensor([4, 5])))
    assert found[0] == 40
    assert np.isnan(found[1])
    below = np.asarray(converted(TABLE, torch.tensor([1, -1])))
    assert below[0] == 10
    # Only `x[i]` counts from the end, as in torch.
    assert below[1] == 40 if name == "index" else np.isnan(below[1])


def test_gradients_of_what_is_inside_stay() -> None:
    converted = tb.convert(Fn(READS["gather"]), TABLE, torch.tensor([0, 1]), train=False)
    index = np.asarray([4, 9])
    slopes = jax.grad(lambda x: converted(x, index)[0])(TABLE.numpy())
    assert slopes.tolist() == [0, 0, 0, 0, 1]
