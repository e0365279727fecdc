"""`optimize`: within the limit, legal, deterministic, and never worse than a builder that fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import repeatable

from fzero.errors import ScheduleError
from fzero.pipeline import BUILDERS, Cost, check, optimize, simulate, zb_h1
from fzero.pipeline.greedy import Policy, list_schedule


def best_builder(cost, stages, microbatches, limit, chunks):
    """The makespan of the best builder that fits, or None."""
    found = []
    for builder in BUILDERS.values():
        if builder.trains and builder.chunks in (None, chunks):
            timeline = simulate(builder.build(stages, microbatches, chunks), cost)
            if max(timeline.peak_live_per_rank) <= limit:
                found.append(timeline.makespan_s)
    return min(found, default=None)


seconds = st.integers(1, 20).map(lambda n: n / 4)


@st.composite
def problems(draw):
    chunks = draw(st.sampled_from([1, 1, 2, 3]))
    ranks = draw(st.integers(1, 3 if chunks > 1 else 4))
    microbatches = draw(st.integers(1, 6))
    stages = ranks * chunks
    per_stage = st.lists(seconds, min_size=stages, max_size=stages)
    cost = Cost(
        f=draw(seconds),
        b=draw(st.none() | st.just(10.0)),
        i=draw(seconds),
        w=draw(seconds),
        send=draw(st.sampled_from([0, 0.25, 2])),
        per_stage=draw(st.none() | per_stage.map(tuple)),
    )
    return cost, stages, microbatches, draw(st.integers(chunks, 2 * stages)), chunks


@settings(repeatable, max_examples=40)
@given(problems())
def test_never_worse_than_the_best_builder_that_fits(problem):
    cost, stages, microbatches, limit, chunks = problem
    found = optimize(cost, stages, microbatches, limit, chunks=chunks, search_budget=40)
    check(found)
    timeline = simulate(found, cost)
    assert max(timeline.peak_live_per_rank) <= limit
    sizes = (found.num_ranks, found.num_stages, found.num_microbatches)
    assert sizes == (stages // chunks, stages, microbatches)
    builder = best_builder(cost, stages, microbatches, limit, chunks)
    assert builder is None or timeline.makespan_s <= builder + 1e-9


def test_deterministic():
    cost = Cost(f=1, i=1.3, w=0.6, send=0.2, per_stage=(1, 0.8, 1.4, 1))
    assert optimize(cost, 4, 6, 4) == optimize(cost, 4, 6, 4)


def test_greedy_alone_reaches_the_zero_bubble_time():
    # Without any builder to start from; it needs one place more than ZB-H1 for ZB-H1's time.
    policies = [Policy(((5,),) * 4, patience=patience) for patience in (0.0, 0.5, 1.0)]
    found = [list_schedule([[s] for s in range(4)], 8, Cost(), policy) for policy in policies]
    assert min(simulate(schedule).makespan_s for schedule in found) == 27
    assert all(max(simulate(schedule).peak_live_per_rank) <= 5 for schedule in found)


def test_gains_on_uneven_stages():
    # The fixed orders assume equal stages; here one is slow and sends take time. The slow stage
    # is busy without a gap from its first input on (1 + 0.5 s) to the end: nothing is shorter.
    cost = Cost(f=1, i=1, w=1, send=0.5, per_stage=(1, 2, 1, 1))
    assert best_builder(cost, 4, 8, 4, 1) == 51.5
    assert simulate(optimize(cost, 4, 8, 4), cost).makespan_s == 1.5 + 8 * 6


def test_local_search_gains():
    cost = Cost(f=1, i=1, w=1)
    without = simulate(optimize(cost, 4, 6, 2, chunks=2, search_budget=0), cost).makespan_s
    assert simulate(optimize(cost, 4, 6, 2, chunks=2), cost).makespan_s < without


def test_less_memory_than_any_builder():
    # 1F1B holds 4 on the first rank. With 2 or 1 there is still a schedule, only a slower one.
    makespans = []
    for limit in (4, 3, 2, 1):
        found = optimize(Cost(), 4, 8, limit)
        timeline = simulate(found)
        assert max(timeline.peak_live_per_rank) <= limit
        makespans.append(timeline.makespan_s)
    assert makespans == sorted(makespans)
    assert makespans[-1] > makespans[0]


def test_no_limit_takes_the_shortest():
    cost = Cost(f=1, i=1, w=1)
    found = simulate(optimize(cost, 6, 8, chunks=2, search_budget=0), cost)
    # ZB-V's closed form: only the skew of the starts is left, and it holds 2p = 6 for it.
    assert found.makespan_s == 6 * 8 + 2
    assert max(found.peak_live_per_rank) == 6


def test_whole_backwards_where_splitting_costs():
    # A split that takes longer than the whole must not be used just because it exists.
    found = optimize(Cost(f=1, b=1, i=1, w=1), 2, 4)
    assert {a.kind for a in found.actions} == {"F", "B"}


def test_equal_makespans_take_less_memory():
    found = optimize(Cost(f=1, i=1, w=1), 4, 8)
    assert simulate(found).makespan_s == simulate(zb_h1(4, 8)).makespan_s
    assert max(simulate(found).peak_live_per_rank) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 0}, "no schedule fits memory_limit=0: .* allow at least 1"),
        ({"memory_limit": 1, "chunks": 2}, "each of 2 chunks of a rank; allow at least 2"),
        ({"chunks": 3}, r"stages \(4\) must be divisible by chunks \(3\)"),
    ],
)
def test_nothing_fits(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        optimize(Cost(), 4, 8, **arguments)


def test_caps_that_leave_no_way():
    # Two chunks share one place: the first takes it, and nothing can free it.
    assert list_schedule([[0, 1]], 2, Cost(), Policy(((1, 1),))) is None
