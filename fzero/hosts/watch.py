"""Every process hears of every other; when one is lost, all others end and say which.

Each process tells process 0 every second (or more often) what it is at, from a thread that runs
while the main one waits in a collective. Process 0 decides who failed first, and tells all. When
process 0 itself is lost, every other one sees that for itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any

from fzero.errors import HostsError
from fzero.hosts import activity
from fzero.hosts.channel import Line, Message, Server, connect


# A run that a peer's failure ended: not this process's fault, worth starting again (EX_TEMPFAIL).
EXIT_PEER_LOST = 75
EXIT_INTERRUPTED = 130
# A process that dies makes collectives fail in others at once; which of the two comes to process 0
# first is chance, so it listens this long before it says who it was.
GRACE_S = 0.5
# Beats in a limit: some may be late.
BEATS = 6
# Failures from the surest to know the cause by, to the least.
KINDS = ("lost", "raised", "silent")


class Watch:
    """This process's part of the watch.

    Args:
        process: which one this is.
        num_processes: of how many.
        host: its name.
        limit_s: seconds without a word after which a process counts as lost.
    """

    def __init__(self, process: int, num_processes: int, host: str, limit_s: float) -> None:
        self.process, self.num, self.limit_s = process, num_processes, limit_s
        self.every_s = min(1.0, limit_s / BEATS)
        self._about = {"host": host, "pid": os.getpid()}
        self._judge: _Judge | None = None
        self._line: Line | None = None
        self._zero: Message = {}
        self._over = threading.Event()  # no longer watching
        self._ended = threading.Event()  # the verdict is there
        self._verdict: Message = {}
        self._heard: dict[int, Message] = {}
        self._news = threading.Condition()
        self._count = 0

    def serve(self, address: str, token: str) -> int:
        """Starts listening, in process 0; the port."""
        self._judge = _Judge(self.num, self.limit_s, self.every_s)
        return self._judge.serve(address, token)

    def start(self, address: str, port: int, token: str) -> None:
        """Joins process 0, and begins to tell and to listen.

        Raises:
            HostsError: process 0 does not answer there.
        """
        try:
            self._line = connect(address, port, self.limit_s)
        except OSError as error:
            raise HostsError(
                f"join: process {self.process} on {self._about['host']} cannot reach process 0 at"
                f" {address} port {port}: {error}. Expected that hosts reach each other; where"
                " process 0 has several addresses, give the right one: fz.join(watch_address=...)"
            ) from error
        self._line.send({"hello": self.process, "token": token, **self._about, **_at()})
        for work in (self._beat, self._listen):
            threading.Thread(target=work, name="fzero-hosts", daemon=True).start()

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What every process gave under a name, in their order; waits for all.

        Raises:
            HostsError: another process came to something else.
        """
        assert self._line is not None
        with self._news:
            number, self._count = self._count, self._count + 1
        self._line.send({"say": number, "name": name, "value": value, **_at()})
        with self._news:
            while number not in self._heard:
                self._news.wait()
            found = self._heard.pop(number)
        if "error" in found:
            raise HostsError(found["error"])
        values: list[Any] = found["values"]
        return values

    def failed(self, error: BaseException) -> bool:
        """Tells that this process fails; whether it is the one whose failure ends the run."""
        if self._ended.is_set():  # somebody else's failure, which this one may follow from
            return bool(self._verdict["process"] == self.process)
        if self._over.is_set() or self._line is None:
            return True
        kind = type(error).__name__
        said = f"{kind}: {error}".splitlines()[0][:500]
        self._line.send({"failed": said, **_at()})
        self._ended.wait(20 * GRACE_S)  # on a busy machine, too
        return bool(self._verdict.get("process", self.process) == self.process)

    def leave(self) -> None:
        """Stops watching: this process ends as it should."""
        if self._over.is_set():
            return
        self._over.set()
        if self._line is not None:
            self._line.send({"bye": True})
        if self._judge is not None:
            self._judge.leave()

    def _beat(self) -> None:
        assert self._line is not None
        while not self._over.wait(self.every_s):
            self._line.send({"beat": True, **_at()})

    def _listen(self) -> None:
        assert self._line is not None
        self._line.socket.settimeout(self.every_s)
        last = time.monotonic()
        while not self._over.is_set():
            began = time.monotonic()
            messages = self._line.receive()
            if time.monotonic() - began > 5 * self.every_s:
                last = time.monotonic()  # this process was stopped itself, or starved
            if messages:
                last = time.monotonic()
            for message in messages or ():
                self._take(message)
            if self._over.is_set():
                return
            if messages is None:
                self._end({"process": 0, "why": _sentence(0, self.num, self._zero, "lost")})
            elif time.monotonic() - last > self.limit_s + self.every_s:
                self._end(
                    {"process": 0,
                     "why": _sentence(0, self.num, self._zero, "silent", self.limit_s)}
                )  # fmt: skip

    def _take(self, message: Message) -> None:
        if "heard" in message:
            with self._news:
                self._heard[message["heard"]] = message
                self._news.notify_all()
        elif "why" in message:
            self._end(message)
        elif "zero" in message:
            self._zero = message["zero"]
        elif "over" in message:
            self._over.set()

    def _end(self, verdict: Message) -> None:
        """Ends this process, unless it is the one that failed: that one has its own words."""
        self._verdict = verdict
        self._ended.set()
        self._over.set()
        if verdict["process"] == self.process and verdict.get("kind") == "raised":
            return
        if self._judge is not None:
            time.sleep(GRACE_S / 5)  # jax's coordinator ends with this process: the others first
        _leave_now(verdict["why"], EXIT_PEER_LOST)


class _Judge:
    """What process 0 knows of all processes, and how it decides."""

    def __init__(self, num: int, limit_s: float, every_s: float) -> None:
        self.num, self.limit_s, self.every_s = num, limit_s, every_s
        self.known: dict[int, Message] = {}
        self.last: dict[int, float] = {}
        self.gone: set[int] = set()
        self.said: dict[int, dict[int, Message]] = {}
        self.suspects: list[tuple[int, float, int, str]] = []
        self.since: float | None = None
        self.over = False
        self._told = self._ticked = time.monotonic()

    def serve(self, address: str, token: str) -> int:
        """Starts; the port."""
        self.server = Server(address, token, self.num, self._heard, self._tick, self.every_s / 2)
        return self.server.port

    def leave(self) -> None:
        """Process 0 ends as it should: the others go on alone."""
        self.over = True
        self.server.send_all({"over": True})

    def _heard(self, process: int, message: Message | None) -> None:
        now = time.monotonic()
        if message is None:
            if process not in self.gone:
                self._suspect("lost", process, "")
            return
        self.last[process] = now
        self.known[process] = {**self.known.get(process, {}), **message}
        if "bye" in message:
            self.gone.add(process)
        elif "failed" in message:
            self._suspect("raised", process, message["failed"])
        elif "say" in message:
            self._collect(process, message)

    def _collect(self, process: int, message: Message) -> None:
        number = message["say"]
        said = self.said.setdefault(number, {})
        said[process] = message
        if len(said) < self.num and len({one["name"] for one in said.values()}) == 1:
            return
        names = {p: one["name"] for p, one in sorted(said.items())}
        answer: Message = {"heard": number}
        if len(set(names.values())) > 1:
            came = ", ".join(f"process {p} to {name!r}" for p, name in names.items())
            answer["error"] = (
                f"hosts: processes came to different points: {came}. Expected that every process"
                " makes the same calls of fzero in the same order"
            )
        else:
            answer["values"] = [said[p]["value"] for p in range(self.num)]
            del self.said[number]
        self.server.send_all(answer)

    def _suspect(self, kind: str, process: int, words: str) -> None:
        if not self.over:
            self.suspects.append((KINDS.index(kind), time.monotonic(), process, words))
            self.since = self.since or time.monotonic()

    def _tick(self) -> None:
        now = time.monotonic()
        if (
            now - self._ticked > self.limit_s / 2
        ):  # stopped or starved itself: others get their time
            self.last = dict.fromkeys(self.last, now)
        self._ticked = now
        if self.over:
            return
        if now - self._told > self.every_s:
            self._told = now
            self.server.send_all({"zero": {**self.known.get(0, {}), **_at()}})
        for process, last in self.last.items():
            known = process in self.gone or any(s[2] == process for s in self.suspects)
            if now - last > self.limit_s and not known:
                self._suspect("silent", process, "")
        if self.since is not None and now - self.since > GRACE_S:
            kind, _, process, words = min(self.suspects)
            about = self.known.get(process, {})
            why = _sentence(process, self.num, about, KINDS[kind], self.limit_s, words)
            self.over = True
            self.server.send_all({"why": why, "process": process, "kind": KINDS[kind]})


def _at() -> Message:
    return {"at": activity.now()}


def _sentence(
    process: int, num: int, about: Message, kind: str, limit_s: float = 0, words: str = ""
) -> str:
    where = activity.text(*about.get("at", (None, "starting")))
    who = (
        f"process {process} of {num} (host {about.get('host', 'unknown')}, pid"
        f" {about.get('pid', 'unknown')})"
    )
    what = {
        "lost": f"was lost: killed, out of memory, or its host went down; last heard of at {where}",
        "silent": f"has said nothing for {limit_s:g} s: stopped, or its host or network is down;"
        f" last heard of at {where}",
        "raised": f"failed at {where}: {words}",
    }[kind]
    return (
        f"fzero: {who} {what}. All processes end; start them again to go on from the newest"
        " checkpoint"
    )


def _leave_now(why: str, code: int) -> None:
    """Ends the process whatever its main thread waits for. Nothing half-written can stay behind:
    checkpoints and exports get their names when they are whole."""
    sys.stdout.flush()
    print(why, file=sys.stderr, flush=True)
    os._exit(code)


def end_with(watch: Watch, error: BaseException, code: int, shown: str) -> None:
    """Ends a process that fails: in its own words if it is the first, else as the others do."""
    if watch.failed(error):
        sys.stdout.flush()
        print(shown, file=sys.stderr, flush=True)
        os._exit(code)
    signal.pause()  # the listener ends this process


def install(watch: Watch) -> None:
    """Uncaught exceptions of the main thread are told to the others."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown = "".join(traceback.format_exception(kind, error, trace)).rstrip()
        end_with(watch, error, EXIT_INTERRUPTED if kind is KeyboardInterrupt else 1, shown)

    sys.excepthook = hook
