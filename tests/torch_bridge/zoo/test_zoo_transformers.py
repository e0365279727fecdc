"""transformers models: values, gradients, statistics, names and one optimizer step."""

from __future__ import annotations

import functools

import pytest
import zoo_checks as checks
from zoo_entries import Result, evaluate
from zoo_transformers import ENTRIES, ROLLED

from tests.support.sample import some


# GPT-2 has tests/torch_bridge/test_gpt2.py, convolutions have test_zoo_torch.py, and batch norms in
# rolled blocks test_rolled.py; `make nightly` has the others.
CORE = ("llama",)
every_model = pytest.mark.parametrize("name", some(ENTRIES, *(set(ENTRIES) - set(CORE))))


@functools.cache
def result_of(name: str) -> Result:
    return evaluate(ENTRIES[name])


@pytest.mark.slow  # the first test of a model converts it, and this is the longest file
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
@pytest.mark.parametrize("name", some(ENTRIES, *(set(ENTRIES) - set(CORE))))
def test_a_batch_of_one(name: str) -> None:
    checks.check_row(ENTRIES[name])


@every_model
def test_equal_blocks_are_rolled(name: str) -> None:
    """So the other tests compare loops with PyTorch, for the models that have enough layers."""
    stacks = [run.name for run in result_of(name).converted.blocks.stacks]
    assert stacks == list(ROLLED.get(name, ()))


@pytest.mark.parametrize("name", some(ENTRIES, *(set(ENTRIES) - {"llama"})))
def test_divided_over_two_devices_it_trains_as_on_one(name: str) -> None:
    checks.check_divided(result_of(name), ENTRIES[name])
