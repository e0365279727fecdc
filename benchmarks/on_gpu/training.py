"""Training beside its peers: converted by fzero, written by hand in JAX, torch compiled and eager.

All four train the same weights on the same batch with AdamW, float32 masters and bf16 products, and
keep all activations. They take turns in blocks of steps; a figure is the median of the blocks, and
a ratio comes with a 95 % interval.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

import fzero as fz
from fzero.batch import Inputs
from fzero.preflight.calibrate import kind_of
from fzero.preflight.rates import default_rates
from fzero.preflight.shapes import model_flops
from fzero.preflight.topology import Topology
from on_gpu import cases
from on_gpu.child import Row


PLAN = fz.Plan(zero=0, data=1, precision="bf16", remat="none")
BLOCKS, STEPS = 8, 5


def gpt2_124m(tiny: bool) -> dict[str, Row]:
    """GPT-2's smallest, 16 x 1024 tokens."""
    make = functools.partial(
        cases.gpt2, 16, 1024, n_layer=12, n_embd=768, n_head=12, vocab_size=50257
    )
    return _rows("gpt2", make, tiny)


def gpt2_15b(tiny: bool) -> dict[str, Row]:
    """GPT-2 XL, 4 x 1024 tokens."""
    make = functools.partial(
        cases.gpt2, 4, 1024, n_layer=48, n_embd=1600, n_head=25, vocab_size=50257
    )
    return _rows("gpt2", make, tiny)


def llama_1b(tiny: bool) -> dict[str, Row]:
    """TinyLlama's shapes, 2 x 4096 tokens."""
    return _rows("llama", llama_1b_case, tiny)


def llama_1b_case() -> Any:
    """TinyLlama's shapes on random tokens."""
    return cases.llama(
        2, 4096, num_hidden_layers=22, hidden_size=2048, intermediate_size=5632,
        num_attention_heads=32, num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip


def resnet_50(tiny: bool) -> dict[str, Row]:
    """ResNet-50, 128 images of 224 x 224."""

    def make() -> Any:
        config = transformers.ResNetConfig(num_labels=1000)
        return cases.images(transformers.ResNetForImageClassification(config), "resnet", 128, 224)

    return _rows("resnet", make, tiny)


def vit_b(tiny: bool) -> dict[str, Row]:
    """ViT-B/16, 128 images of 224 x 224."""

    def make() -> Any:
        config = transformers.ViTConfig(num_labels=1000)
        return cases.images(transformers.ViTForImageClassification(config), "vit", 128, 224)

    return _rows("vit", make, tiny)


def _rows(kind: str, make: Callable[[], Any], tiny: bool) -> dict[str, Row]:
    made = functools.partial(cases.tiny, kind) if tiny else make
    return {"step": functools.partial(compare, made, tiny)}


class ByHand:
    """The same step as one would write it in JAX."""

    def __init__(self, case: Any) -> None:
        weights = {n: value.detach().numpy() for n, value in case.module.state_dict().items()}
        params = case.hand_params(weights, case.module.config)
        endings = ("running_mean", "running_var")
        buffers = {n: jnp.array(v) for n, v in weights.items() if n.endswith(endings)}
        values = tuple(cases.numpy_batch(case).values())
        self.batch = jax.tree.map(jnp.array, values[0] if len(values) == 1 else values)
        tx, config = cases.adamw(), case.module.config

        def narrow(x: Any) -> Any:
            return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x

        def loss(params: Any, buffers: Any, batch: Any) -> Any:
            own = jax.tree.map(narrow, (params, batch))
            value, new = case.hand_loss(own[0], buffers, own[1], config)
            return value.astype(jnp.float32), jax.tree.map(
                lambda a, b: a.astype(b.dtype), new, buffers
            )

        def step(state: Any, batch: Any) -> Any:
            params, buffers, moments = state
            (value, buffers), grads = jax.value_and_grad(loss, has_aux=True)(params, buffers, batch)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), buffers, moments), value

        params = jax.tree.map(jnp.array, params)
        self.state = params, buffers, tx.init(params)
        self.run = jax.jit(step, donate_argnums=0)

    def step(self) -> Any:
        self.state, value = self.run(self.state, self.batch)
        return value

    def wait(self) -> None:
        jax.block_until_ready(self.state[0])


def compare(make: Callable[[], Any], tiny: bool) -> dict[str, Any]:
    """One model's row: times, ratios, memory, compile times, first losses."""
    torch.manual_seed(0)
    case = make()
    model = cases.model_of(case)
    device = cases.torch_device()
    first: dict[str, Any] = {}
    runs: dict[str, Any] = {}

    def begin(name: str, made: Callable[[], Any]) -> None:
        """Makes a contestant and takes its first step, which compiles."""
        started = time.perf_counter()
        try:
            runs[name] = made()
            loss = float(runs[name].step())
            runs[name].wait()
        except Exception as error:  # a peer that fails is said, and the others go on
            if name in ("fzero", "by hand"):
                raise
            runs.pop(name, None)
            first[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            return
        first[name] = {"loss": loss, "first_step_s": time.perf_counter() - started}

    begin("fzero", lambda: cases.Fzero(model, PLAN, cases.numpy_batch(case)))
    memory = _jax_peak()
    begin("by hand", lambda: ByHand(case))
    begin("torch", lambda: cases.Torch(case, "bf16", device))
    if "torch" in runs:
        begin("torch.compile", runs["torch"].compiled)
    times = _blocks(runs, 2 if tiny else BLOCKS, 1 if tiny else STEPS)
    median = {name: float(np.median(own)) for name, own in times.items()}
    count = int(np.prod(next(iter(case.batch.values())).shape[: 2 if "ids" in case.batch else 1]))
    flops = model_flops(model, PLAN, Inputs.of(_shapes(case)).rows, 1)
    device_kind = f"{kind_of(jax.devices()[0])}:1"
    said = fz.preflight(model, cases.adamw(), PLAN, _shapes(case), device_kind)
    # torch.compile goes on with what torch's first step left.
    same = [name for name in runs if name != "torch.compile"]
    gaps = [abs(first[name]["loss"] / first["fzero"]["loss"] - 1) for name in same]
    return {
        "right": max(gaps) < 2e-2, "first": first, "seconds_a_step": median,
        "per_s": {name: count / value for name, value in median.items()},
        "unit": "tokens" if "ids" in case.batch else "images",
        "mfu": {name: flops / value / _peak() for name, value in median.items()},
        "fzero_is_faster_by": {name: value / median["fzero"] for name, value in median.items()},
        "interval": {
            name: common.ratio_interval(own, times["fzero"]) for name, own in times.items()
        },
        "predicted": {
            "likely_s": said.bounds.likely_seconds, "peak_bytes": said.memory.peak
        },
        "peak_bytes_fzero": memory,
        "peak_bytes_torch": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }  # fmt: skip


def _blocks(runs: dict[str, Any], blocks: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step of each run, per block; the order turns round every time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(1 + blocks):  # the first warms up
        for name in list(runs)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            for _ in range(steps):
                runs[name].step()
            runs[name].wait()
            if number:
                times[name].append((time.perf_counter() - started) / steps)
    return times


def _shapes(case: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cases.numpy_batch(case))


def _peak() -> float:
    """FLOP/s of bf16 by the device's data sheet."""
    return default_rates(Topology(kind_of(jax.devices()[0]), 1, 1)).flops_of("bf16")


def _jax_peak() -> int | None:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")
