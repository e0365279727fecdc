"""LoRA on a large model, and generation beside a loop by hand."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import fzero as fz
import torch_bridge as tb
from fzero.batch import Inputs
from fzero.preflight.shapes import model_flops
from on_gpu import cases, training
from on_gpu.child import Row


BENCHMARKS = Path(__file__).parents[1]


def lora_8b(tiny: bool) -> dict[str, Row]:
    """Llama 3's 8B shapes with LoRA of rank 16 beside a base in bf16, 1 x 4096 tokens."""
    return {"step": functools.partial(_lora, tiny)}


def _lora(tiny: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(usual if tiny else torch.bfloat16)
    try:
        case = cases.tiny("llama") if tiny else _llama_8b()
    finally:
        torch.set_default_dtype(usual)
    ids = next(value for name, value in case.batch.items() if name != "labels")
    model = tb.lora(tb.convert(case.module, ids), rank=16).model(case.jax_loss)
    plan = fz.Plan(zero=0, data=1, precision="bf16", remat="layer")
    started = time.perf_counter()
    run = cases.Fzero(model, plan, cases.numpy_batch(case))
    losses = [float(run.step())]
    run.wait()
    first = time.perf_counter() - started
    times = training._blocks({"fzero": run}, 2 if tiny else training.BLOCKS, 1)["fzero"]
    losses.append(float(run.step()))
    seconds = float(np.median(times))
    flops = model_flops(model, plan, Inputs.of(training._shapes(case)).rows, 1)
    return {
        "right": bool(np.isfinite(losses).all()) and losses[1] < losses[0], "losses": losses,
        "first_step_s": first, "median_s": seconds,
        "tokens_per_s": int(np.prod(ids.shape[:2])) / seconds,
        "mfu": flops / seconds / training._peak(), "goal": "MFU of 0.5",
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }  # fmt: skip


def _llama_8b() -> Any:
    return cases.llama(
        1, 4096, num_hidden_layers=32, hidden_size=4096, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip


def generation(tiny: bool) -> dict[str, Row]:
    """`benchmarks/generate.py`: a converted GPT-2 beside a loop written by hand."""
    return {"greedy": functools.partial(_generation, tiny)}


def _generation(tiny: bool) -> dict[str, Any]:
    sizes = {"layers": 12, "width": 768, "prompt": 64, "new": 128, "rounds": 7}
    if tiny:
        sizes = {"layers": 1, "width": 64, "prompt": 4, "new": 4, "rounds": 2}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "generate.json")
        options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, str(BENCHMARKS / "generate.py"), "--json", str(out), *options]
        # It ends with 1 where the loop by hand is faster by much, which is a figure here.
        subprocess.run([*command, "--rows", "1", "8"], check=False, stdout=sys.stderr)
        rows = json.loads(out.read_text())["rows"]
    return {"rows": rows, "right": all(row["same_tokens"] > 0.9 for row in rows)}
