"""What a Lightning module may do around its steps; all that would be left out is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.errors import ConversionError, warn


# Packages whose LightningModule is the one that modules inherit from.
_PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")

_CLIP = "clip with Plan(clip_norm=...), or in optax before the optimizer"
_BATCH = "do it where batches are made, and convert with such a batch"
_OWN = "what it does to gradients or weights belongs into the optax transformation"
_BEFORE = "call it before, and then name it in ignore_hooks="
# Hooks that Lightning calls while it fits, and where that belongs in a pure step.
_HOOKS = {
    "backward": _OWN,
    "optimizer_step": _OWN,
    "optimizer_zero_grad": _OWN,
    "lr_scheduler_step": "give from_lightning tx= with the schedule in it",
    "configure_gradient_clipping": _CLIP,
    "on_before_backward": _OWN,
    "on_after_backward": _OWN,
    "on_before_zero_grad": _OWN,
    "on_before_optimizer_step": _OWN,
    "on_before_batch_transfer": _BATCH,
    "transfer_batch_to_device": _BATCH,
    "on_after_batch_transfer": _BATCH,
    "configure_callbacks": "what they do to training is of the plan (ema=, microbatches=) or of tx",
    "on_fit_start": _BEFORE,
    "on_train_start": _BEFORE,
    "on_train_epoch_start": "call what it does between steps",
    "on_train_epoch_end": "call what it does between steps",
    "on_train_batch_start": "call what it does between steps",
    "on_train_batch_end": "call what it does between steps",
}
# What Lightning calls before it fits: whether that was done nobody can see.
_MAKE_READY = ("setup", "configure_model")


def own_method(kind: type, name: str) -> Any:
    """The method that a module's class has of its own, not from Lightning's or torch's base."""
    for one in kind.__mro__:
        if _is_base(one):
            return None
        if name in vars(one):
            return getattr(kind, name)
    return None


def _is_base(kind: type) -> bool:
    lightning = kind.__name__ == "LightningModule" and kind.__module__.split(".")[0] in _PACKAGES
    return lightning or kind in (torch.nn.Module, object)


def check_hooks(module: torch.nn.Module, ignored: Sequence[str]) -> None:
    """Refuse a module that does more to train than its training step.

    Args:
        module: the module.
        ignored: names of hooks that may be left out.

    Raises:
        ConversionError: names everything that would be left out, and where it belongs.

    Warns:
        What makes a module ready before it is fitted has to be called before.
    """
    kind = type(module)
    known = [*_HOOKS, *_MAKE_READY]
    unknown = sorted(set(ignored) - set(known))
    if unknown:
        raise ConversionError(f"ignore_hooks: {unknown} are no hooks of training: {known}")
    if own_method(kind, "training_step") is None:
        raise ConversionError(
            f"{kind.__name__} has no training_step(batch, batch_idx); tb.convert(module, *example)"
            " converts modules with a forward only"
        )
    if not getattr(module, "automatic_optimization", True):
        raise ConversionError(
            f"{kind.__name__}: automatic_optimization is False: its training_step optimizes by"
            " hand, which is no function of parameters and batch. Return the loss of one"
            " optimizer's step, and build a step for each optimizer"
        )
    for name in (n for n in _MAKE_READY if own_method(kind, n) and n not in ignored):
        warn(
            f"{kind.__name__}.{name} is taken as called: no conversion calls it. Call it before,"
            f" and say ignore_hooks=({name!r},)"
        )
    found = [name for name in _HOOKS if own_method(kind, name) and name not in ignored]
    if found:
        lines = "\n".join(f"  {name}: {_HOOKS[name]}" for name in found)
        raise ConversionError(
            f"{kind.__name__} overrides hooks that Lightning calls while it trains, and a pure step"
            f" would leave out:\n{lines}\nOr name those that training does not depend on (logging,"
            f" say): ignore_hooks={tuple(found)}"
        )
