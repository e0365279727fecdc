"""A small module with everything that names can do, trained in PyTorch; shared by all formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import fzero as fz
from torch_bridge.module.moments import Moments


LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.99), 1e-8, 0.05
ROWS, FEATURES = 16, 5


class Net(nn.Module):
    """A tied weight, a frozen one, buffers of two dtypes, rows that eight devices do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 13)
        self.norm = nn.LayerNorm(13)
        self.again = nn.Linear(13, FEATURES)
        self.outer = nn.Linear(FEATURES, 13)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.full((13,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.tensor([3, 2**20]))
        self.register_buffer("low", torch.randn(3).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(x)))
        return self.outer(torch.tanh(self.again(hidden))) * self.scale


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(seed: int = 0) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Endless points with targets that a network can learn."""
    random = np.random.default_rng(seed)
    mix = random.standard_normal((FEATURES, 13)).astype(np.float32)
    while True:
        x = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
        yield {"x": x, "y": np.sin(x @ mix)}


def adamw(module: nn.Module) -> torch.optim.AdamW:
    learned = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(learned, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def optax_adamw() -> optax.GradientTransformation:
    return optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY)


def torch_steps(module: nn.Module, optimizer: Any, data: Any, steps: int) -> list[float]:
    """Trains a module in PyTorch; the loss before each update."""
    losses = []
    module.train()
    for _ in range(steps):
        batch = next(data)
        error = module(torch.from_numpy(batch["x"])) - torch.from_numpy(batch["y"])
        loss = torch.mean(error**2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def mean_square(forward: Any, batch: Any) -> fz.Mean:
    error = forward(batch["x"]) - batch["y"]
    return fz.Mean(jnp.sum(error**2), jnp.float32(error.size))


def torch_moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> Moments:
    """What PyTorch's Adam holds, by name."""
    found = {n: optimizer.state[p] for n, p in module.named_parameters() if p in optimizer.state}
    steps = {int(state["step"]) for state in found.values()}
    assert len(steps) == 1
    return Moments(
        steps.pop(),
        {name: state["exp_avg"].numpy().copy() for name, state in found.items()},
        {name: state["exp_avg_sq"].numpy().copy() for name, state in found.items()},
    )
