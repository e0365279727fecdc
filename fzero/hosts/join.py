"""`fz.join`: this process becomes one of several."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import math
import os
import secrets
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fzero.errors import HostsError
from fzero.hosts.watch import Watch, end_with, install
from fzero.hosts.world import ALONE, World, find_world


# A collective that waits for a lost process would wait for ever. Long enough for a machine that is
# very busy to let a thread run, short enough not to pay for idle accelerators.
LIMIT_S = 60.0
LIMIT_VARIABLE = "FZERO_LIMIT_S"
# Room for an address, a port and a token.
_NOTE_BYTES = 256


class _Joined:
    """What `join` did in this process."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.watch: Watch | None = None
        self.port: socket.socket | None = None  # kept as long as the process lives


_JOINED = _Joined()


def join(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    cluster_detection_method: str | None = None,
    limit_s: float | None = None,
    watch_address: str | None = None,
    **initialize: Any,
) -> World:
    """Makes this process one of several, if it is; to be called before the first use of a device.

    The world comes from the arguments; or from torchrun's variables (`MASTER_ADDR`, `MASTER_PORT`,
    `WORLD_SIZE`, `RANK`, and `LOCAL_RANK` for the device), which `fzero launch` sets too; or from
    what `jax.distributed` detects (SLURM, Open MPI, Kubernetes, Cloud TPU). Without any of these
    the process is alone, and nothing happens. A second call does nothing.

    A handler that the program has for SIGTERM stays (jax would put its own in its place).

    From then on the processes watch each other: one that is killed, stopped or fails ends all
    others with a sentence that names it, its host, and the step and action it was at.

    Args:
        coordinator_address: `"host:port"` of process 0, as in `jax.distributed.initialize`.
        num_processes: how many there are.
        process_id: which one this is.
        local_device_ids: which of the host's devices are this process's.
        cluster_detection_method: as in `jax.distributed.initialize`.
        limit_s: seconds without a word after which a process counts as lost; by default what
            `FZERO_LIMIT_S` in the environment says, or 60.
        watch_address: the address of process 0's host at which the others reach it; by default that
            of the coordinator, or of the interface that leads outside.
        **initialize: what else `jax.distributed.initialize` takes, such as timeouts.

    Returns:
        The world.

    Raises:
        HostsError: some of what makes a world is there and some is not (says what is missing), the
            processes have different numbers of devices, or process 0 cannot be reached.

    Example:
        >>> import fzero as fz
        >>> world = fz.join()                       # alone here
        >>> world.num_processes, world.process_id
        (1, 0)

    Source: jax.distributed.initialize.
    """
    if _JOINED.world is not None:
        return _JOINED.world
    limit_s = _limit(limit_s)
    world = find_world(
        os.environ, coordinator_address, num_processes, process_id, local_device_ids,
        cluster_detection_method,
    )  # fmt: skip
    if jax.distributed.is_initialized():
        world = World("jax.distributed", jax.process_count(), jax.process_index(), {})
    elif world is not ALONE and world.num_processes != 1:
        _prepare_transfers(world)
        initialize.setdefault("heartbeat_timeout_seconds", max(100, math.ceil(2 * limit_s)))
        try:
            with _handler_kept():
                jax.distributed.initialize(**world.arguments, **initialize)
        except (RuntimeError, ValueError) as error:
            raise HostsError(f"join: jax.distributed ({world.source}): {error}") from error
    if world.num_processes != 1:
        world = World(world.source, jax.process_count(), jax.process_index(), world.arguments)
    if world.num_processes != 1:
        _JOINED.watch = _watched(world, limit_s, watch_address)
    _JOINED.world = world
    return world


def watch() -> Watch | None:
    """The watch of this process, where it joined others."""
    return _JOINED.watch


def fail(error: BaseException, code: int, shown: str) -> None:
    """Tells the other processes that this one fails, and ends it; returns where it is alone."""
    if _JOINED.watch is not None:
        end_with(_JOINED.watch, error, code, shown)


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """What a program does at SIGTERM stays: jax puts a note of its own in its place."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _limit(limit_s: float | None) -> float:
    text = os.environ.get(LIMIT_VARIABLE, str(LIMIT_S)) if limit_s is None else str(limit_s)
    with contextlib.suppress(ValueError):
        found = float(text)
        if 1 <= found < math.inf:
            return found
    raise HostsError(
        f"join: expected limit_s ({LIMIT_VARIABLE} in the environment) to be at least 1 second,"
        f" got {text}"
    )


def _prepare_transfers(world: World) -> None:
    """What jax reads when it starts its devices, for sending arrays between processes.

    Port 0 would be told to the others as it is, and they would wait for ever. GPUs send through
    NCCL; there this is what jax falls back to.
    """
    name = "jax_cross_host_transfer_socket_address"
    if not jax.config.read(name):
        host = _own_address(world.arguments.get("coordinator_address"))
        kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        # jax binds the port at the first transfer. Until then systems would give it to any
        # connection that goes out; jax shares it with a socket that only holds it.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, 0))
        _JOINED.port, port = kept, kept.getsockname()[1]
        jax.config.update(name, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    # Threads of XLA's CPU client: its devices may all wait for other processes, and somebody has to
    # send what those wait for.
    own = max(1, getattr(jax.config, "jax_num_cpu_devices"))  # noqa: B009 (mypy)
    threads = os.environ.get("NPROC", "")
    have = int(threads) if threads.isdecimal() else len(os.sched_getaffinity(0))
    if have < 2 * own + 2:
        os.environ["NPROC"] = str(2 * own + 2)


def _own_address(coordinator: str | None) -> str:
    """The address of this host's interface that leads to the coordinator, or outside."""
    host, port = "192.0.2.1", 9  # documentation's: nothing is sent there
    if coordinator is not None:
        host, _, text = coordinator.rpartition(":")
        host, port = host.strip("[]"), int(text)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def _watched(world: World, limit_s: float, address: str | None) -> Watch:
    """Starts the watch. Where process 0 listens goes through the devices, once."""
    assert world.num_processes is not None
    assert world.process_id is not None
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        each = ", ".join(f"process {p}: {n}" for p, n in sorted(counts.items()))
        raise HostsError(f"join: expected equally many devices in every process, got {each}")
    from jax.experimental import multihost_utils

    watch = Watch(world.process_id, world.num_processes, socket.gethostname(), limit_s)
    note = {}
    if world.process_id == 0:
        address = address or _own_address(world.arguments.get("coordinator_address"))
        token = secrets.token_hex(16)
        port = watch.serve(_interface(address), token)
        note = {"address": address, "port": port, "token": token}
    text = np.zeros(_NOTE_BYTES, np.uint8)
    data = json.dumps(note).encode()
    text[: len(data)] = np.frombuffer(data, np.uint8)
    found = json.loads(bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b"\0"))
    watch.start(found["address"], found["port"], found["token"])
    install(watch)
    # Before jax's own, which waits for the others: what is called last was registered first.
    atexit.register(watch.leave)
    sys.stdout.flush()
    return watch


def _interface(address: str) -> str:
    """What to listen on for an address: itself, or where it is a name or outside, everything."""
    try:
        ipaddress.ip_address(address)
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
        return address
    except (ValueError, OSError):
        return ""
