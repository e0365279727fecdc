"""Products in 8 bits beside torchao's, which trains so."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from ml_dtypes import bfloat16

import fzero as fz
import torch_bridge as tb
from fzero.links import apply_layer


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its kernels for GPUs are not there
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training


class Regression(torch.nn.Module):
    """Two layers, whose products are large enough for 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 48, bias=False)
        self.down = torch.nn.Linear(48, 32)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


def values(tensor: Any) -> np.ndarray:
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_one_layer_has_torchaos_bits(recipe: str) -> None:
    """With one scale an operand, but for a last bit: torchao's emulation divides by it before."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    x, g = (torch.tensor(rng.normal(size=(32, n)), dtype=torch.bfloat16) for n in (64, 48))
    x.requires_grad_()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    linear = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).to(torch.bfloat16)
    convert_to_float8_training(linear, config=config)
    out = linear(x)
    out.backward(g)
    assert linear[0].weight.grad is not None

    layer = fz.Layer("mlp", lambda rng: {"w": jnp.zeros((48, 64))}, lambda p, x, ctx: x @ p["w"].T)
    context = fz.Context(None, jax.random.key(0), True, products=fz.Float8(recipe=recipe))
    w, own = (jnp.asarray(values(t).astype(bfloat16)) for t in (linear[0].weight, x))
    ours, pull = jax.vjp(lambda w, x: apply_layer(layer, {"w": w}, x, {}, context)[0], w, own)
    dw, dx = pull(jnp.asarray(values(g).astype(bfloat16)))
    for found, theirs in ((ours, out), (dx, x.grad), (dw, linear[0].weight.grad)):
        differ = np.float32(found) != values(theirs)
        assert differ.mean() <= (0.01 if recipe == "tensorwise" else 0)
        np.testing.assert_allclose(np.float32(found), values(theirs), rtol=2**-7)


def test_a_converted_module_trains_as_torchaos() -> None:
    torch.manual_seed(0)
    module = Regression()
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(16, n)).astype(np.float32) for n in (64, 32))
    converted = tb.convert(module, torch.from_numpy(x))
    plan = fz.Plan(zero=3, data=1, precision="fp8", min_shard_bytes=0)
    model = converted.model(
        lambda model, batch: jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)
    )
    tx = optax.sgd(0.5)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    theirs = Regression()
    theirs.load_state_dict(module.state_dict())
    master = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    theirs = theirs.to(torch.bfloat16)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    convert_to_float8_training(theirs, config=config)
    ours, other = [], []
    for _ in range(5):
        state, metrics = step(state, {"x": x, "y": y})
        ours.append(float(metrics["loss"]))
        out = theirs(torch.from_numpy(x).bfloat16())
        loss = torch.nn.functional.mse_loss(out.float(), torch.from_numpy(y))
        theirs.zero_grad()
        loss.backward()
        other.append(loss.item())
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                assert p.grad is not None
                master[name] -= 0.5 * p.grad.float()
                p.copy_(master[name])
    # tanh rounds otherwise in bf16, whose steps are 2^-8 of a value.
    np.testing.assert_allclose(ours, other, rtol=2e-3)
    assert ours[-1] < ours[0]
