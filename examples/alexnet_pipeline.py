"""An AlexNet of PyTorch, trained in 1, 2 and 4 pipeline stages: one loss curve.

    python examples/alexnet_pipeline.py

The children of a `torch.nn.Sequential` become the layers of a chain, which a plan cuts into stages.
Dropout keys follow the rows of the batch and the layer, so that the cut changes nothing but where
things run. The curves are drawn to runs/alexnet_pipeline/loss.png.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 8)  # virtual devices, before anything uses jax
BATCH, STEPS, HELD_OUT, STAGES = 32, 100, 320, (1, 2, 4)
# Wherever a chain is cut, gradients have the same bits. A program that is not cut is fused, and so
# rounds, otherwise: relative, over the first steps. (At a kink of ReLU or max pooling the last bit
# of a sum decides about a whole gradient, so later no two programs agree.) Another dropout mask, or
# a microbatch that got lost, would show in the second digit of the first losses.
FIRST, BOUND = 10, 1e-5
OUT = Path(__file__).parent.parent / "runs" / "alexnet_pipeline"

# 1797 digits of 8 x 8 pixels as 32 x 32 images with 3 channels; the last ones are held out.
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
small = torch.from_numpy(digits.images[order, None] / 16).float()
wide = nn.functional.interpolate(small, (32, 32), mode="bilinear")
images = ((wide - wide.mean()) / wide.std()).expand(-1, 3, -1, -1).numpy()
labels = digits.target[order].astype(np.int32)
held_out = {"x": images[-HELD_OUT:], "label": labels[-HELD_OUT:]}

# Krizhevsky's five convolutions, three overlapping max pools and three linear layers, for images a
# seventh as wide; for 100 steps dropout of a half would be too much.
torch.manual_seed(0)
module = nn.Sequential(
    nn.Sequential(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
    nn.Sequential(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(48, 32, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Flatten()),
    nn.Sequential(nn.Dropout(0.2), nn.Linear(32 * 2 * 2, 256), nn.ReLU()),
    nn.Sequential(nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU()),
    nn.Linear(256, 10),
)
for layer in module.modules():
    if hasattr(layer, "weight"):  # deep and without normalisation: torch's own start is too small
        nn.init.kaiming_normal_(layer.weight)
module[-1].weight.data.mul_(0.1)


def loss(logits, batch):
    """Cross-entropy and accuracy, as exact means over microbatches and devices."""
    count = jnp.float32(batch["label"].size)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = jnp.argmax(logits, -1) == batch["label"]
    return fz.Mean(jnp.sum(losses), count), {"accuracy": fz.Mean(jnp.sum(right), count)}


chain = tb.sequential(module, torch.zeros(2, 3, 32, 32), loss=loss)
model = chain.model
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, STEPS), eps=1e-5)


def train(stages):
    """The loss of every step on that many stages, and the accuracy at the end."""
    plan = fz.Plan(pipe=stages, data=2, microbatches=4, schedule="1f1b")
    state = fz.init(model, tx, plan, rng=0)
    train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)
    random, losses = np.random.default_rng(0), []
    for _ in range(STEPS):
        rows = random.integers(0, len(labels) - HELD_OUT, BATCH)
        state, metrics = train_step(state, {"x": images[rows], "label": labels[rows]})
        losses.append(float(metrics["loss"]))
    accuracy = float(eval_step(state, held_out)["accuracy"])
    print(f"pipe={stages}  loss {losses[0]:.3f} -> {losses[-1]:.3f}  accuracy {accuracy:.3f}")
    return np.array(losses), state, accuracy


runs = {stages: train(stages) for stages in STAGES}
one, _, accuracy = runs[1]
cut = [losses for stages, (losses, _, _) in runs.items() if stages > 1]
same = all(np.array_equal(losses, cut[0]) for losses in cut)
apart = np.abs(cut[0] - one) / one
difference = float(np.max(apart[:FIRST]))

OUT.mkdir(parents=True, exist_ok=True)
figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
axes = figure.add_subplot()
for (stages, (losses, _, _)), width in zip(runs.items(), (6, 3, 1), strict=True):
    # Each thinner than the ones below it, or the last would hide them.
    axes.plot(losses, linewidth=width, label=f"{stages} stage{'s' * (stages > 1)}")
axes.set(xlabel="step", ylabel="cross-entropy", title="AlexNet on digits: pipeline stages")
axes.legend(frameon=False)
figure.savefig(OUT / "loss.png")

# Back to PyTorch, from the state of four stages.
module.load_state_dict(tb.state_dict(chain, runs[STAGES[-1]][1]))
with torch.no_grad():
    answers = module.eval()(torch.from_numpy(held_out["x"])).argmax(-1).numpy()
in_torch = float(np.mean(answers == held_out["label"]))
print(f"held-out accuracy in PyTorch: {in_torch:.3f}")
print(f"losses of 2 and 4 stages are {'the same to the bit' if same else 'DIFFERENT'}")
print(f"from those of one program in {FIRST} steps: {difference:.1e} (bound {BOUND:.0e}),"
      f" at the end {apart[-1]:.1e}")  # fmt: skip
assert same
assert difference < BOUND
assert abs(in_torch - accuracy) < 0.01
assert in_torch > 0.8
