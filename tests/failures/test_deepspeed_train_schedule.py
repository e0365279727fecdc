"""DeepSpeed's TrainSchedule once received an activation into a buffer that it had yet to send from.

Reported with 8 microbatches, 4 stages, stage 2: with `min(stages - stage, microbatches)` = 2
buffers, cyclic (`microbatch % 2`), the step after a backward was

    RecvActivation 0, SendGrad 0, ForwardPass 0

and so the activation of microbatch 2 overwrote the buffer from which the gradient of microbatch 0
had yet to be sent. DeepSpeed hid it with one buffer more (`stages - stage + 1`), and in 2023 fixed
it by sending first. Here both orders are data; the old one is refused, at the cell that overwrites.
"""

from __future__ import annotations

import pytest

from fzero.errors import ScheduleError
from fzero.pipeline import check, one_f_one_b, slots
from fzero.schedule.instructions import Instruction, check_program


STAGES, STAGE, MICROBATCHES, BUFFERS = 4, 2, 8, 2

# What DeepSpeed 0.19.8 emits for this stage, step by step.
FIXED = """
RecvActivation 0, ForwardPass 0
SendActivation 0
RecvActivation 1, ForwardPass 1
RecvGrad 0, SendActivation 1, BackwardPass 0
SendGrad 0, RecvActivation 0, ForwardPass 0
RecvGrad 1, SendActivation 0, BackwardPass 1
SendGrad 1, RecvActivation 1, ForwardPass 1
RecvGrad 0, SendActivation 1, BackwardPass 0
SendGrad 0, RecvActivation 0, ForwardPass 0
RecvGrad 1, SendActivation 0, BackwardPass 1
SendGrad 1, RecvActivation 1, ForwardPass 1
RecvGrad 0, SendActivation 1, BackwardPass 0
SendGrad 0, RecvActivation 0, ForwardPass 0
RecvGrad 1, SendActivation 0, BackwardPass 1
SendGrad 1, RecvActivation 1, ForwardPass 1
RecvGrad 0, SendActivation 1, BackwardPass 0
SendGrad 0
RecvGrad 1, BackwardPass 1
SendGrad 1
"""

OPERATIONS = {
    "RecvActivation": "RECV_F",
    "ForwardPass": "F",
    "SendActivation": "SEND_F",
    "RecvGrad": "RECV_B",
    "BackwardPass": "B",
    "SendGrad": "SEND_B",
}


def old_order(text):
    """Before the fix: the receive of a step came before its send."""
    before = "SendGrad {0}, RecvActivation {0}"
    after = "RecvActivation {0}, SendGrad {0}"
    for buffer in range(BUFFERS):
        text = text.replace(before.format(buffer), after.format(buffer))
    return text


def program(text, buffers):
    """DeepSpeed's instructions with microbatches, which it counts per kind, and buffers."""
    seen = dict.fromkeys(OPERATIONS, 0)
    row = []
    for word in text.replace(",", "\n").split("\n"):
        if word.strip():
            name = word.split()[0]
            microbatch = seen[name]
            seen[name] += 1
            row.append(Instruction(OPERATIONS[name], STAGE, microbatch, microbatch % buffers))
    assert set(seen.values()) == {MICROBATCHES}
    return [row]


def test_the_fixed_order_is_safe_with_two_buffers():
    rows = program(FIXED, BUFFERS)
    # The buffers are those that DeepSpeed wrote down.
    written = [int(w.split()[1]) for w in FIXED.replace(",", "\n").split("\n") if w.strip()]
    assert [i.slot for i in rows[0]] == written
    check_program(rows)
    assert slots(one_f_one_b(STAGES, MICROBATCHES)).per_stage[STAGE] == BUFFERS


def test_the_old_order_overwrites_a_gradient_that_waits_to_be_sent():
    with pytest.raises(ScheduleError) as caught:
        check_program(program(old_order(FIXED), BUFFERS))
    message, _, grid = str(caught.value).partition("\n")
    assert message == (
        "rank 0, cell 8: 2RECV_F2@0 overwrites slot 0, which holds microbatch 0 until 2SEND_B0@0 "
        "has read it; run 2SEND_B0@0 first, or give stage 2 one slot more"
    )
    assert ">2RECV_F2@0<" in grid
    assert grid.count(">") == 1


def test_the_old_order_was_safe_with_one_buffer_more():
    check_program(program(old_order(FIXED), BUFFERS + 1))


def test_the_same_from_the_schedule_alone():
    """Nothing but `one_f_one_b` and the order of the two communications."""
    built = one_f_one_b(STAGES, MICROBATCHES)
    need = slots(built).per_stage
    assert need == [4, 3, 2, 1]
    cyclic = [[m % count for m in range(MICROBATCHES)] for count in need]
    check(built, assignment=cyclic)
    with pytest.raises(ScheduleError, match="overwrites slot"):
        check(built, assignment=cyclic, receive_first=True)
    assert slots(built, receive_first=True).per_stage == [4, 4, 3, 2]
