"""Losses of the 3.3M-parameter GPT-2 in 8 bits beside bfloat16's, and their picture.

    python benchmarks/float8_curves.py --run      # three trainings, one after the other; resumes
    python benchmarks/float8_curves.py            # the picture and the table, from the losses

Each training is `fzero train` of `examples/gpt2_3m.json` on Python's standard library, one CPU
device, from the same weights and with the same rows. What is kept are the losses of its steps
(`benchmarks/results/float8_curves.json`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
LOSSES = ROOT / "benchmarks" / "results" / "float8_curves.json"
TABLE = LOSSES.with_suffix(".md")
PICTURE = ROOT / "docs" / "float8_curves.svg"
RUNS = {
    "bf16": ("--precision", "bf16"),
    "tensorwise": ("--precision", "fp8"),
    "rowwise": ("--precision", "fp8", "--plan-set", 'float8={"recipe": "rowwise"}'),
}
COLOURS = {"bf16": "#000000", "tensorwise": "#D55E00", "rowwise": "#0072B2"}
# Losses are drawn and compared as medians over so many steps: rows differ more than precisions.
OVER = 25


def train(name: str, out: Path, steps: int, batch: int, seq: int) -> None:
    """One training, or the rest of it."""
    folder = out / name
    resumes = folder.exists() and any(folder.iterdir())
    command = [
        sys.executable, "-m", "fzero.cli", "train", "--model", f"hf:{ROOT}/examples/gpt2_3m.json",
        "--data", "stdlib", "--out", str(folder), "--steps", str(steps), "--batch", str(batch),
        "--seq", str(seq), "--lr", "1e-3", "--clip", "1.0", "--zero", "3", "--devices", "1",
        "--eval-every", "0", "--eval-sequences", "8", "--save-every", "100", *RUNS[name],
        *(["--resume"] if resumes else []),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)


def collect(out: Path, options: dict[str, int]) -> dict[str, Any]:
    """The losses of all trainings so far."""
    losses = {}
    for name in RUNS:
        path = out / name / "metrics.jsonl"
        if path.exists():
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            losses[name] = [round(e["loss"], 5) for e in entries if "loss" in e]
    return {"model": "examples/gpt2_3m.json", "data": "stdlib", **options, "losses": losses}


def running(values: list[float]) -> list[float]:
    """Running medians over `OVER` steps."""
    half = OVER // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def differences(losses: dict[str, list[float]], name: str) -> list[float]:
    """How much larger each step's loss is than bfloat16's of the same step and rows."""
    return [a / b - 1 for a, b in zip(losses[name], losses["bf16"], strict=False)]


def table(found: dict[str, Any]) -> str:
    """Mean losses of five parts of the training, as Markdown."""
    losses = found["losses"]
    steps = min(map(len, losses.values()))
    parts = [(at * steps // 5, (at + 1) * steps // 5) for at in range(5)]
    names = [f"steps {a + 1} to {b}" for a, b in parts]
    rows = ["| mean loss | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(parts)]
    for name, values in losses.items():
        means = [statistics.fmean(values[a:b]) for a, b in parts]
        rows.append(f"| {name} | " + " | ".join(f"{x:.4f}" for x in means) + " |")
    for name in (name for name in losses if name != "bf16"):
        means = [statistics.fmean(differences(losses, name)[a:b]) for a, b in parts]
        rows.append(f"| {name} over bf16 | " + " | ".join(f"{x:+.2%}" for x in means) + " |")
    return "\n".join(rows) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """Losses above, their difference to bfloat16's below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    losses = found["losses"]
    drawn = Figure(figsize=(8, 5), layout="constrained")
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for name, values in losses.items():
        label = name if name == "bf16" else f"fp8, {name}"
        above.plot(running(values), color=COLOURS[name], linewidth=1.4, label=label)
        if name != "bf16":
            shares = [100 * x for x in differences(losses, name)]
            below.plot(shares, color=COLOURS[name], alpha=0.2, linewidth=0.7)
            below.plot(running(shares), color=COLOURS[name], linewidth=1.4)
    below.axhline(0, color="black", linewidth=0.8)
    above.set_ylabel("loss (nats per token)")
    below.set(xlabel="step", ylabel="over bf16 (%)")
    above.legend(frameon=False)
    for axes in (above, below):
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.hashsalt": "float8", "font.family": "sans-serif"}):
        drawn.savefig(path, metadata={"Date": None, "Creator": None})
    lines = (line.rstrip() for line in path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="train first")
    parser.add_argument("--only", choices=RUNS, action="append")
    parser.add_argument("--out", type=Path, default=Path("runs/float8"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--losses", type=Path, default=LOSSES)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args()
    if given.run:
        sizes = {"steps": given.steps, "batch": given.batch, "seq": given.seq}
        for name in given.only or RUNS:
            train(name, given.out, **sizes)
            given.losses.write_text(json.dumps(collect(given.out, sizes)) + "\n")
    found = json.loads(given.losses.read_text())
    given.losses.with_suffix(".md").write_text(table(found))
    draw(found, given.picture)
    print(table(found))


if __name__ == "__main__":
    main()
