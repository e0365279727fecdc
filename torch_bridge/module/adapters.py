"""Which adapters a module has: its own leaves' names, and those in PEFT's files."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fzero.errors import ConversionError
from torch_bridge.module.names import Layout


# What PEFT puts before the names of the module that it wraps.
PREFIX = "base_model.model."
# What lies below a layer that has updates: the layer without.
BASE = ".base_layer."
# What a module computes with an adapter's tensors, and what holds where a file is silent.
_COMPUTES: Mapping[str, Any] = {
    "peft_type": "LORA", "lora_alpha": 8, "use_rslora": False, "alpha_pattern": {},
    "use_dora": False,
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A linear layer with a low-rank update.

    Attributes:
        weight: name of the leaf that is updated.
        down: name of the first factor, `(rank, in)`.
        up: name of the second, `(out, rank)`.
        scaling: what their product is multiplied by.
        transposed: whether the weight is `(in, out)`.
    """

    weight: str
    down: str
    up: str
    scaling: float
    transposed: bool


@dataclass(frozen=True)
class Adapter:
    """One adapter of a converted module.

    Attributes:
        name: what it is called in the module.
        config: as in PEFT's `adapter_config.json`.
        keys: the name in PEFT's files of every leaf that belongs to it.
        of_base: those of them that the module has without it, too (biases that are trained along).
        targets: the layers that it updates.
        plain: whether low-rank updates of linear layers are all that it is.
        shaped: the layers among them that do not multiply by their weight as it is kept.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    keys: Mapping[str, str] = field(repr=False)
    of_base: frozenset[str] = field(repr=False)
    targets: tuple[Target, ...] = field(repr=False)
    plain: bool
    shaped: tuple[str, ...] = field(default=(), repr=False)


def read_adapters(module: torch.nn.Module, layout: Layout) -> dict[str, Adapter]:
    """The adapters that PEFT, or `tb.lora`, has put into a module, by name."""
    configs: Any = getattr(module, "peft_config", None)
    if not isinstance(configs, Mapping):
        return {}
    leaf_of = layout.leaf_of()
    found: dict[str, Adapter] = {}
    for name, config in configs.items():
        written = plain_config(config)
        own = {
            leaf.name: key
            for leaf in layout.leaves
            if (key := _file_key(leaf.name, str(name))) is not None
        }
        biases = _biases(module, layout, written.get("bias"))
        targets, plain = _targets(module, str(name), leaf_of)
        known = {target.down for target in targets} | {target.up for target in targets}
        plain = plain and known == set(own)
        keys = {**own, **{leaf: _prefixed(leaf) for leaf in biases}}
        shaped = _shaped(module, str(name))
        found[str(name)] = Adapter(str(name), written, keys, biases, targets, plain, shaped)
    return found


def _biases(module: torch.nn.Module, layout: Layout, which: Any) -> frozenset[str]:
    """The leaves of the base that PEFT's `bias=` trains and saves beside the factors."""
    names = {leaf.name for leaf in layout.leaves if leaf.is_param}
    if which == "all":
        return frozenset(n for n in names if n.rpartition(".")[2] == "bias" and "lora_" not in n)
    if which != "lora_only":
        return frozenset()
    paths = (path for path, child in module.named_modules() if hasattr(child, "lora_A"))
    return frozenset(n for path in paths if (n := f"{path}.base_layer.bias") in names)


def _prefixed(key: str) -> str:
    return key if key.startswith(PREFIX) else PREFIX + key


def _file_key(leaf: str, adapter: str) -> str | None:
    """A leaf's name in PEFT's files, if it belongs to an adapter."""
    own = re.escape(adapter)
    if match := re.fullmatch(rf"(.*\.)?lora_magnitude_vector\.{own}\.weight", leaf):
        key = f"{match[1] or ''}lora_magnitude_vector"
    elif match := re.fullmatch(
        rf"(.*\.)?(lora_\w+|token_adapter\.trainable_tokens_delta)\.{own}(\..+)?", leaf
    ):
        key = f"{match[1] or ''}{match[2]}{match[3] or ''}"
    elif match := re.fullmatch(rf"(.*?)\.modules_to_save\.{own}\.(.+)", leaf):
        key = f"{match[1]}.{match[2]}"
    else:
        return None
    return _prefixed(key)


def _targets(
    module: torch.nn.Module, adapter: str, leaf_of: Mapping[str, Any]
) -> tuple[tuple[Target, ...], bool]:
    """The linear layers of an adapter, and whether it is nothing else."""
    found: dict[str, Target] = {}
    plain = True
    for path, child in module.named_modules():
        factors: Any = getattr(child, "lora_A", None)
        if not isinstance(factors, torch.nn.ModuleDict) or adapter not in factors:
            continue
        weight: Any = getattr(getattr(child, "base_layer", None), "weight", None)
        names = [f"{path}.base_layer.weight", f"{path}.lora_A.{adapter}.weight"]
        names.append(f"{path}.lora_B.{adapter}.weight")
        variant: Any = getattr(child, "lora_variant", None) or {}
        if getattr(weight, "ndim", 0) != 2 or adapter in variant or getattr(child, "merged", False):
            plain = False
            continue
        if names[0] not in leaf_of:  # of a parametrization, which computes it
            plain = False
            continue
        base, down, up = (leaf_of[name].name for name in names)
        scaling: Any = child.scaling
        transposed = bool(getattr(child, "fan_in_fan_out", False))
        found[down] = Target(base, down, up, float(scaling[adapter]), transposed)
    return tuple(found.values()), plain


def _shaped(module: torch.nn.Module, adapter: str) -> tuple[str, ...]:
    """The layers of an adapter that do not multiply by their weight, and add their bias."""
    known: dict[Any, bool] = {}
    found = []
    for path, child in module.named_modules():
        base: Any = getattr(child, "base_layer", None)
        if not isinstance(base, torch.nn.Linear) or adapter not in getattr(child, "lora_A", ()):
            continue
        kind = type(base), base.in_features, base.out_features
        if kind not in known:
            known[kind] = _multiplies(base)
        found += [] if known[kind] else [path]
    return tuple(found)


def _multiplies(layer: torch.nn.Linear) -> bool:
    """Whether a linear layer computes what its class' does; of another forward, tried."""
    if type(layer).forward is torch.nn.Linear.forward and "weight" in layer._parameters:
        return True
    kept = dict([*layer.named_parameters(), *layer.named_buffers()])
    if not kept.keys() <= {"weight", "bias"}:  # of a parametrization, or a scale
        return False
    draw = torch.Generator("cpu").manual_seed(0)
    shapes = {name: value.shape for name, value in kept.items()}
    own = {n: torch.randn(shape, generator=draw, device="cpu") for n, shape in shapes.items()}
    x = torch.randn(2, layer.in_features, generator=draw, device="cpu")
    try:
        with torch.no_grad():
            out = torch.func.functional_call(layer, own, (x,))
        wanted = torch.nn.functional.linear(x, own["weight"], own.get("bias"))
        return torch.allclose(out, wanted, rtol=1e-3, atol=1e-3)
    except Exception:  # whatever it wants, it is no plain layer
        return False


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration of PEFT as what its JSON file holds."""
    values = config.to_dict() if callable(getattr(config, "to_dict", None)) else dict(config)

    def plain(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = plain(values)
    return found


def computes_otherwise(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a file's configuration says of its tensors that a module's adapter does not compute.

    Returns:
        By name what the file says and what the module has. Shapes say the rest.
    """

    def said(where: Mapping[str, Any], name: str) -> Any:
        value = where.get(name)
        return _COMPUTES[name] if value is None else value  # (0 and False are said)

    both = {name: (said(config, name), said(adapter.config, name)) for name in _COMPUTES}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def base_name(leaf: str) -> str:
    """What a leaf of the base is called in the module without adapters."""
    return leaf.removeprefix(PREFIX).replace(BASE, ".")


def pick(adapters: Mapping[str, Adapter], name: str | None, operation: str) -> Adapter:
    """An adapter by its name, or the only one.

    Raises:
        ConversionError: there is none of this name, or there are several.
    """
    if name is None and len(adapters) == 1:
        return next(iter(adapters.values()))
    if name is None or name not in adapters:
        raise ConversionError(
            f"{operation}: adapter={name!r}: expected one of {sorted(adapters)}"
            if adapters
            else f"{operation}: the module has no adapters; see tb.lora"
        )
    return adapters[name]
