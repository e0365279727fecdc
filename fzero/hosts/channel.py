"""Lines of JSON between process 0 and all others, beside the devices.

What goes through here has to work when collectives do not: before programs are known to be the
same, and after a process has died. Process 0 serves (itself too); nobody else talks to anybody.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any


Message = dict[str, Any]
# A line is a fingerprint at most; a peer that sends more is none of ours.
MOST_BYTES = 1 << 26


class Line:
    """One end of a connection.

    Args:
        connection: a connected socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """Sends a message; whether the other end still takes any."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self.socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Messages that came (waits for some bytes); `None` at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not data or len(self._rest) > MOST_BYTES:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None  # none of ours
        return found if all(isinstance(message, dict) for message in found) else None

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self.socket.close()


class Server:
    """Process 0's end of all connections, in a thread of its own.

    Args:
        address: the interface to listen on.
        token: what a process has to say first.
        num_processes: how many will come.
        heard: called with a process and its message; with `None` when its connection ended.
        tick: called about every `every_s` seconds.
        every_s: seconds.
    """

    def __init__(
        self, address: str, token: str, num_processes: int,
        heard: Callable[[int, Message | None], None], tick: Callable[[], None], every_s: float,
    ) -> None:  # fmt: skip
        self.lines: dict[int, Line] = {}
        self._token, self._num = token, num_processes
        self._heard, self._tick, self._every_s = heard, tick, every_s
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=num_processes)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="fzero-hosts", daemon=True).start()

    def send_all(self, message: Message) -> None:
        """Sends a message to every process that is there; to this one last, which it may end."""
        for _, line in sorted(self.lines.items(), reverse=True):
            line.send(message)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._every_s):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    connection.settimeout(self._every_s)
                    self._selector.register(connection, selectors.EVENT_READ, Line(connection))
                else:
                    self._read(key.data)
            self._tick()

    def _read(self, line: Line) -> None:
        messages = line.receive()
        process = next((p for p, known in self.lines.items() if known is line), None)
        if messages is None:
            self._selector.unregister(line.socket)
            line.close()
            if process is not None:
                del self.lines[process]
                self._heard(process, None)
            return
        for message in messages:
            if process is None:
                process = int(message.get("hello", -1))
                if message.get("token") != self._token or process not in range(self._num):
                    self._selector.unregister(line.socket)
                    line.close()
                    return
                self.lines[process] = line
            self._heard(process, message)


def connect(address: str, port: int, timeout_s: float) -> Line:
    """A connection to process 0.

    Raises:
        OSError: nobody answers there.
    """
    connection = socket.create_connection((address, port), timeout=timeout_s)
    connection.settimeout(None)
    return Line(connection)
