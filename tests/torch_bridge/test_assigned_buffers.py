"""Buffers that a forward assigns anew, in the module itself and in its parts: PyTorch's values."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from fzero import ConversionError


X = torch.arange(12.0).reshape(4, 3) / 7 - 0.5


class Center(nn.Module):
    """What DINO's loss does: a running mean that is no parameter, assigned in a method."""

    def __init__(self, assign: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, y = self.center, x * self.weight
        self.assign(self, y)
        # The old value, where it was read before, and the new one.
        return y - before + 0.5 * self.center


class Part(nn.Module):
    """A module around another, with a buffer that is none."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("none", None)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return self.inner(x) * self.count


def mean(y: torch.Tensor) -> torch.Tensor:
    return y.detach().mean(0)


def plain(self: nn.Module, y: torch.Tensor) -> None:
    with torch.no_grad():
        self.center = self.center * 0.9 + mean(y) * 0.1


def registered(self: nn.Module, y: torch.Tensor) -> None:
    self.register_buffer("center", self.center * 0.9 + mean(y) * 0.1)


def in_the_dict(self: nn.Module, y: torch.Tensor) -> None:
    self._buffers["center"] = self.center * 0.9 + mean(y) * 0.1


def twice_and_in_place(self: nn.Module, y: torch.Tensor) -> None:
    self.center = self.center * 0.9
    self.center += mean(y) * 0.1


def changed_places(self: nn.Module, y: torch.Tensor) -> None:
    self.center, self.other = self.other, self.center


def written_and_changed_places(self: nn.Module, y: torch.Tensor) -> None:
    self.center.add_(mean(y))
    self.center, self.other = self.other, self.center


def to_and_fro(self: nn.Module, y: torch.Tensor) -> None:
    kept = self.center
    self.center = kept + mean(y)
    self.other = self.other + self.center
    self.center = kept


WAYS = [plain, registered, in_the_dict, twice_and_in_place, changed_places,
        written_and_changed_places, to_and_fro]  # fmt: skip


class Beside(nn.Module):
    """Modules that assign in one way each, on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleDict({way.__name__: Center(way) for way in WAYS})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([module(x) for module in self.each.values()])


MADE = {
    **{way.__name__: lambda way=way: Center(way) for way in WAYS},
    "in parts": lambda: Part(Beside()),
    "in parts of parts": lambda: Part(Part(Beside())),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_each_call_finds_what_the_last_one_assigned(make):
    module = make()
    converted = tb.convert(module, X)
    params, buffers = converted.params, converted.buffers
    for call in range(3):
        x = X + call
        out = converted.apply(params, buffers, jnp.asarray(x.numpy()), train=True)
        want, buffers = module(x), out.buffers
        # A mean of four is rounded in another order.
        np.testing.assert_allclose(out.output, want.detach(), rtol=1e-6, atol=1e-6)
        for name, value in module.named_buffers():
            np.testing.assert_allclose(buffers[name], value, rtol=1e-6, atol=1e-6)


class OfLoss:
    """A loss that keeps a running mean in the module, as DINO's do that are its methods."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held = getattr(self.module, "inner", self.module)
        loss = ((out - held.center) ** 2).mean()
        held.center = held.center * 0.9 + out.detach().mean(0) * 0.1
        return loss


@pytest.mark.parametrize("around", [lambda m: m, Part], ids=["root", "part"])
def test_a_loss_assigns_as_a_forward_does(around):
    module = around(Center(lambda self, y: None))
    loss = OfLoss(module)
    converted = tb.convert(tb.with_loss(module, loss), X, X)
    params, buffers = converted.params, converted.buffers
    for call in range(3):
        x = X + call
        arrays = [jnp.asarray(x.numpy())] * 2
        out = converted.apply(params, buffers, *arrays, train=True)
        want, buffers = loss(module(x), x), out.buffers
        np.testing.assert_allclose(out.output, want.detach(), rtol=1e-5)


class Called(Center):
    """Assigns behind its forward; a subclass inherits that."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = super().__call__(x)
        self.center = self.center + out.detach().mean(0)
        return out


@pytest.mark.parametrize("kind", [Called, type("Inherits", (Called,), {})])
def test_a_call_of_the_modules_own_assigns_as_a_forward_does(kind):
    module = kind(lambda self, y: None)
    converted = tb.convert(module, X)
    buffers = converted.buffers
    for call in range(3):
        out = converted.apply(converted.params, buffers, jnp.asarray((X + call).numpy()))
        want, buffers = module(X + call), out.buffers
        np.testing.assert_allclose(out.output, want.detach(), rtol=1e-5, atol=1e-6)
    assert ("__call__" in vars(kind)) == (kind is Called)  # as it was before


def of_the_weight(self: nn.Module, y: torch.Tensor) -> None:
    self.center = self.weight.detach()


def of_another_that_is_written(self: nn.Module, y: torch.Tensor) -> None:
    self.center = self.other
    self.other += 1


@pytest.mark.parametrize(
    ("assign", "other"), [(of_the_weight, "weight"), (of_another_that_is_written, "other")]
)
def test_memory_that_somebody_writes_is_no_value_of_a_buffer(assign, other):
    with pytest.raises(ConversionError, match=rf"`center` the memory of `{other}`.*clone"):
        tb.convert(Center(assign), X)


def sets(name: str, value: object) -> Callable[[nn.Module, torch.Tensor], None]:
    return lambda self, y: setattr(self, name, value)


def taken_away(self: nn.Module, y: torch.Tensor) -> None:
    center = self.center
    del self._buffers["center"]
    self.__dict__["center"] = center


@pytest.mark.parametrize(
    ("assign", "said"),
    [
        (sets("weight", nn.Parameter(torch.zeros(3))), "the parameter `inner.weight` anew"),
        (sets("other", torch.zeros(1)), r"shape \(1,\) to the buffer `inner.other`, .* \(3,\)"),
        (sets("other", torch.zeros(3, dtype=torch.int32)), "assigns torch.int32 to the buffer"),
        (taken_away, "takes the buffer `inner.center` away"),
    ],
)
def test_what_a_state_cannot_keep_is_refused_by_name(assign, said):
    with pytest.raises(ConversionError, match=said):
        tb.convert(Part(Center(assign)), X)


def test_one_tensor_in_two_places_is_not_assigned_in_one():
    module = Part(Center(plain))
    module.register_buffer("shared", module.inner.center)
    with pytest.raises(ConversionError, match=r"`inner.center` anew, .* one tensor with shared"):
        tb.convert(module, X)
