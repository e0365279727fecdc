"""`fz.predict_step` of converted modules: the forward's output for each example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rolled_cases import WIDTH, Block, Net, convert, tiny_gpt2
from support import tiny

import fzero as fz
import torch_bridge as tb
from fzero.errors import ConversionError


X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(5)).numpy()
IDS = np.random.default_rng(0).integers(0, 61, (8, 6)).astype(np.int32)
PLAN = tiny.plan(zero=3, data=2)


@pytest.fixture(scope="module")
def net() -> Net:
    return Net([Block(i) for i in range(3)])


@pytest.fixture(scope="module")
def rolled(net: Net) -> tb.Converted:
    return convert(net)


def of_output(out: Any, batch: Any) -> Any:
    return jnp.mean((out - batch["y"]) ** 2)


def of_forward(forward: Any, batch: Any) -> Any:
    return of_output(jax.checkpoint(forward)(batch["x"] * 2.0), batch)


def predicted(model: fz.Model, batch: Any, plan: fz.Plan = PLAN) -> Any:
    return fz.predict_step(model, plan)(fz.init(model, None, plan), batch)


def by_torch(net: Net, x: Any) -> Any:
    with torch.no_grad():
        return net.eval()(torch.from_numpy(np.asarray(x))).numpy()


@pytest.mark.parametrize("chain", [True, False])
def test_the_forwards_output_for_each_example(net: Net, rolled: tb.Converted, chain: bool) -> None:
    said = rolled.model(of_output, inputs=lambda batch: batch["x"], chain=chain)
    found = predicted(said, {"x": X})  # labels are not read
    np.testing.assert_allclose(found, by_torch(net, X), rtol=1e-5, atol=1e-6)
    rows = fz.layout(said, None, PLAN).batch_sharding
    assert found.sharding.is_equivalent_to(rows, found.ndim)
    traced = rolled.model(of_forward, chain=chain)
    found = predicted(traced, {"x": X[:5], "y": X[:5]})
    np.testing.assert_allclose(found, by_torch(net, 2.0 * X[:5]), rtol=1e-5, atol=1e-6)
    with pytest.raises(ConversionError, match=r"KeyError: 'y'.*inputs="):
        predicted(traced, {"x": X})


def test_a_pipeline_predicts_as_without(rolled: tb.Converted) -> None:
    model = rolled.model(of_output, inputs=lambda batch: batch["x"])
    plan = tiny.plan(pipe=2, data=2, microbatches=2, partition=(2, 3))
    found = predicted(model, {"x": X}, plan)
    np.testing.assert_allclose(found, predicted(model, {"x": X}), rtol=1e-6, atol=1e-6)
    assert len(found.sharding.device_set) == 4


def test_a_loss_that_calls_forward_twice_says_which_call_is_meant(rolled: tb.Converted) -> None:
    def twice(forward: Any, batch: Any) -> Any:
        return jnp.mean(forward(batch["x"]) - forward(-batch["x"]))

    with pytest.raises(ConversionError, match=r"(?s)second time.*inputs="):
        predicted(rolled.model(twice, chain=False), {"x": X})


@pytest.fixture(scope="module")
def gpt2() -> tuple[torch.nn.Module, tb.Converted]:
    ids, module = torch.from_numpy(IDS).long(), tiny_gpt2(3, 0.0)
    return module, tb.convert(module, input_ids=ids, labels=ids)


@pytest.mark.parametrize("chain", [True, False])
def test_a_model_output_gives_its_arrays(gpt2: Any, chain: bool) -> None:
    ids, (module, converted) = torch.from_numpy(IDS).long(), gpt2
    batch = {"input_ids": IDS, "labels": IDS}
    found = predicted(converted.model("module", chain=chain), batch)
    assert list(found) == ["logits"]  # the loss has no rows
    with torch.no_grad():
        expected = module.eval()(ids).logits.numpy()
    np.testing.assert_allclose(found.logits, expected, rtol=1e-4, atol=1e-5)
    last = converted.model("module", outputs=lambda out: out.logits[:, -1], chain=chain)
    np.testing.assert_array_equal(predicted(last, batch), found.logits[:, -1])
    half = predicted(last, batch, PLAN.replace(precision="bf16", zero=1))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), found.logits[:, -1], rtol=0.1, atol=0.05)
