"""The script of Lightning #17523, `validate()` and then `fit()` with ZeRO-3, as pure functions.

    python examples/lightning_validate_then_fit.py

There the strategy builds an engine around the module for `validate` and another one for `fit`, and
under DeepSpeed's stage 3 both manage the same parameters. Here nothing is built around the module:
its steps are functions of one state. Prints every loss of fit alone and of validate, fit, validate,
fit; they are the same, bit for bit, on 8 devices. Lightning itself is used if it is installed.
"""

import jax
import numpy as np
import torch

import fzero as fz
import torch_bridge as tb


try:
    from lightning import LightningModule
except ImportError:  # only the names of its methods matter
    from torch.nn import Module as LightningModule

jax.config.update("jax_num_cpu_devices", 8)  # before anything uses jax; GPUs come first
EPOCHS, BATCHES = 2, 4


class Model(LightningModule):
    """A module as Lightning takes it: steps, logging, an optimizer and a schedule."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("valid_loss", torch.nn.functional.cross_entropy(logits, y))
        self.log("valid_accuracy", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def loader(seed):
    """Random rows, and which half of them has the larger sum."""
    rng = np.random.default_rng(seed)
    for _ in range(BATCHES):
        x = rng.standard_normal((64, 32)).astype(np.float32)
        yield [x, (x[:, :16].sum(1) > x[:, 16:].sum(1)).astype(np.int32)]


torch.manual_seed(0)
lightning = tb.from_lightning(Model(), next(loader(0)), steps_per_epoch=BATCHES)
plan = fz.Plan(zero=3, min_shard_bytes=0)  # even these leaves are split over the devices
train_step = fz.train_step(lightning.model, lightning.tx, plan)
eval_step = fz.eval_step(lightning.model, plan)


def fit(state):
    """An epoch of training: the new state and every loss."""
    losses = []
    for batch in loader(seed=1):
        state, metrics = train_step(state, batch)
        losses.append(metrics["train_loss"])
    return state, losses


def validate(state):
    """What is logged, averaged over the validation set; the state stays what it is."""
    logged = [eval_step(state, batch) for batch in loader(seed=2)]
    return {name: float(np.mean([one[name] for one in logged])) for name in logged[0]}


alone, state = [], fz.init(lightning.model, lightning.tx, plan, rng=0)
for _ in range(EPOCHS):
    state, losses = fit(state)
    alone += losses

together, state = [], fz.init(lightning.model, lightning.tx, plan, rng=0)
for epoch in range(EPOCHS):
    print(
        "validate: loss {valid_loss:.4f}, accuracy {valid_accuracy:.3f}".format(**validate(state))
    )
    state, losses = fit(state)
    together += losses
    print(f"fit, epoch {epoch}: losses", *(f"{loss:.6f}" for loss in losses))
print("validate: loss {valid_loss:.4f}, accuracy {valid_accuracy:.3f}".format(**validate(state)))

assert [x.tobytes() for x in together] == [x.tobytes() for x in alone]
print(f"all {len(alone)} losses are those of fit alone, bit for bit")
