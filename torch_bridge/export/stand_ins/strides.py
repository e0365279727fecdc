"""What counts over a tensor's memory: `as_strided`, what it scatters, diagonals that are filled.

Strides are over memory, and here a tensor is its elements in order. What a forward writes by them
torch.export makes `aten.as_strided_scatter` of, with the gradient of the write. PyTorch has another
for a `torch.as_strided_scatter` that a forward calls itself: that is an operator of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.errors import ConversionError


_LIBRARY = torch.library.Library("torch_bridge", "FRAGMENT")
_LIBRARY.define(
    "as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride,"
    " SymInt? storage_offset=None) -> Tensor"
)
_LIBRARY.impl("as_strided_scatter", torch.as_strided_scatter, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_bridge::as_strided_scatter", lambda x, *_: torch.empty_like(x), lib=_LIBRARY
)


def _in_order(name: str, operator: Any) -> Callable[..., torch.Tensor]:
    def function(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        memory = input.untyped_storage().nbytes() // input.element_size()
        if not input.is_contiguous() or memory != input.numel():
            raise ConversionError(
                f"{name} of a view: its strides count over memory of which an array in JAX holds"
                " only the view's own elements. Call .contiguous().clone() first, or index."
            )
        found: torch.Tensor = operator(input, *args, **kwargs)
        return found

    return function


def _fill_diagonal(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """By a mask: PyTorch's own writes by strides, which are wrong where `x` is a view."""
    if x.ndim < 2 or any(size != x.shape[0] for size in x.shape[1:] if x.ndim > 2):
        return torch.ops.aten.fill_diagonal_(x, fill_value, wrap)  # which says what is wrong
    places = [
        torch.arange(size, device=x.device).reshape(-1, *[1] * (x.ndim - dim - 1))
        for dim, size in enumerate(x.shape)
    ]
    # Wrapped, it begins anew one row behind the last column.
    first = places[0] % (x.shape[1] + 1) if wrap and x.ndim == 2 else places[0]
    mask = first == places[1]
    for place in places[2:]:
        mask = mask & (first == place)
    if not (x.is_floating_point() or x.is_complex()):
        fill_value = int(fill_value)  # as `fill_` casts, and `masked_fill_` does not
    return x.masked_fill_(mask, fill_value)


_strided = _in_order("as_strided", torch.ops.aten.as_strided)
_scattered = _in_order("as_strided_scatter", torch.ops.torch_bridge.as_strided_scatter)
STRIDES: dict[Any, Callable[..., Any]] = {
    torch.as_strided: _strided,
    torch.Tensor.as_strided: _strided,
    torch.as_strided_scatter: _scattered,
    torch.Tensor.as_strided_scatter: _scattered,
    torch.Tensor.fill_diagonal_: _fill_diagonal,
}
