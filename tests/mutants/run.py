"""Plants known bugs, one at a time, and sees the tests fail.

    python tests/mutants/run.py [--check] [NAME ...]        (all of them: `make mutants`)

With `--check` it only says which of them no longer apply, in a second.

A mutant is a patch in this folder whose text before the diff says what the bug would do to a user
and which tests must see it:

    What: hybrid sharding clips too hard, by the root of the number of replicas
    Test: tests/zero/test_replicas.py

Each is applied to a copy of the last commit. One that no longer applies is as much a failure as
one that no test sees: make it again from the code as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# pytest's exit code when tests ran and some failed; a crash of the process counts as seen, too.
FAILED = 1


def header(patch: Path, name: str) -> str:
    """A line of what stands before a patch's diff."""
    found = re.search(rf"^{name}: (.+)$", patch.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{patch}: expected a line '{name}: ...' before the diff")
    return found[1]


def misfit(patch: Path, folder: str | Path, *options: str) -> str | None:
    """Why a mutant does not apply there, if it does not."""
    done = subprocess.run(
        ["git", "apply", "--recount", "-C1", *options, str(patch)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if not done.returncode:
        return None
    return f"DOES NOT APPLY, make it again: {done.stderr.strip().splitlines()[0]}"


def outcome(patch: Path) -> str:
    """`killed`, or what is wrong with a mutant."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        wrong = misfit(patch, folder)
        if wrong is not None:
            return wrong
        tests = shlex.split(header(patch, "Test"))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=folder, env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode == FAILED or done.returncode < 0:
        return "killed"
    if done.returncode == 0:
        return "SURVIVED"
    return f"pytest ended with {done.returncode}: {done.stdout.strip()[-200:]}"


def main(names: list[str]) -> int:
    """Runs mutants; 0 if all were killed."""
    only_check = "--check" in names
    named = [HERE / f"{name}.patch" for name in names if name != "--check"]
    patches = named or sorted(HERE.glob("*.patch"))
    if only_check:
        wrong = {patch.stem: misfit(patch, ROOT, "--check") for patch in patches}
        for name, why in wrong.items():
            if why is not None:
                print(f"{name:32} {why}")
        print(f"{sum(why is None for why in wrong.values())} of {len(wrong)} apply")
        return int(any(wrong.values()))
    found = {}
    for patch in patches:
        found[patch.stem] = outcome(patch)
        print(f"{patch.stem:32} {found[patch.stem]:10} {header(patch, 'What')}", flush=True)
    killed = sum(value == "killed" for value in found.values())
    print(f"{killed} of {len(found)} killed")
    return int(killed < len(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
