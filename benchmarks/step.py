"""fzero's training step against the same step written by hand, and against PyTorch and DeepSpeed.

Both steps train the same GPT from the same weights on the same tokens with the same shardings, take
turns in one process, and are compared as a ratio of medians. The hand-written step is `by_hand.py`.

    python benchmarks/step.py                            # every stage, on 1 device and on 8
    python benchmarks/step.py --zero 3 --devices 8 --microbatches 2 --json step.json
    python benchmarks/step.py --quick                    # a tiny model, a few rounds
    python benchmarks/step.py --peers --peers-dir DIR --peers-python PYTHON --json peers.json

Without enough GPUs the devices are virtual CPU devices, which share the machine's cores.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import by_hand
import common
import jax
import numpy as np
import peers
from jax.extend.backend import clear_backends
from rich.console import Console

import fzero as fz
from fzero.preflight import hlo


MIB = 2**20
GOAL = 1.03  # largest ratio of medians that we accept


def main() -> int:
    """Runs what the command line asks for."""
    args = _arguments()
    start_devices(max(args.devices))
    if args.as_peer:
        return peers.run_as_peer(args.zero[0], args.devices[0])
    report, grid = peers.compare(args) if args.peers else compare(args)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if args.json:
        common.save(args.json, report, grid)
    return 0


def start_devices(count: int) -> None:
    """Makes sure of `count` devices, virtual ones if need be; before anything else uses jax."""
    jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:  # too few GPUs
        jax.config.update("jax_platforms", "cpu")
        clear_backends()


def compare(args: argparse.Namespace) -> tuple[dict[str, Any], common.Grid]:
    """Times every stage on every number of devices."""
    config = common.CONFIGS[args.config]
    console = Console(soft_wrap=True)
    rate = common.matmul_rate()
    before = common.provenance()
    what = (
        f"{config.name}: {config.layers} layers of {config.width}, {config.batch} x {config.seq}"
        f" tokens, float32, AdamW, {args.microbatches} microbatch(es)"
    )
    load = before["load_average"][0]
    console.print(f"{what}; jax {jax.__version__} on {before['device']}, load {load:.1f}")
    rows = []
    for devices in args.devices:
        _print_limits(console, config, devices, rate)
        for zero in args.zero:
            row = measure(config, zero, devices, args)
            row["limit"] = vars(common.limit(config, zero, devices, rate))
            rows.append(row)
            console.print(_sentence(row))
    settings = ("config", "microbatches", "rounds", "warmup")
    report = {
        "settings": {name: getattr(args, name) for name in settings},
        "matmul_flops_per_second": rate, "before": before, "after": common.provenance(),
        "rows": rows,
    }  # fmt: skip
    return report, _grid(rows, f"fzero / by hand, {what} (goal: a ratio of at most {GOAL})")


def measure(config: common.Config, zero: int, devices: int, args: Any) -> dict[str, Any]:
    """One stage: both steps compiled, run in turns, and checked against each other."""
    batches = common.token_batches(config, 30)
    own, theirs = (
        build(config, zero, devices, args.microbatches, batches)
        for build in (fzero_program, by_hand_program)
    )
    losses: dict[str, list[float]] = {"fzero": [], "by_hand": []}

    def run(name: str, program: Program) -> Callable[[int], None]:
        return lambda index: losses[name].append(program.step(index % len(batches)))

    runs = {"fzero": run("fzero", own), "by_hand": run("by_hand", theirs)}
    times, cpu = common.interleaved(runs, args.rounds, args.warmup)
    gap = np.abs(np.subtract(losses["fzero"], losses["by_hand"])).max()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["fzero"] / medians["by_hand"]
    row = {
        "zero": zero, "devices": devices, "microbatches": args.microbatches, "ratio": ratio,
        "ratio_95": common.ratio_interval(times["fzero"], times["by_hand"]),
        "ratio_of_cpu": statistics.median(cpu["fzero"]) / statistics.median(cpu["by_hand"]),
        "ratio_of_fastest": min(times["fzero"]) / min(times["by_hand"]),
        "largest_loss_difference": float(gap),
        "tokens_per_second": config.tokens / medians["fzero"],
        "fzero": own.facts() | common.spread(times["fzero"]),
        "by_hand": theirs.facts() | common.spread(times["by_hand"]),
        "seconds": times, "cpu_seconds": cpu,
    }  # fmt: skip
    del own, theirs, runs, run
    gc.collect()
    return row


class Program:
    """A compiled step, and a way to take it.

    Args:
        lower: traces and lowers the step.
        step: takes the step with the batch of that number and returns its loss.
    """

    def __init__(self, lower: Callable[[], Any], step: Callable[[int], float]) -> None:
        start = time.perf_counter()
        lowered = lower()
        self.trace_s = time.perf_counter() - start
        start = time.perf_counter()
        compiled = lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.sent_bytes = hlo.total(hlo.collectives(compiled.as_text())).wire_bytes
        self.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        self.step = step

    def facts(self) -> dict[str, Any]:
        """What is known before it runs."""
        names = ("trace_s", "compile_s", "sent_bytes", "temporary_bytes")
        return {name: getattr(self, name) for name in names}


def fzero_program(
    config: common.Config, zero: int, devices: int, microbatches: int, batches: Any
) -> Program:
    """fzero's step."""
    model, tx = common.gpt(config), common.adamw()
    reduce = "step" if zero < 2 and microbatches > 1 else "microbatch"  # as by hand
    plan = fz.Plan(zero=zero, data=devices, microbatches=microbatches, reduce=reduce)
    step = fz.train_step(model, tx, plan)
    loop = {"state": fz.init(model, tx, plan)}

    def run(index: int) -> float:
        loop["state"], metrics = step(loop["state"], {"ids": batches[index]})
        jax.block_until_ready(loop["state"])
        return float(metrics["loss"])

    return Program(lambda: step.lower(loop["state"], {"ids": batches[0]}), run)


def by_hand_program(
    config: common.Config, zero: int, devices: int, microbatches: int, batches: Any
) -> Program:
    """The step written by hand."""
    params, own = common.initial_params(config), jax.devices()[:devices]
    step, state, to = by_hand.train_step(config, common.adamw(), zero, own, params, microbatches)
    loop = {"state": state}

    def run(index: int) -> float:
        *new, loss, _ = step(*loop["state"], jax.device_put(batches[index], to))
        loop["state"] = jax.block_until_ready(tuple(new))
        return float(loss)

    return Program(lambda: step.lower(*loop["state"], jax.device_put(batches[0], to)), run)


def _print_limits(console: Console, config: common.Config, devices: int, rate: float) -> None:
    """What no step can do without, before any is measured."""
    console.print(
        f"\n[bold]{devices} device(s)[/]: one matmul of 2048 x 2048 runs at {rate / 1e9:.0f}"
        " GFLOP/s on the whole machine"
    )
    for name, zero in (("stages 0 to 2", 0), ("stage 3", 3)):
        least = common.limit(config, zero, devices, rate)
        console.print(
            f"  limit of {name}: {least.flops / 1e9:.1f} GFLOP = {1e3 * least.seconds:.0f} ms;"
            f" each device sends {least.sent_bytes / MIB:.2f} MiB"
        )


def _sentence(row: dict[str, Any]) -> str:
    return (
        f"  ZeRO-{row['zero']}: fzero {1e3 * row['fzero']['median_s']:.1f} ms, by hand"
        f" {1e3 * row['by_hand']['median_s']:.1f} ms, ratio {row['ratio']:.3f}"
    )


def _grid(rows: list[dict[str, Any]], title: str) -> common.Grid:
    columns = (
        "devices", "ZeRO", "fzero ms", "by hand ms", "ratio", "95 %", "of fastest", "of CPU",
        "trace s", "compile s", "sent MiB", "temp MiB", "of limit", "loss gap",
    )  # fmt: skip
    cells = []
    for row in rows:
        own, theirs = row["fzero"], row["by_hand"]

        def both(key: str, unit: float, digits: int, own: Any = own, theirs: Any = theirs) -> str:
            return f"{own[key] / unit:.{digits}f} / {theirs[key] / unit:.{digits}f}"

        cells.append((
            str(row["devices"]), str(row["zero"]), f"{1e3 * own['median_s']:.1f}",
            f"{1e3 * theirs['median_s']:.1f}", f"{row['ratio']:.3f}",
            "{:.3f}-{:.3f}".format(*row["ratio_95"]), f"{row['ratio_of_fastest']:.3f}",
            f"{row['ratio_of_cpu']:.3f}",
            both("trace_s", 1, 1), both("compile_s", 1, 1), both("sent_bytes", MIB, 1),
            both("temporary_bytes", MIB, 0), f"{row['limit']['seconds'] / own['median_s']:.0%}",
            f"{row['largest_loss_difference']:.0e}",
        ))  # fmt: skip
    return common.Grid(title, columns, cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--config", choices=sorted(common.CONFIGS), help="sizes (small; with --quick, tiny)")
    add("--zero", type=int, nargs="+", default=[0, 1, 2, 3], help="stages (all)")
    add("--devices", type=int, nargs="+", default=[1, 8], help="numbers of devices (1 8)")
    add("--microbatches", type=int, default=1, help="pieces of a batch (1)")
    add("--rounds", type=int, help="timed steps of each (20; with --quick, 3)")
    add("--warmup", type=int, help="untimed steps of each before (3; with --quick, 1)")
    add("--quick", action="store_true", help="a smoke run: times mean nothing")
    add("--json", metavar="FILE", help="write all figures there, and the table beside it")
    add("--peers", action="store_true", help="compare with PyTorch and DeepSpeed instead")
    add("--peers-dir", metavar="DIR", help="directory with run_all.py and its programs")
    add("--peers-python", metavar="PYTHON", help="interpreter that has torch and deepspeed")
    add("--repeats", type=int, default=1, help="runs of each peer (1)")
    add("--as-peer", action="store_true", help="one run of fzero, as run_all.py wants it")
    args = parser.parse_args()
    args.config = args.config or ("tiny" if args.quick else "small")
    args.rounds = args.rounds or (3 if args.quick else 20)
    args.warmup = args.warmup or (1 if args.quick else 3)
    if args.peers and not (args.peers_dir and args.peers_python):
        parser.error("--peers needs --peers-dir and --peers-python")
    return args


if __name__ == "__main__":
    sys.exit(main())
