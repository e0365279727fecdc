"""Hugging Face `TrainingArguments` as a plan, an optimizer and a schedule."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fzero as fz
from fzero.errors import ConversionError
from fzero.tree import path_name
from torch_bridge.configs.accelerate import from_accelerate, given_fields
from torch_bridge.configs.deepspeed import deepspeed_plan
from torch_bridge.configs.keys import Keys, read
from torch_bridge.configs.outcome import Imported, Note, Schedule


# The Trainer decays nothing with such a name, and no `nn.LayerNorm`, which by name these are:
_NO_DECAY = re.compile(
    r"bias|layernorm|rmsnorm|(^|[./])norm($|[./])|_norm($|[./])"
    r"|(^|[./])[^./]*(norm|ln_?\d*|ln_f)[^./]*[./](weight|scale)$",
    re.IGNORECASE,
)
# What changes a training's numbers, and is neither of the plan nor of the optimizer made here.
_NO_COUNTERPART = {
    "optim_args": "write it with optax, or tb.optimizer",
    "optim_target_modules": "write what it does with optax.partition",
    "label_smoothing_factor": "smooth in the loss, fz.CrossEntropy(label_smoothing=)",
    "neftune_noise_alpha": "add the noise to embeddings in the module's own forward",
    "parallelism_config": "say its axes in the plan, fz.Plan(replica=, tensor=, context=)",
}
# What is read of them; others of its hundred say how a run goes on around the steps.
_READ = (
    "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "deepspeed", "fp16", "fsdp", "fsdp_config",
    "gradient_accumulation_steps", "gradient_checkpointing", "learning_rate", "lr_scheduler_kwargs",
    "lr_scheduler_type", "max_grad_norm", "max_steps", "optim", "per_device_train_batch_size",
    "warmup_ratio", "warmup_steps", "weight_decay", *_NO_COUNTERPART,
)  # fmt: skip
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw")


def from_training_arguments(
    arguments: Any, *, devices: int | None = None, num_steps: int | None = None
) -> Imported:
    """Hugging Face `TrainingArguments` as fzero says them.

    Args:
        arguments: the object, its `to_dict()`, or the JSON file that `to_json_string()` wrote.
        devices: how many the run has; taken for `auto` batch sizes and for `batch_size`.
        num_steps: updates of the whole run; `max_steps` says so where it is positive. Schedules
            that end somewhere need it.

    Returns:
        Plan, AdamW with the Trainer's schedule and its rule of what is not decayed (biases and
        norms, told by their names: a batch norm called `norm1` is one, which the Trainer decays),
        and what became of each argument that matters here.

    Raises:
        ConversionError: an optimizer, a schedule, a precision or another argument that changes the
            training's numbers without counterpart, or a key that looks like one misspelt.

    Example:
        >>> got = from_training_arguments({"learning_rate": 5e-5, "max_steps": 100, "bf16": True,
        ...                                "gradient_accumulation_steps": 4}, devices=8)
        >>> got.plan.microbatches, got.plan.clip_norm, float(got.schedule(0))
        (4, 1.0, 4.999999873689376e-05)

    Source: transformers' `TrainingArguments`, `Trainer.get_decay_parameter_names` and
        `transformers.optimization`.
    """
    given = arguments.to_dict() if hasattr(arguments, "to_dict") else arguments
    source, values = read(given)
    get = values.get
    if devices is not None and devices < 1:
        raise ConversionError(f"{source}: devices={devices}: expected how many the run has")
    said = max(0, int(get("max_steps") or 0))
    if num_steps and said and num_steps != said:
        raise ConversionError(f"{source}: max_steps is {said}, and num_steps={num_steps}: keep one")
    steps = num_steps or said
    notes: list[Note] = []
    _refuse_misspelt(source, values)
    said_so = {name: _plain(value) for name, value in values.items() if value is not None}
    keys = Keys(source, said_so, {}, notes=notes)
    keys.refuse(_NO_COUNTERPART, (None, False, 0, "", []))
    for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm"):
        keys.number(name, least=0)
    for name in ("adam_beta1", "adam_beta2"):
        if (beta := keys.number(name, 0.0, least=0)) >= 1:
            raise keys.error(name, repr(beta), "expected less than 1")
    rows, microbatches = (
        keys.count(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    base = _layout(source, values, devices, steps)
    fields: dict[str, Any] = {"zero": 0} if base is None else given_fields(base.plan)
    if base is None:
        notes.append(Note("deepspeed, fsdp", None, "zero=0", "data parallel, as the Trainer's own"))
    else:
        notes.extend(base.notes)
    if get("bf16") and get("fp16"):
        raise ConversionError(f"{source}: bf16 and fp16 are both true: keep one")
    for name in ("bf16", "fp16"):
        if get(name):
            fields["precision"] = name
            notes.append(Note(name, True, f"precision={name!r}"))
    fields["microbatches"] = microbatches or 1
    notes.append(Note("gradient_accumulation_steps", fields["microbatches"],
                      f"microbatches={fields['microbatches']}"))  # fmt: skip
    clip = float(values.get("max_grad_norm", 1.0) or 0.0)
    fields["clip_norm"] = clip or None
    notes.append(Note("max_grad_norm", clip, f"clip_norm={clip or None}"))
    if get("gradient_checkpointing") or fields.get("remat") is None:
        fields["remat"] = "layer" if get("gradient_checkpointing") else "none"
        notes.append(Note("gradient_checkpointing", bool(get("gradient_checkpointing")),
                          f"remat={fields['remat']!r}"))  # fmt: skip
    tx, schedule = (base.tx, base.schedule) if base is not None and base.tx else (None, None)
    if tx is None:
        tx, schedule = _optimizer(source, values, steps, notes)
    batch = rows * fields["microbatches"] * devices if rows and devices else None
    return Imported(fz.Plan(**fields), tx, schedule, batch, tuple(notes))


def _plain(value: Any) -> Any:
    """A number that YAML takes for a text: `5e-5`, without a dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _refuse_misspelt(source: str, values: Mapping[str, Any]) -> None:
    """Refuse what is nearly one of the arguments that are read: passed over, it would be silent."""
    for key in set(values).difference(_READ):
        # So near that none of transformers' own names is (per_device_eval_batch_size is at 0.87).
        for near in difflib.get_close_matches(key, _READ, 1, cutoff=0.9):
            raise ConversionError(f"{source}: {key} is no training argument: did you mean {near}?")


def _layout(
    source: str, values: Mapping[str, Any], devices: int | None, steps: int
) -> Imported | None:
    """What a DeepSpeed file or `fsdp` says of the layout; `None` where there is neither."""
    given: str | PathLike[str] | Mapping[str, Any] | None = values.get("deepspeed")
    if given:
        rate, warm = float(values.get("learning_rate", 5e-5)), _warmup(source, values, steps)
        auto = {
            "optimizer.params.lr": rate,
            "optimizer.params.betas": _betas(values),
            "optimizer.params.eps": values.get("adam_epsilon", 1e-8),
            "optimizer.params.weight_decay": values.get("weight_decay", 0.0),
            "scheduler.params.warmup_min_lr": 0,
            "scheduler.params.warmup_max_lr": rate,
            "scheduler.params.total_num_steps": steps,
            "bf16.enabled": bool(values.get("bf16")),
            "fp16.enabled": bool(values.get("fp16")),
            "gradient_clipping": values.get("max_grad_norm", 1.0),
        }  # fmt: skip
        if warm is not None:
            auto["scheduler.params.warmup_num_steps"] = max(1, warm)
        _require_agreement(values, read(given)[1])
        return deepspeed_plan(given, devices, auto)
    words = values.get("fsdp")
    if not words:
        return None
    given = values.get("fsdp_config") or {}
    config: dict[str, Any] = {
        f"fsdp_{key.removeprefix('fsdp_')}": value
        for key, value in (given if isinstance(given, Mapping) else read(given)[1]).items()
        if value or not key.startswith("xla")
    }
    if "fsdp_cpu_offload" in config:
        config["fsdp_offload_params"] = config.pop("fsdp_cpu_offload")
    # Since transformers 5 `True`, with all in `fsdp_config`; before, words for the strategy.
    for word in words.split() if isinstance(words, str) else () if words is True else words:
        word = str(getattr(word, "value", word))
        if word == "offload":
            config["fsdp_offload_params"] = True
        elif word != "auto_wrap":
            config["fsdp_sharding_strategy"] = word.upper().replace("ZERO_2", "ZERO2")
    return from_accelerate(
        {"distributed_type": "FSDP", "fsdp_config": config}
        | ({} if devices is None else {"num_processes": devices})
    )


# What a DeepSpeed file and the arguments both say; transformers refuses those that differ as well.
_SAID_TWICE = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "adam_beta1, adam_beta2",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}


def _require_agreement(values: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse a DeepSpeed file that says otherwise than the arguments: either may be meant."""
    if values.get("fsdp"):
        raise ConversionError("deepspeed and fsdp are both given: keep one")
    for path, names in _SAID_TWICE.items():
        in_file: Any = config
        for key in path.split("."):
            in_file = in_file.get(key) if isinstance(in_file, Mapping) else None
        arguments = [values.get(name) for name in names.split(", ")]
        if in_file in (None, "auto") or None in arguments:
            continue
        given = arguments if len(arguments) > 1 else arguments[0]
        if (list(in_file) if isinstance(in_file, list | tuple) else in_file) != given:
            raise ConversionError(
                f"deepspeed: {path} is {in_file!r}, and {names} is {given!r} in the arguments: make"
                ' them one, or "auto" in the file'
            )


def _optimizer(
    source: str, values: Mapping[str, Any], steps: int, notes: list[Note]
) -> tuple[optax.GradientTransformation, Schedule]:
    name = str(values.get("optim", "adamw_torch"))
    if name not in _ADAMW:
        raise ConversionError(
            f"{source}: optim is {name!r}: expected one of {list(_ADAMW)}; make others with"
            " tb.optimizer, or pass any optax transformation to train_step"
        )
    schedule = _schedule(source, values, steps)
    decay = float(values.get("weight_decay") or 0.0)
    tx = optax.adamw(
        schedule, *_betas(values),
        float(values.get("adam_epsilon", 1e-8)), weight_decay=decay, mask=_decayed,
    )  # fmt: skip
    notes.append(Note("optim", name, "tx", "biases and norms are not decayed" if decay else ""))
    notes.append(
        Note("lr_scheduler_type", str(values.get("lr_scheduler_type", "linear")), "schedule")
    )
    return tx, schedule


def _decayed(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not _NO_DECAY.search(path_name(path)), params
    )


def _betas(values: Mapping[str, Any]) -> tuple[float, float]:
    return float(values.get("adam_beta1", 0.9)), float(values.get("adam_beta2", 0.999))


def _warmup(source: str, values: Mapping[str, Any], steps: int) -> int | None:
    """How many updates; `None` where it is a share of so many that nobody says."""
    count, share = float(values.get("warmup_steps") or 0), float(values.get("warmup_ratio") or 0)
    if count < 0 or not 0 <= share <= 1:
        raise ConversionError(
            f"{source}: warmup_steps={count:g}, warmup_ratio={share:g}: expected how many updates,"
            " or a share of them from 0 to 1"
        )
    if count >= 1:
        return int(count)
    return math.ceil(steps * (count or share)) if steps or not (count or share) else None


def _schedule(source: str, values: Mapping[str, Any], steps: int) -> Schedule:
    name = str(values.get("lr_scheduler_type", "linear"))
    name = name.rpartition(".")[2].lower()
    rate, warm = float(values.get("learning_rate", 5e-5)), _warmup(source, values, steps)
    if warm is None:
        if name != "constant":  # which has no warmup
            raise ConversionError(
                f"{source}: the warmup is a share of all updates: pass num_steps="
            )
        warm = 0
    if values.get("lr_scheduler_kwargs"):
        raise ConversionError(f"{source}: lr_scheduler_kwargs: write the schedule with optax")
    after: dict[str, Callable[[Any], Any]] = {
        "constant": lambda count: 1.0,
        "constant_with_warmup": lambda count: 1.0,
        "linear": lambda count: jnp.maximum(0.0, (steps - count) / max(1, steps - warm)),
        "cosine": lambda count: jnp.maximum(
            0.0, 0.5 * (1 + jnp.cos(math.pi * (count - warm) / max(1, steps - warm)))
        ),
    }
    if name not in after:
        raise ConversionError(
            f"{source}: lr_scheduler_type is {name!r}: expected one of {list(after)}; write others"
            " with optax.schedules"
        )
    if name in ("linear", "cosine") and not steps:
        raise ConversionError(
            f"{source}: max_steps: the schedule {name!r} ends with the run: pass num_steps="
        )
    if name == "constant":
        return lambda count: jnp.float32(rate)

    def moved(count: Any) -> Any:
        at = jnp.float32(count)
        return rate * jnp.where(at < warm, at / max(1, warm), after[name](at))

    return moved
