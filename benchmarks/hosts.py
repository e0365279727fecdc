"""Several processes on one machine: what they cost, and how fast they end and start again.

    python benchmarks/hosts.py --json benchmarks/results/hosts.json
    python benchmarks/hosts.py --parts transfers steps --rounds 1

- `transfers`: arrays from a device of one process to one of another by `fzero.processes.send`, as
  pipelines hand on, and the same bytes through a raw socket between the same processes, in turns.
- `steps`: a pipeline of four ranks in one process, in two and in four; their losses must be equal
  to the last bit.
- `makespans`: a pipeline over four processes whose actions sleep (`sleeping.py`), against its
  simulation: the cores do not matter, so the rest is what dispatching and transfers cost.
- `kills`: from SIGKILL of a process to the end of all others (and of SIGSTOP, where the others have
  to wait for `limit_s`).
- `starts`: from the start of all processes to the end of their first step, from nothing and from a
  checkpoint.

All processes share the machine's cores, so a step over four processes can be no faster than in one:
the ratio says what the processes cost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
import sleeping
from rich.console import Console

import fzero as fz
from fzero.hosts.agree import exchange


PARTS = ("transfers", "steps", "makespans", "kills", "starts")
KIB, MIB = 2**10, 2**20
SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)
STREAM = 8  # messages one after the other, nobody waits in between
DEVICES = 4
CONFIG = common.Config("hosts", vocabulary=512, width=256, layers=4, heads=4, seq=64, batch=16)
PLAN = fz.Plan(pipe=4, data=1, microbatches=8, schedule="1f1b")
# Actions that sleep, as many and as long as those of a large model; a row is what is handed on.
SLEEP_S = 0.05
SLEEPING = {"1f1b": 4, "zb_h1": 4, "interleaved": 8, "zb_v": 8}
ROW = MIB // 4
SILENCE_S = 6.0  # `limit_s` where a process is stopped
PATIENCE_S = 600.0  # compiling on a machine that does other things
POLL_S = 0.005


def main() -> int:
    """Runs what the command line asks for."""
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each, in turns")
    parser.add_argument("--json", help="where to write the report")
    options = parser.parse_args()
    before, rows = common.provenance(), []
    with tempfile.TemporaryDirectory(prefix="fzero-hosts-") as folder:
        for part in options.parts:
            measured = globals()[part](Path(folder), options.rounds)
            rows += measured
            for row in measured:
                print(json.dumps(row), flush=True)
    report = {
        "before": before,
        "after": common.provenance(),
        "rounds": options.rounds,
        "rows": rows,
    }
    cells = [(row["what"], row["figure"], row.get("beside", "")) for row in rows]
    grid = common.Grid("Several processes on one machine", ("what", "figure", "beside"), cells)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if options.json:
        common.save(options.json, report, grid)
    return 0


def start(folder: Path, what: str, processes: int, **env: str) -> subprocess.Popen[bytes]:
    """Starts a part's workers under `fzero launch`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
               str(folder / "logs"), "--", __file__, "worker", what, str(folder)]  # fmt: skip
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES // processes)}
    with (folder / "launch.log").open("a") as log:
        return subprocess.Popen(command, env={**os.environ, **cpu, **env}, stdout=log, stderr=log)


def finished(folder: Path, what: str, processes: int, **env: str) -> dict[str, Any]:
    """What process 0 of a part's workers found."""
    code = start(folder, what, processes, **env).wait(PATIENCE_S)
    if code:
        raise SystemExit((folder / "launch.log").read_text()[-4000:])
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def transfers(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Hand-overs beside raw sockets."""
    found = [finished(folder / f"transfers-{n}", "transfers", 2) for n in range(rounds)]

    def seconds(way: str, kind: str, size: int) -> float:
        return statistics.median(x for one in found for x in one[way][kind][str(size)])

    rows = []
    for kind, of in (("alone", "and back, half of it"), ("streamed", f"{STREAM} in a row, each")):
        for size in SIZES:
            send, raw = seconds("send", kind, size), seconds("socket", kind, size)
            rows.append({
                "what": f"transfer of {_size(size)}, {of}", "figure": f"{1e3 * send:.2f} ms",
                "beside": f"socket {1e3 * raw:.2f} ms, {send / raw:.1f} times",
                "send_s": send, "socket_s": raw,
            })  # fmt: skip
        small, large = SIZES[0], SIZES[-1]
        each = {
            way: (seconds(way, kind, large) - seconds(way, kind, small)) / ((large - small) / MIB)
            for way in ("send", "socket")
        }
        rows.append({
            "what": f"  of it for each MiB ({kind})", "figure": f"{1e3 * each['send']:.2f} ms",
            "beside": f"socket {1e3 * each['socket']:.2f} ms",
            "send_s": each["send"], "socket_s": each["socket"],
        })  # fmt: skip
    dispatch = statistics.median(x for one in found for x in one["dispatch"])
    rows.append(
        {"what": "the call itself", "figure": f"{1e6 * dispatch:.0f} us", "send_s": dispatch}
    )
    return rows


def steps(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A pipeline's step over processes against the same in one."""
    found: dict[int, list[dict[str, Any]]] = {1: [], 2: [], 4: []}
    for number in range(rounds):
        for processes in found:
            there = folder / f"steps-{processes}-{number}"
            found[processes].append(finished(there, "steps", processes))
    expected = found[1][0]["losses"]
    assert all(one["losses"] == expected for many in found.values() for one in many), found
    rows, alone = [], {}
    for processes, many in found.items():
        row: dict[str, Any] = {
            name: statistics.median(x for one in many for x in one[name])
            for name in ("seconds", "cpu_seconds")
        }
        alone = alone or row
        ratio, cpu = (row[name] / alone[name] for name in ("seconds", "cpu_seconds"))
        beside = f"{ratio:.2f} of one process; CPU-seconds {cpu:.2f}" if processes > 1 else ""
        rows.append({
            "what": f"step of a pipeline of four ranks, {processes} process"
            + ("es" if processes > 1 else ""),
            "figure": f"{1e3 * row['seconds']:.0f} ms", "beside": beside, **row,
        })  # fmt: skip
    return rows


def makespans(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Steps of a pipeline that sleeps, over four processes, against their simulation."""
    from fzero.pipeline import Cost, schedule, simulate

    library = sleeping.build(folder)
    plans = {name: _sleeping_plan(name) for name in SLEEPING}
    found = [
        finished(folder / f"makespans-{number}", "makespans", 4, FZERO_SLEEP=str(library))
        for number in range(rounds)
    ]
    rows = []
    for name, plan in plans.items():
        cost = Cost(f=SLEEP_S, i=SLEEP_S, w=SLEEP_S)
        order = schedule(name, stages=SLEEPING[name], microbatches=plan.microbatches)
        simulated = simulate(order, cost).makespan_s
        seconds = [x for one in found for x in one[name]]
        usual, least = statistics.median(seconds), min(seconds)
        rows.append({
            "what": f"step of {name} over four processes, whose actions sleep",
            "figure": f"{1e3 * usual:.0f} ms",
            "beside": f"{usual / simulated:.2f} of the simulated one, at best"
            f" {least / simulated:.2f}",
            "seconds": seconds, "simulated_s": simulated,
        })  # fmt: skip
    return rows


def kills(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds from a signal to the end of all."""
    rows = []
    for processes, how in ((2, "SIGKILL"), (4, "SIGKILL"), (2, "SIGSTOP")):
        limit = {"FZERO_LIMIT_S": str(SILENCE_S)} if how == "SIGSTOP" else {}
        times = []
        for number in range(rounds):
            there = folder / f"kills-{how}-{processes}-{number}"
            launcher = start(there, "trains", processes, **limit)
            _until(lambda there=there: _said(there, "at") >= 3, launcher, there)
            listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
            children = [int(pid) for pid in listed.split()]
            others = [pid for place, pid in enumerate(children) if place != number % processes]
            os.kill(children[number % processes], getattr(signal, how))
            began = time.perf_counter()
            while any(_runs(pid) for pid in others):
                time.sleep(POLL_S)
            times.append(time.perf_counter() - began)
            launcher.wait(PATIENCE_S)
        silence = f"limit_s={SILENCE_S:g}" if limit else ""
        rows.append({
            "what": f"{how} of one of {processes} to the end of the others",
            "figure": f"{statistics.median(times):.1f} s",
            "beside": ", ".join(filter(None, (f"most {max(times):.1f} s", silence))),
            "seconds": times,
        })  # fmt: skip
    return rows


def starts(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Seconds from the start of the processes to the end of their first step."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for processes in (1, 2, 4):
            there = folder / f"starts-{processes}-{number}"
            for how in ("from nothing", "from a checkpoint"):
                began = time.time()
                times = finished(there, "starts", processes)
                found.setdefault((processes, how), []).append(
                    {name: moment - began for name, moment in times.items()}
                )
    rows = []
    for (processes, how), many in found.items():
        joined, ready, stepped = (
            statistics.median(one[name] for one in many) for name in ("joined", "ready", "stepped")
        )
        state = "restored" if how == "from a checkpoint" else "made"
        rows.append({
            "what": f"start of {processes}, {how}, to the end of its first step",
            "figure": f"{stepped:.1f} s",
            "beside": f"joined after {joined:.1f} s, the state {state} after {ready:.1f} s",
            "joined_s": joined, "ready_s": ready, "stepped_s": stepped,
        })  # fmt: skip
    return rows


def worker(what: str, folder: Path) -> None:
    """One process of a part."""
    world = fz.join()
    found = {"transfers": _transfers, "steps": _steps, "makespans": _makespans,
             "trains": _trains, "starts": _starts}[what](folder)  # fmt: skip
    if world.process_id == 0:
        (folder / "found.json").write_text(json.dumps(found))


def _transfers(folder: Path) -> dict[str, Any]:
    """Round trips and streams of every size, by `send` and through a socket, in turns."""
    from jax.sharding import NamedSharding, PartitionSpec

    from fzero.compat import auto_mesh
    from fzero.processes import from_host, send

    me = jax.process_index()
    ends = [next(d for d in jax.devices() if d.process_index == process) for process in (0, 1)]
    here, there = (
        NamedSharding(auto_mesh(np.array([device]), ("one",)), PartitionSpec()) for device in ends
    )
    line = _connected(me)
    dispatch: list[float] = []

    def ping(array: jax.Array, _: bytearray) -> None:
        jax.block_until_ready(send(send(array, there), here))

    def stream(array: jax.Array, _: bytearray) -> None:
        sent = []
        for _ in range(STREAM):
            began = time.perf_counter()
            sent.append(send(array, there))
            dispatch.append(time.perf_counter() - began)
        jax.block_until_ready(sent)

    def raw_ping(_: jax.Array, data: bytearray) -> None:
        for sender in (0, 1):
            line.sendall(data) if me == sender else _receive(line, data)

    def raw_stream(_: jax.Array, data: bytearray) -> None:
        for _ in range(STREAM):
            line.sendall(data) if me == 0 else _receive(line, data)

    runs: dict[tuple[str, str], Callable[[jax.Array, bytearray], None]] = {
        ("send", "alone"): ping, ("socket", "alone"): raw_ping,
        ("send", "streamed"): stream, ("socket", "streamed"): raw_stream,
    }  # fmt: skip
    found: dict[str, Any] = {"send": {}, "socket": {}}
    for size in SIZES:
        array, data = from_host(np.ones(size, np.uint8), here), bytearray(size)
        for number in range(12):
            for (way, kind), run in runs.items():
                exchange("round", None)
                began = time.perf_counter()
                run(array, data)
                took = time.perf_counter() - began
                if number < 2:
                    continue
                # There and back is seen where it began; a stream where it ends.
                told = exchange("took", took)
                own = told[0] / 2 if kind == "alone" else told[1] / STREAM
                found[way].setdefault(kind, {}).setdefault(size, []).append(own)
    return {**found, "dispatch": dispatch}


def _connected(me: int) -> socket.socket:
    """A socket between the two processes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = exchange("port", listener.getsockname()[1])[0]
        line = socket.create_connection(("127.0.0.1", port)) if me else listener.accept()[0]
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def _receive(line: socket.socket, data: bytearray) -> None:
    view = memoryview(data)
    while len(view):
        view = view[line.recv_into(view) :]


def _ready(devices: Any = None) -> tuple[Any, ...]:
    model, tx = common.gpt(CONFIG), common.adamw()
    return model, tx, fz.train_step(model, tx, PLAN, devices=devices)


def _batches(steps: int) -> list[dict[str, Any]]:
    return [{"ids": tokens} for tokens in common.token_batches(CONFIG, steps)]


def _steps(folder: Path, warmup: int = 3, timed: int = 12) -> dict[str, Any]:
    model, tx, step = _ready()
    state, losses, seconds, cpu = fz.init(model, tx, PLAN), [], [], []
    for number, batch in enumerate(_batches(warmup + timed)):
        began, cpu_began = time.perf_counter(), time.process_time()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]).hex())
        if number >= warmup:
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
    everyone = exchange("cpu", cpu)
    return {
        "losses": losses,
        "seconds": seconds,
        "cpu_seconds": [sum(x) for x in zip(*everyone, strict=True)],
    }


def _sleeping_plan(name: str) -> fz.Plan:
    return fz.Plan(pipe=DEVICES, data=1, microbatches=2 * DEVICES, schedule=name)


def _makespans(folder: Path, warmup: int = 2, timed: int = 5) -> dict[str, Any]:
    sleeping.register(Path(os.environ["FZERO_SLEEP"]))
    found: dict[str, Any] = {}
    for name, layers in SLEEPING.items():
        plan, tx = _sleeping_plan(name), common.adamw()
        model = sleeping.model(layers, ROW, SLEEP_S)
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        batch = {"x": np.ones((plan.microbatches, ROW), np.float32)}
        for number in range(warmup + timed):
            exchange("step", None)
            began = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            took = max(exchange("took", time.perf_counter() - began))
            if number >= warmup:
                found.setdefault(name, []).append(took)
    return found


def _trains(folder: Path) -> None:
    """Until it is ended from outside."""
    model, tx, step = _ready()
    state, batch = fz.init(model, tx, PLAN), _batches(1)[0]
    for number in range(1, 1_000_000):
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        if jax.process_index() == 0:
            _say(folder, "at", number)


def _starts(folder: Path) -> dict[str, float]:
    joined, there = time.time(), folder / "checkpoints"
    model, tx, step = _ready()
    again = there.is_dir()
    state = fz.restore(there, model, tx, PLAN) if again else fz.init(model, tx, PLAN)
    jax.block_until_ready(state.params)
    ready = time.time()
    state, metrics = step(state, _batches(1)[0])
    jax.block_until_ready(metrics)
    stepped = time.time()
    if not again:
        fz.save(there, state, PLAN, asynchronous=False)
    return {"joined": joined, "ready": ready, "stepped": stepped}


def _say(folder: Path, name: str, number: int) -> None:
    new = folder / f"{name}.new"
    new.write_text(str(number))
    new.replace(folder / name)


def _said(folder: Path, name: str) -> int:
    return int((folder / name).read_text()) if (folder / name).exists() else 0


def _until(true: Callable[[], bool], launcher: subprocess.Popen[bytes], folder: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not true():
        if launcher.poll() is not None or time.monotonic() > limit:
            launcher.terminate()
            raise SystemExit((folder / "launch.log").read_text()[-4000:])
        time.sleep(POLL_S)


def _runs(pid: int) -> bool:
    """Whether a process has not ended (its parent may not have noticed)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


if __name__ == "__main__":
    sys.exit(main())
