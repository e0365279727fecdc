"""A capacity of experts: what they drop in train mode is counted from mixture to mixture.

transformers' mixtures take all their tokens. With a capacity the traced forward hands a count on
from one to the next, as it does the tokens: so it goes through loops over blocks, links of a chain
and stages of a pipeline, and comes out beside the module's output, for a metric.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from fzero.compat import set_within
from fzero.errors import ConversionError, is_number
from fzero.links import Mean
from torch_bridge.export.stand_ins.replacement import as_class


METRIC = "dropped"


class Counted(NamedTuple):
    """What a forward gives in train mode where experts have a capacity.

    Attributes:
        output: the module's own.
        dropped: float32 `(2,)`: how many choices of tokens were dropped, and how many there were.
    """

    output: Any
    dropped: Any


class _Count:
    """The count of a forward that runs, and by what."""

    def __init__(self, capacity: float, module: torch.nn.Module) -> None:
        first = next(module.parameters(), torch.zeros(()))
        self.capacity, self.mixtures = capacity, 0
        self.value = torch.zeros(2, dtype=torch.float32, device=first.device)


_COUNT: ContextVar[_Count | None] = ContextVar("count", default=None)


def within_capacity(
    rows: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, num: int
) -> torch.Tensor | None:
    """A mixture's result within the capacity of the forward that runs; None: it has none."""
    count = _COUNT.get()
    if count is None:
        return None
    count.mixtures += 1
    out, count.value = torch.ops.torch_bridge.expert_sum_within(
        rows, x, chosen, gates, num, count.capacity, count.value
    )
    return out


@contextlib.contextmanager
def capacity_of(module: torch.nn.Module, capacity: float | None, train: bool) -> Iterator[None]:
    """Meanwhile, the module's forward in train mode has a capacity, and gives `Counted`.

    Args:
        module: the module; its class is put back.
        capacity: see `fz.experts`; None leaves the module as it is.
        train: whether its forward in train mode is wanted.

    Raises:
        ConversionError: no capacity, or a forward that would not be seen.
    """
    if capacity is None:
        yield
        return
    if not is_number(capacity) or not capacity > 0:
        raise ConversionError(
            f"tb.convert(capacity={capacity!r}): expected a number above 0 (1.25: an expert takes a"
            " quarter more than its even share of the tokens), or None. A forward's own argument of"
            " that name is given by position"
        )
    if not train:
        raise ConversionError(
            "tb.convert(train=False, capacity=...): experts drop tokens in train mode only; leave"
            " one of the two out"
        )
    kind = type(module)
    if "forward" in vars(module):
        raise ConversionError(
            f"tb.convert(capacity=...): the {kind.__name__}'s forward was replaced on the module"
            " itself; put it into a module around it, and convert that"
        )

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.forward(self, *args, **kwargs)
        count = _Count(float(capacity), self)
        with set_within(_COUNT, count):
            output = kind.forward(self, *args, **kwargs)
        if not count.mixtures:
            raise ConversionError(
                f"tb.convert(capacity=...): no mixture of transformers' interface ran in the"
                f" {kind.__name__}'s forward in train mode, so that nothing would be dropped. Leave"
                " it out; a layer of your own drops tokens, and says how many:"
                " fz.experts(..., capacity=1.25)"
            )
        return Counted(output, count.value)

    with as_class(module, {"forward": forward}):
        yield


def counts(mode: Any) -> bool:
    """Whether a graph's forward gives `Counted`."""
    return mode.out_spec.context is Counted


def told(result: Any, dropped: Any) -> Any:
    """What a loss gives, with the share that was dropped as a metric.

    Args:
        result: a loss, or that and a dict of metrics.
        dropped: of all calls of the forward, as in `Counted`.

    Raises:
        ConversionError: the loss has a metric of that name.
    """
    value, metrics = result if isinstance(result, tuple) else (result, {})
    if METRIC in metrics:
        raise ConversionError(
            f"the loss has a metric {METRIC!r}, the name of what experts drop"
            " (tb.convert(capacity=...)); give it another name"
        )
    total, count = dropped
    return value, {**metrics, METRIC: Mean(total, count)}
