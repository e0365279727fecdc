"""Moves between tiers against raw copies, and a step whose optimizer state is parked.

    python benchmarks/offload.py
    python benchmarks/offload.py --mib 4096 --rounds 9 --json offload.json     # on a GPU
    python benchmarks/offload.py --only step

Three questions, each answered in one run with its peer in turns:

- `moves`: GB/s of `fz.offload` and `fz.reload` to host memory, for states of the same bytes in few
  or many leaves, against `jax.device_put` of one array of as many bytes (goal: 0.9 of it; many
  small leaves cost a call each);
- `residue`: device bytes that are left after everything was offloaded (goal: below 1 MB), and the
  growth of host memory over 50 cycles;
- `step`: a step with the optimizer state on the host against the same step with all on the device,
  and against the bound max(step, bytes / bandwidth), where bytes go both ways at the rates above.

The disk has a benchmark of its own, `offload_disk.py`. On a CPU, host and device memory are the
same: the figures show overheads, not links.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from rich.console import Console

import fzero as fz


KIB, MIB = 2**10, 2**20
GOAL = 0.9
LEAF_BYTES = {"one leaf": None, "4 MiB leaves": 4 * MIB, "64 KiB leaves": 64 * KIB}


def main() -> int:
    """Runs what was asked for and prints it."""
    args = _arguments()
    report: dict[str, Any] = {"before": common.provenance(), "rows": {}}
    grids = []
    for name, run in (("moves", moves), ("residue", residue), ("step", step)):
        if args.only in (None, name):
            report["rows"][name], grid = run(args)
            Console(width=140).print(grid.rich())
            grids.append(grid)
    report["after"] = common.provenance()
    if args.json:
        common.save(args.json, report, grids[0])
        if len(grids) > 1:
            file = common.Path(args.json).with_suffix(".md")
            rest = "\n".join(grid.markdown() for grid in grids[1:])
            head, *facts = file.read_text().partition("- before")
            file.write_text(head + rest + "\n" + "".join(facts))
    return 0


def _state(leaf_bytes: int | None, total: int) -> fz.TrainState:
    """A state without optimizer, of so many bytes in leaves of so many."""
    each = total if leaf_bytes is None else leaf_bytes
    count = total // each

    params = {f"w{i:05}": np.full((each // 4,), i, np.float32) for i in range(count)}
    model = fz.Model((params, {}), lambda p, b, batch, rng, train: (jnp.float32(0), b, {}))
    return fz.init(model, None, fz.Plan(zero=0, data=1), rng=0)


def _host(array: jax.Array) -> Any:
    return array.sharding.with_memory_kind("pinned_host")


def moves(args: argparse.Namespace) -> tuple[Any, common.Grid]:
    """GB/s to the host and back."""
    total = args.mib * MIB
    large = _state(None, total).params["w00000"]
    held: dict[str, Any] = {"raw": large}
    device, host = large.sharding, _host(large)

    def raw_out(_: int) -> None:
        old, held["raw"] = held["raw"], jax.device_put(held["raw"], host)
        held["raw"].block_until_ready()
        old.delete()

    def raw_back(_: int) -> None:
        old, held["raw"] = held["raw"], jax.device_put(held["raw"], device)
        held["raw"].block_until_ready()
        old.delete()

    def out(name: str) -> Callable[[int], None]:
        def run(_: int) -> None:
            held[name] = fz.offload(held[name])

        return run

    def back(name: str) -> Callable[[int], None]:
        def run(_: int) -> None:
            held[name] = fz.reload(held[name])

        return run

    rows, seconds = {}, {}
    for name, leaf_bytes in LEAF_BYTES.items():
        held[name] = _state(leaf_bytes, total)
        runs = {"raw out": raw_out, "raw back": raw_back, "out": out(name), "back": back(name)}
        times: dict[str, list[float]] = {key: [] for key in runs}
        for number in range(args.warmup + args.rounds):
            # Out and back alternate, the two contestants take turns.
            pairs = (("raw out", "out"), ("raw back", "back"))
            for pair in pairs:
                for key in pair[:: 1 if number % 2 else -1]:
                    found, _ = common.interleaved({key: runs[key]}, 1, 0)
                    if number >= args.warmup:
                        times[key] += found[key]
        seconds = {key: statistics.median(value) for key, value in times.items()}
        rows[name] = {
            "gb_per_s": {key: total / 1e9 / value for key, value in seconds.items()},
            "of_raw_out": seconds["raw out"] / seconds["out"],
            "of_raw_back": seconds["raw back"] / seconds["back"],
        }
        del held[name]
    table = [
        (name, *(f"{row['gb_per_s'][key]:.2f}" for key in ("raw out", "out", "raw back", "back")),
         f"{row['of_raw_out']:.2f}", f"{row['of_raw_back']:.2f}")
        for name, row in rows.items()
    ]  # fmt: skip
    columns = ("state", "raw out GB/s", "offload GB/s", "raw back GB/s", "reload GB/s",
               "offload / raw", "reload / raw")  # fmt: skip
    return rows, common.Grid(f"{args.mib} MiB to host memory and back; medians", columns, table)


def residue(args: argparse.Namespace) -> tuple[Any, common.Grid]:
    """What stays on the device, and what fifty cycles add to host memory."""
    model, tx = common.gpt(common.CONFIGS["small"]), common.adamw()
    state = fz.init(model, tx, fz.Plan(zero=3), rng=0)
    whole = fz.placement(state).bytes_per_device["total"]
    state = fz.offload(state)
    left = sum(
        shard.data.nbytes
        for array in jax.live_arrays() if array.sharding.memory_kind == "device"
        and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        for shard in array.addressable_shards[:1]
    )  # fmt: skip
    process, seen = psutil.Process(), []
    for _ in range(50):
        state = fz.offload(fz.reload(state))
        seen.append(process.memory_info().rss)
    grown = max(seen[25:]) - max(seen[:25])
    row = {"bytes_before": whole, "bytes_left": left, "host_growth_bytes": grown}
    table = [(f"{whole:,}", f"{left:,}", f"{grown:,}")]
    columns = ("bytes on a device", "left after fz.offload", "host growth, cycles 25 to 50")
    return row, common.Grid("small GPT with AdamW, ZeRO-3", columns, table)


def step(args: argparse.Namespace) -> tuple[Any, common.Grid]:
    """The cost of a parked optimizer state."""
    config = common.CONFIGS[args.config]
    model, tx = common.gpt(config), optax.adamw(3e-4)
    base = fz.Plan(zero=3, data=args.devices)
    tokens = common.token_batches(config, 1)[0]
    batch = {"ids": np.asarray(tokens)}
    plans = {
        "device": base,
        "host": base.replace(tiers={"opt_state": "host"}, stream_bytes=args.stream_mib * MIB),
        "half on the host": base.replace(
            tiers={"opt_state": 0.5}, stream_bytes=args.stream_mib * MIB
        ),
    }
    states = {name: fz.init(model, tx, plan, rng=0) for name, plan in plans.items()}
    steps = {name: fz.train_step(model, tx, plan) for name, plan in plans.items()}

    def runner(name: str) -> Callable[[int], None]:
        def run(_: int) -> None:
            states[name], metrics = steps[name](states[name], batch)
            jax.block_until_ready((states[name].params, metrics))

        return run

    runs = {name: runner(name) for name in plans}
    times, _ = common.interleaved(runs, args.rounds, args.warmup)
    parked = {name: fz.placement(state).host_bytes_per_device["total"]
              for name, state in states.items()}  # fmt: skip
    rate = _both_ways(max(max(parked.values()), MIB))
    rows, table = {}, []
    plain = statistics.median(times["device"])
    for name in plans:
        seconds = statistics.median(times[name])
        bound = max(plain, parked[name] / rate)
        rows[name] = {
            **common.spread(times[name]), "parked_bytes_per_device": parked[name],
            "of_device": seconds / plain, "bound_s": bound, "of_bound": seconds / bound,
        }  # fmt: skip
        table.append(
            (name, f"{seconds * 1e3:.1f}", f"{parked[name] / MIB:.1f}", f"{seconds / plain:.3f}",
             f"{bound * 1e3:.1f}", f"{seconds / bound:.3f}")
        )  # fmt: skip
    columns = ("optimizer state", "ms a step", "MiB parked", "/ device", "bound ms", "/ bound")
    title = f"{config.name} GPT, AdamW, ZeRO-3, {args.devices} devices"
    return rows, common.Grid(title, columns, table)


def _both_ways(size: int) -> float:
    """Bytes per second of bringing and sending back so many bytes on one device, at once."""
    here = jnp.zeros(size // 4)
    there = jax.device_put(jnp.ones(size // 4), _host(here))
    jax.block_until_ready((here, there))

    def both(_: int) -> None:
        jax.block_until_ready(
            (jax.device_put(here, there.sharding), jax.device_put(there, here.sharding))
        )

    times, _ = common.interleaved({"both": both}, 5, 1)
    return size / min(times["both"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="bytes that are moved")
    parser.add_argument("--only", choices=("moves", "residue", "step"))
    parser.add_argument("--config", default="small", choices=list(common.CONFIGS))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stream-mib", type=int, default=8, help="stream_bytes of the plan")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", help="write the report here, and tables beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
