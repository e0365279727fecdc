"""A schedule is a value: equality, text forms, errors that name the place."""

from __future__ import annotations

import importlib
import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import all_sizes, build, load, merge_split_backward, repeatable

from fzero.errors import ScheduleError
from fzero.pipeline import Action, Schedule, align, check, schedule
from fzero.schedule.actions import rows_of
from fzero.schedule.order import is_aligned


def test_equality_hash_and_counts():
    one, other = build("zb_v", 4, 8), build("zb_v", 4, 8)
    assert one == other
    assert hash(one) == hash(other)
    assert one != build("zb_v", 4, 7)
    assert (one.num_ranks, one.num_stages, one.num_microbatches) == (4, 8, 8)
    assert one.stage_to_rank == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 0}
    assert one.num_chunks == 2
    uneven = Schedule([[Action("F", 0, 0), Action("F", 2, 0)], [Action("F", 1, 0)]])
    assert uneven.num_chunks == 2


def test_idle_cells_count_for_equality_but_not_for_order():
    plain, idle = build("1f1b", 4, 8), align(build("1f1b", 4, 8))
    assert plain != idle
    assert plain == idle.compact()
    assert plain.rank_actions(2) == idle.rank_actions(2)
    assert None in idle.ranks[2]


def test_immutable():
    with pytest.raises(AttributeError):
        build("gpipe", 2, 2).ranks = ()  # type: ignore[misc]


cells = st.one_of(
    st.none(),
    st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 40), st.integers(0, 200)),
)


@repeatable
@given(st.lists(st.lists(cells, max_size=8), min_size=1, max_size=5))
def test_text_forms_round_trip(rows):
    value = Schedule(rows)
    assert Schedule.from_json(io.StringIO(value.to_json())) == value
    text = value.to_csv()
    # A row that is one idle cell, or none at all, is one blank line in a CSV file.
    if all(row and row != (None,) for row in value.ranks):
        assert Schedule.from_csv(io.StringIO(text, newline="")) == value


def test_files_round_trip(tmp_path):
    value = align(build("zb_h1", 4, 8))
    value.to_csv(tmp_path / "s.csv")
    value.to_json(tmp_path / "s.json")
    assert Schedule.from_csv(tmp_path / "s.csv") == value
    assert Schedule.from_json(str(tmp_path / "s.json")) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1Q0\n", r"bad.csv, row 2 \(rank 1\), cell 2: .*got '1Q0'"),
        ("0F0,0F\n", r"row 1 \(rank 0\), cell 2: .*got '0F'"),
        ("0F0,-1B0\n", r"cell 2: .*got '-1B0'"),
        ("0F0,0SEND_F0,0B0\n", r"cell 2: .*communication action '0SEND_F0'.*compute_only"),
        ("0F0,0REDUCE_GRAD\n", r"cell 2: .*communication action '0REDUCE_GRAD'"),
        ("(0F3;3X1)OVERLAP_F_B\n", r"row 1 \(rank 0\), cell 1: .*got '3X1'"),
        ("", "expected a row of actions per rank, got an empty file"),
    ],
)
def test_malformed_csv_names_file_row_and_cell(tmp_path, text, message):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule.from_csv(tmp_path / "bad.csv")
    assert "bad.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object with format 'fzero.schedule/1', got 'list'"),
        ('{"format": "other"}', "got 'other'"),
        ('{"format": "fzero.schedule/1", "ranks": 3}', "list of lists"),
        ('{"format": "fzero.schedule/1", "ranks": [["0F0"], "0B0"]}', "list of lists"),
        ('{"format": "fzero.schedule/1", "ranks": [["0F0", 7]]}', r"rank 0\), cell 2: .*got 7"),
        ('{"format": "fzero.schedule/1", "ranks": [["0F0"], ["F"]]}', r"rank 1\), cell 1"),
    ],
)
def test_malformed_json_names_row_and_cell(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json(io.StringIO(text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ScheduleError, match=r"none.csv: cannot read"):
        Schedule.from_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match=r"cannot read .*directory"):
        Schedule.from_csv(tmp_path)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="not a text file"):
        Schedule.from_csv(tmp_path / "bytes.csv")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("0F0", r"rank 0, cell 0: expected an Action or None, got '0F0'"),
        (Action("X", 0, 0), "expected one of the kinds F, B, I, W, got 'X'"),
        (Action("F", -1, 0), "stage: expected a whole number of at least 0, got -1"),
        (Action("F", 0, 1.5), "microbatch: expected a whole number of at least 0, got 1.5"),
    ],
)
def test_cells_that_are_no_actions(cell, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule([[cell]])


def test_names():
    with pytest.raises(ScheduleError, match=r"expected one of gpipe, 1f1b, .*, got '1F1B!'"):
        schedule("1F1B!", stages=4, microbatches=8)
    with pytest.raises(ScheduleError, match="zb_v: expected chunks=2"):
        schedule("zb_v", stages=6, microbatches=8, chunks=3)
    with pytest.raises(
        ScheduleError, match=r"stages \(6\) must be divisible by chunks \(4\).*4 or 8"
    ):
        schedule("interleaved", stages=6, microbatches=8, chunks=4)
    for stages, microbatches in ((0, 1), (1, 0), (True, 1), (1.0, 1)):
        with pytest.raises(ScheduleError, match="expected a whole number of at least 1"):
            schedule("1f1b", stages=stages, microbatches=microbatches)


def test_defaults_of_chunks():
    assert schedule("interleaved", stages=8, microbatches=4).num_ranks == 4
    assert schedule("inference", stages=8, microbatches=4).num_ranks == 8
    assert schedule("dualpipe_v", stages=8, microbatches=4).num_ranks == 4
    one_chunk = schedule("interleaved", stages=4, microbatches=8, chunks=1)
    # The rule for warm-up forwards doubles the hops so that chunks do not wait for each other; with
    # one chunk that is exactly eager 1F1B.
    assert one_chunk == schedule("eager_1f1b", stages=4, microbatches=8)


def test_every_builder_is_legal_for_every_size():
    for name, ranks, microbatches, chunks in all_sizes(5, 9):
        built = build(name, ranks, microbatches, chunks)
        proof = check(built)
        assert proof.num_actions == len(built.actions)
        sizes = (built.num_ranks, built.num_stages, built.num_microbatches)
        assert sizes == (ranks, ranks * chunks, microbatches), name


def test_alignment_respects_every_dependency():
    for name, ranks, microbatches, chunks in all_sizes(4, 6):
        aligned = align(build(name, ranks, microbatches, chunks))
        assert is_aligned(aligned)
        assert align(aligned.compact()) == aligned
    assert not is_aligned(build("1f1b", 2, 2))


def test_merging_split_backwards():
    merged = merge_split_backward(build("zb_h1", 4, 8))
    check(merged)
    # The first rank delays nothing, so all its backwards are whole again: it runs 1F1B.
    assert merged.rank_actions(0) == build("1f1b", 4, 8).rank_actions(0)
    other = rows_of([["0F0", "0F1", "0I0", "0W1"]])
    assert merge_split_backward(other) == other


def _torch_runtime(ranks: int, stages: int, microbatches: int):
    schedules = importlib.import_module("torch.distributed.pipelining.schedules")
    # The runtime asks its stages for sizes only, until it runs.
    stage = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, is_last=False)
    return schedules._PipelineScheduleRuntime([stage], microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h2", "zb_v", "dualpipe_v"])
def test_torch_loads_our_files_and_we_load_torchs(tmp_path, name):
    ours = align(build(name, 4, 8))
    ours.to_csv(tmp_path / "ours.csv")
    runtime = _torch_runtime(4, ours.num_stages, 8)
    runtime._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    assert runtime.stage_index_to_group_rank == ours.stage_to_rank
    runtime._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    assert (tmp_path / "torch.csv").read_bytes() == (tmp_path / "ours.csv").read_bytes()
    assert Schedule.from_csv(tmp_path / "torch.csv") == ours


def test_torch_lowers_our_schedules(tmp_path):
    # torch derives sends and receives itself and raises when it cannot: a second opinion on
    # deadlocks from somebody else's code.
    for name, ranks, microbatches, chunks in all_sizes(3, 5):
        if name == "inference":
            continue  # torch's check knows training schedules only
        ours = build(name, ranks, microbatches, chunks)
        path = tmp_path / "s.csv"
        ours.to_csv(path)
        runtime = _torch_runtime(ranks, ours.num_stages, microbatches)
        runtime._load_csv(str(path), format="compute_only")
        computed = [
            [str(a) for a in row if str(a) in {str(x) for x in ours.actions}]
            for _, row in sorted(runtime.pipeline_order_with_comms.items())
        ]
        assert computed == [[str(a) for a in ours.rank_actions(r)] for r in range(ranks)]


# Which of torch's schedules is which of ours, and in which words they differ.
TORCH_NAMES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped_bfs",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}


@pytest.mark.parametrize(
    "table",
    load("torch_schedules.json")["tables"],
    ids=lambda t: f"{t['schedule']}-{t['ranks']}-{t['stages']}-{t['mb']}",
)
def test_torch_emits_the_same_actions(table):
    """Action by action. Differences: torch's idle cells, and what is named below."""
    ranks, stages, microbatches = table["ranks"], table["stages"], table["mb"]
    if "error" in table:
        # torch refuses DualPipeV for fewer microbatches than stages; ours is the order for as
        # many microbatches as stages, without those that are missing.
        assert table["schedule"] == "DualPipeV"
        assert microbatches < stages
        ours = build("dualpipe_v", ranks, microbatches)
        assert ours == build("dualpipe_v", ranks, stages).first_microbatches(microbatches)
        check(ours)
        return
    torchs = Schedule.from_csv(io.StringIO("".join(f"{row}\r\n" for row in table["rows"])))
    proof = check(torchs)
    assert torchs.stage_to_rank == dict(enumerate(table["stage_to_rank"]))
    if table["schedule"] == "InterleavedZeroBubble":
        # Not among our builders; legal, and read from its file like any other. Its forwards and
        # input gradients are those of a looped placement with fewer warm-up forwards than ours.
        assert "interleaved_zero_bubble" not in TORCH_NAMES.values()
        assert proof.aligned
        return
    name = TORCH_NAMES[table["schedule"]]
    ours = build(name, ranks, microbatches, stages // ranks)
    for rank in range(ranks):
        assert torchs.rank_actions(rank) == ours.rank_actions(rank)
    # LoopedBFS and ZBV come with the idle cells that our alignment makes, except ZBV for too few
    # microbatches: torch pads that one after a longer table. Interleaved1F1B has its own, one
    # column in two at times. GPipe, 1F1B and DualPipeV come without, so they are not aligned.
    padded = name == "looped_bfs" or (name == "zb_v" and microbatches >= 2 * ranks - 1)
    assert (align(ours) == torchs) == padded
    assert proof.aligned == (padded or name in ("zb_v", "interleaved"))


def test_torch_overlapped_pairs_become_adjacent_cells():
    read = Schedule.from_csv(io.StringIO("0F0,(0F3;3B1)OVERLAP_F_B,,0B0\n"))
    assert read == rows_of([["0F0", "0F3", "3B1", "", "0B0"]])


DEEPSPEED_KINDS = {"ForwardPass": "F", "BackwardPass": "B"}


@pytest.mark.parametrize(
    "table",
    load("deepspeed_schedules.json")["tables"],
    ids=lambda t: f"{t['mb']}-{t['stages']}-{t['stage']}",
)
def test_deepspeed_emits_the_same_actions(table):
    """`TrainSchedule` is 1F1B: one instruction in two steps computes, the others communicate."""
    count, stages, stage = table["mb"], table["stages"], table["stage"]
    words = [w for step in table["steps"].split(";") for w in step.split(",") if w.strip()]
    seen = {"F": 0, "B": 0}
    actions = []
    for word in words:
        name, *buffer = word.split()
        kind = DEEPSPEED_KINDS.get(name)
        if kind is not None:
            # DeepSpeed counts buffers, not microbatches; they are taken cyclically.
            assert int(buffer[0]) == seen[kind] % table["num_pipe_buffers"]
            actions.append(Action(kind, stage, seen[kind]))
            seen[kind] += 1
    assert tuple(actions) == build("1f1b", stages, count).rank_actions(stage)
