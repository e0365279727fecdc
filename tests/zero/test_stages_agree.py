"""ZeRO stages 0 to 3 give the same numbers, bit for bit: 20 AdamW steps on 1x8 devices.

Which sums a compiler fuses decides how they round, and that depends on the CPU: what is marked
`bits` is compiled as users compile, and `make test-bits` runs it for several instruction sets.
"""

import os
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support import tiny
from tests.support.gpt import gpt, same_bits, train


# Every value of every option, in few cases. One microbatch in float32 without anything is compared
# in tests/failures/test_against_pytorch.py, clipped below.
CASES = {
    "fp32-accumulate-clip": {"microbatches": 2, "clip_norm": 0.5},
    "bf16-clip-remat-none": {"precision": "bf16", "clip_norm": 0.5, "remat": "none"},
    "fp16-accumulate": {"precision": "fp16", "microbatches": 2},
}
# With look-ahead loops, as GPUs run by default: (stages, how far losses may be from plain loops).
# The loops' first and last layers are compiled outside of them, and may round otherwise.
AHEAD = {
    "fp32-accumulate-clip": ((0, 1, 2, 3), 1e-5),
    "bf16-clip-remat-none": ((1, 3), 1e-2),
}
TX = optax.adamw(3e-3)


class Result(NamedTuple):
    """What a run leaves: losses and norms of every step, and the last state laid out whole."""

    trace: list[tuple[float, float]]
    state: fz.TrainState


def whole(model, tx, state, plan):
    """A state laid out as stage 0 lays it out, without its padding."""
    to = plan.replace(zero=0, gather="eager")
    return jax.device_get(fz.replan(state, model, tx, plan, to).replace(rng=None))


@cache
def start():
    """Given values: a stage compiles its step only. That stages draw the same ones, see below."""
    return jax.device_get(jax.jit(gpt().init)(jax.random.key(0)))


@cache
def run(case, zero, prefetch=None, gather="eager"):
    plan = fz.Plan(zero=zero, data=8, min_shard_bytes=128, prefetch=prefetch, gather=gather,
                   **CASES[case])  # fmt: skip
    # With dropout: random keys must not depend on the stage either.
    model = gpt(dropout=0.1, given=start())
    trace, state = train(model, plan, steps=20, tx=TX)
    return Result(trace, whole(model, TX, state, plan))


def agree(one, other):
    """Asserts that two runs have the same losses, norms, parameters and optimizer state."""
    assert one.trace == other.trace, "losses or norms differ"
    tiny.same_bits(one.state, other.state)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize(
    ("case", "stages"),
    [("fp32-accumulate-clip", (0,)), ("bf16-clip-remat-none", (0,)),
     *(pytest.param(*more, marks=pytest.mark.nightly) for more in
       [("fp32-accumulate-clip", (1, 2)), ("bf16-clip-remat-none", (1, 2)),
        ("fp16-accumulate", (0, 1, 2))])],
)  # fmt: skip
def test_losses_norms_and_states_are_bit_identical(case, stages):
    if case.startswith("fp16") and "SSE4_2" in os.environ.get("XLA_FLAGS", ""):
        pytest.skip("XLA compiles no float16 for SSE4.2")
    last = run(case, 3)
    assert last.trace[0][0] > last.trace[-1][0], "the model did not learn anything"
    for zero in stages:
        agree(run(case, zero), last)


@pytest.mark.nightly
@pytest.mark.parametrize("case", AHEAD)
def test_stages_that_gather_ahead_are_bit_identical(case):
    (*stages, last), apart = AHEAD[case]
    ahead = run(case, last, prefetch=True)
    for zero in stages:
        agree(run(case, zero, prefetch=True), ahead)
    plain = run(case, last)  # found above
    np.testing.assert_allclose(ahead.trace, plain.trace, rtol=apart)


def test_two_devices_compile_what_lies_between_as_more_do():
    """Fenced off; one device has nothing to be alike with."""

    def fences(data):
        model, plan = tiny.chain(), tiny.plan(zero=3, data=data)
        step = fz.train_step(model, TX, plan)
        state = fz.abstract_state(model, TX, plan)
        return step.lower(state, tiny.tokens(4)).as_text().count("optimization_barrier")

    alone, two, four = map(fences, (1, 2, 4))
    assert alone < two == four


@pytest.mark.slow
@pytest.mark.bits
def test_gathering_in_the_forward_pass_changes_no_bit():
    case = "bf16-clip-remat-none"
    agree(run(case, 2, gather="lazy"), run(case, 3))  # found above


# Where one gathers for all: loops that look ahead, and plain ones.
SEVERAL = {
    "fp16, ahead": {"zero": 1, "precision": "fp16", "prefetch": True, "reduce": "step",
                    "microbatches": 4, "replica": 2, "data": 4},
    "fp32": {"zero": 2, "microbatches": 2, "data": 8, "clip_norm": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_the_first_of_several_microbatches_gathers_for_all(name):
    """Which then stands before the loop over the others, where the compiler may round otherwise."""
    model, tx, found = tiny.chain(apply=tiny.dropped_block), optax.sgd(0.1, momentum=0.9), []
    model = model.with_init(jax.device_get(model.init(jax.random.key(0))))
    for gather in ("eager", "lazy"):
        plan = tiny.plan(gather=gather, **SEVERAL[name])
        state, step, trace = fz.init(model, tx, plan), fz.train_step(model, tx, plan), []
        for seed in (0, 1, 0):
            state, metrics = step(state, tiny.tokens(32, seed=seed))
            trace.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        found.append(Result(trace, whole(model, tx, state, plan)))
    lazy, eager = found
    # Roundings of float32, and of float16's gradients: 2^-11 of each.
    rtol = 1e-3 if "fp16" in name else 2e-6
    np.testing.assert_allclose(lazy.trace, eager.trace, rtol=rtol)
    tiny.close(lazy.state.params, eager.state.params, rtol=0, atol=rtol)


@pytest.mark.slow
def test_padded_tied_and_clipped():
    """A table of 27 x 13 that two layers read: no dim divides, and each adds its own gradient.

    Here look-ahead loops and plain ones have the same bits, too.
    """
    model, tx, runs = tiny.chain(), optax.adamw(1e-2), {}
    plans = [(0, False), (0, True), (1, True), (2, False), (3, False), (3, True)]
    for zero, prefetch, gather in [*((*p, "eager") for p in plans), (2, True, "lazy")]:
        plan = tiny.plan(zero=zero, data=8, clip_norm=0.5, prefetch=prefetch, gather=gather)
        state, step, trace = fz.init(model, tx, plan), fz.train_step(model, tx, plan), []
        for seed in (0, 1, 2, 0):
            state, metrics = step(state, tiny.tokens(seed=seed))
            trace.append(tuple(float(metrics[name]) for name in ("loss", "grad_norm", "accuracy")))
        shape = state.params["embed"]["table"].shape
        assert shape == ((32, 13) if plan.gathers_at_use else (27, 13))
        runs[zero, prefetch, gather] = Result(trace, whole(model, tx, state, plan))
    last = runs[3, True, "eager"]
    losses, norms, _ = np.array(last.trace).T
    assert losses[3] < losses[0]
    assert norms.min() > 0.5, "clipping had nothing to do"
    for one in runs.values():
        agree(one, last)


def test_stages_draw_the_same_initial_values():
    model, states = gpt(), {}
    for zero in (0, 1, 2, 3):
        plan = fz.Plan(zero=zero, data=8, min_shard_bytes=128)
        states[zero] = whole(model, TX, fz.init(model, TX, plan), plan)
        tiny.same_bits(states[zero], states[0])


@pytest.mark.nightly
def test_reducing_once_a_step_agrees_between_the_stages_that_offer_it():
    runs = {
        zero: train(gpt(), fz.Plan(zero=zero, data=8, microbatches=2, reduce="step",
                                   min_shard_bytes=128, clip_norm=0.5), steps=4)
        for zero in (0, 1)
    }  # fmt: skip
    assert runs[0][0] == runs[1][0]
    assert same_bits(runs[0][1].params, runs[1][1].params)
