"""ZeRO stages 0 to 3 give the same numbers, bit for bit: 20 AdamW steps on 1x8 devices."""

import pytest

import fzero as fz
from tests.support.gpt import gpt, same_bits, train


CASES = {
    "fp32-clip": {"clip_norm": 0.5},
    "fp32-accumulate-clip": {"microbatches": 2, "clip_norm": 0.5},
    "bf16-clip": {"precision": "bf16", "clip_norm": 0.5},
    "bf16-accumulate": {"precision": "bf16", "microbatches": 2},
    "fp16": {"precision": "fp16"},
    "fp32-remat-none": {"remat": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_norms_and_parameters_are_bit_identical(case):
    runs = {}
    for zero in (0, 1, 2, 3):
        plan = fz.Plan(zero=zero, data=8, min_shard_bytes=128, **CASES[case])
        # With dropout: random keys must not depend on the stage either.
        trace, state = train(gpt(dropout=0.1), plan, steps=20)
        runs[zero] = trace, fz.logical(gpt(), state), state.buffers
    assert runs[0][0][0][0] > runs[0][0][-1][0], "the model did not learn anything"
    for zero in (0, 1, 2):
        assert runs[zero][0] == runs[3][0], f"stage {zero} and 3: losses or norms differ"
        assert same_bits(runs[zero][1], runs[3][1]), f"stage {zero} and 3: parameters differ"


def test_reducing_once_a_step_agrees_between_the_stages_that_offer_it():
    runs = {
        zero: train(gpt(), fz.Plan(zero=zero, data=8, microbatches=2, reduce="step",
                                   min_shard_bytes=128, clip_norm=0.5), steps=4)
        for zero in (0, 1)
    }  # fmt: skip
    assert runs[0][0] == runs[1][0]
    assert same_bits(runs[0][1].params, runs[1][1].params)
