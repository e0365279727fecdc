"""Values and gradients where functions have kinks, bounds and poles: PyTorch's, point by point.

Random inputs never go there; exact zeros, saturation and equal values are ordinary in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_bridge as tb


INF, NAN = float("inf"), float("nan")
POINTS = torch.tensor([0.0, -0.0, 1, -1, 3, -3, 6, -6, 0.5, -0.5, 20, 20.5, INF, -INF, NAN])
PROBABILITIES = torch.tensor([0.0, 1.0, 0.5, 1e-7, 1 - 1e-7])
EQUAL = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, 1.0, 3.0], [-1.0, 2.0, -2.0]])

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish, "leaky_relu": F.leaky_relu, "elu": F.elu, "celu": F.celu,
    "selu": F.selu, "softplus": F.softplus, "softsign": F.softsign, "hardshrink": F.hardshrink,
    "softshrink": F.softshrink, "threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "tanhshrink": F.tanhshrink, "logsigmoid": F.logsigmoid, "abs": torch.abs, "sign": torch.sign,
    "square": torch.square, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sinc": torch.sinc,
    "reciprocal": torch.reciprocal, "log1p": torch.log1p, "tanh": torch.tanh, "erf": torch.erf,
    "sigmoid": torch.sigmoid, "exp": torch.exp, "clamp": lambda x: x.clamp(-1, 3),
    "clamp_min": lambda x: x.clamp(min=0), "round": torch.round, "floor": torch.floor,
    "nan_to_num": torch.nan_to_num, "cube": lambda x: x**3, "half": lambda x: x**0.5,
    "zeroth": lambda x: x**0, "silu": F.silu, "gelu": F.gelu, "mish": F.mish, "sin": torch.sin,
    "log": torch.log, "expm1": torch.expm1, "xlogy": lambda x: torch.xlogy(x, x),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())), "fmod": lambda x: torch.fmod(x, 3.0),
    "remainder": lambda x: torch.remainder(x, 3.0),
}  # fmt: skip
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "std": lambda x: x.std(1), "var": lambda x: x.var(1), "norm": lambda x: x.norm(dim=1),
    "norm1": lambda x: x.norm(p=1, dim=1), "norm3": lambda x: x.norm(p=3, dim=1),
    "norm0.5": lambda x: x.norm(p=0.5, dim=1), "norminf": lambda x: x.norm(p=INF, dim=1),
    "amax": lambda x: x.amax(1), "max": lambda x: x.max(1).values,
    "softmax": lambda x: x.softmax(1), "logsumexp": lambda x: x.logsumexp(1),
    "prod": lambda x: x.prod(1), "median": lambda x: x.median(1).values,
    "cumprod": lambda x: x.cumprod(1), "normalize": F.normalize,
    "cosine": lambda x: F.cosine_similarity(x, x.flip(0)), "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "all masked": lambda x: x.masked_fill(x == x, -INF).softmax(1).nan_to_num(),
}  # fmt: skip


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *x: torch.Tensor) -> Any:
        return self.fn(*x)


def both(fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Outputs and gradients of their sums, PyTorch's and ours."""
    tracked = [x.clone().requires_grad_() for x in inputs]
    want = fn(*tracked)
    # A function without a gradient (round of nothing) has none here either.
    grads = torch.autograd.grad(want.sum(), tracked, allow_unused=True)
    converted = tb.convert(Fn(fn), *inputs, train=False)
    arrays = [jnp.asarray(x.numpy()) for x in inputs]

    def run(arrays: list[jax.Array]) -> jax.Array:
        return converted.apply({}, converted.buffers, *arrays).output

    got, pull = jax.vjp(run, arrays)
    (found,) = pull(jnp.ones_like(got))
    wanted = [
        np.zeros(x.shape) if g is None else g.numpy() for g, x in zip(grads, inputs, strict=True)
    ]
    return want.detach().numpy(), np.asarray(got), wanted, [np.asarray(g) for g in found]


def agree(fn: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Asserts PyTorch's values and gradients: float32's roundings, NaN where it has NaN."""
    want, got, wanted, found = both(fn, *inputs)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
    for g, w, x in zip(found, wanted, inputs, strict=True):
        # A NaN has no slope: whatever loss it reaches is NaN in both.
        g, w = (np.where(torch.isnan(x).numpy(), 0, one) for one in (g, w))
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6)


# Where PyTorch's own kernels disagree with each other: the vectorised gelu of infinities, and the
# sign of a slope at -0.
ELSEWHERE = {"gelu": POINTS.isfinite(), "rsqrt": ~(POINTS == 0)}


@pytest.mark.parametrize("name", UNARY)
def test_elementwise(name):
    agree(UNARY[name], POINTS[ELSEWHERE.get(name, slice(None))])


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_equal_values_and_zeros(name):
    agree(ROWS[name], EQUAL)


def test_angles_at_the_origin():
    agree(torch.atan2, torch.tensor([0.0, 0.0, 1.0, -1.0]), torch.tensor([0.0, 1.0, 0.0, -1.0]))


def test_cross_entropy_of_certainties():
    x, y = torch.meshgrid(PROBABILITIES, torch.tensor([0.0, 1.0, 0.3]), indexing="ij")
    agree(F.binary_cross_entropy, x.contiguous(), y.contiguous())


@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_of_exact_predictions(loss):
    agree(loss, torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]))
