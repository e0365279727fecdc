"""Everything that a GPU has to show, in parts of a few minutes: first checks, then figures.

    make gpu                                            # on a machine with a GPU
    python benchmarks/gpu.py --minutes 9 --json gpu.json      # the same; call again for the rest
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --only torch attention --again --json gpu.json
    python benchmarks/gpu.py --tiny --json gpu.json     # the whole order at tiny sizes, on a CPU

Runs from a plain checkout (`PYTHONPATH=.`) with jax, torch and transformers as they are installed;
nothing is downloaded. Each part is a process of its own, so that one that crashes, hangs or fills
the memory takes nothing with it, and torch and jax do not share a GPU's memory for longer. Every
row is in the file as soon as it is measured. A run that is cut, or ends after `--minutes`, goes on
where it stopped when it is called again; what was begun twice and never ended is left out.

A check is right or wrong; a figure stands beside its peers, measured in turns in one process. The
exit status is 1 if a check is wrong or a row failed, 3 if there is more to do, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from on_gpu.parts import PARTS, Part


HERE = Path(__file__).parent
MORE = 3
# A process with jax and torch takes so long to start; less is not worth starting one.
LEAST_SECONDS = 25


def main() -> int:
    """Runs what is not done yet, within the time."""
    args = _arguments()
    if args.list:
        for part in PARTS:
            print(f"{part.kind:7} {part.name:16} {part.seconds:4.0f} s  {part.what}")
        return 0
    end = time.monotonic() + 60 * args.minutes
    file = Path(args.json)
    report = _read(file)
    chosen = [part for part in PARTS if part.name in (args.only or [p.name for p in PARTS])]
    if args.again:
        for part in chosen:
            report["parts"].pop(part.name, None)
    for part in chosen:
        if not report["parts"].get(part.name, {}).get("done"):
            left = end - time.monotonic()
            if left < min(LEAST_SECONDS, part.seconds):
                break
            # A CPU that others use has no usual time.
            _run(part, left if args.tiny else min(left, part.limit), args.tiny, report, file)
    return _said(report, chosen)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {"parts": {}}


def _write(report: dict[str, Any], file: Path) -> None:
    """Whole or not at all: a run may be cut at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(file.name + ".new")
    beside.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(beside, file)


def _run(part: Part, seconds: float, tiny: bool, report: dict[str, Any], file: Path) -> None:
    """Runs a part in a process of its own, and keeps each row as it comes."""
    kept = report["parts"].setdefault(part.name, {"rows": {}, "begun": {}, "done": False})
    skipped = [*kept["rows"], *(name for name, times in kept["begun"].items() if times > 1)]
    print(f"--- {part.kind} {part.name}: {part.what}", flush=True)
    # The folder of benchmarks, where `on_gpu` is, then the checkout, where fzero is.
    path = os.pathsep.join((str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, **part.environment}
    if tiny:
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        # A trial proves that nothing fails, not how fast it is: compile quickly.
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "on_gpu.child", part.name, json.dumps(skipped)]
    child = subprocess.Popen(
        [*command, *(["--tiny"] if tiny else [])], stdout=subprocess.PIPE, text=True,
        env=environment, cwd=HERE.parent, start_new_session=True,
    )  # fmt: skip
    timer = _Timer(child, seconds)
    assert child.stdout is not None
    for line in child.stdout:
        said = json.loads(line)
        name = said.pop("name")
        if "begun" in said:
            kept["begun"][name] = kept["begun"].get(name, 0) + 1
        else:
            kept["rows"][name] = said
            print(f"    {_short(name, said)}", flush=True)
        _write(report, file)
    status = child.wait()
    timer.stop()
    kept["done"] = status == 0
    if status and not timer.fired:
        # What cannot even start would not do so next time.
        kept["done"] = not kept["begun"] or all(times > 1 for times in kept["begun"].values())
        kept["crashed"] = kept.get("crashed", 0) + 1
        print(f"    ended with status {status}", flush=True)
    _write(report, file)


class _Timer:
    """Ends a process and all that it started, when its time is over."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        import signal
        import threading

        def end() -> None:
            self.fired = True
            os.killpg(child.pid, signal.SIGKILL)

        self.fired = False
        self._timer = threading.Timer(seconds, end)
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()


def _short(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{name}: FAILED: {row['error'].splitlines()[-1][:150]}"
    if "right" in row and not row["right"]:
        return f"{name}: WRONG: {json.dumps(row)[:300]}"
    return f"{name}: {json.dumps({k: v for k, v in row.items() if k != 'seconds'})[:300]}"


def _said(report: dict[str, Any], chosen: list[Part]) -> int:
    """A line at the end, and the exit status."""
    parts = report["parts"]
    rows = [row for part in chosen for row in parts.get(part.name, {"rows": {}})["rows"].values()]
    wrong = sum(not row.get("right", True) for row in rows)
    failed = sum("error" in row for row in rows)
    crashed = sum(parts.get(part.name, {}).get("crashed", 0) for part in chosen)
    left = [part.name for part in chosen if not parts.get(part.name, {}).get("done")]
    cut = [
        f"{part.name} {name}"
        for part in chosen
        if part.name not in left
        for name in parts[part.name]["begun"]
        if name not in parts[part.name]["rows"]
    ]
    print(f"{len(rows)} rows, {wrong} wrong, {failed} failed, {crashed} crashes", end="")
    print(f", {len(cut)} begun twice and never ended ({', '.join(cut)})" if cut else "", end="")
    print(f"; call again for: {', '.join(left)}" if left else "; all done")
    return 1 if wrong or failed or crashed or cut else MORE if left else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="end after so long")
    parser.add_argument("--json", default="runs/gpu.json", help="what was found; also read")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--again", action="store_true", help="forget what was found of these parts")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny sizes on a CPU: a trial of it all"
    )
    parser.add_argument("--list", action="store_true", help="say what there is to run")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
