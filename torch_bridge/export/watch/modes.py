"""Submodules that were put into a mode of their own, which a conversion does not keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import batchnorm, dropout

from fzero.errors import some_of, warn
from torch_bridge.export.watch.forward import untouched


class ModeWarning(UserWarning):
    """Submodules are in another mode than `module.train()` or `module.eval()` puts them into."""


def warn_of_modes(module: torch.nn.Module) -> None:
    """Say which norms and dropouts compute otherwise than both converted modes do.

    A module that overrides `train()` keeps what it says there, in a conversion, too.
    """
    own = {path: child.training for path, child in module.named_modules() if _matters(child)}
    with untouched(module, module.training):
        usual = {path: module.get_submodule(path).training for path in own}
    found = [path for path in own if own[path] != usual[path]]
    if not found:
        return
    word = {True: "train", False: "eval"}
    listed = some_of(
        [f"`{path}` ({type(module.get_submodule(path)).__name__})" for path in found], 3
    )
    call = f"module.{word[module.training]}()"
    warn(
        f"{listed}: in {word[own[found[0]]]} mode, while {call} puts it into"
        f" {word[usual[found[0]]]} mode. A conversion trains as the module does after .train()"
        " and evaluates as after .eval(). To keep a submodule in one mode, say so in the"
        " module: def train(self, mode=True): super().train(mode); self.norm.eval(); return self",
        ModeWarning,
    )


def _matters(child: Any) -> bool:
    """Whether a module itself computes otherwise in another mode."""
    if isinstance(child, batchnorm._NormBase):
        return bool(child.track_running_stats)
    if isinstance(child, dropout._DropoutNd):
        return child.p > 0
    return isinstance(child, torch.nn.RNNBase | torch.nn.MultiheadAttention) and child.dropout > 0
