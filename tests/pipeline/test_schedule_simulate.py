"""Makespans, bubbles and peaks against the closed forms of the papers, on a grid of sizes.

Notation: p ranks, v chunks per rank, m microbatches; f, i, w seconds of one chunk, b = i + w. The
closed forms are for a whole rank's share, v chunks: F = v f, and so on.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import all_sizes, build, repeatable

from fzero.errors import ScheduleError
from fzero.pipeline import Action, Cost, align, gpipe, inference, one_f_one_b, simulate
from fzero.schedule.actions import rows_of


EQUAL = (1, 1, 1)
# Whole numbers, so that sums are exact and makespans are compared with ==.
COSTS = [EQUAL, (2, 2, 1), (4, 4, 3), (3, 2, 1), (2, 3, 1), (2, 1, 3), (1, 2, 2), (1, 1, 3)]
RANKS = range(1, 7)
MICROBATCHES = range(1, 14)
GRID = [(p, m) for p in RANKS for m in MICROBATCHES]


def run(name, p, m, costs, v=None):
    f, i, w = costs
    return simulate(build(name, p, m, v), Cost(f=f, i=i, w=w))


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager_1f1b"])
def test_single_chunk_makespan(name, costs):
    whole = sum(costs)
    for p, m in GRID:
        timeline = run(name, p, m, costs)
        assert timeline.makespan_s == (m + p - 1) * whole
        assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.bubble_fraction_per_rank == pytest.approx([(p - 1) / (m + p - 1)] * p)


@pytest.mark.parametrize("costs", COSTS, ids=str)
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_looped_makespan(name, v, costs):
    whole = sum(costs)
    for p, m in GRID:
        timeline = run(name, p, m, costs, v)
        if m >= p:
            # For `interleaved` the papers want m % p == 0; our uneven groups do not need it.
            assert timeline.makespan_s == v * m * whole + (p - 1) * whole
            assert timeline.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1))
        else:
            # Not the closed form: the last of m microbatches leaves the last rank after p - 1
            # hops, so the first finds its next chunk's rank idle p - m chunks long, on each of
            # v - 1 returns and in both directions.
            late = (p - m) * (v - 1) * whole
            assert timeline.makespan_s == v * m * whole + (p - 1) * whole + late


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_zb_h1_makespan(costs):
    f, i, w = costs
    for p, m in GRID:
        makespan = run("zb_h1", p, m, costs).makespan_s
        closed = m * (f + i + w) + (p - 1) * (f + i - w)
        if w > min(f, i) and p > 1:
            # The closed form fills the bubble with W's that fit into the gaps left by F and I.
            # Longer ones push the gradients that wait behind them: more time, never less.
            assert makespan > closed
        elif m >= p:
            assert makespan == closed
        else:
            # With fewer microbatches than ranks there are only m W's to fill p - 1 gaps with.
            assert makespan == closed + (p - m) * w


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_zb_h2_makespan(costs):
    f, i, w = costs
    for p, m in GRID:
        if m < 2 * p - 1:
            continue  # too few to fill the bubble; bounded in test_never_below_the_floor
        timeline = run("zb_h2", p, m, costs)
        # The published bubble (p - 1)(f + i - 2w) is that of the first rank. The last rank starts
        # (p - 1) f late, and in one isolated step the worse of the two counts.
        bubble = (p - 1) * max(f, f + i - 2 * w)
        assert timeline.makespan_s == m * (f + i + w) + bubble
        if f == i == w:
            assert timeline.idle_s_in_span_per_rank == (0,) * p
            assert timeline.span_s_per_rank == (m * (f + i + w),) * p


@pytest.mark.parametrize("costs", [c for c in COSTS if c[0] == c[1] >= c[2]], ids=str)
def test_zb_v_makespan(costs):
    f, i, w = costs
    for p, m in GRID:
        if m < 2 * p - 1:
            continue
        timeline = run("zb_v", p, m, costs)
        # Only the skew of the starts is left: (p - 1) chunks.
        assert timeline.makespan_s == 2 * m * (f + i + w) + (p - 1) * f
        if costs == EQUAL:
            assert timeline.idle_s_in_span_per_rank == (0,) * p


def test_zb_v_needs_equal_forward_and_input_gradient():
    # with unequal costs the fixed order loses time.
    for costs in [(3, 2, 1), (2, 3, 1), (1, 2, 2)]:
        f, i, w = costs
        makespan = run("zb_v", 4, 16, costs).makespan_s
        assert makespan > 2 * 16 * (f + i + w) + 3 * f


@pytest.mark.parametrize("costs", [EQUAL, (2, 1, 3)], ids=str)
def test_dualpipe_v_makespan(costs):
    f, i, w = costs
    for p, m in GRID:
        if m >= 2 * p:
            timeline = run("dualpipe_v", p, m, costs)
            # Its pairs of F and B run in turn here; side by side they are faster on real devices.
            assert timeline.makespan_s == 2 * m * (f + i + w) + (p - 1) * f


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 32)])
def test_table_of_the_papers(p, m):
    """The sizes for which an independent simulator was run: F = 1, B = 2, I = W = 1 a rank."""
    half = Cost(f=0.5, i=0.5, w=0.5)

    def makespan(name):
        return simulate(build(name, p, m), half if name in TWO_CHUNKS else Cost()).makespan_s

    assert makespan("gpipe") == makespan("1f1b") == makespan("eager_1f1b") == 3 * (m + p - 1)
    assert makespan("interleaved") == makespan("looped_bfs") == 3 * m + 1.5 * (p - 1)
    assert makespan("zb_h1") == makespan("zb_h2") == 3 * m + (p - 1)
    assert makespan("zb_v") == makespan("dualpipe_v") == 3 * m + 0.5 * (p - 1)


TWO_CHUNKS = ("interleaved", "looped_bfs", "zb_v", "dualpipe_v")


def peaks(name, p, m, v=None):
    return list(simulate(build(name, p, m, v)).peak_live_per_rank)


def test_peaks_of_single_chunks():
    for p, m in GRID:
        ranks = range(p)
        assert peaks("gpipe", p, m) == [m] * p
        assert peaks("1f1b", p, m) == [min(m, p - s) for s in ranks]
        assert peaks("eager_1f1b", p, m) == [min(m, 2 * (p - s) - 1) for s in ranks]
        assert peaks("zb_h1", p, m) == [min(m, p)] * p
        assert peaks("zb_h2", p, m) == [min(m, 2 * p - 1)] * p
        assert peaks("inference", p, m, 1) == [1] * p


@pytest.mark.parametrize("v", [2, 3])
def test_peaks_of_looped_chunks(v):
    for p, m in GRID:
        assert peaks("looped_bfs", p, m, v) == [m * v] * p
        # The first group has p microbatches, or a few more where p does not divide m.
        group = math.ceil(m / max(1, m // p))
        closed = [min(m * v, (v - 1) * group + 2 * (p - 1 - s) + 1) for s in range(p)]
        assert peaks("interleaved", p, m, v) == closed
        if m % p == 0:
            assert group == p


def test_peaks_of_the_v_shaped():
    for p, m in GRID:
        if m >= 2 * p - 1:
            assert peaks("zb_v", p, m) == [2 * p] * p
        if m >= 2 * p:
            # A single rank has nothing to overlap with and starts a forward before each backward.
            assert peaks("dualpipe_v", p, m) == [2 * p + 1] * p
        assert max(peaks("zb_v", p, m)) <= min(2 * p, 2 * m)
        assert max(peaks("dualpipe_v", p, m)) <= min(2 * p + 1, 2 * m)


@pytest.mark.parametrize("costs", [(2, 3, 1), (1, 1, 3)], ids=str)
def test_never_below_the_floor(costs):
    """No schedule beats its busiest rank, nor the way of one microbatch down and up."""
    f, i, w = costs
    for name, p, m, v in all_sizes(4, 7):
        timeline = run(name, p, m, costs, v)
        work = m * v * (f if name == "inference" else f + i + w)
        path = p * v * (f if name == "inference" else f + i)
        assert timeline.makespan_s >= max(work, path)
        assert timeline.busy_s_per_rank == (work,) * p
        lock_step = simulate(timeline.schedule, timeline.cost, mode="lockstep")
        assert lock_step.makespan_s >= timeline.makespan_s


def test_inference_makespan():
    for p, m in GRID:
        assert simulate(inference(p, m), Cost(f=3)).makespan_s == 3 * (m + p - 1)


def test_lock_step_by_hand():
    # Columns: F | F F | B F | B | ... each as long as its longest action, then the send.
    timeline = simulate(one_f_one_b(2, 2), Cost(f=1, b=2, send=0.5), mode="lockstep")
    #   0F0 0F1  .  0B0  .  0B1
    #    . 1F0 1B0 1F1 1B1
    ends = {str(e.action): e.end_s for e in timeline.events}
    assert ends == {
        "0F0": 1, "0F1": 2.5, "1F0": 2.5, "1B0": 5, "0B0": 7.5, "1F1": 6.5, "1B1": 9.5, "0B1": 12,
    }  # fmt: skip
    assert timeline.makespan_s == 12
    assert timeline.schedule == align(one_f_one_b(2, 2))


def test_lock_step_keeps_a_grid_that_lines_up():
    spread = rows_of([["0F0", "", "", "", "0B0"], ["", "", "1F0", "1B0"]])
    timeline = simulate(spread, Cost(f=1, b=2), mode="lockstep")
    assert timeline.schedule == spread
    # Empty columns cost nothing.
    assert timeline.makespan_s == 6


def test_lock_step_costs_1f1b_a_fifth_or_more():
    for p, m in [(4, 8), (8, 32)]:
        closed = 3 * (m + p - 1)
        # In the steady state every column has an F on one rank beside a B on another and takes as
        # long as the B: one second lost for each microbatch but the first.
        assert simulate(one_f_one_b(p, m), Cost(), mode="lockstep").makespan_s == closed + m - 1
        # GPipe's columns hold one kind only, so nothing is lost.
        assert simulate(gpipe(p, m), Cost(), mode="lockstep").makespan_s == closed


def test_sends_delay_the_receiver_only():
    timeline = simulate(one_f_one_b(2, 2), Cost(f=1, b=2, send=0.25))
    at = {str(e.action): (e.start_s, e.end_s) for e in timeline.events}
    assert at["0F1"] == (1, 2)
    assert at["1F0"] == (1.25, 2.25)
    assert at["1B0"] == (2.25, 4.25)
    assert at["0B0"] == (4.5, 6.5)


def test_no_send_within_a_rank():
    # The bottom of the V, stage 1 to 2, stays on rank 1.
    timeline = simulate(build("zb_v", 2, 1), Cost(f=1, i=1, w=1, send=10))
    at = {str(e.action): e.start_s for e in timeline.events}
    assert at["2F0"] - at["1F0"] == 1
    assert at["1F0"] == 11
    # Nor does a column in lock step wait for one: all of this schedule is on one rank.
    alone = simulate(build("zb_v", 1, 1), Cost(f=1, i=1, w=1, send=10), mode="lockstep")
    assert alone.makespan_s == 6


def test_eager_hides_sends_that_1f1b_waits_for():
    cost = Cost(f=1, b=2, send=0.2)
    plain, eager = (simulate(build(n, 8, 32), cost).makespan_s for n in ("1f1b", "eager_1f1b"))
    assert eager < plain - 2


def test_costs():
    action = {kind: Action(kind, 0, 0) for kind in "FBIW"}

    def seconds(cost):
        return tuple(cost.seconds(action[k]) for k in "FBIW")

    assert seconds(Cost()) == (1, 2, 1, 1)
    assert seconds(Cost(f=3, b=5)) == (3, 5, 2.5, 2.5)
    assert seconds(Cost(b=5, i=2)) == (1, 5, 2, 3)
    assert seconds(Cost(b=5, w=2)) == (1, 5, 3, 2)
    assert seconds(Cost(i=2, w=4)) == (1, 6, 2, 4)
    assert seconds(Cost(b=5, i=3, w=4)) == (1, 5, 3, 4)
    uneven = Cost(f=2, send=1, per_stage=(0.5, Cost(f=7, send=3)))
    assert uneven.seconds(Action("F", 0, 0)) == 1
    assert uneven.seconds(Action("F", 1, 0)) == 7
    assert (uneven.send_seconds(0), uneven.send_seconds(1)) == (1, 3)
    assert hash(Cost(per_stage=[1, 2])) == hash(Cost(per_stage=(1, 2)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cost(f=-1), "Cost.f: expected seconds of at least 0, got -1"),
        (lambda: Cost(send=math.nan), "Cost.send"),
        (lambda: Cost(b=1, i=2), "expected b >= i"),
        (lambda: simulate(gpipe(3, 1), Cost(per_stage=(1, 1))), "entry for stage 2, got 2 entries"),
        (
            lambda: simulate(gpipe(2, 1), Cost(activation_bytes=(1,))).peak_bytes_per_rank,
            "Cost.activation_bytes: expected an entry for stage 1",
        ),
        (lambda: simulate(gpipe(1, 1), mode="slow"), "expected 'async' or 'lockstep', got 'slow'"),
        (lambda: simulate(rows_of([["0B0", "0F0"]])), "rank 0 at cell 0 wait for ever"),
        (lambda: simulate(rows_of([["0F0", "0W0", "0I0"]])), "rank 0 at cell 1 wait for ever"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_bytes_and_memory_curve():
    cost = Cost(f=1, b=2, activation_bytes=(100, 10))
    timeline = simulate(one_f_one_b(2, 2), cost)
    assert timeline.peak_bytes_per_rank == (200, 10)
    curve = [(level.time_s, level.live, level.live_bytes) for level in timeline.memory_per_rank[0]]
    assert curve == [(0, 0, 0), (0, 1, 100), (1, 2, 200), (6, 1, 100), (9, 0, 0)]


def test_split_backward_holds_until_the_weight_gradient():
    timeline = simulate(rows_of([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]]))
    assert timeline.peak_live_per_rank == (2,)
    whole = simulate(rows_of([["0F0", "0B0", "0F1", "0B1"]]))
    assert whole.peak_live_per_rank == (1,)


def test_actions_that_take_no_time_keep_their_order():
    timeline = simulate(one_f_one_b(2, 4), Cost(f=0, b=0))
    assert timeline.makespan_s == 0
    assert timeline.bubble_fraction == 0
    assert timeline.peak_live_per_rank == (2, 1)


positive = st.integers(1, 9).map(float)


@repeatable
@given(st.data())
def test_event_times_respect_everything(data):
    """Checked from outside: one action at a time per rank, and inputs there before use."""
    name, p, m, v = data.draw(st.sampled_from(list(all_sizes(4, 5))))
    built = build(name, p, m, v)
    cost = Cost(
        f=data.draw(positive), i=data.draw(positive), w=data.draw(positive),
        send=data.draw(positive),
        per_stage=tuple(data.draw(positive) for _ in range(built.num_stages)),
    )  # fmt: skip
    for mode in ("async", "lockstep"):
        timeline = simulate(built, cost, mode=mode)
        at = {e.action: e for e in timeline.events}
        assert set(at) == set(built.actions)
        for row in timeline.rank_events:
            assert all(a.end_s <= b.start_s for a, b in pairwise(row))
            assert [e.action for e in row] == list(built.rank_actions(row[0].rank))
        for action, event in at.items():
            assert event.end_s - event.start_s == pytest.approx(cost.seconds(action))
            before = Action("F", action.stage - 1, action.microbatch)
            if action.kind == "F" and before in at:
                sent = cost.send if at[before].rank != event.rank else 0
                assert event.start_s >= at[before].end_s + sent - 1e-9


def test_nothing_is_sent_after_weight_gradients():
    found = simulate(build("zb_h1", 2, 2), Cost(f=1, i=1, w=1, send=10), mode="lockstep")
    assert found.makespan_s == 47
