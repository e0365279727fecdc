"""From one convolution to the next values keep their features last; the numbers are torch's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from parity import check_parity
from torch import nn
from torch.nn import functional as F

import fzero as fz
import torch_bridge as tb
from torch_bridge.lower import features_last
from torch_bridge.lower.norm import layer_norm


pytestmark = pytest.mark.traced_once

FEATURES = 6
Op = Callable[[Any, torch.Tensor], torch.Tensor]

OPERATORS: dict[str, Op] = {
    "activations": lambda m, y: F.relu(y) + F.gelu(y) + F.silu(y) - F.hardswish(y) * F.elu(y),
    "bounded": lambda m, y: y.clamp(-0.5, 0.5) + F.relu6(y) + F.leaky_relu(y, 0.2) + y.sigmoid(),
    "numbers": lambda m, y: (2 - y) * 3 / 1.5 + 1,
    "another": lambda m, y: y * F.relu(y) + torch.maximum(y, -y),
    "per_feature": lambda m, y: y * m.wide + m.narrow,
    "per_column": lambda m, y: y + m.column * m.number,
    "unlike": lambda m, y: y + m.whole,
    "squeezed": lambda m, y: y * m.gate(y.mean((2, 3), keepdim=True)).sigmoid(),
    "pooled_gate": lambda m, y: y * m.gate(F.adaptive_avg_pool2d(y, 1)),
    "norm": lambda m, y: m.norm(y),
    "group_norm": lambda m, y: F.group_norm(y, 3),
    "max_pool": lambda m, y: F.max_pool2d(y, 3, 2, 1, ceil_mode=True),
    "max_pool_dilated": lambda m, y: F.max_pool2d(y, 2, 1, 1, dilation=2),
    "avg_pool": lambda m, y: F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool_padded": lambda m, y: F.avg_pool2d(y, (2, 3), padding=(1, 0)),
    "adaptive": lambda m, y: F.adaptive_avg_pool2d(y, (3, 2)),
    "adaptive_max": lambda m, y: F.adaptive_max_pool2d(y, 2),
    "mean_of_all": lambda m, y: y.mean((-1, -2)) + y.mean(1).sum((1, 2))[:, None],
    "joined": lambda m, y: torch.cat([y, m.again(y)], 1),
    "joined_backwards": lambda m, y: torch.cat([y, y * 2], -3),
    "joined_elsewhere": lambda m, y: torch.cat([y, y * 2], 2),
    "joined_with_input": lambda m, y: torch.cat([y, m.whole.expand(len(y), -1, -1, -1)], 1),
    "flat": lambda m, y: y.flatten(2).transpose(1, 2) @ m.square,
    "turned": lambda m, y: F.layer_norm(y.permute(0, 2, 3, 1), (FEATURES,)).permute(0, 3, 1, 2),
    "chunks": lambda m, y: torch.mul(*y.chunk(2, 1)) + y[:, 1:4],
    "softmax": lambda m, y: y.softmax(1) + y.softmax(-1),
    "chosen": lambda m, y: torch.where(y > 0, y, y * y),
    "transposed": lambda m, y: m.up(F.relu(y)),
    "named_padding": lambda m, y: m.same(y),
    "resized": lambda m, y: F.interpolate(y, scale_factor=2.0),
    "detached": lambda m, y: y.detach() * y,
    "pooled_features": lambda m, y: F.max_pool3d(y, 2, 1) + F.avg_pool3d(y, 2, 1),
    "adaptive_features": lambda m, y: F.adaptive_avg_pool3d(y, (2, 3, 4)),
    "alone": lambda m, y: m.again(y[0]) + m.again(y)[0],
}


class Net(nn.Module):
    """Every operator, on the output of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, FEATURES, 3, padding=1)
        self.again = nn.Conv2d(FEATURES, FEATURES, 3, padding=1, groups=3, bias=False)
        self.gate = nn.Conv2d(FEATURES, FEATURES, 1)
        self.up = nn.ConvTranspose2d(FEATURES, 4, 3, 2, 1, output_padding=1, groups=2)
        self.same = nn.Conv2d(FEATURES, 2, (2, 4), padding="same", dilation=(1, 2))
        self.norm = nn.BatchNorm2d(FEATURES)
        self.wide = nn.Parameter(torch.randn(1, FEATURES, 1, 1))
        self.narrow = nn.Parameter(torch.randn(FEATURES, 1, 1))
        self.column = nn.Parameter(torch.randn(7))
        self.whole = nn.Parameter(torch.randn(1, FEATURES, 8, 7))
        self.square = nn.Parameter(torch.randn(FEATURES, FEATURES))
        self.register_buffer("number", torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: fn(self, self.conv(x)) for name, fn in OPERATORS.items()}


X = torch.randn(4, 3, 8, 7, generator=torch.Generator().manual_seed(2))


def test_every_operator_gives_torchs_values_and_gradients() -> None:
    torch.manual_seed(1)
    net = Net()
    converted = check_parity(net, X, train=True)
    check_parity(net, X, converted=converted)


class Dims(nn.Module):
    """Convolutions of one and of three dims, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.BatchNorm1d(4), nn.MaxPool1d(2))
        self.three = nn.Sequential(nn.Conv3d(2, 4, 2), nn.Dropout(0.0), nn.ReLU(), nn.AvgPool3d(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.three(y)


def test_one_and_three_dims() -> None:
    torch.manual_seed(0)
    check_parity(Dims(), torch.randn(3, 2, 9), torch.randn(3, 2, 5, 4, 6), train=True)


class OneVolume(nn.Module):
    """The images of a batch are the features of one volume without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(3, 6, 3)
        self.volume = nn.Conv3d(4, 2, (2, 1, 1))
        self.same = nn.Conv3d(4, 2, 2, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.plane(x)
        return self.volume(y) + self.same(y)[:, :5]


def test_a_convolution_of_more_dims() -> None:
    torch.manual_seed(0)
    check_parity(OneVolume(), X)


def resnet() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(2)])
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.drop(F.relu(self.norms[0](self.first(x))))
            return F.relu(x + self.norms[1](self.second(y)))

    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), Block(), Block(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip


@pytest.mark.parametrize("aware", [True, False])
def test_only_the_images_are_turned(aware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loss and its gradients; without it every layer would turn its input and output."""
    if not aware:
        monkeypatch.setattr(features_last, "takes", lambda _: False)
    images = 5
    converted = tb.convert(resnet(), torch.ones(2, 3, 11, 11))

    def loss(params: Any, x: Any) -> Any:
        out = converted.apply(params, converted.buffers, x, rng=jax.random.key(0), train=True)
        return jnp.sum(out.output**2)

    x = np.ones((images, 3, 11, 11), np.float32)
    text = jax.jit(jax.grad(loss)).lower(converted.params, x).as_text()
    turned = re.findall(
        rf"stablehlo.transpose .*-> tensor<({images}x[0-9]+x[0-9]+x[0-9]+)xf32>", text
    )
    large = [shape for shape in turned if "1x1x" not in shape and not shape.endswith("x1x1")]
    assert (large == [f"{images}x11x11x3"]) == aware, turned


def test_moments_have_every_derivative() -> None:
    """A rule of its own leaves out what is zero in the first derivative, and only that."""

    def plain(x: jax.Array) -> jax.Array:
        apart = x - jnp.mean(x, -1, keepdims=True)
        return apart / jnp.sqrt(jnp.mean(jnp.square(apart), -1, keepdims=True) + 1e-5)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)) + 10.0, jnp.float32)
    own = lambda x: layer_norm(x, (5,))  # noqa: E731

    def mixed(fn: Any) -> Any:
        return lambda x: jnp.sum(jnp.sin(fn(x)) * 1.5)

    for derivative in (jax.grad, jax.hessian):
        got, want = (derivative(mixed(fn))(x) for fn in (own, plain))
        # Sums in another order; a term that rounds to zero is left out.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_pooling_with_padding_may_be_divided_over_the_devices_of_a_layer() -> None:
    """Its own derivative holds what XLA's partitioner would get wrong."""
    tx = optax.sgd(0.1)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1), nn.Flatten(1))
    x = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    model = tb.convert(module, x).model(
        lambda forward, batch: jnp.mean(jnp.square(forward(batch["x"])))
    )
    found = []
    for plan in (fz.Plan(data=1), fz.Plan(data=1, tensor=2)):
        step, state = fz.train_step(model, tx, plan), fz.init(model, tx, plan)
        state, metrics = step(state, {"x": x.numpy()})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(*found, rtol=1e-5)


class Ranks(nn.Module):
    """The output of one convolution beside that of another with one dim less."""

    def __init__(self) -> None:
        super().__init__()
        self.two, self.one = nn.Conv2d(3, 3, 1), nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(x) + self.one(x[0])


def test_outputs_of_several_ranks_are_added_as_in_torch() -> None:
    torch.manual_seed(3)
    check_parity(Ranks(), torch.randn(2, 3, 4, 5))
