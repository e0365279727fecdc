"""Does PyTorch, in a process of its own, compute from the written files what JAX computed here?"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from torch_bridge.run.data import Corpus
from torch_bridge.run.errors import CommandError


# fp32 on both sides: four digits of a logit of size ten, and a mean of thousands of them.
LOGITS_BOUND = 1e-4
LOSS_BOUND = 1e-5  # relative
VERIFIER = Path(__file__).with_name("verify.py")


def in_torch(
    directory: Path, factory: str | None, corpus: Corpus, input_ids: Any, logits: Any
) -> dict[str, Any]:
    """Runs verify.py on `directory` and returns what it printed."""
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch, "case.npz")
        np.savez(
            case,
            input_ids=input_ids,
            logits=np.asarray(logits, np.float32),
            validation=corpus.validation,
            labels=corpus.labels,
        )
        # -P: without its own folder on the path, where a neighbour could hide a module of Python's.
        command = [sys.executable, "-P", str(VERIFIER), str(directory), str(case)]
        done = subprocess.run(
            command + ([factory] if factory else []), capture_output=True, text=True
        )
    if done.returncode:
        raise CommandError(
            f"PyTorch could not load what was written to {directory}:\n{done.stderr[-2000:]}"
        )
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def missed_bounds(figures: dict[str, Any], validation_loss: float, precision: str) -> list[str]:
    """What does not agree, in words; the loss must agree only where JAX computed it in fp32."""
    missed = []
    difference = figures["logits_max_abs_diff"]
    if not difference <= LOGITS_BOUND:  # also true of NaN
        missed.append(f"logits differ by {difference:.3g}, expected at most {LOGITS_BOUND:g}")
    relative = abs(figures["torch_val_loss"] - validation_loss) / abs(validation_loss)
    if precision == "fp32" and not relative <= LOSS_BOUND:
        missed.append(
            f"validation loss {figures['torch_val_loss']:.8f} in PyTorch, {validation_loss:.8f} in "
            f"JAX: relative difference {relative:.3g}, expected at most {LOSS_BOUND:g}"
        )
    return missed
