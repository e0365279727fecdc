"""A pipeline's step as it ran: every action, in an order that the schedule allows."""

from __future__ import annotations

import itertools
import sys
import time
from types import SimpleNamespace

import optax
import pytest
from execute_cases import counting, tied
from support import tiny

import fzero as fz
from fzero.pipeline import gpipe, recorded, simulate, zb_h1
from fzero.pipeline.recording import Recording
from fzero.schedule.actions import Action
from fzero.schedule.medians import medians
from fzero.schedule.order import gives, needs
from fzero.schedule.simulate import Event


TX = optax.sgd(1e-2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_recorded_step_has_every_action_once_and_in_order(schedule):
    plan = tiny.plan(pipe=4, data=2, microbatches=4, schedule=schedule)
    state, step = fz.init(tied(), TX, plan), fz.train_step(tied(), TX, plan)
    state, _ = step(state, counting(8))
    began, switching = time.perf_counter(), sys.getswitchinterval()
    with recorded(step) as recording:
        state, _ = step(state, counting(8))
    took, timeline = time.perf_counter() - began, recording.timeline()
    assert sys.getswitchinterval() == switching
    assert timeline.mode == "measured"
    assert sorted(e.action for e in timeline.events) == sorted(
        action for row in plan.build_schedule().ranks for action in row if action is not None
    )
    assert 0 == min(e.start_s for e in timeline.events) < timeline.makespan_s < took
    ends = {gives(e.action): e.end_s for e in timeline.events}
    for rank, row in enumerate(timeline.rank_events):
        for before, after in itertools.pairwise(row):
            assert after.rank == rank
            assert before.end_s <= after.start_s <= after.end_s
    for event in timeline.events:
        for value in needs(event.action, 4):
            assert ends[value] <= event.start_s
    # On paper, with the medians of what was measured, nothing waits for the host.
    paper = simulate(timeline.schedule, timeline.cost)
    assert {e.action for e in paper.events} == {e.action for e in timeline.events}
    for stage in range(4):
        own = sorted(
            e.end_s - e.start_s for e in timeline.events if str(e.action)[:2] == f"{stage}F"
        )
        assert own[0] <= timeline.cost.per_stage[stage].f <= own[-1]
    # Afterwards nothing is recorded any more.
    step(state, counting(8))
    assert recording.timeline() == timeline


def test_only_a_pipeline_is_recorded():
    step = fz.train_step(tied(), TX, tiny.plan())
    refused = pytest.raises(fz.PipelineError, match="expected a pipeline's step")
    with refused, recorded(step):
        pass
    step = fz.train_step(tied(), TX, tiny.plan(pipe=2, data=2, microbatches=2))
    usual = sys.getswitchinterval()
    with recorded(step) as recording:
        assert sys.getswitchinterval() < usual  # ends are noted soon
    assert step.executor.observer is None
    with pytest.raises(fz.PipelineError, match="expected one training step"):
        recording.timeline()


def test_a_whole_backward_pass_costs_both_halves_where_only_those_ran():
    schedule = zb_h1(1, 1)
    lasts = {"F": 1.0, "I": 2.0, "W": 3.0}
    events = [Event(0, a, 0.0, lasts[a.kind]) for a in schedule.ranks[0] if a is not None]
    (found,) = medians(events, schedule).per_stage
    assert (found.f, found.b, found.i, found.w) == (1.0, 5.0, 2.0, 3.0)


def test_each_stage_costs_what_its_own_actions_took():
    """A stage of another process, of which nothing is known, what all the others do."""
    schedule = gpipe(3, 3)
    lasts = {0: (1.0, 1.0, 9.0), 1: (4.0, 4.0, 5.0)}
    events = [
        Event(stage, Action(kind, stage, m), 0.0, seconds)
        for stage, several in lasts.items() for m, seconds in enumerate(several) for kind in "FB"
    ]  # fmt: skip
    assert [(own.f, own.b) for own in medians(events, schedule).per_stage] == [
        (1.0, 1.0), (4.0, 4.0), (4.0, 4.0)
    ]  # fmt: skip


def test_an_action_starts_when_its_inputs_are_there():
    """The second rank's forward was dispatched, on an idle rank, before what it reads was done."""
    schedule = gpipe(2, 1)
    recording = Recording(SimpleNamespace(schedule=schedule))
    order = [Action(kind, stage, 0) for kind, stage in (("F", 0), ("F", 1), ("B", 1), ("B", 0))]
    began = recording._began
    recording._given = dict.fromkeys(order, began)
    recording._ended = {action: began + n for n, action in enumerate(order, 1)}
    starts = {event.action: event.start_s for event in recording.timeline().events}
    assert [starts[action] for action in order] == pytest.approx([0, 1, 2, 3], abs=1e-6)
