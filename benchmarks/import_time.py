"""What `import fzero` costs over `import jax, optax`: CPU seconds of processes in turns.

    python benchmarks/import_time.py

The least of each counts: whatever else runs on the machine only adds.
"""

from __future__ import annotations

import resource
import subprocess
import sys


CODE = {"import jax, optax": "import jax, optax", "import fzero": "import fzero"}
ROUNDS = 15


def seconds(code: str) -> float:
    """CPU seconds of a process that runs `code` and ends."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints both, and their ratio."""
    for code in CODE.values():  # byte code is written
        seconds(code)
    found: dict[str, list[float]] = {name: [] for name in CODE}
    for _ in range(ROUNDS):
        for name, code in CODE.items():
            found[name].append(seconds(code))
    bare, own = (min(times) for times in found.values())
    sys.stdout.write(f"jax and optax {bare:.2f} s, fzero {own:.2f} s, ratio {own / bare:.2f}\n")


if __name__ == "__main__":
    main()
