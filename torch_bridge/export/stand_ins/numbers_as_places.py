"""`x[i] = value` where `i` is a tensor of one number: PyTorch asks it for the number.

A compiled program has none, and no size depends on it: the write is by the tensor. What is read so
(`x[i]`) is put right in the graph (`export.graph.places`).
"""

from __future__ import annotations

from typing import Any

import torch

from fzero.errors import ConversionError


# A byte is a mask in PyTorch.
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_MIXED = (
    "the forward writes where a tensor of one number and other tensors, masks or lists say"
    " together. Give the number a dim, i.reshape(1), or say all places by tensors of one shape."
)


def write_at_numbers(x: torch.Tensor, index: Any, value: Any) -> bool:
    """Write into `x` by tensors of one number.

    Args:
        x: what is written to.
        index: as of `x[index] = value`.
        value: a tensor or a number.

    Returns:
        Whether there is such a tensor in the index; otherwise nothing is written.

    Raises:
        ConversionError: other tensors, or lists, stand beside it.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    places = [
        dim
        for dim, one in enumerate(items)
        if isinstance(one, torch.Tensor) and not one.ndim and one.dtype in _WHOLE
    ]
    if places:
        _write_at(x, items, places, value)
    return bool(places)


def _write_at(x: torch.Tensor, items: list[Any], places: list[int], value: Any) -> None:
    """Where numbers that are tensors say the place, which PyTorch would ask for its value."""
    if any(not _selects(one) for dim, one in enumerate(items) if dim not in places):
        raise ConversionError(_MIXED)
    # Of all else a view; then one element of each dim that a tensor is the index of.
    numbers = [items[at] for at in places]
    rest = x[tuple(slice(None) if at in places else one for at, one in enumerate(items))]
    used = [sum(_keeps(one) for one in items[:at]) for at in places]
    if Ellipsis in [one for one in items if not isinstance(one, torch.Tensor)]:
        cut = next(at for at, one in enumerate(items) if one is Ellipsis)
        behind = [sum(_keeps(one) for one in items[at:]) for at in places]
        used = [
            dim if at < cut else rest.ndim - n
            for dim, n, at in zip(used, behind, places, strict=True)
        ]
    rest = rest.movedim(used, list(range(len(used))))
    shape = rest.shape[len(used) :]
    given = (
        value
        if isinstance(value, torch.Tensor)
        else torch.full((), value, dtype=x.dtype, device=x.device)
    )
    while given.ndim > len(shape) and given.shape[0] == 1:
        given = given.squeeze(0)
    rest.index_put_(
        tuple(one.reshape(1) for one in numbers), given.to(x.dtype).expand(shape).unsqueeze(0)
    )


def _selects(one: Any) -> bool:
    number = isinstance(one, int | torch.SymInt) and not isinstance(one, bool)
    return one is None or one is Ellipsis or number or isinstance(one, slice)


def _keeps(one: Any) -> bool:
    """Whether a dim of the view is left where this stands."""
    return one is not Ellipsis and not isinstance(one, int | torch.SymInt)
