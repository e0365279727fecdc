"""`check` finds every planted fault, and every legal schedule passes."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import EXAMPLES, TRAINING, all_sizes, build, merge_split_backward, repeatable

from fzero.errors import ScheduleError
from fzero.pipeline import Action, Schedule, check, gpipe, one_f_one_b, slots
from fzero.schedule.actions import rows_of
from fzero.schedule.check import check_forwards_in_order
from fzero.schedule.deadlock import SENDS, find_deadlock
from fzero.schedule.grid import MAX_COLUMNS, format_grid
from fzero.schedule.instructions import check_program, lower


@st.composite
def legal(draw, least_microbatches=1, names=tuple(TRAINING)):
    """A legal training schedule with at least two (stage, microbatch) pairs."""
    name = draw(st.sampled_from(names))
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(max(least_microbatches, 2 if ranks == 1 else 1), 7))
    built = build(name, ranks, microbatches)
    # Merging makes B's and I's stand side by side in one schedule.
    merges = names == tuple(TRAINING) and draw(st.booleans())
    return merge_split_backward(built) if merges else built


def rows_as_lists(schedule):
    return [list(row) for row in schedule.ranks]


def pick(draw, schedule, kinds="FBIW"):
    """A random action: rank and cell."""
    places = [
        (rank, cell)
        for rank, row in enumerate(schedule.ranks)
        for cell, action in enumerate(row)
        if action is not None and action.kind in kinds
    ]
    assume(places)
    return draw(st.sampled_from(places))


def refused(rows, *expected):
    """The illegal schedule is refused, in words and with a marked cell."""
    with pytest.raises(ScheduleError) as caught:
        check(Schedule(rows))
    text = str(caught.value)
    grid = text.split("\n", 1)[1]
    assert re.search(r">\S+<", grid), text
    for words in expected:
        assert words in text
    return text


def marked(text):
    """The marked cells of a message."""
    return re.findall(r">(\S+?)<", text)


@repeatable
@given(legal())
def test_legal_schedules_pass(schedule):
    proof = check(schedule)
    assert proof.trains
    assert "buffered" in proof.deadlock_free


@repeatable
@given(legal())
def test_named_schedules_run_forwards_in_the_order_of_microbatches(schedule):
    check_forwards_in_order(schedule, dict.fromkeys(range(schedule.num_stages), "each has buffers"))


def test_forwards_in_another_order():
    rows = rows_of([["0F1", "0F0", "0B0", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    check_forwards_in_order(rows, {})
    with pytest.raises(ScheduleError, match=r"1F1 runs before 1F0: .* as it counts") as caught:
        check_forwards_in_order(rows, {1: "it counts"})
    assert marked(str(caught.value)) == ["1F1", "1F0"]


@repeatable
@given(st.data())
def test_dropped_action(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule)
    rows = rows_as_lists(schedule)
    dropped = rows[rank].pop(cell)
    refused(rows, f"stage {dropped.stage} lacks")


@repeatable
@given(st.data())
def test_duplicated_action(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule)
    rows = rows_as_lists(schedule)
    place = data.draw(st.integers(0, len(rows[rank])))
    rows[rank].insert(place, schedule.ranks[rank][cell])
    text = refused(rows, "runs twice")
    assert marked(text) == [str(schedule.ranks[rank][cell])]


@repeatable
@given(st.data())
def test_backward_before_its_forward(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule, "BI")
    rows = rows_as_lists(schedule)
    backward = rows[rank].pop(cell)
    forward = rows[rank].index(backward._replace(kind="F"))
    rows[rank].insert(data.draw(st.integers(0, forward)), backward)
    assert marked(refused(rows, "which it needs")) == [str(backward)]


@repeatable
@given(st.data())
def test_weight_gradient_before_input_gradient(data):
    schedule = data.draw(legal(names=("zb_h1", "zb_h2", "zb_v")))
    rank, cell = pick(data.draw, schedule, "I")
    rows = rows_as_lists(schedule)
    gradient = rows[rank][cell]
    weight = gradient._replace(kind="W")
    rows[rank].remove(weight)
    rows[rank].insert(cell, weight)
    assert marked(refused(rows, f"{weight} runs before {gradient}")) == [str(weight)]


@repeatable
@given(st.data())
def test_stage_on_two_ranks(data):
    schedule = data.draw(legal())
    assume(schedule.num_ranks > 1 and schedule.num_microbatches > 1)
    rank, cell = pick(data.draw, schedule)
    other = data.draw(st.integers(0, schedule.num_ranks - 1).filter(lambda r: r != rank))
    rows = rows_as_lists(schedule)
    moved = rows[rank].pop(cell)
    rows[other].insert(data.draw(st.integers(0, len(rows[other]))), moved)
    text = refused(rows, "parameters live on one rank")
    assert marked(text) == [str(moved)]


@repeatable
@given(st.data())
def test_wrong_microbatch(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule)
    rows = rows_as_lists(schedule)
    action = rows[rank][cell]
    wrong = data.draw(
        st.integers(0, schedule.num_microbatches).filter(lambda m: m != action.microbatch)
    )
    rows[rank][cell] = action._replace(microbatch=wrong)
    refused(rows)


@repeatable
@given(st.data())
def test_wrong_stage(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule)
    rows = rows_as_lists(schedule)
    action = rows[rank][cell]
    wrong = data.draw(st.integers(0, schedule.num_stages).filter(lambda s: s != action.stage))
    rows[rank][cell] = action._replace(stage=wrong)
    refused(rows)


@repeatable
@given(st.data())
def test_input_gradient_without_weight_gradient(data):
    schedule = data.draw(legal(names=("zb_h1", "zb_h2", "zb_v")))
    rank, cell = pick(data.draw, schedule, "I")
    rows = rows_as_lists(schedule)
    gradient = rows[rank][cell]
    weight = gradient._replace(kind="W")
    rows[rank].remove(weight)
    text = refused(rows, f"lacks {weight}")
    assert marked(text) == [str(gradient._replace(kind="F")), str(gradient)]


@repeatable
@given(st.data())
def test_weight_gradient_without_input_gradient(data):
    schedule = data.draw(legal(names=("zb_h1", "zb_h2", "zb_v")))
    rank, cell = pick(data.draw, schedule, "I")
    rows = rows_as_lists(schedule)
    gradient = rows[rank].pop(cell)
    refused(rows, f"lacks {gradient}")


@repeatable
@given(st.data())
def test_whole_and_split_backward_together(data):
    schedule = data.draw(legal())
    rank, cell = pick(data.draw, schedule, "BI")
    rows = rows_as_lists(schedule)
    action = rows[rank][cell]
    other = action._replace(kind=data.draw(st.sampled_from("IW")) if action.kind == "B" else "B")
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), other)
    text = refused(rows, "both compute the backward of microbatch")
    assert len(marked(text)) == 1


@repeatable
@given(st.data())
def test_missing_microbatch_on_one_stage(data):
    schedule = data.draw(legal(least_microbatches=2))
    assume(schedule.num_stages > 1)
    stage = data.draw(st.integers(0, schedule.num_stages - 1))
    microbatch = data.draw(st.integers(0, schedule.num_microbatches - 1))
    rows = [
        [a for a in row if (a.stage, a.microbatch) != (stage, microbatch)] for row in schedule.ranks
    ]
    text = refused(rows, "it has no action there at all")
    assert marked(text) == ["?"]


def test_missing_stage_and_empty_rank():
    refused([gpipe(2, 2).ranks[0], []], "rank 1 has no actions")
    refused(rows_of([["0F0", "2F0"]]).ranks, "stage 1 of 3 is on no rank")
    with pytest.raises(ScheduleError, match="with actions, got an empty one"):
        check(Schedule([]))


def dependencies(schedule):
    """The graph that an independent solver sees: rank orders and data, nothing of `order`."""
    graph = {}
    done = set(schedule.actions)
    for rank in range(schedule.num_ranks):
        row = schedule.rank_actions(rank)
        for before, after in pairwise(row):
            graph.setdefault(after, set()).add(before)
    for action in done:
        kind, stage, microbatch = action
        if kind == "F":
            wanted = [Action("F", stage - 1, microbatch)]
        elif kind == "W":
            wanted = [Action("I", stage, microbatch)]
        else:
            wanted = [Action("F", stage, microbatch)]
            wanted += [Action(k, stage + 1, microbatch) for k in "BI"]
        graph.setdefault(action, set()).update(w for w in wanted if w in done)
    return graph


def rendezvous(schedule, batched):
    """The same with every communication as one node that both of its ranks must reach."""
    last = schedule.num_stages - 1
    graph = {}

    def messages(action, rank):
        kind, stage, microbatch = action
        step = {"F": 1, "B": -1, "I": -1}.get(kind, 0)
        ends = [("in", stage - step), ("out", stage + step)] if step else []
        found = {"in": [], "out": []}
        for way, other in ends:
            if 0 <= other <= last and schedule.stage_to_rank[other] != rank:
                source = stage if way == "out" else other
                found[way].append((step, source, microbatch))
        return found

    for rank in range(schedule.num_ranks):
        steps, out = [], []
        for action in schedule.rank_actions(rank):
            found = messages(action, rank)
            group = out + found["in"]
            steps += [group] if batched else [[m] for m in group]
            out = found["out"]
        steps.append(out)
        for index, group in enumerate(steps):
            enter, leave = (rank, index, "enter"), (rank, index, "leave")
            graph.setdefault(enter, set()).update({(rank, index - 1, "leave")} if index else ())
            graph.setdefault(leave, set()).add(enter)
            for message in group:
                graph.setdefault(message, set()).add(enter)
                graph[leave].add(message)
    return graph


def acyclic(graph):
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError:
        return False
    return True


def within_rank(action):
    """Sorts the actions of one microbatch as data flows: down the stages, then up."""
    down = action.kind == "F"
    step = {"F": 0, "I": 1, "B": 1, "W": 2}[action.kind]
    return (step, action.stage if down else -action.stage)


@settings(repeatable, max_examples=3 * EXAMPLES)
@given(st.data())
def test_random_orders_against_an_independent_solver(data):
    """Orders legal on each rank but shuffled: legal exactly when the graph has no cycle."""
    schedule = data.draw(legal(least_microbatches=2))
    rows = []
    for row in schedule.ranks:
        order = data.draw(st.permutations(row))
        places = {}
        for action in order:
            places.setdefault(action.microbatch, []).append(action)
        # Restores what `check` finds within a rank, so that only cycles over ranks are left.
        sorted_rows = {m: sorted(group, key=within_rank) for m, group in places.items()}
        rows.append([sorted_rows[a.microbatch].pop(0) for a in order])
    shuffled = Schedule(rows)
    if acyclic(dependencies(shuffled)):
        assert "buffered" in check(shuffled).deadlock_free
        for sends in ("batched", "sequential"):
            expected = acyclic(rendezvous(shuffled, sends == "batched"))
            assert (find_deadlock(shuffled, sends) is None) == expected
    else:
        text = refused(rows, "deadlock with buffered sends", "no executor can run this order")
        assert len(marked(text)) >= 2


def test_deadlock_names_the_cycle():
    text = refused(
        rows_of([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]).ranks,
        "rank 0 waits at 0B0 for 1B0 on rank 1",
        "rank 1 waits at 1F1 for 0F1 on rank 0",
    )
    assert marked(text) == ["0B0", "1F1"]


# Under which meaning of a send each schedule is free of deadlock for all sizes with more than one
# rank and microbatch; `buffered` always.
STRICTEST = {
    "gpipe": "sequential",
    "inference": "sequential",
    "1f1b": "batched",
    "eager_1f1b": "batched",
    "zb_h1": "batched",
    "interleaved": "buffered",
    "looped_bfs": "buffered",
    "zb_h2": "buffered",
    "zb_v": "buffered",
    "dualpipe_v": "buffered",
}


@pytest.mark.parametrize("name", STRICTEST)
def test_blocking_sends_of_the_builders(name):
    always = set(SENDS)
    for ranks in range(1, 6):
        for microbatches in range(1, 10):
            built = build(name, ranks, microbatches, 1 if name == "inference" else None)
            free = check(built).deadlock_free
            always &= set(free)
            for sends in SENDS[1:]:
                assert (sends in free) == acyclic(rendezvous(built, sends == "batched"))
            if ranks == 1:
                assert free == SENDS
    assert [s for s in SENDS if s in always][-1] == STRICTEST[name]


def test_blocking_sends_of_1f1b():
    for stages in range(1, 9):
        for microbatches in range(1, 12):
            free = check(one_f_one_b(stages, microbatches)).deadlock_free
            assert ("sequential" in free) == (stages == 1 or microbatches == 1)
    with pytest.raises(ScheduleError, match="deadlock with sequential sends: rank 0 sends 0F1"):
        check(one_f_one_b(2, 4), sends="sequential")
    check(one_f_one_b(4, 8), sends="batched")
    with pytest.raises(ScheduleError, match="expected one of buffered, batched, sequential"):
        check(one_f_one_b(2, 2), sends="eager")  # type: ignore[arg-type]


@repeatable
@given(st.data())
def test_overlapping_slots(data):
    schedule = data.draw(legal(least_microbatches=2))
    need = slots(schedule)
    crowded = [stage for stage, count in enumerate(need.per_stage) if count > 1]
    assume(crowded)
    stage = data.draw(st.sampled_from(crowded))
    fewer = [list(row) for row in need.assignment]
    # One slot less than the peak: whatever the assignment, two live activations must meet.
    count = need.per_stage[stage] - 1
    fewer[stage] = [data.draw(st.integers(0, count - 1)) for _ in fewer[stage]]
    with pytest.raises(ScheduleError, match="overwrites slot") as caught:
        check(schedule, assignment=fewer)
    assert re.search(r">\d+(RECV_F|F)\d+@\d+<", str(caught.value))
    check(schedule, assignment=need.assignment)


def test_assignments_that_do_not_fit():
    with pytest.raises(ScheduleError, match="for each of 2 stages, got 1 rows"):
        check(gpipe(2, 2), assignment=[[0, 1]])
    with pytest.raises(
        ScheduleError, match=r"stage 1: expected a slot .* 2 microbatches, got \[0\]"
    ):
        check(gpipe(2, 2), assignment=[[0, 1], [0]])


def test_programs_that_read_the_wrong_slot():
    good = lower(one_f_one_b(2, 2), [[0, 1], [0, 0]])
    check_program(good)
    row = list(good[0])
    last = row[-1]
    with pytest.raises(ScheduleError, match=f"{last._replace(slot=0)} reads slot 0, which holds"):
        check_program([[*row[:-1], last._replace(slot=0)], good[1]])
    with pytest.raises(ScheduleError, match="reads slot 1 before anything is in it"):
        check_program([[last]])


def test_wide_grids_are_cut_around_the_mark():
    rows = rows_as_lists(one_f_one_b(4, 64))
    rows[2].insert(70, rows[2][70])
    text = refused(rows, "runs twice")
    grid = text.split("\n")[1:]
    assert len(grid[0].split()) == MAX_COLUMNS
    assert "71" in grid[0].split()
    assert all(" ..." in line and "... " in line for line in grid[1:])


def test_grid_of_all_builders_lists_every_action():
    for name, ranks, microbatches, chunks in all_sizes(3, 3):
        built = build(name, ranks, microbatches, chunks)
        text = str(built)
        assert set(map(str, built.actions)) <= set(text.split())
        assert text == format_grid(built.ranks)
