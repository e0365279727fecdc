"""transformers' GPT-2 in four pipeline stages, each ZeRO-3 over two devices.

    python examples/gpt2_pipeline.py

The converted model is a chain: embedding, a stack of blocks, and the head, which is tied to the
embedding across stages. The same plan without the pipeline gives the same losses; and the weights
go back into transformers under their own names.
"""

import sysconfig
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from torch import nn
from transformers import AutoConfig, GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb
from fzero.pipeline import partition


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
BATCH, SEQ, STEPS = 16, 32, 24
# Relative. Stages are compiled apart, so the last bits of their sums differ, and every step carries
# that on.
BOUND = 1e-5

# Text: every byte is a token; a tenth of the files is kept for validation.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(f.read_bytes() for f in files[1::10] + files[2::10]), np.uint8)
held_out = np.frombuffer(b"".join(f.read_bytes() for f in files[::10]), np.uint8)


def batch_at(text, step):
    """The batch of one step, from its number alone."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ, BATCH)
    return {"x": np.stack([text[start : start + SEQ] for start in starts]).astype(np.int32)}


# The demo's model, with random weights.
torch.manual_seed(0)
config = AutoConfig.from_pretrained(Path(__file__).with_name("gpt2_3m.json"))
module = GPT2LMHeadModel(config)
converted = tb.convert(module, torch.zeros((2, SEQ), dtype=torch.int64))
print(converted.blocks)


def loss(forward, batch):
    """Cross entropy of the next byte."""
    return tb.causal_lm_loss(forward(batch["x"]).logits, batch["x"])


model = converted.model(loss)
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 4, STEPS))
print(partition(model, 4, "parameters"))


def train(plan):
    """The loss of every step, and the last state."""
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(text, number))
        losses.append(float(metrics["loss"]))
    return np.array(losses), state


plan = fz.Plan(zero=3, data=2, pipe=4, microbatches=4, schedule="1f1b", clip_norm=1.0)
alone, _ = train(plan.replace(pipe=1))
losses, state = train(plan)
for number in range(0, STEPS, 6):
    print(f"step {number:2d}  pipe=1 {alone[number]:.6f}  pipe=4 {losses[number]:.6f}")
difference = float(np.max(np.abs(losses - alone) / alone))
validation = batch_at(held_out, 0)
after = float(fz.eval_step(model, plan)(state, validation)["loss"])
print(fz.placement(state))

# Back to transformers: a file that it loads.
with tempfile.TemporaryDirectory() as directory:
    tb.save(Path(directory, "model.safetensors"), converted, state, plan)
    config.save_pretrained(directory)
    returned = GPT2LMHeadModel.from_pretrained(directory)
tokens = torch.from_numpy(validation["x"]).long()
with torch.no_grad():
    logits = returned(tokens).logits[:, :-1].flatten(0, 1)
    in_torch = float(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
print(f"validation loss {after:.3f}, in PyTorch {in_torch:.3f}")
print(f"largest difference between the loss curves: {difference:.1e} (bound {BOUND:.0e})")
assert difference < BOUND
assert abs(in_torch - after) < 1e-4 * after
assert losses[-1] < losses[0] - 2
