"""What gathering parameters in the next forward pass saves: four steps compiled for 8 H200s.

    python -m benchmarks.gathered_lazily      # and the table of docs/preflight.md; no GPU

Takes the extra `preflight` (`make gpu-programs`), a minute of one core and 2 GiB a row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import optax

import fzero as fz
from benchmarks import common
from tests.support.large import GPT2_XL, LLAMA_8B, abstract_batch, gpt2, llama


RESULTS = Path(__file__).parent / "results" / "gathered_lazily.json"
DOCS = Path(__file__).parents[1] / "docs" / "preflight.md"
ROWS = {
    "Llama 8B, stage 1": (llama, LLAMA_8B, 1, 1),
    "GPT-2 1.5B, stage 2": (gpt2, GPT2_XL, 4, 2),
}


def row(name: str, gather: str) -> dict[str, Any]:
    """One prediction's figures."""
    model, size, rows, zero = ROWS[name]
    plan = fz.Plan(zero=zero, data=8, precision="bf16", clip_norm=1.0, gather=gather, remat="layer")
    found = fz.preflight(
        model(size), optax.adamw(3e-4), plan, abstract_batch(size, rows * 8), "h200:8"
    )
    large = [c for c in found.collectives if c.bytes > 2**20]
    kinds = {"all-gather": "gathers", "reduce-scatter": "reductions"}
    apart = {}
    for kind, word in kinds.items():
        own = [c for c in large if c.kind == kind]
        total = sum(c.total_bytes for c in own)
        apart[word] = sum(c.total_bytes for c in own if not c.num_matmuls) / total if total else 0.0
    return {
        "sent_gib": found.traffic.communicated_bytes / 2**30, **apart,
        "add_ms": 1e3 * found.traffic.exposed_seconds,
        "best_ms": 1e3 * found.bounds.best_seconds,
        "kept_gib": found.memory.state_total / 2**30, "peak_gib": found.memory.peak / 2**30,
        "exposed": found.traffic.exposed_bytes,
    }  # fmt: skip


def table(rows: dict[str, Any]) -> str:
    """Rows as markdown."""
    lines = [
        "| per device and step, 8 H200s | sent | gathers, reductions without a matmul |"
        " collectives add | at best | kept | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in rows.items():
        lines.append(
            f"| {name} | {r['sent_gib']:.1f} GiB | {100 * r['gathers']:.0f} %,"
            f" {100 * r['reductions']:.0f} % | {r['add_ms']:.1f} ms | {r['best_ms']:.0f} ms"
            f" | {r['kept_gib']:.1f} GiB | {r['peak_gib']:.1f} GiB |"
        )
    return "\n".join(lines)


def main() -> None:
    found = {}
    for name in ROWS:
        for gather in ("eager", "lazy"):
            found[f"{name}, {gather}"] = row(name, gather)
            print(f"{name}, {gather}: {found[f'{name}, {gather}']}", flush=True)
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    common.write_part(DOCS, "benchmarks.gathered_lazily", table(found))


if __name__ == "__main__":
    main()
