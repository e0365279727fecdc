"""A GPT-2 trained with ZeRO that sends less: 8-bit gathers, gathers within a host.

    python examples/zeropp.py

Eight virtual devices stand for two hosts of four. Each plan trains the same model on the same text;
what a step sends is read from its compiled program. Loss curves go to PLOT.png if that is given as
an argument. Under a minute on two CPU cores.
"""

import sys
import sysconfig
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from matplotlib.figure import Figure
from transformers import AutoConfig, GPT2LMHeadModel

import fzero as fz
import torch_bridge as tb
from fzero.preflight import hlo


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
# A step that was compiled to be read is not compiled again to run.
cache = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", cache.name)
BATCH, SEQ, STEPS, HOST = 16, 32, 32, 4
# How far the loss may be from that of exact collectives, relative, at any step.
BOUND = 0.02

# Text: every byte is a token.
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = np.frombuffer(b"".join(f.read_bytes() for f in files[::10]), np.uint8)


def batch_at(step):
    """The batch of one step, from its number alone."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ, BATCH)
    return {"x": np.stack([text[start : start + SEQ] for start in starts]).astype(np.int32)}


# The demo's model, half as wide and deep, with random weights.
torch.manual_seed(0)
demo = Path(__file__).with_name("gpt2_3m.json")
module = GPT2LMHeadModel(AutoConfig.from_pretrained(demo, n_embd=128, n_layer=2))
converted = tb.convert(module, torch.zeros((2, SEQ), dtype=torch.int64))
model = converted.model(
    lambda forward, batch: tb.causal_lm_loss(forward(batch["x"]).logits, batch["x"])
)
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, 4, STEPS))

exact = fz.Plan(zero=3, data=8, precision="bf16", clip_norm=1.0)
plans = {
    "exact": exact,
    "int8 gathers": exact.replace(gather_dtype="int8"),
    # On real hosts: secondary="host".
    "and secondary": exact.replace(gather_dtype="int8", secondary=HOST),
}


def sent_by(plan):
    """Bytes that a device sends in a step's gathers, and in those across hosts."""
    step = fz.train_step(model, tx, plan)
    lowered = step.lower(fz.abstract_state(model, tx, plan), batch_at(0))
    found = hlo.collectives(lowered.compile().as_text())
    gathers = [c for c in found if c.kind == "all-gather"]
    across = [c for c in gathers if len({device // HOST for device in c.replica_groups[0]}) > 1]
    return [hlo.total(own).wire_bytes for own in (gathers, across)]


def train(plan):
    """The loss of every step."""
    state, step = fz.init(model, tx, plan, rng=0), fz.train_step(model, tx, plan)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch_at(number))
        losses.append(float(metrics["loss"]))
    return np.array(losses)


print("plan            gathers send  across hosts     kept more  last loss")
curves = {}
for name, plan in plans.items():
    sent, curves[name] = sent_by(plan), train(plan)
    sent.append(fz.describe(plan, model).secondary_bytes)
    row = "  ".join(f"{size / 2**20:8.2f} MiB" for size in sent)
    print(f"{name:14} {row} {curves[name][-1]:10.4f}")

figure = Figure(figsize=(6, 4))
axes = figure.subplots()
for name, losses in curves.items():
    axes.plot(losses, label=name)
axes.set(xlabel="step", ylabel="loss")
axes.legend()
plot = Path(sys.argv[1] if len(sys.argv) > 1 else Path(tempfile.gettempdir(), "zeropp.png"))
figure.savefig(plot, dpi=120)

assert (curves["int8 gathers"] == curves["and secondary"]).all()
print(f"secondary shards changed no bit; {plot} has the curves")
difference = float(np.max(np.abs(curves["int8 gathers"] / curves["exact"] - 1)))
print(f"largest difference that 8 bits make to the loss: {difference:.2%} (bound {BOUND:.0%})")
assert difference < BOUND
assert all(losses[-1] < losses[0] - 2 for losses in curves.values())
