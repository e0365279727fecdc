"""One part, in a process of its own: `python -m on_gpu.child NAME SKIPPED [--tiny]`.

Rows go to standard output, one line of JSON each, as they are done; everything else that is printed
meanwhile goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from on_gpu.parts import PARTS


Row = Callable[[], dict[str, Any]]


def main() -> int:
    """Runs the rows that are not skipped; a row that fails does not end the others."""
    name, skipped, *rest = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints: libraries, compilers, children

    def tell(row: str, **said: Any) -> None:
        print(json.dumps({"name": row, **said}), file=out, flush=True)

    part = next(part for part in PARTS if part.name == name)
    module, _, function = part.where.partition(":")
    rows: dict[str, Row] = getattr(importlib.import_module(f"on_gpu.{module}"), function)(
        "--tiny" in rest
    )
    done = set(json.loads(skipped))
    for row, run in rows.items():
        if row in done:
            continue
        tell(row, begun=True)
        started = time.perf_counter()
        try:
            found = run()
        except Exception as error:  # a row's failure is its result
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        tell(row, **found, seconds=round(time.perf_counter() - started, 2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
