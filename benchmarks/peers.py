"""The same training run in fzero, PyTorch (eager, DDP, FSDP2) and DeepSpeed (ZeRO 1 to 3).

The peers live outside this repository, in a directory with a `run_all.py` that starts one program
after the other and collects what each writes. fzero joins as one more program
(`step.py --as-peer`), so that all share model, initial weights, data, optimizer and clock.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import jax

import fzero as fz


MIB = 2**20
# What to run, by the names of run_all.py: one process with two threads, and two of one each.
PEERS = ("plain_2thr", "ddp", "fsdp2", "ds_zero1", "ds_zero2", "ds_zero3")


def run_as_peer(zero: int, devices: int) -> int:
    """Trains a ZeRO stage as the environment says (PEER_CONFIG, PEER_STEPS), writes PEER_OUT."""
    return run_plan_as_peer(f"fzero_zero{zero}_{devices}", fz.Plan(zero=zero, data=devices))


def run_plan_as_peer(name: str, plan: fz.Plan) -> int:
    """Trains under any plan; see `run_as_peer`."""
    config = common.CONFIGS[os.environ.get("PEER_CONFIG", "small")]
    steps = int(os.environ.get("PEER_STEPS", "30"))
    load, imported = os.getloadavg(), _resident_bytes("VmRSS")
    model, tx = common.gpt(config), common.adamw()
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    batches = common.token_batches(config, steps)
    start = time.perf_counter()
    if plan.pipe == 1:  # a pipeline compiles in its first step, which is not timed
        step.lower(state, {"ids": batches[0]}).compile()
    compile_s = time.perf_counter() - start
    _restart_peak()
    ready, cpu = _resident_bytes("VmRSS"), time.process_time()
    losses, times = [], []
    for ids in batches:
        start = time.perf_counter()
        state, metrics = step(state, {"ids": ids})
        jax.block_until_ready(state)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / steps
    peak = _resident_bytes("VmHWM")
    # The peers' recorder leaves the first five steps out and takes the upper of two middle ones.
    timed = sorted(times[5:] if steps > 6 else times)
    median = timed[len(timed) // 2]
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "name": name, "config": dataclasses.asdict(config),
        "losses": losses, "step_s_median": median, "step_s_min": timed[0],
        "tok_s": config.tokens / median, "tok_per_cpu_s": config.tokens / cpu,
        "rss_peak_mb": [max(peak, highest) / MIB], "rss_import_mb": [imported / MIB],
        "rss_ready_mb": [ready / MIB], "rss_peak_train_mb": [peak / MIB],
        "live_tensors_after_mb": [sum(x.nbytes for x in jax.tree.leaves(state)) / MIB],
        "compile_s": compile_s, "loadavg_start": load, "loadavg_end": os.getloadavg(),
        "jax": jax.__version__, "times": times,
    }  # fmt: skip
    text = json.dumps(result)
    if "PEER_OUT" in os.environ:
        Path(os.environ["PEER_OUT"]).write_text(text)
    else:
        print(text)
    return 0


def _resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(field)), 0)


def _restart_peak() -> None:
    """Gives freed memory back and restarts the kernel's peak, as the peers' recorder does."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """Runs the peers and fzero's stages in turns."""
    ours = {
        f"fzero_zero{zero}_{devices}": _own_command(zero, devices)
        for devices in args.devices
        for zero in args.zero
    }
    return compare_programs(args, (*PEERS, *ours), ours)


def compare_programs(
    args: argparse.Namespace, names: Sequence[str], ours: dict[str, str]
) -> tuple[dict[str, Any], common.Grid]:
    """Runs programs in turns.

    Args:
        args: `peers_dir`, `peers_python` and `repeats`.
        names: programs, by the names of run_all.py; losses are compared with the first's.
        ours: commands of those that run_all.py does not know.
    """
    directory = Path(args.peers_dir).resolve()
    before = common.provenance()
    for repeat in range(args.repeats):
        for name in names:
            also = [f"{name}|1|{ours[name]}"] if name in ours else []
            _run_one(directory, args.peers_python, name, repeat, also)
    rows = [_row(directory, name, args.repeats) for name in names]
    reference = next((row["losses"] for row in rows if row["losses"]), None)
    for row in rows:
        if row["losses"] and reference:
            gaps = (abs(a - b) for a, b in zip(row["losses"], reference, strict=True))
            row["largest_loss_difference"] = max(gaps)
    return {"before": before, "after": common.provenance(), "rows": rows}, _grid(rows)


def _own_command(zero: int, devices: int) -> str:
    program = shlex.join([sys.executable, str(Path(__file__).with_name("step.py"))])
    return f"{program} --as-peer --zero {zero} --devices {devices}"


def _run_one(directory: Path, python: str, name: str, repeat: int, also: list[str]) -> None:
    command = [python, "run_all.py", "--set", "speed", "--only", name, "--repeats", "1",
               "--first", str(repeat)]  # fmt: skip
    for job in also:
        command += ["--also", job]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith(f"[{repeat}]")]
    print("\n".join(said) or done.stderr[-500:], flush=True)


def _row(directory: Path, name: str, repeats: int) -> dict[str, Any]:
    """What a program wrote, over its repeats: the best median step, and what belongs to it."""
    files = [directory / "results" / "speed" / f"{name}.r{k}.json" for k in range(repeats)]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    if not found:
        return {"name": name, "losses": None}
    best = min(found, key=lambda r: r["step_s_median"])
    kept = ("losses", "step_s_median", "step_s_min", "tok_s", "tok_per_cpu_s", "rss_peak_mb",
            "rss_import_mb", "rss_ready_mb", "rss_peak_train_mb", "live_tensors_after_mb",
            "compile_s", "loadavg_start", "loadavg_end", "jax", "torch")  # fmt: skip
    row = {key: best[key] for key in kept if key in best}
    medians = [r["step_s_median"] for r in found]
    return {"name": name, **row, "step_s_medians": medians}


def _grid(rows: list[dict[str, Any]]) -> common.Grid:
    columns = (
        "program", "ms a step", "tokens/s", "tokens per CPU-second", "last loss",
        "largest loss gap to PyTorch", "peak MiB above import", "compile s",
    )  # fmt: skip
    cells: list[tuple[str, ...]] = []
    for row in rows:
        if not row["losses"]:
            cells.append((row["name"], "no result", *("",) * 6))
            continue
        pairs = zip(row["rss_peak_train_mb"], row["rss_import_mb"], strict=True)
        cells.append((
            row["name"], f"{1e3 * row['step_s_median']:.0f}", f"{row['tok_s']:.0f}",
            f"{row['tok_per_cpu_s']:.0f}", f"{row['losses'][-1]:.6f}",
            f"{row.get('largest_loss_difference', float('nan')):.1e}",
            " + ".join(f"{peak - start:.0f}" for peak, start in pairs),
            f"{row['compile_s']:.1f}" if "compile_s" in row else "",
        ))  # fmt: skip
    steps = max(len(row["losses"] or ()) for row in rows)
    return common.Grid(f"The same {steps} steps; medians", columns, cells)
