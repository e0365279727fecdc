"""A pipeline against the same model without one, and against itself cut elsewhere."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from execute_cases import counting, gradients, tied, train, untied
from support import tiny

import fzero as fz


MICROBATCHES = 4
BATCH = counting(16)
# A rounding or two of a sum as large as the leaf's largest element (float32 has 24 bits).
ULP = 2.0**-22


def plan(pipe, **options):
    return tiny.plan(pipe=pipe, data=2, microbatches=MICROBATCHES, **options)


def dropped():
    """With dropout: random keys must not depend on the stage either."""
    return untied(apply=tiny.dropped_block)


@pytest.fixture(scope="module", params=[dropped, tied], ids=["dropout", "tied"])
def model(request):
    return request.param()


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
    assert len(same) >= len(whole) - 2, same


CUTS = [(4, "uniform"), (4, (1, 1, 3, 1)), (2, (1, 5)), (2, "parameters"), (2, "type:blocks")]


@pytest.mark.parametrize(("stages", "partition"), CUTS, ids=str)
def test_where_a_chain_is_cut_changes_no_bit(model, cut_in_two, stages, partition):
    tiny.same_bits(gradients(model, plan(stages, partition=partition), BATCH), cut_in_two)


OPTIMIZERS = {
    # What reads nothing but its own element is the same to the bit, if its gradients are.
    "sgd": (lambda: optax.sgd(0.1), True),
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    # Long chains of operations are compiled to other machine code beside other leaves.
    "adamw": (lambda: optax.adamw(1e-2), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name):
    make, exact = OPTIMIZERS[name]
    whole, cut = (train(untied(), plan(pipe), 4, tx=make()) for pipe in (1, 4))
    if exact:
        tiny.same_bits(cut.params, whole.params)
        assert [m["loss"] for m in cut.trace] == [m["loss"] for m in whole.trace]
    else:
        tiny.close(cut.params, whole.params, rtol=0, atol=2 * ULP)


def test_initial_values_are_those_without_a_pipeline():
    model = tiny.chain(4)
    cut = fz.init(model, None, plan(3), rng=3)
    whole = fz.init(model, None, plan(1), rng=3)
    tiny.same_bits(fz.logical(model, cut, plan(3)), fz.logical(model, whole))
    assert jax.random.key_data(cut.rng).tolist() == jax.random.key_data(whole.rng).tolist()
