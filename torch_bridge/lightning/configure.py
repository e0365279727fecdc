"""What `configure_optimizers` returns, in any of its forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.lightning.hooks import own_method
from torch_bridge.lightning.steps import with_trainer


@dataclass(frozen=True)
class Configured:
    """One optimizer, and its scheduler if there is one.

    Args:
        optimizer: a torch optimizer.
        scheduler: a scheduler or `None`.
        every: optimizer steps between two of the scheduler.
    """

    optimizer: Any
    scheduler: Any
    every: int


@dataclass(frozen=True)
class _Trainer:
    """What `configure_optimizers` may ask of a trainer."""

    num_steps: int | None
    steps_per_epoch: int | None

    def __getattr__(self, name: str) -> Any:
        found = {
            "estimated_stepping_batches": ("num_steps", self.num_steps),
            "max_steps": ("num_steps", self.num_steps),
            "num_training_batches": ("steps_per_epoch", self.steps_per_epoch),
            "accumulate_grad_batches": ("", 1),
        }
        if name == "max_epochs":
            both = self.num_steps, self.steps_per_epoch
            whole = None if None in both else -(-both[0] // both[1])  # type: ignore[operator]
            found[name] = ("num_steps= and steps_per_epoch", whole)
        if name not in found:
            raise ConversionError(
                f"configure_optimizers uses self.trainer.{name}; there is no trainer here. Make the"
                " transformation yourself (tb.optimizer, optax) and pass it as tx="
            )
        argument, value = found[name]
        if value is None:
            raise ConversionError(
                f"configure_optimizers uses self.trainer.{name}: pass {argument}= to from_lightning"
            )
        return value


def configured(
    module: torch.nn.Module, num_steps: int | None, steps_per_epoch: int | None
) -> Configured:
    """Call a module's `configure_optimizers`.

    Args:
        module: the module.
        num_steps: optimizer steps to train for, if known.
        steps_per_epoch: optimizer steps in an epoch, if known.

    Returns:
        Its one optimizer, with the scheduler's interval in optimizer steps.

    Raises:
        ConversionError: none or several optimizers or schedulers, an interval in epochs of unknown
            length, or a form that Lightning does not take either.
    """
    name = type(module).__name__
    if own_method(type(module), "configure_optimizers") is None:
        raise ConversionError(f"{name} has no configure_optimizers; pass tx=, an optax optimizer")
    with with_trainer(module, _Trainer(num_steps, steps_per_epoch)):
        returned = module.configure_optimizers()  # type: ignore[operator]
    optimizers, schedulers = _as_lists(returned)
    if len(optimizers) != 1:
        raise ConversionError(
            f"configure_optimizers of {name} returns {len(optimizers)} optimizers; a step here has"
            " one. Give one optimizer a group for each kind of parameter, or pass tx= (for networks"
            " that train in turns: a model and a step for each)"
        )
    if len(schedulers) > 1:
        raise ConversionError(
            f"configure_optimizers of {name} returns {len(schedulers)} schedulers for one"
            " optimizer; make them one (torch.optim.lr_scheduler.ChainedScheduler or SequentialLR)"
        )
    if not schedulers:
        return Configured(optimizers[0], None, 1)
    config = schedulers[0]
    config = dict(config) if isinstance(config, Mapping) else {"scheduler": config}
    every = _every(config.get("interval", "epoch"), config.get("frequency", 1), steps_per_epoch)
    return Configured(optimizers[0], config["scheduler"], every)


def _as_lists(returned: Any) -> tuple[list[Any], list[Any]]:
    """Optimizers and schedulers, or their configurations."""
    if isinstance(returned, torch.optim.Optimizer):
        return [returned], []
    if isinstance(returned, Mapping) and "optimizer" in returned:
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, tuple | list):
        pair = len(returned) == 2 and isinstance(returned[0], list)
        if pair and all(isinstance(one, torch.optim.Optimizer) for one in returned[0]):
            second = returned[1]
            return returned[0], list(second) if isinstance(second, list | tuple) else [second]
        if all(isinstance(one, torch.optim.Optimizer | Mapping) for one in returned):
            each = [_as_lists(one) for one in returned]
            return [o for own, _ in each for o in own], [s for _, own in each for s in own]
    raise ConversionError(
        f"configure_optimizers returned {returned!r:.80}; expected an optimizer, a list of one, a"
        " dict with 'optimizer' (and 'lr_scheduler'), or a list of optimizers and one of schedulers"
    )


def _every(interval: str, frequency: int, steps_per_epoch: int | None) -> int:
    """Optimizer steps between two steps of a scheduler."""
    if interval not in ("step", "epoch"):
        raise ConversionError(f"lr_scheduler: interval is {interval!r}; expected 'step' or 'epoch'")
    if interval == "step" and frequency == 1:
        return 1
    if steps_per_epoch is None:
        step = "'interval': 'step'"
        what, other = (
            ("steps once per epoch", step)
            if interval == "epoch"
            else (f"has frequency={frequency}", f"{step}, 'frequency': 1")
        )
        raise ConversionError(
            f"the scheduler {what}: pass steps_per_epoch= to from_lightning (or give it"
            f" {{'scheduler': ..., {other}}})"
        )
    if interval == "epoch":
        return steps_per_epoch * frequency
    if steps_per_epoch % frequency:
        raise ConversionError(
            f"the scheduler steps every {frequency} batches, counted anew in each epoch of"
            f" {steps_per_epoch}; make one a multiple of the other"
        )
    return frequency
