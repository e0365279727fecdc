"""Runs the tutorials whose outputs are committed: `make docs-outputs`, or `kept.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from run_pages import ROOT, main, name_of


# They need what `make docs` does not install: jax's compiler for NVIDIA GPUs.
KEPT = (ROOT / "docs/tutorials/will_it_fit.md",)


def outputs_file(page: Path) -> Path:
    """Where a page's outputs are committed."""
    return page.with_suffix(".outputs.json")


def run_all(into: Path | None = None) -> None:
    """Runs them and writes their outputs beside them, or into a folder."""
    made = ROOT / "docs/_made" if into is None else into
    if main(made, list(KEPT)):
        raise RuntimeError("the code of a tutorial failed: see above")
    for page in KEPT:
        outputs = json.loads((made / f"{name_of(page)}.json").read_text())["outputs"]
        target = outputs_file(page) if into is None else into / outputs_file(page).name
        target.write_text(json.dumps({"outputs": outputs}, indent=1) + "\n")


if __name__ == "__main__":
    run_all(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
