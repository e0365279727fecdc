"""What `tensor` divides of transformers' architectures, and how far two devices are off.

    python -m benchmarks.divided_models               # those not in results/divided_models.json yet
    python -m benchmarks.divided_models --only bert   # these, anew
    python -m benchmarks.divided_models --untrained   # what is divided alone
    python -m benchmarks.divided_models --table       # the table of docs/axes.md again, no more

The architectures are the 29 of `tests/torch_bridge/zoo`, tiny, each converted and trained for a
step on one device and with `Plan(tensor=2)`. Ten CPU seconds each; rows are written as they are
done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np

from benchmarks import common


HERE = Path(__file__).parent
RESULTS = HERE / "results" / "divided_models.json"
DOCS = HERE.parent / "docs" / "axes.md"


def zoo() -> tuple[Any, Any, dict[str, Any]]:
    """The checks of the zoo, how it makes modules, and its architectures: they import torch."""
    sys.path.extend(str(HERE.parent / "tests/torch_bridge" / name) for name in ("zoo", ""))
    checks, entries, models = map(
        importlib.import_module, ("zoo_checks", "zoo_entries", "zoo_transformers")
    )
    return checks, entries, models.ENTRIES


def row(name: str, train: bool) -> dict[str, Any]:
    """How one architecture is divided, and, if it is trained, how far its step is off."""
    import torch

    import torch_bridge as tb

    checks, entries, known = zoo()
    torch.manual_seed(3)
    entry = known[name]
    example = entry.call(entries.EXAMPLE_BATCH)
    converted = tb.convert(entries.livelier(entry.make()), *example.args, **example.kwargs)
    found = converted.parallel
    sizes = {leaf: int(np.prod(value.shape)) for leaf, value in converted.params.items()}
    return {
        "name": name,
        "divided": dict(Counter(one.how for one in found.divided)),
        "whole": dict(Counter(one.why for one in found.whole)),
        "share": sum(sizes[one.name] for one in found.divided) / sum(sizes.values()),
        "off": checks.deviations(converted, entry) if train else {},
    }


def wanted(names: Iterable[str], rows: Mapping[str, dict[str, Any]], train: bool) -> list[str]:
    """The architectures that have no row, or none of a step."""
    return [name for name in names if name not in rows or (train and not rows[name]["off"])]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = [
        "| architecture | divided (parameters) | of all | whole, and why (parameters) | off |",
        "|:--|:--|--:|:--|--:|",
    ]
    for one in rows:
        divided, whole = (
            "; ".join(f"{words} ({count})" for words, count in one[key].items())
            for key in ("divided", "whole")
        )
        off = f"{max(one['off'].values()):.0e}" if one["off"] else ""
        lines.append(f"| {one['name']} | {divided} | {one['share']:.0%} | {whole} | {off} |")
    return "\n".join(lines)


def main() -> int:
    """Converts and trains what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ARCHITECTURE", help="these, anew")
    parser.add_argument("--untrained", action="store_true", help="without a step of each")
    parser.add_argument("--table", action="store_true", help="write the table again, no more")
    args = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = {one["name"]: one for one in known}
    if not args.table:
        jax.config.update("jax_num_cpu_devices", 2)
        names = list(zoo()[2])
        for name in args.only or wanted(names, rows, not args.untrained):
            rows[name] = row(name, not args.untrained)
            print(name, rows[name]["off"], flush=True)
            kept = [rows[name] for name in names if name in rows]
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    common.write_part(DOCS, "benchmarks.divided_models", table(json.loads(RESULTS.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
