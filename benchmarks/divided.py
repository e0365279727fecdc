"""Plans over all axes for large models on H200s, compiled and ranked by preflight; no GPU needed.

    python -m benchmarks.divided                      # all of them, and the tables of docs/axes.md
    python -m benchmarks.divided --only llama-70b
    python -m benchmarks.divided --table              # those tables again, nothing compiled

Takes the extra `preflight` and cuDNN (`make test-gpu-programs` installs both): a minute of one core
and 2 GiB a plan. What `fzero preflight --sweep` prints for one length is here for several. Rows are
written to `results/divided.json` as they are done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax

import fzero as fz
from benchmarks import common, large_models
from benchmarks.large_models import LlamaSize
from fzero.preflight.network import CollectiveUse
from fzero.preflight.sweep import REFUSED, Tried, sweep


HERE = Path(__file__).parent
RESULTS = HERE / "results" / "divided.json"
DOCS = HERE.parent / "docs" / "axes.md"


@dataclass(frozen=True)
class Case:
    """Plans for one model and batch.

    Args:
        size: the model.
        topology: the GPUs.
        rows: of the global batch.
        seqs: tokens of a row; each is tried.
        choices: fields of the plan, and the values to try.
        plan: further fields of the plan.
    """

    size: LlamaSize
    topology: str
    rows: int
    seqs: tuple[int, ...]
    choices: dict[str, tuple[Any, ...]]
    plan: dict[str, Any] = field(default_factory=dict)

    def rows_of(self, seq: int) -> list[dict[str, Any]]:
        """What preflight says of each plan, best first."""
        base = fz.Plan(
            **{"zero": 3, "precision": "bf16", "clip_norm": 1.0, "remat": "layer"} | self.plan
        )
        model = large_models.llama(dataclasses.replace(self.size, seq=seq))
        batch = large_models.batch_shapes(self.rows, seq)
        found = sweep(
            lambda plan: model, optax.adamw(3e-4), base, self.choices, batch, self.topology,
            progress=lambda one: print(seq, one.choice, one.verdict, one.why, flush=True),
        )  # fmt: skip
        return [row(seq, one) for one in found.tried]


LONG = dataclasses.replace(large_models.LLAMA_8B, exchange="ring")
CASES = {
    "llama-70b": Case(
        large_models.LLAMA_70B, "h200:8x8", 64, (8192,),
        {"tensor": (1, 2, 4, 8), "context": (1, 2)},
    ),
    "mixtral-8x22b": Case(
        large_models.MIXTRAL_8X22B, "h200:8x8", 64, (8192,),
        {"expert": (1, 2, 4, 8), "tensor": (1, 2)},
    ),
    "between": Case(
        large_models.LLAMA_8B, "h200:8", 8, (4096, 1024),
        {"sequence_parallel": (False, True)}, {"tensor": 8},
    ),
    "long": Case(
        large_models.LLAMA_8B, "h200:8", 1, (131072,), {"context": (2, 4), "tensor": (2, 4)},
    ),
    "longer": Case(
        large_models.LLAMA_8B, "h200:8", 1, (131072, 262144, 524288, 1048576), {"context": (8,)},
    ),
    "long-ring": Case(LONG, "h200:8", 1, (131072,), {"context": (8,)}),
    # Two layers of it, so that XLA's scheduler has memory left.
    "two-layers-ring": Case(
        dataclasses.replace(LONG, layers=2), "h200:8", 1, (131072,), {"context": (8,)},
    ),
}  # fmt: skip


def row(seq: int, one: Tried) -> dict[str, Any]:
    """A plan and what was found."""
    told: dict[str, Any] = {"seq": seq, "choice": one.choice, "verdict": one.verdict}
    told |= {"why": one.why, "state_gib": (one.state_bytes or 0) / 2**30}
    if one.found is None:
        return told
    over = {
        axes: {"sent_gib": own.communicated_bytes / 2**30, "adds_s": own.exposed_seconds,
               "hidden": 1 - own.exposed_bytes / max(own.communicated_bytes, 1),
               "kinds": kinds_of([c for c in one.found.collectives if c.axes == axes])}
        for axes, own in one.found.by_axes.items()
        if own.communicated_bytes > 2**30
    }  # fmt: skip
    b = one.found.bounds
    return told | {
        "peak_gib": one.found.memory.peak / 2**30, "likely_s": b.likely_seconds,
        "best_s": b.best_seconds, "mfu": b.likely_mfu, "over": over,
        "unknown": list(one.found.unknown_flops),
    }  # fmt: skip


def kinds_of(collectives: Sequence[CollectiveUse]) -> dict[str, dict[str, float]]:
    """For each kind of collective, what is sent and which share of it is beside kernels."""
    found: dict[str, dict[str, float]] = {}
    for kind in sorted({c.kind for c in collectives}):
        own = [c for c in collectives if c.kind == kind]
        sent = sum(c.total_bytes for c in own)
        waits = sum(c.total_bytes for c in own if c.exposed)
        found[kind] = {"sent_gib": sent / 2**30, "hidden": 1 - waits / max(sent, 1)}
    return found


def main() -> int:
    """Compiles what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--table", action="store_true", help="write the tables again, no more")
    args = parser.parse_args()
    # A program for a described GPU cannot be read back from a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if args.table else args.only:
        rows[name] = []
        for seq in CASES[name].seqs:
            rows[name] += CASES[name].rows_of(seq)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for name, own in rows.items():
        common.write_part(DOCS, f"benchmarks.divided: {name}", table(own))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = [
        "| tokens | plan | kept | peak | sent (GiB), and what it adds | likely | MFU |",
        "|--:|:--|--:|--:|:--|--:|--:|",
    ]
    for one in (row for row in rows if row["verdict"] != REFUSED):
        plan = ", ".join(f"{name}={value}" for name, value in one["choice"].items())
        kept = f"{one['state_gib']:.1f}" if one["state_gib"] else ""
        if "peak_gib" not in one:
            lines.append(
                f"| {one['seq']} | {plan} | {kept} | {one['verdict']} | {one['why']} | | |"
            )
            continue
        sent = "; ".join(
            f"{axes} {own['sent_gib']:.0f}, {own['adds_s']:.2f} s"
            for axes, own in one["over"].items()
        )
        peak = f"{one['peak_gib']:.1f}" + ("" if one["verdict"] == "fits" else ", too large")
        lines.append(
            f"| {one['seq']} | {plan} | {kept} | {peak} | {sent} | {one['likely_s']:.2f} s |"
            f" {one['mfu']:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
