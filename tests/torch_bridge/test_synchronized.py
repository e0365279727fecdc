"""`SyncBatchNorm`: on several devices what a batch norm is on one."""

import copy

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fzero as fz
import torch_bridge as tb
from tests.support import tiny


X = np.random.RandomState(0).randn(16, 3, 6).astype("f") * [[[1], [3], [0.2]]] + 1
BATCH = {"x": X.astype("f"), "y": np.arange(16, dtype=np.int32) % 4}
TX = optax.sgd(0.1)


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3, **options)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.conv(x)))


class Blocks(nn.Module):
    def __init__(self, num=1, **options):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(num))
        self.out = nn.Linear(18, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x.flatten(1))


def loss(forward, batch):
    return fz.cross_entropy(forward(batch["x"]), batch["y"])


def synchronized(module):
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module))


def trained(module, plan, steps=3):
    converted = tb.convert(module, torch.from_numpy(BATCH["x"][:2]))
    model, devices = converted.model(loss), jax.devices()[: plan.data * plan.replica]
    state = fz.init(model, TX, plan, devices=devices)
    step = fz.train_step(model, TX, plan, devices=devices)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return {k: v.numpy() for k, v in tb.state_dict(converted, state).items()}, metrics


def by_torch(module, steps=3):
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = torch.from_numpy(BATCH["x"]), torch.from_numpy(BATCH["y"]).long()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    return {k: v.numpy() for k, v in module.state_dict().items()}


@pytest.mark.parametrize(
    ("options", "num", "plan"),
    [
        ({}, 1, tiny.plan(zero=3, data=4)),
        ({}, 3, tiny.plan(zero=1, data=2, replica=2, remat="layer")),
        ({"momentum": None, "affine": False}, 1, tiny.plan(data=4)),
        ({"track_running_stats": False}, 1, tiny.plan(data=2)),
    ],
)
def test_its_statistics_are_those_of_all_devices(options, num, plan):
    module = Blocks(num, **options)
    want = by_torch(module)
    got, _ = trained(synchronized(module), plan)
    assert got.keys() == want.keys()
    for name, value in want.items():  # sums of rows in another order
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
    alone, _ = trained(module, plan)  # an ordinary one has each device's
    off = [name for name in want if not np.allclose(alone[name], want[name], rtol=2e-3, atol=2e-5)]
    assert "blocks.0.conv.weight" in off


def test_on_one_device_and_in_evaluation_it_is_a_batch_norm():
    module = synchronized(Blocks())
    x = torch.from_numpy(BATCH["x"])
    assert tb.parity(module, tb.convert(module, x), x).agrees
    want = by_torch(Blocks())
    got, _ = trained(module, fz.Plan(data=1))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


def test_without_running_statistics_an_evaluation_has_those_of_all_devices():
    module = synchronized(Blocks(1, track_running_stats=False))
    converted = tb.convert(module, torch.from_numpy(BATCH["x"][:2]))
    model, losses = converted.model(loss), []
    for num in (1, 2):
        about = {"devices": jax.devices()[:num]}
        state = fz.init(model, None, tiny.plan(data=num), **about)
        losses.append(
            float(fz.eval_step(model, tiny.plan(data=num), **about)(state, BATCH)["loss"])
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # rows in another order
