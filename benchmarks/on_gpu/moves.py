"""Rates of the device, moves between tiers, and steps whose optimizer state is parked."""

from __future__ import annotations

import functools
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import large_models
import numpy as np
import optax
from large_models import LlamaSize

import fzero as fz
from on_gpu.child import Row


# Seconds of a step with everything on the device, by model.
_ON_DEVICE: dict[LlamaSize, float] = {}
BENCHMARKS = Path(__file__).parents[1]
GIB = 2**30


def calibration(tiny: bool) -> dict[str, Row]:
    """`fzero calibrate`: the rates file is the row."""
    from fzero.preflight.calibrate import SMALL, calibrate

    def run() -> dict[str, Any]:
        found = calibrate(effort=SMALL if tiny else None)
        return {"rates": found.rates(), "measured": found.measured, "device": found.device}

    return {"rates": run}


def moves(tiny: bool) -> dict[str, Row]:
    """`benchmarks/offload.py`'s moves and residue at 12 GiB."""
    mib = 8 if tiny else 12 * 1024
    return {
        "moves": functools.partial(_offload, "moves", mib, tiny),
        "residue": functools.partial(_offload, "residue", mib, tiny),
    }


def _offload(what: str, mib: int, tiny: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "offload.json")
        command = [sys.executable, str(BENCHMARKS / "offload.py"), "--only", what]
        rounds = ["--rounds", "1" if tiny else "5", "--warmup", "1"]
        subprocess.run([*command, "--mib", str(mib), *rounds, "--json", str(out)], check=True)
        rows = json.loads(out.read_text())["rows"][what]
    return {"rows": rows, "goal": "0.9 of the raw copy" if what == "moves" else "below 1 MB left"}


def parked(tiny: bool) -> dict[str, Row]:
    """A Llama of 1.1B by where its optimizer state is, and torch's optimizer on the CPU."""
    size = LlamaSize(vocab=32000, d=2048, layers=22, heads=32, kv_heads=4, hidden=5632)
    if tiny:
        size = LlamaSize(vocab=64, d=32, layers=2, heads=2, kv_heads=1, hidden=64, seq=32)
    plans: dict[str, dict[str, Any]] = {
        "device": {},
        "host": {"tiers": {"opt_state": "host"}},
        "half on the host": {"tiers": {"opt_state": 0.5}},
        "updated on the host": {"tiers": {"opt_state": "host"}, "update_on": "host"},
    }
    rows: dict[str, Row] = {
        name: functools.partial(_steps, size, 2, more, tiny) for name, more in plans.items()
    }
    return {**rows, "torch, optimizer on the CPU": functools.partial(_torch_offload, tiny)}


def llama_8b(tiny: bool) -> dict[str, Row]:
    """Llama 8B on one GPU: two moments and the masters' updates visit from the host."""
    size = large_models.LLAMA_8B
    if tiny:
        size = LlamaSize(vocab=64, d=32, layers=2, heads=2, kv_heads=1, hidden=64, seq=32)
    return {
        "optimizer on the host": functools.partial(
            _steps, size, 1, {"tiers": {"opt_state": "host"}}, tiny
        )
    }


def _steps(size: LlamaSize, rows: int, more: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Seconds of a step, and the bound max(step without what is parked, link)."""
    plan = fz.Plan(zero=3, data=1, precision="bf16", stream_bytes=256 * 2**20, **more)
    model, tx = large_models.llama(size), optax.adamw(3e-4)
    state = fz.init(model, tx, plan, 0)
    step = fz.train_step(model, tx, plan)
    random = np.random.default_rng(0)
    batch = {"ids": random.integers(0, size.vocab, (rows, size.seq + 1), dtype=np.int32)}
    seconds, losses = [], []
    for _ in range(3 if tiny else 7):
        started = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(jax.block_until_ready((state.params, metrics["loss"]))[1]))
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[2:])
    placed = fz.placement(state)
    host = placed.host_bytes_per_device["total"]
    stats = jax.devices()[0].memory_stats() or {}
    del state
    gc.collect()
    rate = _both_ways(64 * 2**20 if tiny else 2 * GIB) if host else None
    if not host:
        _ON_DEVICE[size] = median
    # What it cannot take less than: its work, or what goes over the link. The goal is 1.1.
    bound = max(_ON_DEVICE.get(size, 0.0), host / rate if rate else 0.0)
    return {
        "right": bool(np.isfinite(losses).all()) and losses[-1] < losses[0],
        "median_s": median, "all_s": seconds, "first_step_s": seconds[0],
        "tokens_per_s": rows * size.seq / median, "losses": losses,
        "device_bytes": placed.bytes_per_device["total"], "host_bytes": host,
        "link_bytes_per_s": rate, "link_s": host / rate if rate else 0.0,
        "of_bound": median / bound if bound and host else None,
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }  # fmt: skip


def _both_ways(size: int) -> float:
    """Bytes per second in each direction, copies going both ways at once."""
    here = jnp.zeros(size // 4)
    there = jax.device_put(jnp.ones(size // 4), here.sharding.with_memory_kind("pinned_host"))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        jax.block_until_ready(
            (jax.device_put(here, there.sharding), jax.device_put(there, here.sharding))
        )
        best = min(best, time.perf_counter() - started)
    return size / best


def _torch_offload(tiny: bool) -> dict[str, Any]:
    """torch's way: gradients copied to pinned memory, AdamW on the CPU, parameters copied back."""
    import torch

    from on_gpu import cases

    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 22, "hidden_size": 2048, "intermediate_size": 5632,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    }  # fmt: skip
    case = cases.tiny("llama") if tiny else cases.llama(2, 4096, **sizes)
    device = cases.torch_device()
    module = case.module.to(device).train()
    batch = {name: value.to(device) for name, value in case.batch.items()}
    pin = device == "cuda"
    own = [
        torch.empty_like(p, device="cpu", pin_memory=pin).copy_(p.data) for p in module.parameters()
    ]
    for tensor in own:
        tensor.grad = torch.zeros_like(tensor, pin_memory=pin)
    tx = torch.optim.AdamW(own, lr=3e-4, fused=True)
    seconds = []
    for _ in range(3 if tiny else 5):
        started = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            value = case.torch_loss(module, batch)
        value.backward()
        with torch.no_grad():
            for tensor, p in zip(own, module.parameters(), strict=True):
                tensor.grad.copy_(p.grad, non_blocking=True)
                p.grad = None
            if pin:
                torch.cuda.synchronize()
            tx.step()
            for tensor, p in zip(own, module.parameters(), strict=True):
                p.copy_(tensor, non_blocking=True)
        if pin:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"median_s": statistics.median(seconds[1:]), "all_s": seconds}
