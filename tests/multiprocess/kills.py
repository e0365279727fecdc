"""Kills processes of runs at random moments, over and over, and says what became of the runs.

    python tests/multiprocess/kills.py --kills 200 --out benchmarks/results/kills.jsonl
    python tests/multiprocess/kills.py --table benchmarks/results/kills.jsonl --page docs/hosts.md

A run is a pipeline over processes (hand-overs), with rows that each process reads for itself
(collectives), a checkpoint every third step (saving) and every start from the newest one
(restoring). One random process gets SIGKILL: half of the time at a moment after its start, half of
the time at one after a step. Then all have to end by themselves, and the run is started again.
After `--each` kills it may finish, and has to have the bits of a run that nobody killed. Each run
is a line of `--out`: what it was killed at, the commit, and whether its bits were those.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


NUM_STEPS = 60
SAVE_EVERY = 3
# Compiling on a machine that does other things, too.
START_LIMIT_S = 300.0
# From a kill to the end of all others; more is a hang.
END_LIMIT_S = 60.0


def worker(folder: Path) -> None:
    """One process of a run: from the newest checkpoint to the last step."""
    import jax
    import numpy as np
    import optax
    import xxhash

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from support import tiny

    import fzero as fz

    rank = os.environ["RANK"]

    def at(phase: str) -> None:
        (folder / f"phase-{rank}").write_text(phase)

    at("join")
    world = fz.join()
    devices, pipe = len(jax.devices()), 2
    plan = tiny.plan(zero=2, pipe=pipe, data=devices // pipe, microbatches=2, schedule="zb_h1")
    model, tx, checkpoints = tiny.chain(), optax.adamw(1e-2), folder / "checkpoints"
    at("restore")
    try:
        state, done = fz.restore(checkpoints, model, tx, plan), 0
        done = int(state.step)
    except fz.CheckpointError as error:
        if "found none" not in str(error):
            raise  # one that is there has to be whole
        at("init")
        state, done = fz.init(model, tx, plan), 0
    at("first step")  # compiling
    step, layout = fz.train_step(model, tx, plan), fz.layout(model, tx, plan)
    while done < NUM_STEPS:
        batch = tiny.tokens(8, seed=done)
        own = 8 // world.num_processes
        part = slice(world.process_id * own, (world.process_id + 1) * own)
        state, metrics = step(state, fz.local_batch({k: x[part] for k, x in batch.items()}, layout))
        at("step, under way")  # hand-overs and collectives
        jax.block_until_ready(metrics)
        done += 1
        (folder / f"at-{world.process_id}").write_text(str(done))
        if done % SAVE_EVERY == 0:
            at("save")
            fz.save(checkpoints, state, plan, keep=2)
        at("step, dispatch")
    at("end")
    fz.wait(checkpoints)
    digest = xxhash.xxh3_64()
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        for shard in leaf.addressable_shards:
            digest.update(np.ascontiguousarray(np.asarray(shard.data)).tobytes())
    (folder / f"end-{world.process_id}").write_text(digest.hexdigest())


def start(folder: Path, processes: int) -> subprocess.Popen[str]:
    """Starts a run, or goes on with it."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "fzero.cli", "launch", "--processes", str(processes), "--logs",
               str(folder / "logs"), "--", __file__, "worker", str(folder)]  # fmt: skip
    env = {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(4 // processes),
        # What the run that nobody killed compiled: a start is mostly that, and kills are many.
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    log = (folder / "launch.log").open("a")
    return subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True)


def number(path: Path) -> int:
    """What a file says, or 0."""
    text = path.read_text() if path.exists() else ""
    return int(text or 0)


def newest(folder: Path) -> int:
    """The newest checkpoint's number, or -1."""
    found = (folder / "checkpoints").glob("*")
    return max((int(p.name) for p in found if p.name.isdigit()), default=-1)


def kill_once(folder: Path, processes: int, rng: random.Random, whole_s: float) -> dict[str, Any]:
    """One start and one kill; what happened."""
    for path in (*folder.glob("at-*"), *folder.glob("phase-*")):
        path.unlink()
    launcher, began, victim = start(folder, processes), time.monotonic(), rng.randrange(processes)
    if rng.random() < 0.5:
        moment, at = rng.uniform(0.2, whole_s), 0
    else:
        moment, at = rng.uniform(0.0, 0.2), rng.randrange(1, 9)
    mark, first = folder / "at-0", 0
    while launcher.poll() is None and time.monotonic() - began < START_LIMIT_S:
        first = first or number(mark)  # the first step that this start took
        if at == 0 or (first and number(mark) >= first + at - 1):
            break
        time.sleep(0.01)
    time.sleep(moment)
    listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    children = [int(pid) for pid in (listed.read_text().split() if listed.exists() else ())]
    if launcher.poll() is not None or len(children) != processes:
        code = launcher.wait(timeout=4 * START_LIMIT_S)
        assert code == 0, (folder / "launch.log").read_text()[-4000:]
        return {"kind": "missed"}
    before = newest(folder)
    os.kill(children[victim], signal.SIGKILL)
    killed = time.monotonic()
    mark = folder / f"phase-{victim}"
    phase = (mark.read_text() if mark.exists() else "") or "import"
    hung = False
    try:
        launcher.wait(timeout=END_LIMIT_S)
    except subprocess.TimeoutExpired:
        hung = True
        launcher.terminate()
        for pid in children:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        launcher.wait(timeout=END_LIMIT_S)
    return {
        "kind": "kill", "after": "step" if at else "start", "phase": phase, "victim": victim,
        "hung": hung,
        "seconds": round(time.monotonic() - killed, 3), "code": launcher.returncode,
        "lost": newest(folder) < before,
    }  # fmt: skip


def finish(folder: Path, processes: int) -> tuple[list[str], float]:
    """Lets a run end; the hashes of its processes, and the seconds."""
    began = time.monotonic()
    code = start(folder, processes).wait(timeout=4 * START_LIMIT_S)
    assert code == 0, (folder / "launch.log").read_text()[-4000:]
    ends = [(folder / f"end-{p}").read_text() for p in range(processes)]
    return ends, time.monotonic() - began


def rounds(
    root: Path, kills: int, processes: int, each: int, seed: int, seconds: float = 86400
) -> Iterator[dict[str, Any]]:
    """Runs that are killed `each` times, until there have been enough kills or time is up."""
    rng, began = random.Random(seed), time.monotonic()
    expected, _ = finish(root / "straight", processes)
    # Once more, with all programs compiled: as long as those take that are killed.
    again, whole_s = finish(root / "again", processes)
    assert again == expected
    done, runs = 0, 0
    while done < kills and time.monotonic() - began < seconds:
        folder = root / f"run-{runs}"
        runs += 1
        found: list[dict[str, Any]] = []
        while len(found) < min(each, kills - done):
            one = kill_once(folder, processes, rng, whole_s)
            if one["kind"] == "missed":
                break  # it came to its end
            found.append(one)
        done += len(found)
        same = finish(folder, processes)[0] == expected
        yield {"processes": processes, "seed": seed, "same bits": same, "kills": found}


def table(runs: list[dict[str, Any]]) -> str:
    """What became of all runs, as Markdown."""
    rows = ["| processes | kills | hung | lost | runs with the same bits | to the end of all |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    phases: Counter[str] = Counter()
    for processes in sorted({run["processes"] for run in runs}):
        of = [run for run in runs if run["processes"] == processes]
        found = [one for run in of for one in run["kills"]]
        waits = sorted(one["seconds"] for one in found)
        hung, lost = (sum(one[what] for one in found) for what in ("hung", "lost"))
        same = sum(run["same bits"] for run in of)
        rows.append(f"| {processes} | {len(found)} | {hung} | {lost} | {same} of {len(of)} |"
                    f" {waits[len(waits) // 2]:.1f} s, at most {waits[-1]:.1f} s |")  # fmt: skip
        phases.update(one["phase"] for one in found)
    at = ", ".join(f"{phase} {count}" for phase, count in phases.most_common())
    commits = ", ".join(sorted({run["commit"] for run in runs}))
    return "\n".join([*rows, "", f"Killed at: {at}. Commits: {commits}."])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=86400)
    parser.add_argument("--out", type=Path, help="a line for each run is appended")
    parser.add_argument("--table", type=Path, help="shows what is in such a file, and ends")
    parser.add_argument("--page", type=Path, help="writes that into a page")
    options = parser.parse_args()
    if options.table:
        shown = table([json.loads(line) for line in options.table.read_text().splitlines()])
        print(shown)
        if options.page:
            sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
            from common import write_part

            write_part(options.page, "tests/multiprocess/kills.py", shown)
        return
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    about = {"commit": done.stdout.strip(), "day": time.strftime("%Y-%m-%d", time.gmtime())}
    with tempfile.TemporaryDirectory(prefix="fzero-kills-") as folder:
        for run in rounds(
            Path(folder), options.kills, options.processes, options.each, options.seed,
            options.seconds,
        ):  # fmt: skip
            line = json.dumps({**about, **run})
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]))
    else:
        main()
