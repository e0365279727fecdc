"""A flax model on scikit-learn's handwritten digits, with ZeRO-3.

    python examples/flax_digits.py

BatchNorm's statistics and dropout's keys are part of the state: evaluation between epochs changes
neither, and the module is told by its `train` argument which of the two it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import fzero as fz


jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first
BATCH, EPOCHS, HELD_OUT = 96, 6, 360

# 1797 images of 8 x 8 pixels; the last fifth is held out.
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
train = {"image": images[:-HELD_OUT], "label": labels[:-HELD_OUT]}
held_out = {"image": images[-HELD_OUT:], "label": labels[-HELD_OUT:]}


class Classifier(nn.Module):
    """Two hidden layers with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, x, train: bool):
        for width in (256, 128):
            x = nn.Dense(width)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


def loss(forward, batch):
    """Cross-entropy and accuracy, as exact means over all devices."""
    logits, count = forward(batch["image"]), jnp.float32(batch["label"].size)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = jnp.argmax(logits, -1) == batch["label"]
    return fz.Mean(jnp.sum(losses), count), {"accuracy": fz.Mean(jnp.sum(right), count)}


model = fz.from_flax(Classifier(), loss, held_out["image"][:2])
plan = fz.Plan(zero=3)
tx = optax.adamw(3e-3)
state = fz.init(model, tx, plan, rng=0)
train_step, eval_step = fz.train_step(model, tx, plan), fz.eval_step(model, plan)
print(fz.describe(plan, model, tx))

for epoch in range(EPOCHS):
    shuffled = np.random.default_rng(epoch).permutation(len(train["label"]))
    for start in range(0, len(shuffled) - BATCH + 1, BATCH):
        rows = shuffled[start : start + BATCH]
        state, _ = train_step(state, {name: values[rows] for name, values in train.items()})
    found = eval_step(state, held_out)
    print(f"epoch {epoch}  loss {found['loss']:.3f}  accuracy {found['accuracy']:.3f}")

print(f"held-out accuracy {found['accuracy']:.3f} after {int(state.step)} steps")
assert found["accuracy"] > 0.95
