"""Linear layers whose weight is kept in blocks of 4 or 8 bits, as `fz.quantize` makes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch

from fzero.errors import ConversionError
from fzero.weight_records import dequantize, quantized_shape


class Dense(NamedTuple):
    """What the records of a leaf stand for.

    Attributes:
        shape: of the weight.
        dtype: of the weight, before it was quantised.
        to: "nf4", "nf4-double" or "int8".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    to: str

    def tensor(self, records: torch.Tensor) -> torch.Tensor:
        """The weight, in float32."""
        return _widened(records, list(self.shape), torch.float32)


class QuantizedLinear(torch.nn.Module):
    """A linear layer (or transformers' `Conv1D`) with records for a weight, and without its values.

    Args:
        layer: the layer.
        to: "nf4", "nf4-double" or "int8".
    """

    def __init__(self, layer: torch.nn.Module, to: str) -> None:
        super().__init__()
        weight: Any = layer.weight
        shape = quantized_shape(tuple(weight.shape), to)
        records = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        self.dense = Dense(tuple(weight.shape), weight.dtype, to)
        self.transposed = not isinstance(layer, torch.nn.Linear)
        self.weight = torch.nn.Parameter(records, requires_grad=False)
        self.bias: Any = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            raise ConversionError(
                f"a quantised layer was called with {x.dtype}: the module casts its input to the"
                " dtype of the weight; leave this layer out (tb.quantize(..., targets=))"
            )
        weight = torch.ops.fzero.dequantize(self.weight, list(self.dense.shape), x.dtype)
        if not self.transposed:
            return torch.nn.functional.linear(x, weight, self.bias)
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), weight)
        return out.view((*x.size()[:-1], weight.size(1)))


def _widened(records: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    wide = dequantize(jnp.asarray(records.cpu().numpy()), tuple(shape), np.float32)
    return torch.from_numpy(np.array(wide)).to(records.device, dtype)


@torch.library.custom_op("fzero::dequantize", mutates_args=())
def _dequantize(records: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return _widened(records, shape, dtype)


@_dequantize.register_fake
def _(records: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=records.device)
