"""Large models compiled for GPUs that are not here: the tables and outputs of two pages, and more.

    python -m benchmarks.pages                       # all of them, and what pages show of them
    python -m benchmarks.pages --only "GPT-2 1.5B"   # one
    python -m benchmarks.pages --table               # the pages again, nothing compiled

Takes the extra `preflight` and cuDNN (`make gpu-programs` installs both): a minute of one core and
2 GiB a plan. Rows are written to `results/pages.json` as they are done. `docs/preflight.md` and
`docs/finetuning.md` hold what is made of them between two comments; what sentences say of them is
compared by `tests/docs/test_figures.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import fzero as fz
from benchmarks import common, large_models
from fzero.preflight.sweep import sweep
from tests.support.large import GPT2_XL, gpt2


Rows = dict[str, dict[str, Any]]
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/pages.json"
LLAMA_8B, LLAMA_70B = large_models.llama_8b()[0], large_models.llama_70b()[0]
LORA, QLORA = large_models.llama_70b_lora()[0], large_models.llama_70b_qlora()[0]


@dataclass(frozen=True)
class Case:
    """A step to compile; what is not said is what `fzero preflight` takes by itself.

    Args:
        model: the model.
        topology: the GPUs.
        rows: of the global batch.
        seq: tokens of a row.
        plan: fields of the plan.
        choices: fields to try, as by `--sweep`; the page then shows what that prints.
    """

    model: fz.Model
    topology: str
    rows: int
    seq: int
    plan: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """What preflight says."""
        usual = {"zero": 3, "precision": "bf16", "clip_norm": 1.0, "remat": "layer"}
        plan = fz.Plan(**usual | self.plan)
        batch, tx = large_models.batch_shapes(self.rows, self.seq), optax.adamw(1e-3)
        if self.choices:
            tried = sweep(lambda _: self.model, tx, plan, self.choices, batch, self.topology)
            return {"printed": str(tried)}
        found = fz.preflight(self.model, tx, plan, batch, self.topology)
        sums, memory = found.traffic, found.memory
        return {
            "fits": found.fits, "memory_bytes": found.rates.memory_bytes,
            "peak_bytes": memory.peak, "state_bytes": memory.state_total,
            "secondary_bytes": memory.secondary, "gathered_bytes": memory.gathered,
            "sent_bytes": sums.communicated_bytes,
            "cross_host_bytes": sums.cross_host_bytes, "network_bytes": sums.network_bytes,
            "exposed": sums.exposed_bytes / sums.communicated_bytes,
            "without_matmul": sums.without_matmul_bytes / sums.communicated_bytes,
            "best_s": found.bounds.best_seconds, "likely_s": found.bounds.likely_seconds,
            "keeps": list(found.keeps), "printed": str(found),
        }  # fmt: skip


def weights(number: int = 16, width: int = 2048) -> fz.Sequential:
    """Weights in one layer, without a stack."""
    names = [f"w{i:02}" for i in range(number)]

    def init(rng: jax.Array) -> Any:
        keys = jax.random.split(rng, number)
        return {
            name: jax.random.normal(key, (width, width))
            for name, key in zip(names, keys, strict=True)
        }

    def apply(p: Any, batch: Any, ctx: fz.Context) -> Any:
        x = batch["ids"][:, 1:].astype(p[names[0]].dtype)
        for name in names:
            x = jnp.tanh(x @ p[name])
        return x

    def loss(x: jax.Array, batch: Any) -> fz.Mean:
        return fz.Mean(jnp.sum(x**2), jnp.float32(x.size))

    return fz.Sequential([fz.Layer("weights", init, apply)], loss)


def _zeropp(**plan: Any) -> Case:
    return Case(LLAMA_8B, "h100:8x8", 64, 4096, {"data": 64} | plan)


CASES = {
    "GPT-2 1.5B": Case(gpt2(GPT2_XL), "h200:8", 32, 1024),
    "16 weights": Case(weights(), "h200:8", 64, 2048, {"precision": "fp32"}),
    "Llama 8B": Case(LLAMA_8B, "h200:8", 8, 4096),
    "70B, replica=8, data=8": Case(LLAMA_70B, "h200:8x8", 64, 4096, {"replica": 8, "data": 8}),
    "70B, data=64": Case(LLAMA_70B, "h200:8x8", 64, 4096, {"data": 64}),
    "8 hosts, data=64": Case(LLAMA_8B, "h200:8x8", 64, 4096, {"data": 64}),
    "8 hosts, replica=8, data=8": Case(LLAMA_8B, "h200:8x8", 64, 4096, {"replica": 8, "data": 8}),
    "zero=3, data=64": _zeropp(),
    'gather_dtype="int8"': _zeropp(gather_dtype="int8"),
    'secondary="host"': _zeropp(secondary="host"),
    "both": _zeropp(gather_dtype="int8", secondary="host"),
    **{f"LoRA, bf16, {seq}": Case(LORA, "h100:8", 8, seq) for seq in (8192, 16384, 32768)},
    **{f"LoRA, nf4, {seq}": Case(QLORA, "h100:8", 8, seq) for seq in (8192, 32768, 65536)},
    **{
        f"keeping, {rows} rows, {remat}": Case(
            LLAMA_8B, "h100:8", rows, 4096, {"remat": remat}
        )
        for rows in (8, 16, 32) for remat in (None, "layer")
    },
    "sweep": Case(
        LLAMA_8B, "a100-80:8", 8, 4096,
        choices={"zero": (0, 1, 3), "remat": ("layer", "dots"), "data": (8,)},
    ),
}  # fmt: skip


def printed(name: str, command: str) -> Callable[[Rows], str]:
    """A command and what it prints, as code is indented."""

    def made(rows: Rows) -> str:
        lines = f"$ {command}\n{rows[name]['printed']}".splitlines()
        return "\n".join(f"    {line}".rstrip() for line in lines)

    return made


def hosts(rows: Rows) -> str:
    """What flat and hybrid sharding send."""
    lines = [
        "| per device and step | sent | in collectives across hosts | through its network card |",
        "|---|---|---|---|",
    ]
    for plan in ("data=64", "replica=8, data=8"):
        row = rows[f"8 hosts, {plan}"]
        own = (gib(row[f"{name}_bytes"]) for name in ("sent", "cross_host", "network"))
        lines.append(f"| `{plan}` | {' | '.join(own)} |")
    return "\n".join(lines)


def zeropp(rows: Rows) -> str:
    """What ZeRO++ saves."""
    lines = [
        "| per device and step | sent | in collectives across hosts | kept for backward |",
        "|---|---|---|---|",
    ]
    for name in ("zero=3, data=64", 'gather_dtype="int8"', 'secondary="host"', "both"):
        row = rows[name]
        own = [gib(row["sent_bytes"]), gib(row["cross_host_bytes"])]
        own.append(gib(row["secondary_bytes"]) if row["secondary_bytes"] else "")
        word = name if name == "both" else f"`{name}`"
        lines.append(f"| {word} | {' | '.join(own)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def lora(rows: Rows) -> str:
    """What adapters on Llama 70B take."""
    lines = ["| base | tokens a row | peak | a step, likely |", "|---|--:|--:|--:|"]
    for name, row in rows.items():
        if name.startswith("LoRA, "):
            base, seq = name.split(", ")[1:]
            peak = gib(row["peak_bytes"]) + ("" if row["fits"] else ": does not fit")
            seconds = f"{row['likely_s']:.1f} s " if row["fits"] else ""
            lines.append(f"| {base} | {int(seq):,} | {peak} | {seconds}|")
    return "\n".join(lines)


def keeping(rows: Rows) -> str:
    """What a plan keeps that does not say it, and what that brings."""
    lines = [
        "| Llama 8B, 8 H100s, tokens of each | kept | peak | a step, likely |"
        ' with `remat="layer"` |',
        "|---|---|--:|--:|--:|",
    ]
    for num in (8, 16, 32):
        row, other = (rows[f"keeping, {num} rows, {remat}"] for remat in (None, "layer"))
        ratio = row["likely_s"] / other["likely_s"]
        lines.append(
            f"| {num // 8} x 4,096 | `{row['keeps'][0]}` | {gib(row['peak_bytes'])}"
            f" | {row['likely_s']:.2f} s, {ratio:.2f} of | {other['likely_s']:.2f} s,"
            f" {gib(other['peak_bytes'])} |"
        )
    return "\n".join(lines)


def gib(count: float) -> str:
    """Bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"


_8B = "fzero preflight --model benchmarks/large_models.py:llama_8b"
PARTS: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "output": (
        "docs/preflight.md",
        printed("Llama 8B", f"{_8B} --topology h200:8 --batch 8 --seq 4096 --remat layer"),
    ),
    "hosts": ("docs/preflight.md", hosts),
    "zeropp": ("docs/preflight.md", zeropp),
    "sweep": (
        "docs/preflight.md",
        printed("sweep", f"{_8B} --topology a100-80:8 \\\n    --batch 8 --seq 4096"
                " --sweep zero=0,1,3 remat=layer,dots data=8"),
    ),
    "keeping": ("docs/preflight.md", keeping),
    "lora": ("docs/finetuning.md", lora),
}  # fmt: skip
"""Parts of pages by name: the page, and what makes the part of all rows."""


def main() -> int:
    """Compiles what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--table", action="store_true", help="write the pages again, no more")
    args = parser.parse_args()
    # A program for a described GPU cannot be read back from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if args.table else args.only:
        rows[name] = {"made": common.provenance(), **CASES[name].run()}
        print(
            name, {k: v for k, v in rows[name].items() if k not in ("made", "printed")}, flush=True
        )
        rows = {name: rows[name] for name in CASES if name in rows}
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for name, (page, make) in PARTS.items():
        common.write_part(ROOT / page, f"benchmarks.pages: {name}", make(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
