"""`from_lightning`: a module's steps and optimizers as a `Model` and an optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optax
import torch

from fzero.model import Model
from torch_bridge.convert import convert
from torch_bridge.converted import Converted
from torch_bridge.lightning.configure import configured
from torch_bridge.lightning.hooks import check_hooks
from torch_bridge.lightning.predict import predicting
from torch_bridge.lightning.steps import as_steps
from torch_bridge.optim import optimizer


@dataclass(frozen=True, eq=False)
class Lightning:
    """A Lightning module as what fzero trains.

    Attributes:
        model: `training_step` where it trains, `validation_step` where it is evaluated; what they
            log is the metrics. `fz.predict_step` gives the arrays that `predict_step` returns, or
            forward where there is none, called with the batch (Lightning's default).
        tx: `configure_optimizers`, schedule included.
        converted: the module's tensors and names, for `tb.save`, `tb.state_dict` and the like.
            (Its `apply` takes a batch, and gives `{"loss": ..., "logs": {...}}`.)
    """

    model: Model
    tx: optax.GradientTransformation
    converted: Converted


def from_lightning(
    module: torch.nn.Module,
    example_batch: Any,
    *,
    tx: optax.GradientTransformation | None = None,
    num_steps: int | None = None,
    steps_per_epoch: int | None = None,
    eval_loss: str | None = None,
    ignore_hooks: Sequence[str] = (),
) -> Lightning:
    """Convert a Lightning module: its steps, its optimizer and its schedule.

    The module is one of `lightning` or `pytorch_lightning`, or any `torch.nn.Module` with the same
    methods; neither package is needed. `training_step` and `validation_step` are exported, like
    a forward, with all that they call; so is `predict_step` (or forward, by Lightning's default),
    and if it cannot be, `fz.predict_step` says why. A loss is the mean over a device's rows that
    the step computes, and then over devices and microbatches, as it is with data parallelism in
    Lightning; so is what `self.log` and `self.log_dict` are given.

    Args:
        module: the module, after `setup` and `configure_model` if it has them (a warning asks for
            them unless they are named in `ignore_hooks`).
        example_batch: what its data loader gives: tensors or arrays in dicts, lists or tuples, with
            at least 2 rows. Batches of training and validation have the same structure. (Steps take
            arrays: `jax.tree.map(np.asarray, batch)`.)
        tx: replaces `configure_optimizers`, which is then not called.
        num_steps: optimizer steps to train for: what a schedule needs that asks the trainer for
            `estimated_stepping_batches`, or that `tb.optimizer` says so of.
        steps_per_epoch: optimizer steps in an epoch: what a schedule that steps per epoch needs.
        eval_loss: the logged value that is the loss of evaluation. By default it is what
            `validation_step` returns, or else the one logged value with `loss` in its name.
        ignore_hooks: hooks that training does not depend on, or that were called, to be left out.

    Returns:
        Model, transformation and converted module.

    Raises:
        ConversionError: the steps cannot be converted; use `self.trainer`, `batch_idx` or the like;
            optimize by hand; there are several optimizers; or hooks would be left out. It names
            what it found.

    Example:
        >>> import jax.numpy as jnp
        >>> class Line(torch.nn.Module):  # or lightning.LightningModule
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         loss = self.layer(batch["x"]).square().mean()
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> line = from_lightning(Line(), {"x": torch.ones(4, 2)})
        >>> batch = {"x": jnp.ones((8, 2))}
        >>> loss, _, metrics = line.model.loss(*line.model.init, batch, None, True)
        >>> bool(loss == metrics["train_loss"]), sorted(line.converted.params)
        (True, ['layer.bias', 'layer.weight'])
    """
    check_hooks(module, ignore_hooks)
    with as_steps(module, eval_loss):
        converted = convert(module, example_batch, batch_dim=0)
    if tx is None:
        found = configured(module, num_steps, steps_per_epoch)
        tx = optimizer(
            found.optimizer, converted, found.scheduler, every=found.every, num_steps=num_steps
        )
    return Lightning(predicting(module, example_batch, converted, _loss), tx, converted)


def _loss(forward: Callable[[Any], Any], batch: Any) -> tuple[Any, dict[str, Any]]:
    out = forward(batch)
    return out["loss"], out["logs"]
