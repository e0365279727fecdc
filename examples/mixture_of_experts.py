"""A Mixtral of transformers whose experts live on their owners, with no line about devices.

    python examples/mixture_of_experts.py

Eight virtual devices: two groups for ZeRO-3 (`data`), in each of which four devices have two of the
eight experts (`expert`). Tokens travel to their experts and back; none is dropped.
`converted.parallel` says what lies along the axis. Last, losses are compared with one device's.
Under a minute on two CPU cores.
"""

import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
import torch
import transformers

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
SEQ, ROWS, STEPS = 32, 16, 10
# Sums over tokens add up in another order.
BOUND = 1e-5

# Text: every byte is a token.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(f.read_bytes() for f in files[::10]), np.uint8)


def batch_at(step):
    """The batch of one step, from its number alone."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ, ROWS)
    return {"ids": np.stack([text[at : at + SEQ] for at in starts]).astype(np.int32)}


torch.manual_seed(0)
config = transformers.MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_local_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=SEQ,
)  # fmt: skip
module = transformers.MixtralForCausalLM(config)
converted = tb.convert(module, torch.zeros(2, SEQ, dtype=torch.long))
print("\n".join(line for line in str(converted.parallel).splitlines() if "expert" in line))
model = converted.model(
    lambda forward, batch: tb.causal_lm_loss(forward(batch["ids"]).logits, batch["ids"])
)
tx = optax.adamw(1e-3)


def train(plan, devices):
    """The loss of every step."""
    state = fz.init(model, tx, plan, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


plan = fz.Plan(zero=3, data=2, expert=4, clip_norm=1.0, min_shard_bytes=1024)
alone = fz.Plan(zero=0, data=1, clip_norm=1.0)
kept, whole = (fz.describe(each, model, tx).bytes_per_device["total"] for each in (plan, alone))
print(f"\na device keeps 1/{whole / kept:.1f} of the bytes that one alone would")
eight, one = train(plan, jax.devices()), train(alone, jax.devices()[:1])
difference = float(np.max(np.abs(eight / one - 1)))
print(f"loss {one[0]:.3f} -> {one[-1]:.3f} after {STEPS} steps")
print(f"largest difference between 8 devices and one: {difference:.1e} (bound {BOUND:g})")
assert difference < BOUND
