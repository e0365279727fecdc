"""`max_norm=` of embeddings, which writes to the weight within a forward, as a value of its own.

PyTorch scales the rows that are looked up and are too long, in place and without a gradient, and
then looks them up: what reads the weight later in the forward sees the rows as they are then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from fzero.errors import ConversionError


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define(
    "embedding_renorm(Tensor weight, Tensor indices, float max_norm, float norm_type) -> Tensor"
)


def _renormed(weight: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.embedding_renorm_(weight.clone(), *args)


_LIBRARY.impl("embedding_renorm", _renormed, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_bridge::embedding_renorm", lambda weight, *_: torch.empty_like(weight), lib=_LIBRARY
)


class RewrittenRows:
    """The weights of one export with the rows that its forward has scaled so far.

    Args:
        training: whether a training forward is exported.

    Attributes:
        table: functions of PyTorch -> what is traced in their place.
    """

    def __init__(self, training: bool) -> None:
        self._training = training
        # By the id of a weight: the weight, so that the id stays its own, and what it became.
        self._became: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.table: Mapping[Any, Callable[..., Any]] = {
            F.embedding: functools.partial(self._look_up, F.embedding),
            F.embedding_bag: functools.partial(self._look_up, F.embedding_bag),
        }

    def as_they_are(self, arguments: Any) -> Any:
        """Arguments of a function, with the weights as the forward has rewritten them."""
        if not self._became:
            return arguments
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._now, arguments)

    def _now(self, x: torch.Tensor) -> torch.Tensor:
        while id(x) in self._became:
            x = self._became[id(x)][1]
        return x

    def _look_up(
        self, function: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        # Both have one argument between the weight and max_norm, and norm_type behind it.
        given = dict(zip(("between", "max_norm", "norm_type"), args, strict=False)) | kwargs
        if given.get("max_norm") is None:
            return function(input, weight, *args, **kwargs)
        if self._training and weight.requires_grad:
            raise ConversionError(
                "max_norm= of an embedding rewrites the rows of its weight in each training step,"
                " which the optimizer then starts from; a step here is a pure function. To"
                " evaluate: tb.convert(..., train=False). To train: leave max_norm= out, and scale"
                " rows that are too long after each step, state.replace(params=...)."
            )
        bounds = float(given["max_norm"]), float(given.get("norm_type", 2.0))
        rows = torch.ops.torch_bridge.embedding_renorm(weight, input, *bounds)
        self._became[id(weight)] = weight, rows
        if "max_norm" in kwargs:
            kwargs["max_norm"] = None
        return function(input, rows, *args[:1], *([None] if args[1:] else []), *args[2:], **kwargs)
