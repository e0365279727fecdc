"""A module and a loss of PyTorch as one module, which returns that loss."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.export.watch.counts import LOSS
from torch_bridge.module.wrappers import unwrapped


def with_loss(module: torch.nn.Module, loss: Any) -> torch.nn.Module:
    """The module, with its tensors and names, as one that returns a torch loss of its output.

    Converted, its own loss is what steps train: `tb.convert(tb.with_loss(module, loss), x, y)` and
    then `converted.model("module")`, of batches `(x, y)`. (`tb.fit` does both.)

    Args:
        module: the module; it is not changed, and shares its tensors and attributes with what is
            returned.
        loss: a torch loss, function or module, called as `loss(module(*batch[:-1]), batch[-1])`. It
            gives one number, a mean over rows: devices and microbatches have rows of their own,
            and the means over these count alike.

    Returns:
        A module of a subclass of the module's class, called with all parts of a batch.

    Raises:
        ConversionError: the loss is no function or module, or the module's `forward` cannot be
            called within another; when it is converted, the loss has dims.

    Example:
        >>> from torch_bridge import convert
        >>> module, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
        >>> classes = torch.tensor([0, 1, 1, 0])
        >>> converted = convert(with_loss(module, torch.nn.CrossEntropyLoss()), x, classes)
        >>> converted.model("module").init[0]["weight"].shape
        (2, 3)
    """
    if not callable(loss) or isinstance(loss, type):
        raise ConversionError(
            f"loss={loss!r:.60}: expected a function or module that is called with what the module"
            ' gives and the last part of a batch, or "module" in tb.fit for one that returns its'
            " own loss"
        )
    module = unwrapped(module)
    own = type(module)
    if "forward" in vars(module):
        raise ConversionError(
            "the module's `forward` is an attribute of its own, not its class's, and cannot be"
            ' called with a loss: give a module that returns its loss, and loss="module"'
        )
    if isinstance(module, torch.fx.GraphModule):
        raise ConversionError(
            "a torch.fx.GraphModule makes copies of itself without a loss around it: give the"
            ' module that was traced, or one that returns its loss, and loss="module"'
        )

    def forward(self: Any, *inputs: Any) -> Any:
        return own.forward(self, *inputs)

    def call(self: Any, *batch: Any) -> Any:  # with the hooks of the module around its forward
        value = loss(own.__call__(self, *batch[:-1]), batch[-1])
        if isinstance(value, torch.Tensor) and value.ndim:
            raise ConversionError(
                f"the loss has {value.ndim} dim(s): expected one number, a mean over rows"
                ' (reduction="mean")'
            )
        return value

    held = {"forward": forward, "__call__": call, LOSS: staticmethod(loss)}
    made: torch.nn.Module = object.__new__(type(own.__name__, (own,), held))
    # All attributes are those of the module, and not of a copy: hooks and other functions that hold
    # the module read its mode, and write what a forward of this one reads.
    object.__setattr__(made, "__dict__", vars(module))
    return made


_OF_TORCH = (
    "the loss is one of PyTorch, which computes with tensors, where a step has arrays of JAX: give"
    ' tb.convert(tb.with_loss(module, loss), *batch).model("module"), or tb.fit(module, loader,'
    " loss, optimizer=...); or write it with jax.numpy or optax (tb.causal_lm_loss for words)"
)


def require_of_jax(loss: Any) -> None:
    """Refuse a loss that is a module or function of PyTorch itself."""
    of = (getattr(loss, "__module__", None) or "").partition(".")[0]
    if isinstance(loss, torch.nn.Module) or of == "torch":
        raise ConversionError(f"model: {_OF_TORCH}")


_OF_TENSORS = re.compile(
    r"must be Tensor, not|received an invalid combination of arguments|and 'Tensor'|'Tensor' and"
)
_NO_ATTRIBUTE = re.compile(r"(?:Tracer|ArrayImpl)'?(?: object)? has no attribute '?(\w+)")


@contextmanager
def tensors_told() -> Iterator[None]:
    """Runs a loss; PyTorch's error for an array where it wants a tensor says what to do."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        # Functions in C tell by their words; those in Python ask an array for what a tensor has.
        *_, last = traceback.extract_tb(error.__traceback__)
        within = Path(last.filename).is_relative_to(Path(torch.__file__).parent)
        absent = _NO_ATTRIBUTE.search(str(error))
        asked = absent is not None and hasattr(torch.Tensor, absent[1])
        asked |= "'int' object is not callable" in str(error) and ".size(" in (last.line or "")
        if not within and not asked and not _OF_TENSORS.search(str(error)):
            raise
        raise ConversionError(f"{_OF_TORCH} ({str(error).splitlines()[0]})") from error
