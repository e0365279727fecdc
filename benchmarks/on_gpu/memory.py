"""What plans take on the device beside what preflight says: a process, so a peak, for each."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

from on_gpu.child import Row


PLANS: dict[str, dict[str, Any]] = {
    "layer": {},
    "what memory has room for": {"remat": None},
    "dots": {"remat": "dots"},
    "none": {"remat": "none"},
    "microbatches": {"microbatches": 4},
    "fp32": {"precision": "fp32"},
    "fp8": {"precision": "fp8"},
    "whole parameters": {"zero": 1},
    "activations on the host": {"remat": "offload"},
    "optimizer on the host": {"tiers": {"opt_state": "host"}},
}

_WORKER = """
import json, sys
import jax, large_models, optax
import fzero as fz
from fzero.preflight.calibrate import kind_of
from fzero.preflight.measure import measure
tiny, more = json.loads(sys.argv[1])
size = large_models.LlamaSize(32000, d=1024, layers=8, heads=8, kv_heads=4, hidden=4096, seq=2048)
if tiny:
    size = large_models.LlamaSize(64, d=32, layers=2, heads=2, kv_heads=1, hidden=64, seq=32)
plan = fz.Plan(**{"zero": 3, "data": 1, "precision": "bf16", "remat": "layer", **more})
model, tx = large_models.llama(size), optax.adamw(1e-3)
batch = large_models.batch_shapes(8, size.seq)
kind = kind_of(jax.devices()[0])
jax.config.update("jax_enable_compilation_cache", False)
said = fz.preflight(model, tx, plan, batch, f"{kind}:1")
found = measure(model, tx, plan, batch, steps=2 if tiny else 10)
print("FOUND", json.dumps({
    "predicted_peak": said.memory.peak, "peak": found.peak_bytes,
    "predicted_state": said.memory.state_total, "state": sum(found.state_bytes.values()),
    "keeps": said.keeps,
    "likely_s": said.bounds.likely_seconds, "best_s": said.bounds.best_seconds,
    "median_s": found.seconds,
}))
"""


def plans(tiny: bool) -> dict[str, Row]:
    """A row for each plan."""
    return {name: functools.partial(_run, more, tiny) for name, more in PLANS.items()}


def _run(more: dict[str, Any], tiny: bool) -> dict[str, Any]:
    command = [sys.executable, "-c", _WORKER, json.dumps([tiny, more])]
    done = subprocess.run(command, env=os.environ, text=True, stdout=subprocess.PIPE, check=True)
    said = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    found: dict[str, Any] = json.loads(said.removeprefix("FOUND"))
    right = found["state"] == found["predicted_state"]
    if found["peak"] is not None:  # CPUs do not say
        found["peak_ratio"] = found["peak"] / found["predicted_peak"]
        # Preflight's is what the compiler plans; the allocator adds what lies between blocks.
        right = right and 0.9 <= found["peak_ratio"] <= 1.1
    return {"right": right, **found, "likely_ratio": found["likely_s"] / found["median_s"]}
