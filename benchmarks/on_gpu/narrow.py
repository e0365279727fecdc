"""Products in 8 bits: what the GPU's kernels give, and what a step gains."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import fzero as fz
from fzero.float8.products import in_float8
from fzero.float8.recipe import RECIPES
from on_gpu import cases, training
from on_gpu.child import Row


def products(tiny: bool) -> dict[str, Row]:
    """A product and its gradients, by recipe: on this device and on the CPU."""
    return {recipe: functools.partial(_product, recipe, tiny) for recipe in RECIPES}


def _product(recipe: str, tiny: bool) -> dict[str, Any]:
    size = 64 if tiny else 2048
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, g = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys)
    product = in_float8(lambda p, x: x @ p["w"], "mlp", fz.Float8(recipe, keep=()))

    @jax.jit
    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x, w: product({"w": w}, x), x, w)
        return {"out": out, **dict(zip(("dx", "dw"), pull(g), strict=True))}

    here, there = run(x, w, g), run(*jax.device_put((x, w, g), jax.devices("cpu")[0]))
    gaps = {}
    for name, found in here.items():
        ours, theirs = (np.asarray(one, np.float32) for one in (found, there[name]))
        gaps[name] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    # Sums of the same 8-bit operands in another order, rounded to bf16.
    return {"right": max(gaps.values()) < 2**-6, "gaps": gaps}


def llama_1b(tiny: bool) -> dict[str, Row]:
    """TinyLlama's shapes in bf16 and in 8 bits, in turns."""
    return {"step": functools.partial(_steps, tiny)}


def _steps(tiny: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    case = cases.tiny("llama") if tiny else training.llama_1b_case()
    model, batch = cases.model_of(case), cases.numpy_batch(case)
    plans = {"bf16": training.PLAN}
    for recipe in RECIPES:
        plans[recipe] = training.PLAN.replace(precision="fp8", float8=fz.Float8(recipe))
    runs = {name: cases.Fzero(model, plan, batch) for name, plan in plans.items()}
    losses = {name: float(run.step()) for name, run in runs.items()}
    times = training._blocks(runs, *((2, 1) if tiny else (training.BLOCKS, training.STEPS)))
    median = {name: float(np.median(own)) for name, own in times.items()}
    gaps = [abs(loss / losses["bf16"] - 1) for loss in losses.values()]
    return {
        "right": max(gaps) < 2e-2, "losses": losses, "seconds_a_step": median,
        "faster_than_bf16_by": {name: median["bf16"] / own for name, own in median.items()},
    }  # fmt: skip
