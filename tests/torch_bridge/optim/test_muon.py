"""Muon, and Muon for matrices beside AdamW for the rest, make torch's own updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support import tiny

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError


NUM_STEPS = 10
D = 8


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(D, 2 * D), torch.nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    """Equal blocks, which are rolled into a stack, and a layer before them."""

    def __init__(self, num=3):
        super().__init__()
        self.first = torch.nn.Linear(D, D)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(num))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def optimizers(module, **options):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    rest = [p for p in module.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=0.02, **options),
        torch.optim.AdamW(rest, lr=1e-2),
    ]


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((64, D)).astype(np.float32)


def by_torch(module, several):
    for seed in range(NUM_STEPS):
        loss = (module(torch.tensor(batch(seed))) - 1.0).square().mean()
        for one in several:
            one.zero_grad()
        loss.backward()
        for one in several:
            one.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.3}],
    ids=["usual", "matched"],
)
@pytest.mark.parametrize("shape", [(16, 8), (8, 16)], ids=["tall", "wide"])
def test_updates_are_those_of_torch(options, shape):
    """Each product of the iteration is rounded to bfloat16, whose last bit may fall otherwise."""
    rng = np.random.default_rng(0)
    weight = torch.nn.Parameter(torch.tensor(rng.standard_normal(shape), dtype=torch.float32))
    params = {"weight": jnp.asarray(weight.detach().numpy().copy())}
    muon = torch.optim.Muon([weight], lr=0.02, **options)
    tx = tb.optimizer(muon, [("weight", weight)])
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(NUM_STEPS):
        grads = {"weight": rng.standard_normal(shape).astype(np.float32)}
        weight.grad = torch.tensor(grads["weight"])
        muon.step()
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        # A bfloat16 of 1 has steps of 2^-7; the rate and the matrix's factor multiply them.
        ours, theirs = np.asarray(params["weight"]), weight.detach().numpy()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=NUM_STEPS * 0.02 * 2**-7)


def test_muon_beside_adamw_trains_a_rolled_module_as_torch_does():
    torch.manual_seed(0)
    module = Net()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    converted = tb.convert(module, torch.zeros(64, D))
    several = optimizers(module)
    tx = tb.optimizer(several, converted)
    plan = tiny.plan(zero=1, data=2)
    chain = converted.model(lambda forward, batch: jnp.mean((forward(batch["x"]) - 1.0) ** 2))
    assert any(isinstance(link, fz.Stack) for link in chain.layers)
    state, step = fz.init(chain, tx, plan), fz.train_step(chain, tx, plan)
    for seed in range(NUM_STEPS):
        state, _ = step(state, {"x": batch(seed)})
    by_torch(module, several)
    for name, value in tb.state_dict(converted, state).items():
        moved = (module.state_dict()[name] - start[name]).norm()
        # Rounding to bfloat16 turns the directions in which a gradient is smallest.
        assert (value - module.state_dict()[name]).norm() < 0.1 * moved, name


def test_each_tensor_belongs_to_one_optimizer():
    module = torch.nn.Linear(D, D)
    several = [torch.optim.Muon([module.weight]), torch.optim.AdamW(module.parameters())]
    with pytest.raises(ConversionError, match=r"`weight` is in groups 0 and 1"):
        tb.optimizer(several, module.named_parameters())
    with pytest.raises(ConversionError, match="expected a list of 2 schedulers"):
        tb.optimizer(several, module.named_parameters(), [None])
