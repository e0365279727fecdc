"""Train a PyTorch GPT-2 with ZeRO-3 on the source of Python's standard library, and hand it back.

    python examples/gpt2_stdlib.py

What `fzero train` does, as a page of Python: about half a minute on two CPU cores.
"""

import sysconfig
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 4)  # virtual devices, before anything uses jax
BATCH, SEQ, STEPS = 16, 64, 100

# Text: every byte is a token; a tenth of the files is kept for validation.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
train = np.frombuffer(b"".join(f.read_bytes() for f in files[1::10] + files[2::10]), np.uint8)
held_out = np.frombuffer(b"".join(f.read_bytes() for f in files[::10]), np.uint8)


def batch_at(text, step):
    """The batch of one step, from its number alone."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ, BATCH)
    tokens = np.stack([text[start : start + SEQ] for start in starts]).astype(np.int32)
    return {"tokens": tokens}


# A PyTorch model, converted: its parameters keep their state_dict names.
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=256, n_positions=SEQ, n_embd=96, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
module = GPT2LMHeadModel(config)
converted = tb.convert(module, torch.zeros((2, SEQ), dtype=torch.int64))


def loss(forward, batch):
    """Next-token cross-entropy, as an exact mean."""
    return tb.causal_lm_loss(forward(batch["tokens"])["logits"], batch["tokens"])


# One immutable state for everything that follows.
model = converted.model(loss)
plan = fz.Plan(zero=3, clip_norm=1.0)
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 10, STEPS))
state = fz.init(model, tx, plan, rng=0)
train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)
validation = batch_at(held_out, 0)

before = float(eval_step(state, validation)["loss"])
for step in range(STEPS):
    state, metrics = train_step(state, batch_at(train, step))
    if step % 20 == 0:
        print(f"step {step:3d}  loss {float(metrics['loss']):.3f}")
after = float(eval_step(state, validation)["loss"])
print(f"validation loss {before:.3f} -> {after:.3f}")
print(fz.placement(state))

# Back to PyTorch: a file that transformers loads.
with tempfile.TemporaryDirectory() as directory:
    tb.save(Path(directory, "model.safetensors"), converted, state)
    config.save_pretrained(directory)
    returned = GPT2LMHeadModel.from_pretrained(directory)
tokens = torch.from_numpy(validation["tokens"]).long()
with torch.no_grad():
    logits = returned(tokens).logits[:, :-1].flatten(0, 1)
    in_torch = float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
print(f"PyTorch, on the same validation text: {in_torch:.3f}")
assert abs(in_torch - after) < 1e-4 * after
assert after < before - 2
