"""Products that are added or subtracted are rounded first, where somebody sees it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fzero as fz
import torch_bridge as tb
from torch_bridge.lower.rounding import rounded


# Compiled as users do: the tests' own options contract less.
pytestmark = [pytest.mark.as_users, pytest.mark.traced_once]

Form = Callable[[torch.Tensor], Any]
MIN = torch.finfo(torch.float32).min
X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
W = torch.linspace(0.5, 1.5, 8)
FIRST = torch.zeros(64, dtype=torch.long)


class Of(nn.Module):
    """A function of an argument and of a weight of zeros, which no compiler knows."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.zero, self.form = nn.Parameter(torch.zeros(())), form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(x + self.zero)


def both(form: Form, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What PyTorch and a conversion make of an array."""
    module = Of(form).to(x.dtype)
    given = jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch."))
    found = tb.convert(module, x, train=False)(given)
    return module(x).detach().float().numpy(), np.asarray(found).astype(np.float32)


def less_max(z: torch.Tensor) -> torch.Tensor:
    return z - z.amax(-1, keepdim=True)


def cells(z: torch.Tensor) -> torch.Tensor:
    return ((z - z.amin(-1, keepdim=True)) * 4).floor().long()


def tenths(y: torch.Tensor) -> torch.Tensor:
    return (y * 1e3).round() * 0.3


def of_pairs(y: torch.Tensor) -> torch.Tensor:
    return y[:, :, None] * 0.3 + y[:, None, :] * 0.3 - 99 * torch.eye(8)


def places(sums: torch.Tensor) -> torch.Tensor:
    ordered = sums.sort(stable=True, dim=-1).indices[..., 0]
    return torch.stack([sums.max(-1).indices, ordered])


def bits(sums: torch.Tensor) -> torch.Tensor:
    among = torch.isin(sums, torch.arange(-2000, 2000) * 0.3 + 0.1)
    return torch.stack([among.int(), sums.signbit().int(), sums.view(torch.int32)])


# What jumps where a product is rounded in one place and not in another.
JUMPS: dict[str, Form] = {
    "the largest": lambda y: (less_max(y * 0.3) == 0).float(),
    "written twice": lambda y: (y * 0.3) - (y * 0.3).amax(-1, keepdim=True),
    "sorted": lambda y: (lambda z: (z - z.sort(-1).values[..., -1:] == 0).float())(-(y * 0.3)),
    "a gate": lambda y: (lambda z: torch.relu(z - z.topk(3).values[..., -1:]).sign())(y * 0.3),
    "cells": lambda y: cells(y * 1.3),
    "twins": lambda y: y * W - y.abs() * (W * y.sign()),
    "shuffled": lambda y: less_max(F.pixel_shuffle((y * 0.3).view(-1, 4, 4, 2), 2)),
    "in parts": lambda y: less_max((y * 0.3).mT.mT.chunk(2, -1)[0]),
    "repeated": lambda y: less_max((y * 0.3).repeat_interleave(2, 1)),
    "other steps": lambda y: (
        lambda d: torch.stack(
            [d.sgn(), d.relu().sign(), d.logical_not().float(), d.heaviside(W[0])]
        )
    )(((y * 1e3).round() * 0.3 + 0.1) - ((X * 1e3).round() * 0.3 + 0.1)),
    "a place": lambda y: of_pairs((y * 10).round()).flatten(1).argmax(-1),
    "places": lambda y: places(of_pairs((y * 10).round()).flatten(1)),
    "bits": lambda y: bits(tenths(y) + 0.1),
    "a sum before a step": lambda y: ((y * 1e3).round() * 0.3 + 0.1).floor(),
}


@pytest.mark.parametrize("form", JUMPS)
def test_products_are_pytorchs_where_they_are_seen(form: str) -> None:
    want, got = both(JUMPS[form], X)
    np.testing.assert_array_equal(got, want)


PRODUCTS: dict[str, Form] = {
    "square": lambda y: y.square(),
    "quotient": lambda y: y / y.abs().sum(-1, keepdim=True),
    "layer_norm": lambda y: F.layer_norm(y, (8,), W),
    "group_norm": lambda y: F.group_norm(y, 2),
    "rms_norm": lambda y: F.rms_norm(y, (8,), W),
    "batch_norm": lambda y: F.batch_norm(y, torch.zeros(8), torch.ones(8) * 0.3, W),
    "var": lambda y: y.view(64, 2, 4).var(-1),
    "adaptive_avg_pool": lambda y: F.adaptive_avg_pool2d(y[None], (64, 3))[0],
    "deg2rad": torch.deg2rad,
    "log2": lambda y: y.abs().log2(),
    "outer": lambda y: torch.outer(y[:, 0], W),
    "avg_pool": lambda y: F.avg_pool1d(y[:, None], 3, 1, 1)[:, 0],
    "baddbmm": lambda y: torch.baddbmm(y[None], y[None], torch.eye(8)[None], beta=0, alpha=0.3)[0],
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_what_ends_in_a_product_less_its_maximum_is_0(product: str) -> None:
    module = Of(lambda y: (lambda z: (less_max(z), z))(PRODUCTS[product](y)))
    difference, _ = tb.convert(module, X, train=False)(X.numpy())
    np.testing.assert_array_equal(np.asarray(difference).max(-1), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_are_those_of_16_bits(dtype: torch.dtype) -> None:
    want, got = both(lambda y: less_max((y * 0.3).float()), X.to(dtype))
    np.testing.assert_array_equal(got, want)


def masked(y: torch.Tensor) -> torch.Tensor:
    """Scores masked with the lowest number and then scaled: half of the rows see nothing."""
    keep = (y[:, :1] > 0) & (torch.arange(8) < 5)
    return (y + torch.where(keep, 0.0, MIN)) / 8**0.5


READERS: dict[str, Form] = {
    "softmax": lambda z: z.softmax(-1),
    "log_softmax": lambda z: z.log_softmax(-1),
    "logsumexp": lambda z: z.logsumexp(-1),
    "cross_entropy": lambda z: F.cross_entropy(z, FIRST, reduction="none").clamp(max=50.0),
    "by hand": lambda z: (z - z.amax(-1, keepdim=True)).exp(),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_of_equal_masked_scores_attention_is_uniform(reader: str) -> None:
    want, got = both(lambda y: READERS[reader](masked(y)), X)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_of_rows_of_minus_infinity_it_is_none() -> None:
    want, got = both(lambda y: ((y + torch.where(y < 9, -torch.inf, 0.0)) * 0.3).softmax(-1), X)
    assert np.isnan(want).all()
    assert np.isnan(got).all()


def test_training_goes_on_beside_rows_that_see_nothing() -> None:
    """Their rows do not count in the loss; NaN times 0 would be NaN."""
    count = (X[:, :1] > 0).float()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out * y)[:, 0].sum() * 100 / 64

    def form(y: torch.Tensor) -> torch.Tensor:
        return masked(y * torch.arange(8.0)).softmax(-1)

    module, other = Of(form), Of(form)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    loss(other(X), count).backward()
    optimizer.step()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    _, trained = tb.fit(
        module, [(X, count)], loss, optimizer=optimizer, plan=fz.Plan(data=1), trained_module=True
    )
    assert abs(other.zero.item()) > 1
    np.testing.assert_allclose(trained.zero.item(), other.zero.item(), rtol=1e-5)


def test_what_is_rounded_is_the_same_and_has_the_same_gradients() -> None:
    x = jnp.asarray([1.5, -0.0, np.inf, -np.inf, np.nan, MIN, 3e-39])
    once = jax.jit(jax.vmap(jax.checkpoint(rounded)))(x)
    np.testing.assert_array_equal(once.view(np.int32), x.view(np.int32))

    def total(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, each: jax.Array) -> Any:
            return carry + jnp.sum(rounded(each * each)), None

        return jax.lax.scan(jax.checkpoint(body), jnp.float32(0), x)[0]

    given = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.jit(jax.grad(total))(given), 2 * given)
    slopes = jax.hessian(total)(given).reshape(6, 6)
    np.testing.assert_array_equal(slopes, 2 * np.eye(6))


class Block(nn.Module):
    """Its product is read by two of the next block, and by one after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.linear(x).relu())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_equal_blocks_stay_equal() -> None:
    module = Blocks()
    converted = tb.convert(module, X)
    assert converted.params["blocks.*.linear.weight"].shape == (3, 8, 8)
    want = module(X).detach()
    np.testing.assert_allclose(converted(X.numpy()), want, rtol=2e-5, atol=2e-6)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = (self.linear(x) - y).square().mean() * 0.3
        return {"loss": loss + 0.1 * loss.detach()}


def test_a_mean_over_rows_that_is_rounded_is_one() -> None:
    module = WithLoss()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tb.fit(module, [(X, X)], optimizer=optimizer, plan=fz.Plan(zero=1))


def test_scores_that_are_scaled_before_they_are_masked_cost_nothing() -> None:
    """A choice for each score made a forward of eager attention a third slower."""

    def scaled(q: torch.Tensor) -> torch.Tensor:
        return ((q @ q.mT).transpose(1, 2) * 0.3).softmax(-1)

    def masked(q: torch.Tensor) -> torch.Tensor:
        return ((q @ q.mT).masked_fill(q[..., :1] > 0, -3e38) * 0.3).softmax(-1)

    x = torch.randn(2, 4, 3)
    for fn, rounds in ((scaled, False), (masked, True)):
        converted = tb.convert(Of(fn), x, train=False)
        program = jax.make_jaxpr(lambda x, run=converted: run.apply(run.params, {}, x).output)
        assert ("is_finite" in str(program(x.numpy()))) == rounds
