"""Memory and time of a GPT-2 train step with and without whole logits.

    JAX_PLATFORMS=cpu python benchmarks/logits.py              # GPT-2 124M: compiled, not run
    JAX_PLATFORMS=cpu python benchmarks/logits.py --time       # a smaller one: run
    JAX_PLATFORMS=cpu python benchmarks/logits.py --time --size 124m --rows 2 --rounds 9
    JAX_PLATFORMS=cpu python benchmarks/logits.py --gpu        # GPT-2 124M for an H200: predicted

Bytes are those of `compiled.memory_analysis()` for one CPU device, float32 and bfloat16. What is
timed is GPT-2 124M itself (`--size 124m`), or a smaller one with its ratio of head to body, whose
tokens come in as many chunks as those of 8 x 1024 do there. Both steps take turns in one process;
the ratio is the median of the pairs' own, which hardly moves with what else the machine does.
Seconds of the H200 are `fz.preflight`'s, which needs jax's CUDA plugin (`make gpu-programs`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from rich.console import Console

import fzero as fz
import torch_bridge as tb
from fzero import losses


def whole(forward: Any, batch: Any) -> Any:
    """A loss that needs the logits: something else reads them, too."""
    logits = forward(batch["ids"]).logits
    largest = jax.lax.stop_gradient(jnp.max(logits))
    return tb.causal_lm_loss(logits, batch["ids"]), {"largest": largest}


def fused(forward: Any, batch: Any) -> Any:
    """A loss that does not."""
    return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])


def temporaries(converted: tb.Converted, loss: Any, precision: str, shape: tuple[int, int]) -> int:
    """Bytes of temporary memory of a train step."""
    model, tx = converted.model(loss), optax.adamw(1e-4)
    plan = fz.Plan(zero=0, data=1, precision=precision)
    devices = jax.devices()[:1]
    state = fz.abstract_state(model, tx, plan, devices=devices)
    batch = {"ids": jax.ShapeDtypeStruct(shape, jnp.int32)}
    step = fz.train_step(model, tx, plan, devices=devices)
    return int(step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes)


def logits_first(forward: Any, batch: Any) -> Any:
    """The whole logits, and nothing else that reads them."""
    ids = batch["ids"]
    last = jnp.full((ids.shape[0], 1), -100, ids.dtype)
    labels = jnp.concatenate([ids[:, 1:], last], axis=1)
    return fz.cross_entropy(forward(ids).logits, labels)


def converted_gpt2(**sizes: int) -> tb.Converted:
    """GPT-2 without weights, of these sizes; without dropout."""
    off = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))
    return tb.convert(module, torch.zeros(2, 16, dtype=torch.long))


# Words by layers and width as in GPT-2 124M: 50257 * 768 of a head beside 12 * 12 * 768^2.
SIZES = {
    "small": {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 5584},
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
}
CHUNKS = 8 * 1024 // 512  # of 8 x 1024 tokens and 50257 words


def timed(size: str, rows: int, rounds: int) -> tuple[dict[str, Any], common.Grid]:
    """Steps of both on this CPU, in turns."""
    sizes = SIZES[size]
    tokens, words = sizes["n_positions"], sizes["vocab_size"]
    if size == "small":
        losses.CHUNK_BYTES = rows * tokens // CHUNKS * 4 * words
    converted, tx, plan = converted_gpt2(**sizes), optax.adamw(1e-4), fz.Plan(zero=0, data=1)
    devices = jax.devices()[:1]
    ids = np.random.default_rng(0).integers(0, words, (rows, tokens), dtype=np.int32)
    runs, states = {}, {}
    for name, loss in (("with", logits_first), ("without", fused)):
        model = converted.model(loss)
        states[name] = fz.init(model, tx, plan, devices=devices)
        step = fz.train_step(model, tx, plan, devices=devices)

        def run(_: int, name: str = name, step: Any = step) -> None:
            states[name], metrics = step(states[name], {"ids": ids})
            jax.block_until_ready((states[name].params, metrics))

        runs[name] = run
    times, cpu = common.interleaved(runs, rounds, warmup=2)
    report: dict[str, Any] = {"sizes": sizes | {"rows": rows, "rounds": rounds}}
    cells = []
    for what, found in (("seconds", times), ("CPU seconds", cpu)):
        ratios = [b / a for a, b in zip(found["with"], found["without"], strict=True)]
        low, high = common.median_interval(ratios)
        report[what] = {k: common.spread(v) for k, v in found.items()}
        report[what] |= {"ratio": statistics.median(ratios), "interval": (low, high)}
        medians = [f"{1e3 * statistics.median(found[k]):.1f} ms" for k in ("with", "without")]
        cells.append(
            (what, *medians, f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}")
        )
    title = (
        f"A step of {rows} x {tokens} tokens, {sizes['n_layer']} layers of {sizes['n_embd']},"
        f" {words} words, CPU, float32: {rounds} pairs"
    )
    return report, common.Grid(title, ("", "with logits", "without", "ratio", "95 %"), cells)


def predicted(shape: tuple[int, int]) -> tuple[dict[str, Any], common.Grid]:
    """What preflight says of GPT-2 124M on one H200."""
    converted, plan = converted_gpt2(), fz.Plan(zero=0, data=1, precision="bf16", remat="layer")
    batch, report, cells = {"ids": jax.ShapeDtypeStruct(shape, jnp.int32)}, {}, []
    for name, loss in (("with", logits_first), ("without", fused)):
        found = fz.preflight(converted.model(loss), optax.adamw(1e-4), plan, batch, "h200:1")
        bounds, peak = found.bounds, found.memory.peak
        report[name] = {"likely_seconds": bounds.likely_seconds, "peak_bytes": peak}
        best, likely = (f"{1e3 * x:.1f} ms" for x in (bounds.best_seconds, bounds.likely_seconds))
        cells.append((f"{name} logits", best, likely, f"{peak / 2**30:.2f} GiB"))
    title = f"GPT-2 124M, {shape[0]} x {shape[1]} tokens, bfloat16, one H200: predicted, not run"
    return report, common.Grid(title, ("", "at best", "likely", "peak"), cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--size", choices=SIZES, default="small", help="of what is timed")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    shape = (given.rows, given.tokens)
    before = common.provenance()
    if given.time:
        report, grid = timed(given.size, given.rows, given.rounds)
    else:
        report, grid = predicted(shape) if given.gpu else memory(shape)
    Console(width=None if sys.stdout.isatty() else 150).print(grid.rich())
    if given.json:
        report = {"before": before, **report, "after": common.provenance()}
        common.save(given.json, report, grid)


def memory(shape: tuple[int, int]) -> tuple[dict[str, Any], common.Grid]:
    """What both steps of GPT-2 124M take."""
    with torch.device("meta"):
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    converted = tb.convert(module, torch.zeros(2, 16, dtype=torch.long, device="meta"))
    report, cells = {}, []
    for precision in ("fp32", "bf16"):
        losses = {"with": whole, "without": fused}
        report[precision] = {
            name: temporaries(converted, loss, precision, shape) for name, loss in losses.items()
        }
        cells.append((precision, *(f"{x / 2**30:.2f} GiB" for x in report[precision].values())))
    title = f"Temporary memory, GPT-2 124M, {shape[0]} x {shape[1]} tokens, CPU: compiled, not run"
    return report, common.Grid(title, ("", "with logits", "without"), cells)


if __name__ == "__main__":
    main()
