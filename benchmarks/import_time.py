"""What `import fzero` costs over `import jax, optax`: CPU seconds of processes in turns.

    python benchmarks/import_time.py --json benchmarks/results/import_time.json

The least of each counts: whatever else runs on the machine only adds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

import common
from rich.console import Console


CODE = {"import jax, optax": "import jax, optax", "import fzero": "import fzero"}


def seconds(code: str) -> float:
    """CPU seconds of a process that runs `code` and ends."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # As installed packages are: compiled to byte code once, not by every process.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints both, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write the figures there, and the table beside it")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    before = common.provenance()
    for code in CODE.values():  # byte code is written
        seconds(code)
    found: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(given.rounds):
        for name, code in CODE.items():
            found[name].append(seconds(code))
    bare, own = (min(times) for times in found.values())
    grid = common.Grid(
        "CPU seconds of a process", ("jax and optax", "fzero", "ratio"),
        [(f"{bare:.2f} s", f"{own:.2f} s", f"{own / bare:.2f}")],
    )  # fmt: skip
    Console().print(grid.rich())
    if given.json:
        report = {"before": before, "bare_s": bare, "fzero_s": own, "ratio": own / bare}
        common.save(given.json, {**report, "after": common.provenance()}, grid)


if __name__ == "__main__":
    main()
