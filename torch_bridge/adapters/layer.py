"""A layer with a low-rank update beside it, and putting such layers into a module.

Modules and names are those of PEFT, so that files of adapters fit, and so that what reads a
module's adapters does not care who put them there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.module.quantized_linear import QuantizedLinear


# The one adapter that `tb.lora` puts into a module; PEFT's own default.
NAME = "default"


@dataclass(frozen=True)
class Settings:
    """What an adapter is made of.

    Args:
        rank: columns of the update's two factors.
        alpha: the update is multiplied by alpha / rank, or alpha / sqrt(rank) if `rslora`.
        dropout: probability that an entry of the update's input is dropped.
        rslora: see `alpha`.
        dtype: of the factors.
    """

    rank: int
    alpha: float
    dropout: float
    rslora: bool
    dtype: torch.dtype

    @property
    def scaling(self) -> float:
        """What the update is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class LowRank(torch.nn.Module):
    """`base_layer(x) + scaling * lora_B(lora_A(dropout(x)))`.

    Args:
        base: a linear layer.
        settings: of the adapter.
    """

    def __init__(self, base: torch.nn.Module, settings: Settings) -> None:
        super().__init__()
        rows, columns = _sizes(base)
        weight: Any = base.weight
        made = {"bias": False, "device": weight.device, "dtype": settings.dtype}
        drop = torch.nn.Dropout(settings.dropout) if settings.dropout else torch.nn.Identity()
        self.base_layer = base
        self.fan_in_fan_out = _is_transposed(base)
        self.scaling = {NAME: settings.scaling}
        self.lora_dropout = torch.nn.ModuleDict({NAME: drop})
        self.lora_A = torch.nn.ModuleDict({NAME: torch.nn.Linear(rows, settings.rank, **made)})
        self.lora_B = torch.nn.ModuleDict({NAME: torch.nn.Linear(settings.rank, columns, **made)})

    @property
    def weight(self) -> Any:
        """The base's, for forwards that ask for its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        """The base's."""
        return self.base_layer.bias

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x, *args, **kwargs)
        down, up = self.lora_A[NAME], self.lora_B[NAME]
        weight: Any = down.weight
        own = self.lora_dropout[NAME](x.to(weight.dtype))
        return (out + up(down(own)) * self.scaling[NAME]).to(out.dtype)


def put_in(
    module: torch.nn.Module, targets: str | Sequence[str], settings: Settings, idle: bool
) -> tuple[str, ...]:
    """Puts adapters beside layers of a module, in place, and freezes all that was there.

    Args:
        module: the module.
        targets: as for `tb.lora`.
        settings: of the adapters.
        idle: whether some of several targets may name no layer, as in PEFT's files.

    Returns:
        The paths of the layers that have one now.

    Raises:
        ConversionError: targets that are no linear layers, or name none.
    """
    paths = target_paths(module, targets, idle)
    module.requires_grad_(False)
    made: dict[int, LowRank] = {}
    for path in paths:
        base = module.get_submodule(path)
        if id(base) not in made:
            made[id(base)] = LowRank(base, settings)
        module.set_submodule(path, made[id(base)])
    return paths


def target_paths(
    module: torch.nn.Module, targets: str | Sequence[str], idle: bool = False, by: str = "lora"
) -> tuple[str, ...]:
    """The paths of the layers that `targets` means, for an operation; see `put_in`."""
    named = list(_modules(module))
    if not isinstance(targets, Iterable):
        raise ConversionError(_none_of(named, f"{by}: targets={targets!r}"))
    if targets == "all-linear":
        head = _head(module)
        paths = [path for path, m in named if is_linear(m) and m is not head]
    elif isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ConversionError(
                f"{by}: targets={targets!r}: expected a regular expression for whole names: {error}"
            ) from error
        paths = [path for path, _ in named if pattern.fullmatch(path)]
    else:
        targets = list(targets)  # (an iterator is gone after once)
        ends = tuple(f".{end}" for end in targets)
        paths = [path for path, _ in named if path in targets or path.endswith(ends)]
        unused = [t for t in targets if not any(f".{p}".endswith(f".{t}") for p in paths)]
        if unused and not idle:
            raise ConversionError(_none_of(named, f"{by}: targets {unused} name no layer"))
    if not paths:
        raise ConversionError(_none_of(named, f"{by}: targets={targets!r} names no layer"))
    known = dict(named)
    for path in paths:
        if not is_linear(known[path]):
            others = ". For others: put adapters into the module with peft.get_peft_model, and"
            raise ConversionError(
                f"{by}: target `{path}` is a {type(known[path]).__name__}: expected a"
                " torch.nn.Linear (or transformers' Conv1D)"
                f"{others + ' convert that' if by == 'lora' else ''}"
            )
    return tuple(paths)


def is_linear(module: Any) -> bool:
    """Whether a layer is one that `LowRank` stands beside."""
    if isinstance(module, torch.nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False  # of torch.nn.MultiheadAttention, which reads its weight and never calls it
    known = isinstance(module, torch.nn.Linear | QuantizedLinear)
    return known or type(module).__name__ == "Conv1D"


def _modules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return (pair for pair in module.named_modules(remove_duplicate=False) if pair[0])


def _sizes(base: torch.nn.Module) -> tuple[int, int]:
    """Sizes of a linear layer's input and output."""
    weight: Any = base.dense if isinstance(base, QuantizedLinear) else base.weight
    first, second = weight.shape
    return (first, second) if _is_transposed(base) else (second, first)


def _is_transposed(base: torch.nn.Module) -> bool:
    """Whether a layer's weight is `(in, out)`."""
    if isinstance(base, QuantizedLinear):
        return base.transposed
    return not isinstance(base, torch.nn.Linear)


def _head(module: torch.nn.Module) -> Any:
    """The layer that gives a transformers model's logits, which "all-linear" leaves alone."""
    found: Any = getattr(module, "get_output_embeddings", None)
    return found() if callable(found) else None


def _none_of(named: Sequence[tuple[str, torch.nn.Module]], what: str) -> str:
    ends = dict.fromkeys(path.rpartition(".")[2] for path, m in named if is_linear(m))
    return (
        f"{what}: expected the last parts of names of linear layers, of which there are"
        f' {list(ends)[:20]}, a regular expression for whole names, or "all-linear"'
    )
