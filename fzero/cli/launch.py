"""Run a command in several processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, BinaryIO

import typer

from fzero.cli import EXIT_USAGE, command_app, commands
from fzero.hosts.watch import EXIT_PEER_LOST


# After the first process has failed the others end themselves, as soon as they have heard of it.
GRACE_S = 10.0
POLL_S = 0.05
# Lines of the log of the process that failed first.
SHOWN = 20

app = command_app()

Processes = Annotated[int, typer.Option(min=1, help="How many processes.")]
Logs = Annotated[
    Path | None, typer.Option(help="Directory for the log of each process.  [default: a new one]")
]
Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND ...",
        help="A command of fzero with its options (train --out ...), or a Python file.",
        show_default=False,
    ),
]


@app.command(context_settings={"ignore_unknown_options": True})
def launch(command: Command, processes: Processes = 2, logs: Logs = None) -> None:
    """Run a command in several processes on this machine, to try what hosts will do.

    The processes find each other as under torchrun: `fzero train` joins by itself, a script of your
    own calls fz.join(). What process 0 prints is shown; each has its log. When one fails, the end
    of its log is shown, all others are ended, and the exit code is that of the one that failed.
    On GPUs process n uses GPU n.
    """
    run = _resolved(command)
    folder = logs or Path(tempfile.mkdtemp(prefix="fzero-launch-"))
    folder.mkdir(parents=True, exist_ok=True)
    raise typer.Exit(launch_all(run, processes, folder))


def launch_all(command: Sequence[str], processes: int, folder: Path) -> int:
    """Runs a command in several processes; the exit code of the first that failed, or 0.

    Args:
        command: the command.
        processes: how many.
        folder: for `process-N.log`.
    """
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as opened, _forwarded(children):
        port = opened.enter_context(reserved_port())
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            for number in range(processes):
                log = opened.enter_context(_log(folder, number).open("wb"))
                children.append(_started(command, {**world, **_ranks(number)}, log, number == 0))
            return _watched(children, folder)
        finally:
            _end(children)


def _started(
    command: Sequence[str], extra: dict[str, str], log: BinaryIO, shown: bool
) -> subprocess.Popen[bytes]:
    # A group of its own: Ctrl-C comes once, from here.
    options: dict[str, Any] = {"env": os.environ | extra, "start_new_session": True}
    if not shown:
        return subprocess.Popen(command, stdout=log, stderr=log, **options)
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, **options
    )
    assert child.stdout is not None
    thread = threading.Thread(target=_copy, args=(child.stdout, log), daemon=True)
    thread.start()
    setattr(child, "copier", thread)  # noqa: B010 (mypy)
    return child


def _copy(source: Any, log: BinaryIO) -> None:
    """What a process prints, to its log and to the terminal."""
    with contextlib.suppress(ValueError):  # the log was closed: the process is being ended
        while data := source.read(1 << 16):
            log.write(data)
            log.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def _watched(children: Sequence[subprocess.Popen[bytes]], folder: Path) -> int:
    """Waits for all, or for a failure and what follows from it."""
    failed: list[int] = []
    deadline: float | None = None
    while True:
        codes = [child.poll() for child in children]
        failed += [n for n, code in enumerate(codes) if code and n not in failed]
        done = all(code is not None for code in codes)
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if done or (deadline is not None and time.monotonic() > deadline):
            break
        time.sleep(POLL_S)
    if not failed:
        return 0
    for thread in (getattr(child, "copier", None) for child in children):
        if thread is not None:
            thread.join(1.0)
    # Who ended because of another says so with its code.
    first = next((n for n in failed if codes[n] != EXIT_PEER_LOST), failed[0])
    code = codes[first] or 0
    ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    said = _lines(folder, first)[-SHOWN:]
    others = [n for n in failed if codes[n] == EXIT_PEER_LOST and n != first]
    if code < 0 and others:  # killed: it had no time for a word, but the others know where it was
        said += _lines(folder, others[0])[-1:]
    words = "\n".join(f"  {line}" for line in said)
    print(
        f"fzero launch: process {first} of {len(children)} ended first ({ended}). Logs of all are"
        f" in {folder}. The end of its log:\n{words}",
        file=sys.stderr,
    )
    return 128 - code if code < 0 else code


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()  # also where it is stopped
        child.wait()


@contextlib.contextmanager
def _forwarded(children: Sequence[subprocess.Popen[bytes]]) -> Any:
    """Ctrl-C and SIGTERM go to the processes, which end as they do under a scheduler."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before: dict[signal.Signals, Callable[..., Any] | int | None] = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resolved(command: Sequence[str]) -> list[str]:
    if command[0] in commands():
        return [sys.executable, "-m", "fzero.cli", *command]
    if command[0].endswith(".py"):
        return [sys.executable, *command]
    typer.echo(
        f"fzero launch: expected a command of fzero ({', '.join(sorted(commands()))}) or a Python"
        f" file after --, got {command[0]!r}",
        err=True,
    )
    raise typer.Exit(EXIT_USAGE)


def _ranks(number: int) -> dict[str, str]:
    return {"RANK": str(number), "LOCAL_RANK": str(number)}


def _log(folder: Path, number: int) -> Path:
    return folder / f"process-{number}.log"


def _lines(folder: Path, number: int) -> list[str]:
    return _log(folder, number).read_text(errors="replace").splitlines()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port for jax's coordinator that nobody else is given in the meantime.

    gRPC shares ports (`SO_REUSEPORT`), so process 0 can listen on one that is bound here.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])
