"""Memory of a GPT-2 124M train step with and without whole logits: compiled, not run.

    JAX_PLATFORMS=cpu python benchmarks/logits.py

Bytes are those of `compiled.memory_analysis()` for one CPU device, float32 and bfloat16.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
import transformers

import fzero as fz
import torch_bridge as tb


def whole(forward: Any, batch: Any) -> Any:
    """A loss that needs the logits: something else reads them, too."""
    logits = forward(batch["ids"]).logits
    largest = jax.lax.stop_gradient(jnp.max(logits))
    return tb.causal_lm_loss(logits, batch["ids"]), {"largest": largest}


def fused(forward: Any, batch: Any) -> Any:
    """A loss that does not."""
    return tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])


def temporaries(converted: tb.Converted, loss: Any, precision: str, shape: tuple[int, int]) -> int:
    """Bytes of temporary memory of a train step."""
    model, tx = converted.model(loss), optax.adamw(1e-4)
    plan = fz.Plan(zero=0, data=1, precision=precision)
    devices = jax.devices()[:1]
    state = fz.abstract_state(model, tx, plan, devices=devices)
    batch = {"ids": jax.ShapeDtypeStruct(shape, jnp.int32)}
    step = fz.train_step(model, tx, plan, devices=devices)
    return int(step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    given = parser.parse_args()
    with torch.device("meta"):
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    converted = tb.convert(module, torch.zeros(2, 16, dtype=torch.long, device="meta"))
    shape = (given.rows, given.tokens)
    for precision in ("fp32", "bf16"):
        sizes = [temporaries(converted, loss, precision, shape) for loss in (whole, fused)]
        before, after = (size / 2**30 for size in sizes)
        print(f"{precision}: {before:.2f} GiB with logits, {after:.2f} GiB without", flush=True)


if __name__ == "__main__":
    main()
