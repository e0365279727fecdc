"""torch.cond, scan, while_loop and map; torch.autograd.grad in a forward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd import forward_ad
from torch.nn import functional as F

import torch_bridge as tb
from fzero.errors import ConversionError


class Chosen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.linear(x).sin(), lambda x: x.cos() * 2, (x,))


class Scanned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = torch.nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> Any:
        def step(carry: torch.Tensor, row: torch.Tensor) -> Any:
            new = carry * self.decay + row
            return new, new.sin()

        return scan(step, torch.zeros_like(x[0]), x, dim=0)


class Mapped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch_map(lambda row: row.sin() / row.norm(), x)


class Forces(torch.nn.Module):
    """An energy and its slope, of which the loss is made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_(True)
        energy = self.outer(torch.tanh(self.inner(x)))
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad((slope**2).sum(), x, create_graph=True)
        (still,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)  # with no slope itself
        return energy, -slope, bend, energy * still


class Functional(torch.nn.Module):
    """torch.func: gradients of functions that also read what they are differentiated by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x))).sum()

    def forward(self, x: torch.Tensor) -> Any:
        # The x of the closure is a constant of the inner function, not of the outer one.
        closed, value = torch.func.grad_and_value(lambda y: (y * x.detach() * x).sum())(x)
        each = torch.vmap(torch.func.grad(self.energy))(x)
        both = torch.func.grad(lambda a, b: (a["x"] * b**2).sum(), argnums=(0, -1))({"x": x}, x + 1)
        twice = torch.func.grad(lambda y: torch.func.grad(self.energy)(y).pow(2).sum())(x)
        out, pull = torch.func.vjp(lambda y: torch.tanh(self.inner(y)), x)
        rows = torch.func.jacrev(lambda y: self.inner(y).sin())(x[0])
        with torch.no_grad():
            fixed = torch.func.grad(self.energy)(x)
        found = (closed, value, each, both[0]["x"], both[1], twice, pull(out)[0], rows)
        return (*found, fixed * self.energy(x))


class Slopes(Functional):
    """As much of it as one trace is worth."""

    def forward(self, x: torch.Tensor) -> Any:
        closed, value = torch.func.grad_and_value(lambda y: (y * x.detach() * x).sum())(x)
        # Rows that lie in two dims, moved by PyTorch unseen by torch.export.
        by = torch.func.grad(lambda weight, row: (weight * row).sin().sum() / row.numel() + 1)
        each = torch.vmap(by, in_dims=(1, 0))(x.T, x.cos())
        columns = torch.vmap(lambda row: (row.sin(), row.sum()), out_dims=(-1, 0))(x)
        pushed = torch.func.jvp(self.inner, (x,), (x.sin(),))
        return closed, value, each, *columns, *pushed


class Tangents(torch.nn.Module):
    """torch.func.jvp through operators that are made of others, and with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> Any:
        def mixed(a: torch.Tensor, b: dict[str, torch.Tensor]) -> Any:
            y = a @ self.weight + torch.softmax(b["x"] * x, -1)  # (x is a constant here)
            return (a + y.std(1, keepdim=True), {"y": y.flatten()}), a.sum()

        given = (x, {"x": x.cos()})
        out, pushed, total = torch.func.jvp(mixed, given, (x.sin(), {"x": x}), has_aux=True)
        with torch.no_grad():
            fixed = torch.func.jvp(lambda a: a @ self.weight, (x,), (x.cos(),))[1]
        return out[0], out[1]["y"], pushed[0], pushed[1]["y"], total, fixed * x


class Columns(Functional):
    """Rows of a result that lie along its last dim, or are one for all."""

    def forward(self, x: torch.Tensor) -> Any:
        dims = (-1, 0, None)
        return torch.vmap(lambda row: (row.sin(), row.sum(), torch.ones(2)), out_dims=dims)(x)


def leaves(out: Any) -> list[Any]:
    return list(out) if isinstance(out, list | tuple) else [out]


@pytest.mark.parametrize(
    "kind",
    [Chosen, Scanned, Forces, Slopes, Tangents, Columns]
    + [pytest.param(kind, marks=pytest.mark.nightly) for kind in (Mapped, Functional)],
)
def test_values_and_gradients_are_pytorchs(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    module = kind()
    converted = tb.convert(module, torch.randn(4, 3))

    def loss(params: Any, x: Any) -> Any:
        out = converted.apply(params, converted.buffers, x, train=True).output
        return sum(jnp.sum(jnp.sin(y)) for y in leaves(out)), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    for sign in (1.0, -1.0):  # both branches
        module.zero_grad()
        x = (sign * torch.rand(5, 3)).requires_grad_(True)
        (_, got), (slopes, slope) = run(converted.params, x.detach().numpy())
        want = leaves(module(x))
        for a, b in zip(leaves(got), want, strict=True):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=0, atol=2e-6)
        sum(y.sin().sum() for y in want).backward()  # type: ignore[union-attr]
        # float32 sums in another order.
        np.testing.assert_allclose(slope, x.grad, rtol=0, atol=2e-5)
        for name, parameter in module.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            np.testing.assert_allclose(slopes[name], expected, rtol=0, atol=2e-5, err_msg=name)


class Rows(torch.nn.Module):
    """As many derivatives as the weights have columns to the square, one after the other."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2, columns))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.vmap(torch.func.jacrev(lambda row: row[:, None] * row))(self.weight) * x.sum()


def test_derivatives_do_not_run_those_before_them_again() -> None:
    def operations(columns: int) -> int:
        module, x = Rows(columns), torch.ones(4, 3)
        converted = tb.convert(module, x)
        traced = str(jax.make_jaxpr(lambda x: converted(x))(x.numpy()))
        np.testing.assert_array_equal(converted(x.numpy()), module(x).detach().numpy())
        return traced.count(" = ")

    few, many = operations(1), operations(3)
    assert many < 20 * few  # 9 derivatives instead of one; with those before again 2**9


class Halved(torch.nn.Module):
    """How often it turns depends on values; its counter is a whole number."""

    def forward(self, x: torch.Tensor) -> Any:
        count = torch.tensor(0)
        return while_loop(lambda n, x: x.sum() > 1, lambda n, x: (n + 1, x * 0.5), (count, x))


def test_a_loop_turns_as_often_as_pytorchs_and_has_no_gradient() -> None:
    converted = tb.convert(Halved(), torch.ones(4, 3))
    for size in (1.0, 9.0, 300.0):
        x = torch.full((4, 3), size)
        for got, want in zip(converted(x.numpy()), Halved()(x), strict=True):
            np.testing.assert_array_equal(got, want.numpy())
    with pytest.raises(ConversionError, match=r"torch.while_loop.*detach"):
        jax.grad(lambda x: converted(x)[1].sum())(np.ones((4, 3), np.float32))


class Hashed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * 1000003 % 5003, lambda x: x + 1, (x,))


def test_whole_numbers_of_64_bits_within_a_branch() -> None:
    x = torch.arange(2**20, 2**20 + 6)
    converted = tb.convert(Hashed(), x)
    np.testing.assert_array_equal(converted(x.numpy()), Hashed()(x).numpy())


class Dropped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: F.dropout(x, 0.5, True), lambda x: x + 1, (x,))


class Unused(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_(True)
        return torch.autograd.grad(x.sum(), x, allow_unused=True)[0]


class Shared(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        by = torch.func.grad(lambda weight, row: (weight * row).sum() ** 2)
        return torch.vmap(by, (None, 0))(x[0], x)


class Columns(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.func.hessian(self.energy)(x[0])


class Pushed(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.vmap(lambda row: torch.func.jvp(self.inner, (row,), (row,))[1])(x)


class Linearized(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.func.linearize(self.inner, x)[1](x)


class Dual(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(self.inner(forward_ad.make_dual(x, x))).tangent


class NotOneNumber(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.func.grad(self.inner)(x)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Dropped, r"random numbers inside torch.cond"),
        (Unused, r"allow_unused"),
        (Shared, r"torch\.func\.grad under torch\.vmap.*expand"),
        (Columns, r"torch\.func\.jacfwd.*jacrev"),
        (Pushed, r"torch\.func\.jvp under torch\.vmap.*jvp\(torch\.vmap"),
        (Linearized, r"torch\.func\.linearize.*torch\.func\.jvp"),
        (Dual, r"torch\.autograd\.forward_ad.*torch\.func\.jvp"),
        (NotOneNumber, r"torch\.func\.grad.*one number.*vjp"),
    ],
)
def test_what_has_no_form_is_refused(kind: type[torch.nn.Module], said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        tb.convert(kind(), torch.ones(4, 3))
    with forward_ad.dual_level():  # as before: no level is left open
        assert forward_ad.unpack_dual(forward_ad.make_dual(*torch.ones(2, 1))).tangent == 1


def test_parity_leaves_out_what_no_graph_holds() -> None:
    module = Forces()
    x = torch.randn(4, 3)
    assert tb.parity(module, tb.convert(module, x), (x,)).agrees
