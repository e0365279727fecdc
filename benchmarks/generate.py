"""Generation from a converted GPT-2 beside a loop written by hand in JAX: tokens per second.

    python benchmarks/generate.py --json generate.json
    python benchmarks/generate.py --rows 1 --rounds 3

Both prefill, then decode greedily in one program on the device, from the same weights; they take
turns in one process, and their tokens are compared. `generate_by_hand.py` keeps its layers apart,
and a cache for each: what is fastest on a CPU. The ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import generate_by_hand as by_hand
import jax
import numpy as np
import torch
import transformers
from rich.console import Console

import torch_bridge as tb


GOAL = 1.3  # largest ratio to hand-written JAX that we accept


def main() -> int:
    """Runs what the command line asks for."""
    args = _arguments()
    before = common.provenance()
    rows = [measured(args, count) for count in args.rows]
    cells = [
        (
            str(row["rows"]),
            f"{row['converted']:.1f}",
            f"{row['by_hand']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['cpu_ratio']:.2f}",
        )
        for row in rows
    ]
    title = f"{args.layers} layers of {args.width}, {args.prompt} + {args.new} tokens a row, CPU"
    names = ("rows", "converted tokens/s", "by hand tokens/s", "time ratio", "CPU-seconds ratio")
    grid = common.Grid(title, names, cells)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if args.json:
        report = {"before": before, "rows": rows, "after": common.provenance()}
        common.save(args.json, report, grid)
    return int(max(row["ratio"] for row in rows) > GOAL)


def measured(args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Both loops on so many rows, in turns."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, vocab_size=8192,
        n_positions=args.prompt + args.new, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    module = transformers.GPT2LMHeadModel(config).eval()
    converted = tb.convert(module, torch.zeros(2, 8, dtype=torch.long), train=False)
    params = jax.device_put(dict(converted.params))
    own = by_hand.parameters(module.state_dict(), args.layers)
    ids = np.random.default_rng(0).integers(0, 8192, (rows, args.prompt), dtype=np.int32)
    ways: dict[str, Callable[[], Any]] = {
        "converted": lambda: np.stack(tb.generate(converted, params, ids, args.new).tokens),
        "by_hand": lambda: np.asarray(by_hand.generate(own, ids, args.new, config.n_head)),
    }
    found = {name: way() for name, way in ways.items()}  # compiles
    same = float(np.mean(found["converted"] == found["by_hand"]))
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            start, cpu_start = time.perf_counter(), time.process_time()
            ways[name]()
            cpu[name].append(time.process_time() - cpu_start)
            wall[name].append(time.perf_counter() - start)
    speed = {name: rows * args.new / statistics.median(times) for name, times in wall.items()}
    ratio, cpu_ratio = (
        statistics.median(a / b for a, b in zip(t["converted"], t["by_hand"], strict=True))
        for t in (wall, cpu)
    )
    return {"rows": rows, **speed, "ratio": ratio, "cpu_ratio": cpu_ratio, "same_tokens": same}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="batches")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="also write the report here")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
