"""Slots are minimal, attained, and fewer than DeepSpeed's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import all_sizes, build, load, repeatable

from fzero.errors import ScheduleError
from fzero.pipeline import check, inference, one_f_one_b, simulate, slots
from fzero.schedule.actions import rows_of
from fzero.schedule.instructions import check_program, intervals, lower


def deepspeed_now(stages, stage, microbatches):
    """`TrainSchedule.num_pipe_buffers` as of DeepSpeed 0.19."""
    return max(2, min(stages - stage, microbatches))


def deepspeed_before(stages, stage, microbatches):
    """The same before its fix of 2023."""
    return max(2, min(stages - stage + 1, microbatches))


def test_1f1b_needs_exactly_the_hops_ahead():
    """For all stages <= 16: min(stages - stage, microbatches)."""
    for stages in range(1, 17):
        for microbatches in (*range(1, stages + 2), 64):
            per_stage = slots(one_f_one_b(stages, microbatches)).per_stage
            assert per_stage == [min(stages - s, microbatches) for s in range(stages)]
            assert per_stage[-1] == 1


@pytest.mark.parametrize(
    ("stages", "microbatches", "ours", "now", "before"),
    [
        (1, 8, [1], [2], [2]),
        (2, 8, [2, 1], [2, 2], [3, 2]),
        (4, 1, [1, 1, 1, 1], [2, 2, 2, 2], [2, 2, 2, 2]),
        (4, 2, [2, 2, 2, 1], [2, 2, 2, 2], [2, 2, 2, 2]),
        (4, 3, [3, 3, 2, 1], [3, 3, 2, 2], [3, 3, 3, 2]),
        (4, 8, [4, 3, 2, 1], [4, 3, 2, 2], [5, 4, 3, 2]),
        (8, 32, [8, 7, 6, 5, 4, 3, 2, 1], [8, 7, 6, 5, 4, 3, 2, 2], [9, 8, 7, 6, 5, 4, 3, 2]),
    ],
)
def test_table_against_deepspeed(stages, microbatches, ours, now, before):
    assert slots(one_f_one_b(stages, microbatches)).per_stage == ours
    assert [deepspeed_now(stages, s, microbatches) for s in range(stages)] == now
    assert [deepspeed_before(stages, s, microbatches) for s in range(stages)] == before


def test_deepspeed_data_holds_its_formula():
    for table in load("deepspeed_schedules.json")["tables"]:
        sizes = (table["stages"], table["stage"], table["mb"])
        assert table["num_pipe_buffers"] == deepspeed_now(*sizes)


def test_receive_first_costs_one_slot():
    """Where a gradient waits to be sent while the next activation comes in."""
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            built = one_f_one_b(stages, microbatches)
            need = slots(built, receive_first=True).per_stage
            # The first stage receives no activation and sends no gradient: nothing to order.
            assert need[0] == min(stages, microbatches)
            assert need[1:] == [min(stages - s + 1, microbatches) for s in range(1, stages)]


def cyclic(built, counts):
    """DeepSpeed's assignment: microbatch modulo the number of buffers of the stage."""
    return [[m % counts[s] for m in range(built.num_microbatches)] for s in range(built.num_stages)]


def test_order_of_send_and_receive_decides_over_cyclic_slots():
    for stages in range(2, 7):
        for microbatches in range(2, 13):
            built = one_f_one_b(stages, microbatches)
            tight = cyclic(built, slots(built).per_stage)
            check(built, assignment=tight)
            if slots(built, receive_first=True).per_stage == slots(built).per_stage:
                check(built, assignment=tight, receive_first=True)
                continue
            with pytest.raises(ScheduleError, match=r"RECV_F\d+@\d+ overwrites slot"):
                check(built, assignment=tight, receive_first=True)
            roomy = cyclic(built, slots(built, receive_first=True).per_stage)
            check(built, assignment=roomy, receive_first=True)


def test_minimal_and_attained_for_every_builder():
    for name, ranks, microbatches, chunks in all_sizes(4, 7):
        built = build(name, ranks, microbatches, chunks)
        for receive_first in (False, True):
            found = slots(built, receive_first=receive_first)
            check_program(lower(built, found.assignment, receive_first=receive_first))
            for stage, row in enumerate(found.assignment):
                spans = intervals(built, stage, receive_first=receive_first)
                # Minimal: at some moment that many are alive at once.
                moments = {first for first, _ in spans.values()}
                most = max(sum(a <= t <= b for a, b in spans.values()) for t in moments)
                assert found.per_stage[stage] == most == len(set(row))


def test_rank_peak_is_at_most_the_sum_of_its_stages():
    for name, ranks, microbatches, chunks in all_sizes(4, 7):
        built = build(name, ranks, microbatches, chunks)
        per_stage = slots(built).per_stage
        for rank, peak in enumerate(simulate(built).peak_live_per_rank):
            mine = [per_stage[s] for s, r in built.stage_to_rank.items() if r == rank]
            assert max(mine) <= peak <= sum(mine)
            if chunks == 1:
                assert peak == sum(mine)


def test_residuals_live_until_the_weight_gradient():
    assert slots(rows_of([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"]])).per_stage == [2]
    assert slots(rows_of([["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]])).per_stage == [1]


def test_evaluation_holds_one():
    assert slots(inference(4, 8)).per_stage == [1, 1, 1, 1]


@repeatable
@given(st.lists(st.sampled_from("FB"), max_size=24))
def test_slots_of_any_order(kinds):
    """One stage, backwards in any order that is open: never more slots than open forwards."""
    opened, done, most = [], 0, 0
    row = []
    for kind in [*kinds, *"B" * len(kinds)]:
        if kind == "F":
            opened.append(done)
            row.append(f"0F{done}")
            done += 1
        elif opened:
            row.append(f"0B{opened.pop(len(row) % len(opened))}")
        most = max(most, len(opened))
    if not done:
        return
    built = rows_of([row])
    assert slots(built).per_stage == [most]
    check(built)
