"""A pipeline's measured step against its simulation, and against PyTorch's and DeepSpeed's.

Each stage runs on one device. The costs of all actions are measured first, one action at a time,
and given to `fzero.schedule.simulate`; then whole steps are timed, the schedules taking turns.

    python benchmarks/pipeline.py                        # 2, 4 and 8 stages, all schedules
    python benchmarks/pipeline.py --ranks 2 --schedules 1f1b zb_h1 --json pipeline.json
    python benchmarks/pipeline.py --peers --peers-dir DIR --peers-python PYTHON --json peers.json

Without enough GPUs the devices are virtual CPU devices. XLA's CPU backend computes one device's
program on all cores (no flag of jax 0.10 prevents it), so costs are measured with the process bound
to one core: what an action takes when every stage has a core of its own. On two cores two stages
then run side by side; where one idles in the bubble the other takes both cores, which may beat the
simulation. More stages share the cores and cannot reach it; `of limit` says how far they are from
all work on all cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import common
import jax
import peers
from rich.console import Console
from step import start_devices

import fzero as fz
from fzero.pipeline import BUILDERS, Action, Cost, Schedule, schedule, simulate, slots


SCHEDULES = ("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v")
GOAL = 1.1  # measured / simulated that we accept where every rank has a core of its own
MIB = 2**20


def main() -> int:
    """Runs what the command line asks for."""
    args = _arguments()
    if args.as_peer:
        start_devices(args.ranks[0])
        return peers.run_plan_as_peer(
            peer_name(args.schedules[0], args.ranks[0]), _plan(args, args.schedules[0],
                                                               args.ranks[0])
        )  # fmt: skip
    start_devices(max(args.ranks))
    report, grid = compare_peers(args) if args.peers else compare(args)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if args.json:
        common.save(args.json, report, grid)
    return 0


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """Every schedule on every number of ranks."""
    console = Console(soft_wrap=True)
    before = common.provenance()
    rows = []
    for ranks in args.ranks:
        names = [name for name in args.schedules if _fits(args, name, ranks)]
        runs = {name: Run(args, name, ranks) for name in names}
        times, cpu = common.interleaved(runs, args.rounds, args.warmup)
        for name in names:
            row = runs[name].row(times[name], cpu[name])
            rows.append(row)
            console.print(
                f"{ranks} ranks, {name}: measured {1e3 * row['measured_s']:.0f} ms, simulated"
                f" {1e3 * row['simulated_s']:.0f} ms, ratio {row['ratio']:.3f}"
            )
    overhead = dispatch_overhead(args)
    console.print(f"dispatch: {overhead['us_per_action']:.0f} us per action (tiny model)")
    settings = ("config", "microbatches", "remat", "rounds", "warmup")
    report = {
        "settings": {name: getattr(args, name) for name in settings}, "before": before,
        "after": common.provenance(), "dispatch": overhead, "rows": rows,
    }  # fmt: skip
    title = (
        f"pipeline of {args.config}, {args.microbatches} microbatches, remat={args.remat}: measured"
        f" against simulated (goal: {GOAL} with a core for every rank);"
        f" {overhead['us_per_action']:.0f} us per action"
    )
    return report, _grid(title, rows)


class Run:
    """A pipelined training run of one schedule."""

    def __init__(self, args: argparse.Namespace, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        config = common.CONFIGS[args.config]
        self.tokens = config.tokens
        self.plan = _plan(args, name, ranks)
        model, tx = common.gpt(config), common.adamw()
        self.state = fz.init(model, tx, self.plan)
        self.step = fz.train_step(model, tx, self.plan)
        self.batches = common.token_batches(config, 30)
        self(0)  # compiles
        self.cost, self.rest_s, self.slot_bytes = self._measure(args.rounds)

    def __call__(self, index: int) -> None:
        """Takes one step and waits for it."""
        batch = {"ids": self.batches[index % len(self.batches)]}
        self.state, _ = self.step(self.state, batch)
        jax.block_until_ready(self.state)

    def _measure(self, rounds: int) -> tuple[Cost, float, list[int]]:
        """Seconds of each action run alone, of the rest of a step, and bytes of each live slot."""
        seen: dict[tuple[int, str], list[float]] = defaultdict(list)
        rest: list[float] = []
        slot_bytes = [0] * self.plan.build_schedule().num_stages
        clock = 0.0

        def observe(action: Action, held: Any) -> None:
            nonlocal clock
            jax.block_until_ready((held.last, list(held.sent.values())))
            now = time.perf_counter()
            seen[action.stage, action.kind].append(now - clock)
            for (stage, _), saved in held.saved.items():
                size = sum(leaf.nbytes for leaf in jax.tree.leaves(saved))
                slot_bytes[stage] = max(slot_bytes[stage], size)
            clock = time.perf_counter()

        self.step.executor.observer = observe
        with one_core():
            for index in range(rounds):
                clock = time.perf_counter()
                self(index)
                rest.append(time.perf_counter() - clock)  # since the last action
        self.step.executor.observer = None
        own = []
        for stage in range(len(slot_bytes)):
            kinds = {kind: statistics.median(t) for (s, kind), t in seen.items() if s == stage}
            halves = kinds.get("I", 0.0), kinds.get("W", 0.0)
            own.append(Cost(f=kinds["F"], b=kinds.get("B", sum(halves)), i=halves[0], w=halves[1]))
        return Cost(per_stage=own), statistics.median(rest), slot_bytes

    def row(self, times: list[float], cpu: list[float]) -> dict[str, Any]:
        """What was measured beside what was predicted."""
        made: Schedule = self.plan.build_schedule()
        timeline = simulate(made, self.cost)
        measured, predicted = statistics.median(times), timeline.makespan_s + self.rest_s
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else self.ranks
        if jax.devices()[0].platform != "cpu":
            cores = self.ranks
        limit = (sum(timeline.busy_s_per_rank) + self.rest_s) / min(cores, self.ranks)
        need = slots(made).per_stage
        held = [size * count for size, count in zip(self.slot_bytes, need, strict=True)]
        by_rank: dict[int, int] = defaultdict(int)
        for stage, rank in made.stage_to_rank.items():
            by_rank[rank] += held[stage]
        gpipe = [0] * made.num_ranks
        for stage, rank in made.stage_to_rank.items():
            gpipe[rank] += self.slot_bytes[stage] * made.num_microbatches
        return {
            "schedule": self.name, "ranks": self.ranks, "stages": made.num_stages,
            "measured_s": measured, "simulated_s": predicted, "ratio": measured / predicted,
            "limit_s": limit, "of_limit": measured / limit,
            "ratio_of_fastest": min(times) / predicted, "bubble_fraction": timeline.bubble_fraction,
            "update_s": self.rest_s, "tokens_per_second": self.tokens / measured,
            "cpu_s": statistics.median(cpu), "slots_per_stage": need,
            "peak_bytes_per_rank": [by_rank[rank] for rank in range(made.num_ranks)],
            "of_gpipe": max(by_rank.values()) / max(gpipe),
            "costs": [vars(cost) | {} for cost in self.cost.per_stage or ()], "seconds": times,
        }  # fmt: skip


@contextmanager
def one_core() -> Iterator[None]:
    """Binds all threads of this process to one core, where devices are virtual ones of the CPU."""
    if jax.devices()[0].platform != "cpu" or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)

    def bind(to: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), to)

    bind({min(cores)})
    try:
        yield
    finally:
        bind(cores)


def dispatch_overhead(args: argparse.Namespace) -> dict[str, float]:
    """Time per action where there is next to nothing to compute."""
    tiny = argparse.Namespace(**{**vars(args), "config": "tiny", "rounds": 20})
    run = Run(tiny, "1f1b", 2)
    times = []
    for index in range(20):
        start = time.perf_counter()
        run(index)
        times.append(time.perf_counter() - start)
    actions = len(run.plan.build_schedule().actions)
    busy = simulate(run.plan.build_schedule(), run.cost).makespan_s
    step = statistics.median(times)
    return {
        "actions": actions, "step_s": step, "us_per_action": 1e6 * (step - run.rest_s) / actions,
        "simulated_s": busy, "update_s": run.rest_s,
    }  # fmt: skip


def peer_name(name: str, ranks: int) -> str:
    """The name under which a schedule joins the peers' run."""
    return f"fzero_{name}_{ranks}"


# Which of our schedules stands beside which of theirs, with 2 processes or 2 ranks.
PEERS = {
    "tp2_gpipe": "gpipe", "tp2_1f1b": "1f1b", "tp2_int1f1b": "interleaved", "tp2_zbv": "zb_v",
    "tp2_intzb": "zb_h1", "ds_pipe2": "1f1b",
}  # fmt: skip


def compare_peers(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """torch.distributed.pipelining, DeepSpeed and fzero, one after the other, twice."""
    ours = {}
    theirs = [peer for peer, name in PEERS.items() if name in args.schedules]
    for name in dict.fromkeys(PEERS[peer] for peer in theirs):
        program = f"{sys.executable} {os.path.abspath(__file__)}"
        ours[peer_name(name, 2)] = (
            f"{program} --as-peer --ranks 2 --schedules {name} --microbatches {args.microbatches}"
            f" --remat {args.remat}"
        )
    return peers.compare_programs(args, (*theirs, *ours), ours)


def _plan(args: argparse.Namespace, name: str, ranks: int) -> fz.Plan:
    return fz.Plan(
        zero=0, pipe=ranks, data=1, microbatches=args.microbatches, schedule=name,
        remat=args.remat, partition="parameters" if args.config == "tiny" else "uniform",
    )  # fmt: skip


def _fits(args: argparse.Namespace, name: str, ranks: int) -> bool:
    """Whether there is a schedule of that name and the model has layers enough for its stages."""
    chunks = BUILDERS[name].chunks or (2 if name in ("interleaved", "looped_bfs") else 1)
    layers = common.CONFIGS[args.config].layers + 2
    if ranks * chunks > layers:
        return False
    try:
        schedule(name, stages=ranks * chunks, microbatches=args.microbatches)
    except fz.ScheduleError:
        return False
    return True


def _grid(title: str, rows: list[dict[str, Any]]) -> common.Grid:
    columns = ("schedule", "ranks", "measured ms", "simulated ms", "ratio", "of limit", "bubble",
               "tokens/s", "peak MiB", "of GPipe", "update ms")  # fmt: skip
    cells = [
        (
            row["schedule"], str(row["ranks"]), f"{1e3 * row['measured_s']:.1f}",
            f"{1e3 * row['simulated_s']:.1f}", f"{row['ratio']:.3f}",
            f"{row['of_limit']:.2f}", f"{100 * row['bubble_fraction']:.0f} %",
            f"{row['tokens_per_second']:.0f}", f"{max(row['peak_bytes_per_rank']) / MIB:.1f}",
            f"{row['of_gpipe']:.2f}", f"{1e3 * row['update_s']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    return common.Grid(title, columns, cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", default="small", choices=list(common.CONFIGS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(BUILDERS))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--remat", default="none", choices=("layer", "dots", "none"),
                        help="none: as the peers, which keep every activation")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", help="write the report here, and a table beside it")
    parser.add_argument("--peers", action="store_true", help="run the peers instead")
    parser.add_argument("--peers-dir", default="", help="directory of the peers' run_all.py")
    parser.add_argument("--peers-python", default=sys.executable, help="python that has them")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
