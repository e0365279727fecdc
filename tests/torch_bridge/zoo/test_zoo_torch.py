"""Plain torch modules: values, gradients, statistics, names and one optimizer step."""

from __future__ import annotations

import functools

import pytest
import zoo_checks as checks
from zoo_entries import Result, evaluate
from zoo_torch import ENTRIES

from tests.support.sample import some


# What others cover in part, or transformers do.
NIGHTLY = (
    "transformer_encoder", "products", "spectra", "weight_and_spectral_norm",
    "transformer", "norms", "recurrent", "residual_net", "unet", "indexing", "ordering",
)  # fmt: skip
every_model = pytest.mark.parametrize("name", some(ENTRIES, *NIGHTLY))


@functools.cache
def result_of(name: str) -> Result:
    return evaluate(ENTRIES[name])


@every_model
def test_outputs_agree_in_both_modes(name: str) -> None:
    checks.check_forward(result_of(name), ENTRIES[name])


@every_model
def test_gradients_agree(name: str) -> None:
    checks.check_gradients(result_of(name), ENTRIES[name])


@every_model
def test_buffers_agree_after_training(name: str) -> None:
    checks.check_buffers(result_of(name), ENTRIES[name])


@every_model
def test_state_dict_round_trip_is_exact(name: str) -> None:
    checks.check_round_trip(result_of(name))


@every_model
def test_an_optimizer_step_agrees(name: str) -> None:
    checks.check_step(result_of(name), ENTRIES[name])


@every_model
def test_one_conversion_serves_every_batch_size(name: str) -> None:
    checks.check_batch(result_of(name), ENTRIES[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ENTRIES)
def test_a_batch_of_one(name: str) -> None:
    checks.check_row(ENTRIES[name])
