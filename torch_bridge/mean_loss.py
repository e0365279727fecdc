"""Whether a loss of PyTorch is a mean over rows, as it has to be where devices share them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from fzero.errors import ConversionError, warn
from torch_bridge.export.watch.forward import untouched


# Means of a million elements, one of all and one of eight parts, differ by up to 2e-7. With more
# room a batch in which rows count differently may seem to be one in which they do not.
ROUNDING = 1e-5


def require_mean(
    module: torch.nn.Module, loss: Callable[..., Any], example: Any, times: int
) -> bool:
    """Refuse a loss that sums rows, and warn of one in which they count differently.

    It is computed for all rows and for those of each device and microbatch, of outputs that are
    made up, from 0 to 1. Nothing is said of a loss that does not take these.

    Returns:
        Whether it could be looked at.
    """
    *inputs, target = example if isinstance(example, tuple) else (None,)
    if times == 1 or not isinstance(target, torch.Tensor) or not target.ndim:
        return False
    size = len(target) // times
    if not size:
        return False

    def of(start: int, stop: int) -> float:
        return float(loss(tree_map(lambda x: x[start:stop], out), target[start:stop]))

    try:
        with untouched(module, False), torch.no_grad(), torch.random.fork_rng([]):
            with FakeTensorMode(allow_non_fake_inputs=True):
                shapes = module(*inputs)
            out = tree_map(_made_up, shapes)
            whole, again = of(0, size * times), of(0, size * times)
            each = [of(size * number, size * (number + 1)) for number in range(times)]
    except Exception:  # what it cannot be asked it is not asked
        return False
    if whole != again or np.isclose(whole, np.mean(each), rtol=ROUNDING, atol=1e-6):
        return whole == again
    if np.isclose(whole, np.sum(each), rtol=1e-3, atol=1e-6):
        raise ConversionError(
            f"fit: the loss is a sum over rows, of which each of {times} devices and microbatches"
            ' has its share: a mean of these is taken. Use reduction="mean"'
        )
    warn(
        "fit: rows count differently in this loss (labels that are ignored, weights of classes, or"
        f" rows that are compared): it is the mean of {times} losses, one for each device and"
        " microbatch, as under DDP, and not that of the whole batch. plan=fz.Plan(data=1) has the"
        " latter; so has a loss of your own that returns an fz.Mean (tb.convert, fz.train_step)"
    )
    return True


def _made_up(leaf: Any) -> Any:
    """Numbers from 0 to 1 for a tensor that is fake, in no order: rows differ in more than size.

    Those of 16 bits are of 32: two means that are rounded to 16 do not tell.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    mixed = torch.linspace(0.05, 0.95, 61)[torch.arange(61) * 17 % 61]
    made = mixed.repeat(leaf.numel() // 61 + 1)[: leaf.numel()]
    wide = leaf.is_floating_point() and leaf.dtype.itemsize < 4
    return made.reshape(leaf.shape).to(torch.float32 if wide else leaf.dtype)
