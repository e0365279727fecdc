"""LoHa and LoKr of PEFT: their choice of adapters in train mode, and LoHa's gradient by hand."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
from parity import check_parity, convert
from torch import nn

from fzero.errors import ConversionError


CONFIGS = {"loha": peft.LoHaConfig, "lokr": peft.LoKrConfig}
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def adapted(kind: str, layer: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = CONFIGS[kind](r=2, alpha=4, target_modules=["0"], **options)
    module = peft.get_peft_model(nn.Sequential(layer), config)
    with torch.no_grad():
        for parameter in module.parameters():  # an adapter begins as zero
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return module


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_has_the_values_and_gradients_of_peft(kind: str) -> None:
    check_parity(adapted(kind, nn.Linear(8, 6)), X, train=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_is_left_out_as_often_as_it_says(kind: str) -> None:
    module = adapted(kind, nn.Linear(8, 6), module_dropout=0.25)
    made = convert(module, X, both=True)

    def run(key: Any) -> Any:
        return made.apply(made.params, made.buffers, X.numpy(), train=True, rng=key).output

    found = np.asarray(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 400)))
    with torch.no_grad():
        whole = module.eval()(X).numpy()
        with module.disable_adapter():  # type: ignore[operator]
            base = module(X).numpy()
    near = [np.abs(found - want).max((1, 2)) < 1e-5 for want in (whole, base)]
    assert np.all(near[0] != near[1])
    assert 0.18 < near[1].mean() < 0.32


def test_a_gradient_by_hand_that_is_another_one_is_refused() -> None:
    module = adapted("loha", nn.Conv2d(4, 6, 3), use_effective_conv2d=True)
    with pytest.raises(ConversionError, match=r"HadaWeightCP.*register_function"):
        convert(module, torch.ones(1, 4, 5, 5), both=True)
