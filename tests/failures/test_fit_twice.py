"""Fit, then fit again: nothing starts over and nothing is skipped.

Original report: Lightning #5007, a second `trainer.fit()` continues with wrong counters (epochs,
global step, data position), because they live in the trainer beside the model. Here all of them
are in the state, and the loader's position is a function of `state.step`. Shown, on every ZeRO
stage: `fit(2 steps)` twice equals `fit(4 steps)` bit for bit, with the same batches, the same
optimizer count and schedule, also when the second fit builds its steps anew and when nothing of the
first one is left but the state.
"""

import failure_cases as cases
import pytest
from failure_cases import STAGES, bits, differing, fit, tiny_run

import fzero as fz


def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that fills with the steps whose batches are loaded."""
    loaded: list[int] = []
    load = cases.batch_at

    def loader(step: int) -> dict:
        loaded.append(step)
        return load(step)

    monkeypatch.setattr(cases, "batch_at", loader)
    return loaded


@pytest.mark.parametrize("zero", STAGES)
def test_two_and_two_is_four(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(zero)
    loaded = positions(monkeypatch)
    trace, state = [], run.start()
    for _ in range(2):
        state = fit(run, state, 2, trace)
    assert loaded == [0, 1, 2, 3]
    expected_trace, expected = [], run.start()
    expected = fit(run, expected, 4, expected_trace)
    assert loaded == [0, 1, 2, 3] * 2
    assert trace == expected_trace
    assert differing(bits(state), bits(expected)) == []
    counts = [leaf for path, leaf in fz.tree.named_leaves(state.opt_state) if "count" in path]
    assert int(state.step) == 4
    assert counts
    assert all(int(count) == 4 for count in counts)
    assert int(state.buffers["center"]["calls"]) == 4


def test_second_fit_with_steps_of_its_own() -> None:
    run = tiny_run(3)
    trace, state = [], run.start()
    state = fit(run, state, 2, trace)
    # A new process would start like this: the same description, none of the same objects.
    again = cases.build(cases.tiny_model(), cases.tiny_adamw(), cases.tiny_plan(3))
    state = fit(again, cases.copied(state), 2, trace)
    expected_trace, expected = [], run.start()
    expected = fit(run, expected, 4, expected_trace)
    assert trace == expected_trace
    assert differing(bits(state), bits(expected)) == []


def test_a_fit_that_starts_over_is_seen() -> None:
    run = tiny_run(3)
    state = fit(run, run.start(), 2, [])
    reset = state.replace(step=cases.copied(run.first.step))
    expected = fit(run, cases.copied(state), 2, [])
    assert differing(bits(fit(run, reset, 2, [])), bits(expected))
