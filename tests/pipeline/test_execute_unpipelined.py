"""A pipeline against the same model without one, and against itself cut elsewhere."""

from __future__ import annotations

import numpy as np
import optax
import pytest
from execute_cases import counting, gradients, tied, train, untied
from support import tiny
from support.sample import some


MICROBATCHES = 4
BATCH = counting(16)
# A rounding or two of a sum as large as the leaf's largest element (float32 has 24 bits).
ULP = 2.0**-22


def plan(pipe, **options):
    return tiny.plan(pipe=pipe, data=2, microbatches=MICROBATCHES, **options)


@pytest.fixture(scope="module")
def model():
    """With tied weights, and dropout: random keys must not depend on the stage either."""
    return tied(4, tiny.dropped_block)


@pytest.fixture(scope="module")
def cut_in_two(model):
    return gradients(model, plan(2), BATCH)


def test_losses_are_those_without_a_pipeline_and_gradients_nearly(model, cut_in_two):
    """The forward pass is the same to the bit. The backward pass is not quite:

    - A pipeline's is compiled in two halves, input gradients and weight gradients, so that zero
      bubble schedules give the bits of all others. Without a pipeline it is compiled whole, and the
      compiler fuses some sums (of bias gradients) with what they add up.
    - Tied weights get one gradient per stage, summed over microbatches and devices, and these are
      added last. Without a pipeline both readers' gradients are added first.
    """
    whole = gradients(model, plan(1), BATCH)
    assert cut_in_two["loss"] == whole["loss"]
    tiny.close(cut_in_two, whole, rtol=0, atol=ULP)
    same = [path for path, grad in cut_in_two.items() if np.array_equal(grad, whole[path])]
    assert set(whole) - set(same) <= {"blocks/b", "embed/table"}


CUTS = [(4, (1, 1, 3, 1)), (2, "parameters")]


@pytest.mark.parametrize(("stages", "partition"), some(CUTS, CUTS[1]), ids=str)
def test_where_a_chain_is_cut_changes_no_bit(model, cut_in_two, stages, partition):
    tiny.same_bits(gradients(model, plan(stages, partition=partition), BATCH), cut_in_two)


@pytest.mark.as_users
def test_updates_of_the_same_gradients_are_the_same():
    """Without tied weights, and several microbatches on devices in groups, gradients are."""
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    whole, cut = (train(untied(2), plan(pipe), 4, tx=tx) for pipe in (1, 2))
    tiny.same_bits(cut.params, whole.params)
    assert [m["loss"] for m in cut.trace] == [m["loss"] for m in whole.trace]
