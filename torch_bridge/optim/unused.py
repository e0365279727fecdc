"""What `tb.fit` may be given to train with: an optimizer that has taken no step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.optim.schedules import require_of


def require_unused(optimizer: Any, scheduler: Any) -> None:
    """Refuse an optimizer that has taken steps, a class of them, and a scheduler of none."""
    if isinstance(optimizer, type):
        raise ConversionError(
            f"fit: the optimizer is the class {optimizer.__name__}: expected one of it, made of the"
            " module's parameters"
        )
    if isinstance(optimizer, list | tuple) and not hasattr(optimizer, "update"):
        raise ConversionError(
            "fit: several optimizers: expected one. tb.optimizer([...], converted, [...]) makes one"
            " of them and their schedulers, for tb.convert, fz.init and fz.train_step"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        if scheduler is not None:
            raise ConversionError(
                "fit: scheduler= is of a torch optimizer; an optax transformation has its schedule"
                " within, such as optax.adamw(optax.linear_schedule(...))"
            )
    elif any(map(_steps_done, optimizer.state.values())):
        raise ConversionError(
            f"fit: the {type(optimizer).__name__} has state of steps that it took, and fit would"
            " start afresh. Make a new one; or go on from Adam's moments with tb.convert,"
            " tb.optimizer and tb.with_moments (or tb.restore of a checkpoint)"
        )
    elif scheduler is not None:
        require_of(optimizer, scheduler)


def _steps_done(state: Any) -> bool:
    """Whether a parameter's state is of a step (Adagrad has one of none from the beginning)."""
    return not isinstance(state, Mapping) or bool(state.get("step", 1))
