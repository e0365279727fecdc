"""A PyTorch CNN with BatchNorm and dropout: into JAX, trained with ZeRO-3, and back to PyTorch.

    python examples/torch_cnn_digits.py

The module is converted once. Training happens on one sharded state; at the end its `state_dict`
goes back into the PyTorch module, which then gets every held-out digit right that JAX got right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from sklearn.datasets import load_digits

import fzero as fz
import torch_bridge as tb


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first
BATCH, EPOCHS, HELD_OUT = 96, 5, 360

# 1797 images of 8 x 8 pixels; the last fifth is held out.
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order, None] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
train = {"image": images[:-HELD_OUT], "label": labels[:-HELD_OUT]}
held_out = {"image": images[-HELD_OUT:], "label": labels[-HELD_OUT:]}

torch.manual_seed(0)
module = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1),
    torch.nn.BatchNorm2d(32),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Dropout(0.25),
    torch.nn.Linear(32 * 4 * 4, 10),
)
converted = tb.convert(module, torch.zeros(2, 1, 8, 8))


def loss(forward, batch):
    """Cross-entropy and accuracy, as exact means over all devices."""
    logits, count = forward(batch["image"]), jnp.float32(batch["label"].size)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = jnp.argmax(logits, -1) == batch["label"]
    return fz.Mean(jnp.sum(losses), count), {"accuracy": fz.Mean(jnp.sum(right), count)}


model = converted.model(loss)
plan = fz.Plan(zero=3)
tx = optax.adamw(3e-3)
state = fz.init(model, tx, plan, rng=0)
train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)

for epoch in range(EPOCHS):
    shuffled = np.random.default_rng(epoch).permutation(len(train["label"]))
    for start in range(0, len(shuffled) - BATCH + 1, BATCH):
        rows = shuffled[start : start + BATCH]
        state, _ = train_step(state, {name: values[rows] for name, values in train.items()})
    found = eval_step(state, held_out)
    print(f"epoch {epoch}  loss {found['loss']:.3f}  accuracy {found['accuracy']:.3f}")

# Back to PyTorch: parameters and running statistics, under the module's own names.
module.load_state_dict(tb.state_dict(converted, state))
module.eval()
with torch.no_grad():
    answers = module(torch.from_numpy(held_out["image"])).argmax(-1).numpy()
in_torch = float(np.mean(answers == held_out["label"]))
print(f"held-out accuracy: JAX {found['accuracy']:.4f}, PyTorch {in_torch:.4f}")
assert abs(in_torch - float(found["accuracy"])) < 1e-6
assert in_torch > 0.97
