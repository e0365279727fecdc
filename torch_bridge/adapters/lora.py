"""`lora`: a converted module with low-rank updates that are trained instead of its weights."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fzero.errors import CheckpointError, ConversionError
from torch_bridge.adapters.layer import NAME, Settings, put_in
from torch_bridge.convert import convert_copy
from torch_bridge.converted import Converted
from torch_bridge.formats.peft import fitted, read_config, read_weights
from torch_bridge.module.adapters import BASE, base_name
from torch_bridge.module.names import Layout, Leaf
from torch_bridge.module.weights import to_host


# What a configuration may say: of the computation, and nothing of it. All else has to be empty, or
# begin from other weights than the base's own (PiSSA's are what it leaves of them).
_READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules"}
_IDLE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "fan_in_fan_out", "megatron_core", "eva_config", "runtime_config",
    "qalora_group_size", "layers_pattern", "ensure_weight_tying", "loftq_config",
}  # fmt: skip
_FROM_THE_BASE = (True, "gaussian", "orthogonal", "eva")


def lora(
    converted: Converted,
    adapter: str | os.PathLike[str] | None = None,
    *,
    rank: int = 8,
    targets: str | Sequence[str] = "all-linear",
    alpha: float | None = None,
    dropout: float = 0.0,
    rslora: bool = False,
    seed: int = 0,
) -> Converted:
    """A converted module whose weights are frozen, with low-rank updates beside linear layers.

    A layer with an update computes `base(x) + alpha / rank * B(A(dropout(x)))`, with `A` of shape
    `(rank, in)`, uniform in +-1/sqrt(in), and `B` of `(out, rank)`, zeros: so it starts as it was.
    The module is exported anew, from the copy without weights that a conversion keeps, and its
    initial values are those of `converted`. Like any conversion it rolls, shards, pipelines, and is
    saved. Frozen weights stay in their own dtype and are kept and gathered like others; they have
    no gradient, no part in reductions and norms, no optimizer state and no master.

    Modules that PEFT has put adapters into need none of this: `tb.convert` takes them as they are.

    Args:
        converted: what to adapt.
        adapter: a folder that PEFT wrote (`adapter_config.json`, `adapter_model.safetensors`): its
            weights are the initial ones, and what it says goes before all the arguments below.
        rank: columns of each factor.
        targets: last parts of the names of layers (`["q_proj", "v_proj"]`), a regular expression
            for whole names, or "all-linear": every linear layer but the one that gives logits.
        alpha: see above; `rank` by default.
        dropout: probability that an entry of an update's input is dropped in training.
        rslora: divide `alpha` by sqrt(rank) instead (arXiv:2312.03732).
        seed: of the initial values.

    Returns:
        Another `Converted`, whose `base` is `converted`. Factors are named as in PEFT
        (`...q_proj.lora_A.default.weight`) and are float32, or of a 64-bit base's dtype.

    Raises:
        ConversionError: targets that name no linear layer, or one that the module never calls; the
            module could not be copied when it was converted, or has adapters already.
        CheckpointError: `adapter` cannot be read, is of another base, or is more than low-rank
            updates of linear layers.

    Example:
        >>> import torch, torch_bridge as tb
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> adapted = lora(tb.convert(net, torch.zeros(2, 3)), rank=1, targets=["2"])
        >>> sorted(adapted.frozen), adapted.params["2.lora_A.default.weight"].shape
        (['0.bias', '0.weight', '2.base_layer.bias', '2.base_layer.weight'], (1, 4))

    Source: Hu et al. (arXiv:2106.09685); PEFT's `LoraConfig`.
    """
    _require_fresh(converted, adapter)
    if adapter is None:
        where, config = "lora", _asked(rank, targets, alpha, dropout, rslora, seed)
    else:
        where, config = str(adapter), _known(read_config(adapter), str(adapter))
    settings = _settings(config, converted, where)
    # (As Python has them: the configuration is written as JSON, which knows no NumPy.)
    scale = settings.alpha if config["lora_alpha"] != int(settings.alpha) else int(settings.alpha)
    config |= {"r": settings.rank, "lora_alpha": scale, "lora_dropout": settings.dropout}
    paths: tuple[str, ...] = ()

    def change(module: torch.nn.Module) -> None:
        nonlocal paths
        paths = put_in(module, config["target_modules"], settings, adapter is not None)
        own: Any = module
        own.peft_config = {NAME: _written(config, module, paths)}

    made = convert_copy(converted, change, lambda layout: _initial(converted, layout, seed))
    _require_called(made, paths)
    if adapter is None:
        return made
    found = made.adapters[NAME]
    shapes = {leaf.name: leaf.shape for leaf in made.layout.leaves}
    given = fitted(found, shapes, read_weights(adapter), str(adapter))
    factors = {
        name: to_host(tensor.cast(settings.dtype).tensor()) for name, tensor in given.items()
    }
    return made.with_values(factors)


def _require_fresh(converted: Any, adapter: Any) -> None:
    """Refuse what no adapter is put into, or is read from."""
    if not isinstance(converted, Converted):
        raise ConversionError(
            f"lora: expected what tb.convert gave, got a {type(converted).__name__}"
        )
    if not isinstance(adapter, str | os.PathLike | None):
        raise ConversionError(
            f"lora: adapter={adapter!r}: expected a folder that PEFT wrote; targets=, rank= and"
            " others go by name"
        )
    if converted.adapters:
        raise ConversionError(
            f"lora: the module has adapters {sorted(converted.adapters)} already; adapt the one"
            " without (converted.base), or load other weights with tb.with_adapter"
        )
    taken = [leaf.name for leaf in converted.layout.leaves if BASE in f".{leaf.name}"]
    if taken:
        raise ConversionError(
            f"lora: `{taken[0]}`: PEFT calls what lies below an adapter `base_layer`: expected"
            " another name for this layer"
        )


def _asked(
    rank: Any, targets: Any, alpha: Any, dropout: Any, rslora: Any, seed: Any
) -> dict[str, Any]:
    """A configuration from arguments."""
    if not _is_whole(seed, 0):
        raise ConversionError(f"lora: seed={seed!r}: expected a whole number from 0 to 2**63 - 1")
    if alpha is not None and alpha == 0:
        raise ConversionError(
            "lora: alpha=0: what is multiplied by it learns nothing: expected another number"
        )
    several = isinstance(targets, Iterable) and not isinstance(targets, str)
    return {
        "r": rank, "lora_alpha": rank if alpha is None else alpha, "lora_dropout": dropout,
        "use_rslora": rslora, "target_modules": list(targets) if several else targets,
    }  # fmt: skip


def _is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number, of Python's or NumPy's kinds, that torch can count to."""
    known = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return known and least <= int(value) < 2**63


def _settings(config: Mapping[str, Any], converted: Converted, where: str) -> Settings:
    rank, dropout, alpha = config["r"], config["lora_dropout"], config["lora_alpha"]
    if not _is_whole(rank, 1):
        raise ConversionError(f"{where}: rank={rank!r}: expected a whole number of at least 1")
    for name, value in (("alpha", alpha), ("dropout", dropout)):
        known = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not known or not abs(value) <= float(np.finfo(np.float32).max):  # (NaN is not, either)
            raise ConversionError(
                f"{where}: {name}={value!r}: expected a number, as float32 has it"
            )
    if not 0 <= dropout < 1:
        raise ConversionError(f"{where}: dropout={dropout!r}: expected a probability below 1")
    rslora = config["use_rslora"]
    if not isinstance(rslora, bool | np.bool_ | None):
        raise ConversionError(f"{where}: rslora={rslora!r}: expected True or False")
    wide = any(leaf.dtype == torch.float64 for leaf in converted.layout.leaves if leaf.is_param)
    dtype = torch.float64 if wide else torch.float32
    return Settings(int(rank), float(alpha), float(dropout), bool(rslora), dtype)


def _known(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A configuration from a file, if it is of low-rank updates of linear layers alone."""
    if given.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type is {given.get('peft_type')!r}: expected LORA. For others: load the"
            " adapter with peft, and convert that module"
        )
    plain = {("init_lora_weights", begun) for begun in _FROM_THE_BASE} | {("bias", "none")}
    said = {k: x for k, x in given.items() if x and k not in _READ | _IDLE}
    other = {k: x for k, x in said.items() if isinstance(x, dict | list) or (k, x) not in plain}
    if other:
        raise CheckpointError(
            f"{where}: adapter_config.json has {other}, which tb.lora does not know; load the"
            " adapter with peft.PeftModel.from_pretrained(module, folder, is_trainable=True), and"
            " convert that module"
        )
    missing = [key for key in ("r", "target_modules") if not given.get(key)]
    if missing:
        raise CheckpointError(f"{where}: adapter_config.json: expected {missing}, found none")
    return {"lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, **given}


def _written(
    config: Mapping[str, Any], module: torch.nn.Module, paths: Sequence[str]
) -> dict[str, Any]:
    """What `adapter_config.json` will say."""
    own = module.get_submodule(paths[0])
    return {
        "peft_type": "LORA", "task_type": None, "bias": "none", "modules_to_save": None,
        "base_model_name_or_path": getattr(module, "name_or_path", None) or None,
        "init_lora_weights": True, **config, "fan_in_fan_out": bool(own.fan_in_fan_out),
    }  # fmt: skip


def _initial(
    converted: Converted, layout: Layout, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Initial values by leaf name: the base's, and an adapter's that changes nothing yet."""
    old_params, old_buffers = converted.by_initial()
    old = old_params | old_buffers
    leaf_of = converted.layout.leaf_of()
    params: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for number, leaf in enumerate(layout.leaves):
        source = leaf_of.get(base_name(leaf.name))
        value = _factor(leaf, seed, number) if source is None else old[source.name]
        (params if leaf.is_param else buffers)[leaf.name] = value
    return params, buffers


def _factor(leaf: Leaf, seed: int, number: int) -> np.ndarray[Any, Any]:
    dtype = np.float64 if leaf.dtype == torch.float64 else np.float32
    if ".lora_B." in f".{leaf.name}":
        return np.zeros(leaf.shape, dtype)
    bound = leaf.shape[1] ** -0.5  # torch's own for a linear layer, which PEFT takes
    drawn = np.random.default_rng([seed, number]).uniform(-bound, bound, leaf.shape)
    return np.asarray(drawn, dtype)


def _require_called(made: Converted, paths: Sequence[str]) -> None:
    """Refuse a target whose weight the forward reads without calling the layer."""
    read = made.read_leaves()
    own = [leaf for leaf in made.adapters[NAME].keys if ".lora_A." in f".{leaf}"]
    idle = [leaf for leaf in own if leaf not in read]
    if idle or not own:
        raise ConversionError(
            f"lora: the forward never calls the layer of {idle[:5] or list(paths)[:5]}: it reads"
            " the weight itself, or not at all; choose other targets"
        )
