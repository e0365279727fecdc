"""`.data`, `.detach()`, `requires_grad` in a forward: what is read, written and set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import check_parity
from torch import nn
from torch.nn import functional as F

import torch_bridge as tb
from fzero.errors import ConversionError


pytestmark = pytest.mark.traced_once

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.run = nn.Linear(4, 4), run
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("seen", torch.ones(4))
        self.norm = nn.BatchNorm1d(4, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x) * self.scale


def weights_that_do_not_train(net: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ (net.part.weight.data * net.scale)


def a_factor_without_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    return y * y.data


def a_buffer(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.seen.data.add_(x.detach().mean(0))
    return net.part(x) * net.seen


def what_only_the_detached_sees(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    z = y.detach()
    z[:, 1:].clamp_(0)
    return z[: y.shape[0]]


def a_value_used_before(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    z = y * 2
    y.detach().clamp_(0)
    return z


def what_has_no_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = net.part(x)
    y.detach().clamp_(0)
    return net.part(y)


def what_an_operator_gives_back(net: Any, x: torch.Tensor) -> torch.Tensor:
    """`.float()` of float32 is the tensor itself, which has its gradient outside of the region."""
    y = net.part(x)
    with torch.no_grad():
        largest = y.float().to(torch.float32).abs().amax()
        both = torch.broadcast_tensors(y, x)
        weight = net.part.weight.type_as(x).abs().mean()
        net.seen.lerp_(torch.atleast_2d(y).mean(0), 0.1)
    return y / largest + both[0].sum() + weight + (x @ net.part.weight).sin()


def what_a_region_computes(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.no_grad():
        z, w = (y * 1).float(), y.view(-1).float()
    return y * z * w.view_as(y)


def what_a_region_makes(net: Any, x: torch.Tensor) -> torch.Tensor:
    """A new tensor of a free size (a mask, a padding, a queue of solutions)."""
    with torch.no_grad():
        z, w = torch.ones(x.shape[0], 4), torch.full((x.shape[0],), 2.0)
        z[:, 1] = x[:, 0]
    return net.part(x) * z + w[:, None]


def what_was_made_before_a_region(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The targets of a DQN, row by row or at once."""
    y = net.part(x)
    rows, like, new = torch.zeros(x.shape[0]), torch.zeros_like(y), y.new_ones(x.shape[0], 4)
    with torch.no_grad():
        rows[:], like[:, 1] = net.part(x).amax(1), y[:, 0]
        for i in range(2):
            new[i] = y[i] * 2
    return y * rows[:, None] + y * like + y * new


def a_region_in_a_region(net: Any, x: torch.Tensor) -> torch.Tensor:
    """An operator with a graph of its own within a region."""
    y = net.part(x)
    with torch.no_grad():
        z = y * 2
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            w = (y * 3).float()
    return y * z * w


def a_branch_in_a_region(net: Any, x: torch.Tensor) -> torch.Tensor:
    """torch.export keeps no trace of the region around it."""
    y = net.part(x)
    with torch.no_grad():
        z = torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v.sin(), (y,))
    return y * z


def regions_in_an_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    """torch.export forgets those that begin there."""
    y = net.part(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        z = y + 1
        with torch.no_grad():
            z = z + y * 2
            with torch.enable_grad():
                z = z * y
        z = z * y
        with torch.inference_mode():
            w = y * 3
    return z + w


def a_buffer_in_an_autocast(net: Any, x: torch.Tensor) -> torch.Tensor:
    """As codebooks are averaged."""
    y = net.part(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        with torch.no_grad():
            net.seen.mul_(0.5).add_(y.mean(0))
        z = y * net.seen
    return z


def averages_over_all_batches(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    return y + net.norm(y)


@pytest.mark.parametrize(
    "run",
    [what_an_operator_gives_back, what_a_region_computes, what_a_region_makes, a_region_in_a_region,
     a_branch_in_a_region, averages_over_all_batches, weights_that_do_not_train,
     a_factor_without_gradient, a_buffer, what_only_the_detached_sees, a_value_used_before,
     regions_in_an_autocast, a_buffer_in_an_autocast,
     what_has_no_gradient, what_was_made_before_a_region],
)  # fmt: skip
def test_as_in_pytorch(run: Any) -> None:
    check_parity(Net(run), X, train=True)


def through_detach(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    y.detach().clamp_(0)
    return y


def through_data(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    y.data[:, 1:].clamp_(0)
    return y


def seen_by_a_view(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    view = y[:, 1:]
    y.detach().clamp_(0)
    return F.pad(view, (1, 0))


@pytest.mark.parametrize("run", [through_detach, through_data, seen_by_a_view])
def test_a_write_that_pytorch_has_no_gradient_of_is_refused(run: Any) -> None:
    with pytest.raises(ConversionError, match=r"clamp_.default in \(root\) writes through .detach"):
        tb.convert(Net(run), X)


def from_within(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y.clamp_(0)
    return y


def from_within_through_data(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.data.clamp_(0)
    return y


def into_what_is_detached_outside(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        y.clamp_(0)
    return y


def into_what_is_detached_within(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = net.part(x).detach()
    return y.clamp_(0)


@pytest.mark.parametrize(
    "run",
    [from_within, from_within_through_data, into_what_is_detached_outside,
     into_what_is_detached_within],
)  # fmt: skip
def test_a_write_that_an_autocast_stands_between_is_refused(run: Any) -> None:
    with pytest.raises(ConversionError, match=r"clamp_.default .*a body of torch.autocast stands"):
        tb.convert(Net(run), X)


def what_had_none_at_first(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(2, 4)
    y[:, 1:] = net.part(x)[:2, 1:]
    with torch.no_grad():
        y[:, 2] = 0.0
    return y


def test_a_write_into_what_a_gradient_was_written_to_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"under torch.no_grad\(\) into a value that has a"):
        tb.convert(Net(what_had_none_at_first), X)


def what_is_filled_after_a_region(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Places for results, made under no_grad: alone, in a list."""
    y = net.part(x)
    with torch.no_grad():
        out, twice = torch.zeros(x.shape[0], 4), y * 2
        both = [x[:, :2] * 1, torch.zeros(x.shape[0], 2)]
    out[:, 1:3] = y[:, :2]
    twice.view(-1, 2, 2)[:, 0] = y[:, 2:]
    both[0].add_(y[:, :2])
    both[1].copy_(y[:, 2:])
    return out + twice + torch.cat(both, 1)


def what_is_written_in_a_region_and_after_it(net: Any, x: torch.Tensor) -> torch.Tensor:
    y, out = net.part(x), torch.zeros(x.shape[0], 4)
    view = out[:, 1:]
    with torch.no_grad():
        out.add_(y)
    out.mul_(y)
    return out + F.pad(view, (1, 0))


def what_goes_on_detached(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Truncated through time: no gradient comes from step to step."""
    state = torch.zeros_like(x)
    for _ in range(2):
        state = torch.tanh(net.part(state + x)).detach()
        state += net.part(x)
        state[:, 1:] = net.part(state).data[:, 1:]
    return state


def what_is_written_in_a_detached_part(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The values are those of the whole as well, which has no gradient."""
    y, whole = net.part(x), torch.zeros_like(x)
    whole.data[:, 3] = 1.0
    part, other = whole[:, 1:].detach(), whole.detach()
    whole += 1
    part += y[:, 1:]
    again = part.detach()
    again[:, :2] = again[:, :2] * 2
    return y * whole + y * other + F.pad(again, (1, 0)) * y


def each_row_of_a_map(net: Any, x: torch.Tensor) -> torch.Tensor:
    def run(row: torch.Tensor) -> torch.Tensor:
        state = (row * 2).detach()
        state += row
        return state

    return torch.vmap(run)(net.part(x))


def a_buffer_by_its_data(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    net.seen.data.mul_(0.5).add_(y.mean(0))
    return y * net.seen


def what_a_region_alone_sees(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Written under no_grad, or through what it made; nothing with a gradient reads it later."""
    y = net.part(x)
    other = y * 3
    with torch.no_grad():
        other.chunk(2, 1)[0].mul_(2)
        made = y * 2
        made.detach().mul_(2)
        largest = other.amax() + made.sum()
    return y * largest


@pytest.mark.parametrize(
    "run",
    [what_is_filled_after_a_region, what_is_written_in_a_region_and_after_it, what_goes_on_detached,
     what_is_written_in_a_detached_part, each_row_of_a_map, a_buffer_by_its_data,
     what_a_region_alone_sees],
)  # fmt: skip
def test_a_write_has_its_gradient_where_it_was_written(run: Any) -> None:
    check_parity(Net(run), X, train=True)


def a_part_of_several(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.no_grad():
        y.chunk(2, 1)[0].clamp_(0)
    return y


def rows_one_by_one(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.no_grad():
        for row in y:
            row.clamp_(0)
    return y


def a_part_of_the_data(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    y.data.split(1, 1)[0].clamp_(0)
    return y


def what_nothing_was_dropped_from(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.part(x)
    with torch.no_grad():
        F.dropout(y, 0.5, False).clamp_(0)
    return y


def what_a_gradient_was_written_to(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x).detach()
    y += net.part(x)
    y.detach().clamp_(0)
    return y


def what_a_detached_one_shares(net: Any, x: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros_like(x)
    part = whole.detach()
    part += net.part(x)
    whole.clamp_(0)
    return part


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (a_part_of_several, "under torch.no_grad"),
        (rows_one_by_one, "under torch.no_grad"),
        (a_part_of_the_data, "through .detach"),
        (what_nothing_was_dropped_from, "under torch.no_grad"),
        (what_a_gradient_was_written_to, "through .detach"),
        (what_a_detached_one_shares, "into what shares its memory"),
    ],
)
def test_values_without_their_gradient_are_refused(run: Any, said: str) -> None:
    with pytest.raises(ConversionError, match=rf"clamp_.default in \(root\) writes {said}"):
        tb.convert(Net(run), X)


class Assigns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.part(x)
        y.data = y.detach().clamp(0)
        return y


class Freezes(Assigns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.requires_grad_(False)
        return self.part(x)


class FreezesOne(Assigns):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.weight.requires_grad = False
        return self.part(x)


@pytest.mark.parametrize(
    ("module", "said", "line"),
    [
        (Assigns, "assigns to .data of a tensor", "y.data = "),
        (Freezes, r"requires_grad=False of a parameter \[4, 4\]", "self.part.requires_grad_"),
        (
            FreezesOne,
            r"requires_grad=False of a parameter \[4, 4\]",
            "self.part.weight.requires_grad",
        ),
    ],
)
def test_what_torch_export_does_not_record_is_refused(module: Any, said: str, line: str) -> None:
    with pytest.raises(ConversionError, match=rf"{said}.*\n  in 1 at: .*\| {line}"):
        tb.convert(nn.Sequential(nn.Identity(), module()), X)


def test_what_requires_a_gradient_already_may_be_told_so() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.part.requires_grad_(True)(x.detach().requires_grad_(True))
        return x * 2

    check_parity(Net(run), X, train=True)
