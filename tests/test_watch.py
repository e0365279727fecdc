"""What the watch over processes decides and tells, without any: `multiprocess/test_hosts.py` has
real ones."""

from __future__ import annotations

import socket
import types

import jax.numpy as jnp
import pytest

import fzero as fz
from fzero.hosts import activity, channel, join, watch
from fzero.hosts.channel import Line, Server, connect


class Told:
    """Stands for the server: what was sent to all."""

    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send_all(self, message: dict) -> None:
        self.sent.append(message)

    def verdicts(self) -> list[tuple[int, str]]:
        return [(one["process"], one["kind"]) for one in self.sent if "why" in one]


@pytest.fixture
def judge(monkeypatch):
    """Of three processes, each of which was heard of at 0 s."""
    clock = types.SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(watch, "time", clock)
    made = watch._Judge(3, limit_s=4.0, every_s=0.5)
    made.server, made.clock = Told(), clock
    for process in range(3):
        made._heard(process, {"host": f"node-{process}", "pid": 7, "at": [5, "train_step"]})
    return made


def run(judge, seconds: float, beats=(0, 1, 2)) -> None:
    """Time passes, in which these processes are heard of."""
    for _ in range(round(seconds / 0.25)):
        judge.clock.now += 0.25
        for process in beats:
            judge._heard(process, {"beat": True, "at": [6, "train_step"]})
        judge._tick()


def test_the_surest_failure_is_the_one_that_is_named(judge):
    """Collectives fail in the others when one is killed, and may be heard of before it."""
    judge._heard(0, {"failed": "XlaRuntimeError: gloo", "at": [5, "train_step"]})
    run(judge, 0.25)
    judge._heard(2, None)
    assert judge.server.verdicts() == []
    run(judge, 1.0, beats=[1])
    assert judge.server.verdicts() == [(2, "lost")]
    (why,) = (one["why"] for one in judge.server.sent if "why" in one)
    assert why.startswith("fzero: process 2 of 3 (host node-2, pid 7) was lost: killed")
    assert "step 6, train_step" in why


def test_silence_is_longer_than_the_limit_and_not_the_judges_own(judge):
    run(judge, 3.0, beats=[0, 1])
    judge.clock.now += 3600.0  # stopped itself: it has heard of nobody
    judge._tick()
    run(judge, 3.75, beats=[0, 1])
    assert judge.server.verdicts() == []
    run(judge, 1.25, beats=[0, 1])
    assert judge.server.verdicts() == [(2, "silent")]


def test_a_quiet_run_is_told_that_process_0_lives(judge):
    """They take it for lost where it says nothing for longer than the limit."""
    run(judge, 3.0)
    told = [one["zero"] for one in judge.server.sent if "zero" in one]
    assert len(told) >= 3.0 / (2 * judge.every_s)
    assert {one["host"] for one in told} == {"node-0"}


def test_whoever_says_goodbye_is_not_lost(judge):
    judge._heard(1, {"bye": True, "at": [6, "after train_step"]})
    judge._heard(1, None)
    run(judge, 9.0, beats=[0, 2])
    assert judge.server.verdicts() == []
    judge.leave()
    judge._heard(2, None)
    run(judge, 9.0, beats=[])
    assert judge.server.verdicts() == []


def test_values_are_exchanged_in_the_order_of_processes(judge):
    for process in (2, 0, 1):
        judge._heard(process, {"say": 0, "name": "init", "value": f"of {process}", "at": [0, ""]})
    assert judge.server.sent == [{"heard": 0, "values": ["of 0", "of 1", "of 2"]}]
    judge._heard(0, {"say": 1, "name": "init", "value": 1, "at": [0, ""]})
    judge._heard(2, {"say": 1, "name": "save", "value": 1, "at": [0, ""]})
    assert "process 0 to 'init', process 2 to 'save'" in judge.server.sent[1]["error"]


def test_lines_come_in_pieces():
    ends = socket.socketpair()
    line = Line(ends[0])
    for data, messages in ((b'{"a": 1}\n{"b"', [{"a": 1}]), (b": 2}", []), (b"\n", [{"b": 2}]),
                           (b"[1]\n", None), (b"none\n", None)):  # fmt: skip
        ends[1].sendall(data)
        assert line.receive() == messages
    ends[1].close()
    assert line.receive() is None


def test_a_line_without_an_end_is_none_of_ours(monkeypatch):
    """Process 0 would keep whatever a stranger on its port sends."""
    monkeypatch.setattr(channel, "MOST_BYTES", 8)
    ends = socket.socketpair()
    line = Line(ends[0])
    for data, messages in ((b"x" * 9, []), (b"x", None)):
        ends[1].sendall(data)
        assert line.receive() == messages


def test_a_line_that_is_quiet_has_not_ended():
    ends = socket.socketpair()
    line = Line(ends[0])
    line.socket.settimeout(0.01)
    assert line.receive() == []
    ends[1].sendall(b'{"a": 1}\n')
    assert line.receive() == [{"a": 1}]


@pytest.mark.parametrize(
    "hello", [{"hello": 1, "token": "wrong"}, {"hello": 2, "token": "own"}, {"token": "own"}]
)
def test_strangers_are_not_listened_to(hello):
    heard: list[object] = []
    server = Server("127.0.0.1", "own", 2, lambda *one: heard.append(one), lambda: None, 0.01)
    stranger = connect("127.0.0.1", server.port, 5.0)
    stranger.socket.settimeout(5.0)
    stranger.send(hello)
    assert stranger.receive() is None
    assert heard == []
    assert server.lines == {}


def test_what_a_process_is_at(monkeypatch):
    """Within another action until that goes on; what failed stays named."""
    monkeypatch.setattr(activity, "_NOW", activity._Now())
    with activity.doing("train_step", 3):
        with activity.doing("save"):
            assert activity.now() == (3, "save")
        assert activity.now() == (3, "train_step")
    with activity.doing("save"):
        pass
    assert activity.text(*activity.now()) == "step 3, after save"
    with pytest.raises(KeyError), activity.doing("restore"):
        raise KeyError
    assert activity.now() == (3, "restore")


def test_steps_are_counted_where_the_device_has_not_yet():
    late = types.SimpleNamespace(is_ready=lambda: False)
    steps = activity.Steps()
    assert steps.number(jnp.asarray(4).block_until_ready()) == 5
    assert steps.number(late) == 6
    assert steps.number(late) == 7


@pytest.mark.parametrize("text", ["0.5", "inf", "nan", "soon"])
def test_limits_of_less_than_a_second_are_refused(monkeypatch, text):
    monkeypatch.setenv("FZERO_LIMIT_S", text)
    with pytest.raises(fz.HostsError, match=f"at least 1 second, got {text}"):
        join._limit(None)
    assert join._limit(1) == 1.0


def test_what_nobody_takes_in_time_is_not_sent():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        ends[0].settimeout(0.01)
        assert not Line(ends[0]).send({"much": "x" * 2**24})
