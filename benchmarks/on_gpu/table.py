"""What `make gpu` found, as the tables of docs/gpu.md: `python -m benchmarks.on_gpu.table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


RESULTS = Path(__file__).parents[1] / "results"
FIGURES = {
    "gpt2-124m": "GPT-2 124M, 16 x 1024 tokens",
    "llama-1b": "Llama 1.1B, 2 x 4096 tokens",
}
CHECKS = {
    "torch": "losses of five steps beside torch's on the same GPU, fp32, bf16, fp16",
    "attention": "cuDNN's attention against products, forwards and back, masks and packings",
    "tiers": "steps of parked, streamed and moved states against all on the device",
    "encode": "8-bit blocks of gathers: the CPU's bytes, but for ties",
    "float8": "products in 8 bits beside the CPU's, and their gradients",
    "bits": "deterministic plans: the same bits twice",
    "processes": "two processes on one GPU (joined, NCCL refuses them by name)",
}


def figures(found: Any) -> str:
    """Steps beside their peers: ratios of medians, in one process, in turns."""
    lines = [
        "| model | ms a step | by hand in JAX | torch.compile | torch eager | MFU | peak GiB"
        " | torch's | *likely* / measured | peak / said |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, what in FIGURES.items():
        row = found["parts"][name]["rows"]["step"]
        own, said = row["seconds_a_step"]["fzero"], row["predicted"]
        faster = row["fzero_is_faster_by"]
        cells = [
            what, f"{1e3 * own:.1f}",
            *(f"{faster[peer]:.2f} x" for peer in ("by hand", "torch.compile", "torch")),
            f"{row['mfu']['fzero']:.0%}", f"{row['peak_bytes_fzero'] / 2**30:.1f}",
            f"{row['peak_bytes_torch'] / 2**30:.1f}", f"{said['likely_s'] / own:.2f}",
            f"{row['peak_bytes_fzero'] / said['peak_bytes']:.4f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def checks(found: Any) -> str:
    """How many rows of each check were right, and which was not."""
    lines = ["| check | right | of | not |", "|---|---|---|---|"]
    for name, what in CHECKS.items():
        rows = found["parts"][name]["rows"]
        wrong = [row for row, said in rows.items() if not said.get("right")]
        lines.append(f"| {what} | {len(rows) - len(wrong)} | {len(rows)} | {', '.join(wrong)} |")
    for name, row in found["parts"]["tests"]["rows"].items():
        total = row["passed"] + len(row["differ"])
        lines.append(
            f"| tests that need one device: {name} | {row['passed']} | {total} |"
            f" {len(row['differ'])}, each with its reason in the file |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    found = json.loads((RESULTS / "gpu.json").read_text())
    print(f"{figures(found)}\n\n{checks(found)}")
