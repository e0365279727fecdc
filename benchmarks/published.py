"""What preflight says about training runs whose throughput others have published; no GPU needed.

    make published                               # all of them, and the table of docs/published.md
    python -m benchmarks.published --only maxtext-7b titan-8b-a100
    python -m benchmarks.published --table       # that table again, nothing compiled

Each run is written down as it was published (model, GPUs, plan, rows, recomputation); the step is
compiled for those GPUs and its *likely* seconds put beside the published ones. Four of the rows set
a constant of `fz.Rates` and are marked so: what they show is only that one constant fits them.

Takes the extra `preflight` and cuDNN (`make test-gpu-programs` installs both): half a minute of
one core and 1 to 2 GiB a row. Rows are written to `results/published.json` as they are done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import fzero as fz
from benchmarks import common, large_models
from benchmarks.large_models import LlamaSize
from fzero.preflight.rates import Rates, default_rates
from fzero.preflight.topology import parse


HERE = Path(__file__).parent
RESULTS = HERE / "results" / "published.json"
DOCS = HERE.parent / "docs" / "published.md"

LLAMA_2_7B = LlamaSize(vocab=32000, kv_heads=32, hidden=11008)
LLAMA_2_13B = LlamaSize(vocab=32000, d=5120, layers=40, heads=40, kv_heads=40, hidden=13824)
LLAMA_2_70B = dataclasses.replace(large_models.LLAMA_70B, vocab=32000)

# torchtitan keeps attention's result and every second matrix product of a layer, in this order.
_TITAN_KEEPS = ("q", "v", "gate", "down")


def selective_op(primitive: Any, *args: Any, **params: Any) -> bool:
    """torchtitan's selective activation checkpointing by operation, as a policy of `Plan.remat`."""
    return _attention(primitive) or _named(primitive, params, _TITAN_KEEPS)


def minimal_flash(primitive: Any, *args: Any, **params: Any) -> bool:
    """MaxText's `minimal_flash`: all products with weights, and attention's result."""
    return _attention(primitive) or _named(primitive, params, ("q", "k", "v", "o", *_MLP))


_MLP = ("gate", "up", "down")


def _attention(primitive: Any) -> bool:
    return str(primitive.name).startswith("dot_product_attention_fwd")


def _named(primitive: Any, params: Any, names: tuple[str, ...]) -> bool:
    return primitive.name == "name" and params["name"] in names


@dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        title: who ran what, on what.
        size: the Llama.
        topology: the GPUs.
        rows: sequences on each GPU and step.
        seq: tokens of each.
        tokens_per_s: published, on each GPU.
        source: where it was published.
        remat: what is kept for the backward pass.
        plan: further fields of the plan.
        rates: rates that differ from the GPU's data sheet.
        known: whether nothing about the run had to be guessed.
        fitted: the constant that was set with this row, if one was.
    """

    title: str
    size: LlamaSize
    topology: str
    rows: int
    seq: int
    tokens_per_s: float
    source: str
    remat: str | Callable[..., bool] = "layer"
    plan: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    known: bool = True
    fitted: str = ""

    @property
    def seconds(self) -> float:
        """Published, of a step."""
        return self.rows * self.seq / self.tokens_per_s

    def predicted(self) -> fz.Preflight:
        """What preflight says."""
        where = parse(self.topology)
        rates: Rates = default_rates(where)
        if self.rates:
            rates = rates.updated(self.rates, "the published run's description")
        usual = {"zero": 3, "precision": "bf16", "clip_norm": 1.0, "remat": self.remat}
        # torchtitan's default, also where torchao and others ran it.
        usual |= {"reduce_dtype": "fp32"} if "torch" in self.source else {}
        plan = fz.Plan(**usual | self.plan)
        model = large_models.llama(dataclasses.replace(self.size, seq=self.seq))
        batch = large_models.batch_shapes(self.rows * where.num_devices, self.seq)
        return fz.preflight(model, optax.adamw(3e-4), plan, batch, where, rates=rates)


def _from_tflops(size: LlamaSize, seq: int, tflops: float) -> float:
    """Tokens per second of a published rate of FLOPs, counted as MaxText counted them then.

    6 a token and parameter that is multiplied with (the table of tokens is not), and attention
    without leaving out what its mask hides.
    """
    multiplied = large_models.num_params(size) - size.vocab * size.d
    attention = 12 * size.layers * size.d * seq
    return tflops * 1e12 / (6 * multiplied + attention)


TITAN_A100 = "torchtitan, docs/performance.md (2024), 64 A100 of 80 GB, FSDP2"
TITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
MAXTEXT = "MaxText, end_to_end/gpu/a3/test_llama2_7b.md (2024)"
NGC = "NVIDIA, MaxText container's Llama 2 70B on 64 H100 (2024): 7.908 s a step"
# Meta's hosts of late 2024: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W.
GRAND_TETON = {"memory_bytes_per_s": 2.4e12, "memory_bytes": 96 * 2**30, "flops_share": 0.43}
# Google's A3 hosts: four network cards of 200 Gbit/s for eight GPUs.
A3 = {"network_bytes_per_s": 100e9 / 8}
AO = "torchao, float8/README.md (2025): Llama3-8b on 8 H100, batch 1"
TRAINY = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
A100, H100 = "a100-80:8x8", "h100:8"
FP8 = {"precision": "fp8"}
ROWWISE = {"precision": "fp8", "float8": fz.Float8(recipe="rowwise")}

RUNS = {
    "titan-8b-a100": Run(
        "Llama 3 8B", large_models.LLAMA_8B, A100, 1, 8192, 2973, TITAN_A100, selective_op,
        fitted="A100's flops_share",
    ),
    "titan-70b-a100": Run(
        "Llama 3 70B", large_models.LLAMA_70B, A100, 1, 8192, 331, TITAN_A100,
    ),
    "titan-2-13b-a100": Run(
        "Llama 2 13B, no checkpointing", LLAMA_2_13B, A100, 2, 4096, 2162, TITAN_A100,
        minimal_flash,
    ),
    "titan-2-13b-op-a100": Run(
        "Llama 2 13B", LLAMA_2_13B, A100, 2, 4096, 1904, TITAN_A100, selective_op,
    ),
    "titan-2-70b-op-a100": Run(
        "Llama 2 70B", LLAMA_2_70B, A100, 1, 4096, 355, TITAN_A100, selective_op,
    ),
    "titan-2-70b-a100": Run(
        "Llama 2 70B", LLAMA_2_70B, A100, 2, 4096, 353, TITAN_A100,
    ),
    "maxtext-7b": Run(
        "Llama 2 7B", LLAMA_2_7B, H100, 4, 4096, _from_tflops(LLAMA_2_7B, 4096, 492), MAXTEXT,
        minimal_flash, fitted="Hopper's flops_share, with the 70B",
    ),
    "maxtext-7b-2-hosts": Run(
        "Llama 2 7B", LLAMA_2_7B, "h100:2x8", 4, 4096, _from_tflops(LLAMA_2_7B, 4096, 422),
        MAXTEXT, minimal_flash, {"replica": 2, "data": 8}, A3, False,
    ),
    "maxtext-7b-16-hosts": Run(
        "Llama 2 7B", LLAMA_2_7B, "h100:16x8", 4, 4096, _from_tflops(LLAMA_2_7B, 4096, 375),
        MAXTEXT, minimal_flash, {"replica": 16, "data": 8}, A3, False,
    ),
    "maxtext-70b": Run(
        "Llama 2 70B", LLAMA_2_70B, "h100:8x8", 2, 4096, 2 * 4096 / 7.908, NGC, known=False,
        fitted="Hopper's flops_share, with the 7B",
    ),
    "titan-8b-h100": Run(
        "Llama 3.1 8B", large_models.LLAMA_8B, H100, 2, 8192, 6667, TITAN_H100, selective_op,
        rates=GRAND_TETON, fitted="flops_share of 500 W",
    ),
    "titan-8b-128-h100": Run(
        "Llama 3.1 8B", large_models.LLAMA_8B, "h100:16x8", 2, 8192, 6514, TITAN_H100,
        selective_op, rates=GRAND_TETON,
    ),
    "titan-8b-h100-fp8": Run(
        "Llama 3.1 8B, FP8", large_models.LLAMA_8B, H100, 2, 8192, 8532, TITAN_H100, selective_op,
        FP8, GRAND_TETON,
    ),
    "titan-8b-128-h100-fp8": Run(
        "Llama 3.1 8B, FP8", large_models.LLAMA_8B, "h100:16x8", 2, 8192, 8380, TITAN_H100,
        selective_op, FP8, GRAND_TETON,
    ),
    "ao-8b-h100": Run(
        "Llama 3 8B", large_models.LLAMA_8B, H100, 1, 8192, 6150, AO, selective_op,
        rates=GRAND_TETON, known=False,
    ),
    "ao-8b-h100-fp8": Run(
        "Llama 3 8B, FP8", large_models.LLAMA_8B, H100, 1, 8192, 7689.5, AO, selective_op,
        FP8, GRAND_TETON, False,
    ),
    "ao-8b-h100-rowwise": Run(
        "Llama 3 8B, FP8 rowwise", large_models.LLAMA_8B, H100, 1, 8192, 6768, AO, selective_op,
        ROWWISE, GRAND_TETON, False,
    ),
    "trainy-8b-32-h200-fp8": Run(
        "Llama 3.1 8B, FP8", large_models.LLAMA_8B, "h200:4x8", 2, 8192, 10938, TRAINY,
        selective_op, FP8,
    ),
    "trainy-8b-64-h200-fp8": Run(
        "Llama 3.1 8B, FP8", large_models.LLAMA_8B, "h200:8x8", 2, 8192, 10753, TRAINY,
        selective_op, FP8,
    ),
}  # fmt: skip


def compare(run: Run) -> dict[str, Any]:
    """A row: what was published and what preflight says."""
    started = time.process_time()
    found = run.predicted()
    b = found.bounds
    return {
        "published_s": run.seconds, "likely_s": b.likely_seconds, "best_s": b.best_seconds,
        "serial_s": b.serial_seconds, "compute_s": b.compute_seconds, "memory_s": b.memory_seconds,
        "adds_s": found.traffic.exposed_seconds, "links_s": found.traffic.seconds,
        "mfu": b.likely_mfu, "model_tflop": found.model_flops / 1e12,
        "compiled_tflop": found.compiled_flops / 1e12, "peak_gib": found.memory.peak / 2**30,
        "cpu_s": time.process_time() - started,
    }  # fmt: skip


def main() -> int:
    """Compares what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--table", action="store_true", help="write the table again, no more")
    args = parser.parse_args()
    # A program for a described GPU cannot be read back from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if args.table else args.only:
        rows[name] = compare(RUNS[name])
        print(name, {key: round(value, 3) for key, value in rows[name].items()}, flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    text = table(rows)
    print(text)
    common.write_part(DOCS, "make published", text)
    return 0


def table(rows: dict[str, Any]) -> str:
    """The rows as markdown."""
    lines = [
        "| run | GPUs | rows x tokens, kept | published | likely | ratio |"
        " nothing beside collectives | MFU | |",
        "|:--|:--|:--|--:|--:|--:|--:|--:|:--|",
    ]
    for name, run in RUNS.items():
        if name not in rows:
            continue
        row = rows[name]
        kept = run.remat if isinstance(run.remat, str) else run.remat.__name__.replace("_", " ")
        note = f"sets {run.fitted}" if run.fitted else ("" if run.known else "partly guessed")
        lines.append(
            f"| {run.title} | {run.topology} | {run.rows} x {run.seq}, {kept} | {run.seconds:.3f} s"
            f" | {row['likely_s']:.3f} s | {row['likely_s'] / run.seconds:.2f} |"
            f" {row['serial_s']:.3f} s | {row['mfu']:.0%} | {note} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
