"""`quantize`: a converted module whose linear layers are frozen, in blocks of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fzero.errors import ConversionError, StateError
from fzero.weight_records import Quantized, quantized_shape
from torch_bridge.adapters.layer import is_linear, target_paths
from torch_bridge.convert import convert_copy
from torch_bridge.converted import Converted
from torch_bridge.module.names import Layout
from torch_bridge.module.quantized_linear import QuantizedLinear


def quantize(
    converted: Converted, to: str = "nf4", targets: str | Sequence[str] = "all-linear"
) -> Converted:
    """A converted module whose linear layers' weights are frozen, in blocks of 4 or 8 bits.

    With `tb.lora` this is QLoRA: `tb.lora(tb.quantize(converted), rank=16)`. The weights stay in
    blocks in the state, in collectives and in checkpoints (`fz.quantize` says how); each is widened
    to the dtype of the layer's input where it is used, forwards and again backwards. All else, such
    as embeddings, norms, biases and the layer that gives logits, is as before.

    Args:
        converted: what to quantise. Its initial values are read, and quantised, piece by piece
            when a state is made.
        to: "nf4" (4.5 bits an element), "nf4-double" (4.13, scales in 8 bits) or "int8" (8.5).
        targets: which layers; see `tb.lora`.

    Returns:
        Another `Converted`. A weight is a leaf of uint8 under its own name: a row for each block.
        `tb.restore` quantises what it finds in 16 or 32 bits.

    Raises:
        ConversionError: another word for `to`; targets that are no linear layers, are tied, or are
            quantised already; the module has adapters already, or could not be copied.

    Example:
        >>> import torch, torch_bridge as tb
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 2))
        >>> small = quantize(tb.convert(net, torch.zeros(2, 64)))
        >>> small.params["0.weight"].dtype, small.params["0.weight"].shape, sorted(small.frozen)
        (dtype('uint8'), (8, 36), ['0.weight', '1.weight'])

    Source: Dettmers et al., QLoRA, arXiv:2305.14314.
    """
    if not isinstance(converted, Converted):
        raise ConversionError(
            f"quantize: expected what tb.convert gave, got a {type(converted).__name__}"
        )
    try:
        quantized_shape((), to)
    except StateError as error:
        raise ConversionError(str(error)) from None
    if converted.adapters:
        raise ConversionError(
            f"quantize: the module has adapters {sorted(converted.adapters)} already; quantise"
            " first: tb.lora(tb.quantize(converted), ...)"
        )
    old, buffers = converted.by_initial()
    leaf_of = converted.layout.leaf_of()

    def change(module: torch.nn.Module) -> None:
        made: dict[int, QuantizedLinear] = {}
        for path in target_paths(module, targets, by="quantize"):
            layer = module.get_submodule(path)
            if id(layer) not in made:
                why = _refused(layer, leaf_of[f"{path}.weight"].names, module)
                if why and targets == "all-linear":
                    continue
                if why:
                    raise ConversionError(f"quantize: target `{path}` {why}; leave it out")
                made[id(layer)] = QuantizedLinear(layer, to)
            module.set_submodule(path, made[id(layer)])
        if not made:
            raise ConversionError("quantize: no layer is left that can be; give targets=")

    def values(layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
        params: dict[str, Any] = {}
        for leaf in (leaf for leaf in layout.leaves if leaf.is_param):
            before = leaf_of[leaf.name]
            value = old[before.name]
            if leaf.dense and not before.dense:
                value = Quantized(value, leaf.dense.to)
            params[leaf.name] = value
        return params, buffers

    return convert_copy(converted, change, values)


def _refused(layer: torch.nn.Module, names: Sequence[str], module: torch.nn.Module) -> str:
    """Why a layer stays as it is; nothing where it does not."""
    if isinstance(layer, QuantizedLinear):
        return "is quantised already"
    plain = is_linear(layer) and (
        type(layer).forward is torch.nn.Linear.forward or type(layer).__name__ == "Conv1D"
    )
    if not plain:
        return "has a forward of its own"
    owners = {id(module.get_submodule(name.rpartition(".")[0])) for name in names}
    return f"is tied: its weight is {list(names)}" if len(owners) > 1 else ""
