"""Validate, then fit, in any order: evaluation never changes a training run.

Original report: Lightning #17523, `trainer.validate()` before `trainer.fit()` fails or trains
something else under DeepSpeed, because each builds an engine around the same module; ZeRO-3 still
fails on a second `fit`. Shown, on every ZeRO stage: the training trace (every metric of every step,
final state with optimizer state and buffers) is bit-identical to training alone, whatever is
evaluated before, between and after, also within an accumulation; and `eval_step` leaves every leaf
as it was: the same objects, at the same addresses, with the same bits on every device.
"""

from typing import Any

import failure_cases as cases
import optax
import pytest
from failure_cases import STAGES, Run, batch_at, bits, differing, fit, memory, shard_bits, tiny_run

import fzero as fz


ORDERS = ["fit", "validate fit", "fit fit", "fit validate fit", "fit test fit"]
STEPS = 2


def evaluate(run: Run, state: fz.TrainState, which: str) -> dict[str, Any]:
    """Two batches of a validation or test set, on the state that trains; nothing may change."""
    before = memory(state), shard_bits(state)
    results = []
    for number in range(2):
        metrics = run.evaluate(state, batch_at(number, seed={"validate": 1, "test": 2}[which]))
        results.append(metrics)
    assert (memory(state), shard_bits(state)) == before
    return bits(results)


def alone(run: Run, steps: int) -> tuple[list[Any], fz.TrainState]:
    """Training and nothing else."""
    trace: list[Any] = []
    return trace, fit(run, run.start(), steps, trace)


@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.parametrize("order", ORDERS)
def test_order_changes_nothing(zero: int, order: str) -> None:
    run = tiny_run(zero)
    expected_trace, expected = alone(run, STEPS * order.split().count("fit"))
    traces = run.train.num_traces
    state, trace = run.start(), []
    for action in order.split():
        if action == "fit":
            state = fit(run, state, STEPS, trace)
        else:
            evaluate(run, state, action)
    evaluate(run, state, "test")
    assert trace == expected_trace
    assert differing(bits(state), bits(expected)) == []
    assert run.train.num_traces == traces


@pytest.mark.parametrize("zero", STAGES)
def test_evaluation_is_repeatable_and_sees_training(zero: int) -> None:
    run = tiny_run(zero)
    state = run.start()
    first = evaluate(run, state, "validate")
    assert evaluate(run, state, "validate") == first
    state = fit(run, state, STEPS, [])
    assert evaluate(run, state, "validate") != first


@pytest.mark.parametrize("zero", STAGES)
def test_evaluation_within_an_accumulation(zero: int) -> None:
    run = tiny_run(zero)

    def accumulated(evaluated: bool) -> tuple[list[Any], fz.TrainState]:
        state, trace = run.start(), []
        for number in range(3):  # two batches a step, then one more that is left pending
            state, metrics = run.accumulate(state, batch_at(10 * number))
            trace.append(bits(metrics))
            if evaluated:
                assert state.grads is not None
                evaluate(run, state, "validate")
            if number < 2:
                state, metrics = run.train(state, batch_at(10 * number + 1))
                trace.append(bits(metrics))
        return trace, state

    (trace, state), (expected_trace, expected) = accumulated(True), accumulated(False)
    assert trace == expected_trace
    assert differing(bits(state), bits(expected)) == []


@pytest.mark.parametrize("zero", STAGES)
def test_evaluation_within_multi_steps(zero: int) -> None:
    tx = optax.MultiSteps(cases.tiny_adamw(), 2).gradient_transformation()
    run = cases.build(cases.bigram_model(), tx, cases.tiny_plan(zero))
    state, trace = run.start(), []
    for _ in range(4):
        evaluate(run, state, "validate")
        state = fit(run, state, 1, trace)
    expected_trace, expected = alone(run, 4)
    assert trace == expected_trace
    assert differing(bits(state), bits(expected)) == []
    assert int(state.opt_state.gradient_step) == 2


def test_what_is_compared_can_differ() -> None:
    run = tiny_run(3)
    state = fit(run, run.start(), STEPS, [])
    spoiled = run.start()
    # What an evaluation in training mode would do: move the statistics.
    buffers = cases.copied(spoiled.buffers)
    buffers["center"]["mean"] = buffers["center"]["mean"] + 1e-6
    other = fit(run, spoiled.replace(buffers=buffers), STEPS, [])
    assert any("mean" in path for path in differing(bits(state), bits(other)))
