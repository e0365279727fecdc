"""Random operators draw from PyTorch's distributions, by key."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import torch_bridge as tb
from torch_bridge.lower import recurrent


pytestmark = pytest.mark.traced_once

NUM = 4000
ROWS = torch.tensor([[0.8, 0.2, 0.0], [0.0, 0.5, 0.5]])


class Draws(nn.Module):
    """Draws `NUM` numbers by one of torch's operators."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = {
            "rand": lambda: torch.rand(NUM),
            "rand_like": lambda: torch.rand_like(x),
            "randn": lambda: torch.randn(NUM),
            "randn_like": lambda: torch.randn_like(x),
            "randint": lambda: torch.randint(5, 9, (NUM,)).float(),
            "bernoulli": lambda: torch.bernoulli(torch.full_like(x, 0.2)),
            "bernoulli_p": lambda: torch.zeros_like(x).bernoulli_(0.2),
            "multinomial": lambda: torch.multinomial(ROWS, NUM // 2, replacement=True).flatten(),
            "randperm": lambda: torch.randperm(NUM).float(),
            "random_": lambda: torch.empty_like(x).random_(5, 9),
            "poisson": lambda: torch.poisson(torch.full_like(x, 3.0)),
            "gamma": lambda: torch.distributions.Gamma(x + 2.0, 4.0).sample(),
            "beta": lambda: torch.distributions.Beta(x + 0.1, x + 0.1).sample(),
        }[self.kind]()
        return drawn * self.w


class Wanted(NamedTuple):
    """What a distribution's draws look like."""

    mean: float
    deviation: float
    least: float
    largest: float


UNIFORM, NORMAL, COIN = Wanted(0.5, 12**-0.5, 0, 1), Wanted(0, 1, -6, 6), Wanted(0.2, 0.4, 0, 1)
KINDS = {
    "rand": UNIFORM, "rand_like": UNIFORM, "randn": NORMAL, "randn_like": NORMAL,
    "randint": Wanted(6.5, 1.25**0.5, 5, 8), "bernoulli": COIN, "bernoulli_p": COIN,
    "multinomial": Wanted(0.85, 0.6275**0.5, 0, 2),
    "randperm": Wanted((NUM - 1) / 2, NUM / 12**0.5, 0, NUM - 1),
    "random_": Wanted(6.5, 1.25**0.5, 5, 8), "poisson": Wanted(3, 3**0.5, 0, 15),
    "gamma": Wanted(0.5, 0.125**0.5, 0, 5), "beta": Wanted(0.5, (0.25 / 1.2) ** 0.5, 0, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_has_torchs_distribution(kind):
    wanted = KINDS[kind]
    converted = tb.convert(Draws(kind), torch.zeros(NUM))

    def call(seed: int) -> np.ndarray:
        key, x = jax.random.key(seed), np.zeros(NUM, np.float32)
        return np.asarray(converted.apply(converted.params, {}, x, rng=key, train=True).output)

    found = call(0)
    assert found.shape == (NUM,)
    assert found.min() >= wanted.least
    assert found.max() <= wanted.largest
    # Five standard errors; the draws are the same on every run.
    assert abs(found.mean() - wanted.mean) < 5 * wanted.deviation / NUM**0.5 + 1e-6
    assert abs(found.std() / wanted.deviation - 1) < 0.1
    assert np.array_equal(found, call(0))
    assert not np.array_equal(found, call(1))
    if kind in ("randint", "random_"):
        assert set(found.tolist()) == {5, 6, 7, 8}
    if kind == "multinomial":
        assert found[: NUM // 2].max() == found[NUM // 2 :].min() == 1
    if kind == "randperm":
        assert sorted(found.tolist()) == list(range(NUM))


class Shares(nn.Module):
    """Draws of concentrations that are learned."""

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        first = torch.distributions.Gamma(a, torch.full_like(a, 2.0)).rsample()
        shares = torch.distributions.Dirichlet(torch.stack((a, a * 0 + 0.5), -1)).rsample()
        return torch.stack((first, shares[:, 0]))


def test_concentrations_have_the_gradients_of_what_is_drawn() -> None:
    """Of the means a / 2 and a / (a + 1 / 2): five standard errors of 20,000 draws."""
    converted, a = tb.convert(Shares(), torch.ones(8)), jnp.full(20_000, 0.4)

    @jax.jit
    def found(a):
        def drawn(a):
            return converted.apply({}, {}, a, rng=jax.random.key(0), train=True).output

        values, pull = jax.vjp(drawn, a)
        return values, [pull(jnp.zeros_like(values).at[i].set(1.0))[0] for i in range(2)]

    values, slopes = found(a)
    for value, slope, mean, by in zip(values, slopes, (0.2, 4 / 9), (0.5, 0.5 / 0.81), strict=True):
        for drawn, want in ((value, mean), (slope, by)):
            assert abs(drawn.mean() - want) < 5 * drawn.std() / 20_000**0.5


def test_layers_of_an_lstm_drop_other_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, drop = [], recurrent.native_dropout

    def noted(x, p, train, key):
        keys.append(jax.random.key_data(key).tolist())
        return drop(x, p, train, key)

    monkeypatch.setattr(recurrent, "native_dropout", noted)
    weights = [p.detach().numpy() for p in nn.LSTM(3, 3, num_layers=3).parameters()]
    zeros = np.zeros((3, 2, 3), np.float32)
    recurrent.lstm(
        np.ones((4, 2, 3), np.float32), (zeros, zeros), weights, True, 3, 0.5, True, False, False,
        key=jax.random.key(0),
    )  # fmt: skip
    assert len(keys) == 2
    assert keys[0] != keys[1]
