"""What a forward writes in place: values, dtypes and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from parity import check_parity
from torch import nn
from torch.nn import functional as F

import torch_bridge as tb
from fzero.errors import ConversionError


pytestmark = pytest.mark.traced_once


class Fn(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: torch.Tensor) -> Any:
        return self.run(*args)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_comparisons_and_sums_in_place_keep_the_dtype() -> None:
    """As PyTorch's do: the sum of two that are true is 2, there is a negative, 8 bits wrap."""

    def compare(x: torch.Tensor, ids: torch.Tensor) -> Any:
        found = [
            (x * 1).gt_(0), (x * 1).lt_(x * 0.5), (x * 1).ge_(0), (x * 1).le_(0), (x * 1).eq_(0),
            (x * 1).ne_(0), (x * 1).greater_(0), (x * 1).less_equal_(0), (x * 1).not_equal_(0),
            x.detach().clone().logical_not_(), x.detach().clone().logical_and_(x > 0),
            x.detach().clone().logical_or_(x > 1), x.detach().clone().logical_xor_(x > 0),
        ]  # fmt: skip
        part, whole = x * 1, (ids * 1).gt_(2)
        part[1].lt_(0)
        narrow = (ids.to(torch.int8) * 1).add_(ids * 60)
        return [x - y - y for y in found], -part, (x * 1).gt_(0.5).sub_(1) * x, -whole, narrow

    check_parity(Fn(compare), draw(3, 4), torch.arange(5))


def test_diagonals_are_filled_and_have_no_gradient() -> None:
    """Of views as well, of which strides count over other memory; similarities, as in SimCLR."""

    def fill(x: torch.Tensor, cube: torch.Tensor, ids: torch.Tensor) -> Any:
        view = x * 1
        view[1:, 1:4].fill_diagonal_(5.0)
        similar = (x @ x.t()).fill_diagonal_(-1e9).log_softmax(-1)
        wrapped = [(x[:, :3] * 1).fill_diagonal_(2.0, wrap=wrap) for wrap in (False, True)]
        return similar, view, *wrapped, (cube * 1).fill_diagonal_(0.5), ids.fill_diagonal_(2.7)

    check_parity(Fn(fill), draw(8, 5), draw(3, 3, 3), torch.arange(12).reshape(3, 4))


def test_writes_by_strides_have_the_gradient_of_the_write() -> None:
    def write(x: torch.Tensor, src: torch.Tensor) -> Any:
        zeroed, scaled, copied = x * 1, x * 1, x * 1
        zeroed.as_strided((2,), (7,)).zero_()
        scaled.as_strided((2, 2), (5, 1), 3).mul_(3)
        copied.as_strided((2, 2), (5, 1)).copy_(src)
        return zeroed, scaled, copied

    check_parity(Fn(write), draw(4, 5), draw(2, 2, seed=1))


def test_an_operator_in_place_may_take_its_arguments_in_another_order() -> None:
    # `x.T` has the whole program taken apart once more: what is in it has to be well-formed.
    check_parity(Fn(lambda x: (x.abs() + 0.5).polygamma_(1) * x + (x.T - 1).pow_(3).T), draw(3, 4))


def test_a_tensor_of_one_number_is_an_index() -> None:
    """As `x[scores.argmax()]`: no size depends on it, although PyTorch asks it for its number."""

    def read(x: torch.Tensor, i: torch.Tensor) -> Any:
        y = x * 1
        y[i].mul_(2)
        y[i, 1] = y[i, 1] + x[0, 0]
        return x[i], x[:, i], x[i, 1], x[..., i], x[i, i], x[x.sum((1, 2)).argmax()] * x[0], y

    def write(x: torch.Tensor, i: torch.Tensor) -> Any:
        a, b, c, d, e, f = (x * 1 for _ in range(6))
        a[x.sum((1, 2)).argmax()] = 0.0
        b[:, i] = x[:, 0] * 2
        c[i, i] = x[0, 0] * 3
        d[..., i] = x[0, :, 0]
        e[i, ..., i] = x[0, :, 0]
        f[i, 1:3], f[1, i], f[None, i, 0, 2] = x[:1, 1:3], x[0, 0], 5
        return a, b, c, d, e, f

    for run in (read, write):
        converted = check_parity(Fn(run), draw(4, 5, 4), torch.tensor(-2))
        given = draw(4, 5, 4, seed=1), torch.tensor(1)
        check_parity(Fn(run), *given, converted=converted)


def test_what_a_number_of_a_tensor_cannot_say_names_what_to_write() -> None:
    i, x = torch.tensor(1), draw(4, 5)

    def put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[torch.arange(2), i] = 0.0
        return y

    for run in (lambda x, i: x[i : i + 2], lambda x, i: x[torch.arange(2), i]):
        with pytest.raises(ConversionError, match=r"torch\.narrow\(x, 0, i, 2\)"):
            tb.convert(Fn(run), x, i, train=False)
    with pytest.raises(ConversionError, match=r"i\.reshape\(1\)(.|\n)*test_writes\.py"):
        tb.convert(Fn(put), x, i, train=False)


def test_a_byte_is_no_place() -> None:
    """PyTorch takes it for a mask, and torch.export for a place."""

    def put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[i] = 0.0
        return y

    for run in (lambda x, i: x[i], put):
        with pytest.raises(ConversionError, match=r"must not depend on tensor values"):
            tb.convert(Fn(run), draw(4, 5), torch.tensor(1, dtype=torch.uint8), train=False)


@pytest.mark.parametrize("places", [(), (2, 3)], ids=str)
def test_losses_of_each_row_beside_statistics_keep_their_shape(places):
    """A focal loss in a forward with a batch norm, which is written: (rows, ...), then a view."""

    class Focal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3) if not places else nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores, found = self.norm(x), []
            for loss in (F.cross_entropy, F.nll_loss):
                each = loss(scores.log_softmax(1), y, reduction="none").view(x.shape[0], -1)
                found.append(((1 - (-each).exp()) ** 2 * each).mean())
            return torch.stack(found)

    x = torch.linspace(-1, 2, 4 * 3 * math.prod(places)).reshape(4, 3, *places)
    y = torch.arange(4 * math.prod(places)).reshape(4, *places) % 3
    module = Focal()
    converted = tb.convert(module, x, y)
    out = converted.apply(converted.params, converted.buffers, x.numpy(), y.numpy(), train=True)
    np.testing.assert_allclose(out.output, module(x, y).detach(), rtol=1e-5)
