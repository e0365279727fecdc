"""Accelerate's YAML (`accelerate config`) as a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import fzero as fz
from torch_bridge.configs.deepspeed import deepspeed_plan
from torch_bridge.configs.keys import Given, Keys, read
from torch_bridge.configs.outcome import Imported


_START = "how processes start: fz.join finds its world, fzero launch starts one"
_STARTS = (
    "compute_environment", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
    "same_network", "main_training_function", "enable_cpu_affinity", "gpu_ids", "tpu_env",
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm",
    "mpirun_config", "use_cpu", "debug", "deepspeed_hostfile", "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "ipex_config", "use_xpu",
)  # fmt: skip
_FSDP = {
    "fsdp_auto_wrap_policy": "what is gathered together follows from the model's layers",
    "fsdp_transformer_layer_cls_to_wrap": "what is gathered together follows from the layers",
    "fsdp_min_num_params": "see fz.Plan(min_shard_bytes=)",
    "fsdp_backward_prefetch": "a layer is gathered one ahead of its use",
    "fsdp_forward_prefetch": "a layer is gathered one ahead of its use",
    "fsdp_backward_prefetch_policy": "a layer is gathered one ahead of its use",
    "fsdp_cpu_ram_efficient_loading": "tb.restore reads into the sharding",
    "fsdp_sync_module_states": "one initial state for all processes",
    "fsdp_state_dict_type": "tb.save writes either, from any plan",
    "fsdp_use_orig_params": "parameters are leaves by their own names",
    "fsdp_limit_all_gathers": "two gathered layers are alive",
    "fsdp_version": "both versions lay out alike here",
}
# Strategy to stage, and whether groups are replicated.
_STRATEGIES = {
    "FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True), "HYBRID_SHARD_ZERO2": (2, True),
}  # fmt: skip
_BY_NUMBER = dict(enumerate(_STRATEGIES, start=1))


def from_accelerate(
    config: str | PathLike[str] | Mapping[str, Any], *, auto: Mapping[str, Any] | None = None
) -> Imported:
    """A configuration of Accelerate (FSDP, DeepSpeed or plain data parallelism) as fzero says it.

    Args:
        config: the YAML file that `accelerate config` wrote, or its content.
        auto: values for `auto` in the DeepSpeed file that it names, as for `from_deepspeed`.

    Returns:
        The plan, and what became of each key; an optimizer only where a DeepSpeed file has one.

    Raises:
        ConversionError: a key that would change numbers and has no counterpart, or that nothing
            knows.

    Example:
        >>> got = from_accelerate({"distributed_type": "FSDP", "mixed_precision": "bf16",
        ...                        "num_processes": 8,
        ...                        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}})
        >>> got.plan.zero, got.plan.data, got.plan.precision
        (3, 8, 'bf16')

    Source: Accelerate's `ClusterConfig` and its FSDP plugin, huggingface.co/docs/accelerate.
    """
    source, values = read(config)
    given = auto if isinstance(auto, Given) else Given(auto)
    keys = Keys(source, values, given)
    fields: dict[str, Any] = {}
    kind = str(keys.take("distributed_type", "NO")).upper().replace("FALSE", "NO")  # YAML's no
    if kind not in ("NO", "FSDP", "DEEPSPEED") and not kind.startswith("MULTI_"):
        raise keys.error("distributed_type", repr(kind), "expected FSDP, DEEPSPEED or MULTI_GPU")
    if keys.left.get("num_processes") == -1:  # Accelerate's own default
        keys.without_effect({"num_processes": "-1 is said where a run is launched: all devices"})
    devices, machines = keys.count("num_processes"), keys.count("num_machines", 1)
    _precision(keys, fields)
    _parallelism(keys, fields)
    inner = None
    if kind == "DEEPSPEED":
        # DeepSpeed counts the ranks that have rows of their own.
        others = math.prod(_beside_data(fields).values())
        ranks = None if devices is None else max(devices // others, 1)
        inner = _deepspeed(keys, config, ranks, given)
        theirs = inner.plan.precision
        if theirs not in (own := fields.get("precision", theirs), "fp32"):
            raise keys.error(
                "mixed_precision", repr(own),
                f"the DeepSpeed file says {theirs}: make them one, as Accelerate wants, too",
            )  # fmt: skip
        fields = {**given_fields(inner.plan), **fields}
        keys.notes.extend(inner.notes)
    else:
        fields.setdefault("zero", 0)
        keys.note("distributed_type", kind, f"zero={fields['zero']}" if kind != "FSDP" else "")
    if kind == "FSDP":
        _fsdp(keys, fields, devices, machines)
    _data(keys, fields, devices)
    for unused in ("fsdp_config", "deepspeed_config", "megatron_lm_config", "fp8_config"):
        keys.refuse({unused: f"distributed_type is {kind}: take the part out"}, (None, False))
    keys.without_effect(dict.fromkeys(_STARTS, _START))
    keys.without_effect({"dynamo_config": "a step is one compiled program"})
    keys.done()
    if given is not auto:  # whoever gives its own looks itself
        given.warn_of_unasked(source)
    plan, notes = fz.Plan(**fields), tuple(keys.notes)
    if inner is None:
        return Imported(plan, None, None, None, notes)
    return replace(inner, plan=plan, notes=notes)


def _data(keys: Keys, fields: dict[str, Any], devices: int | None) -> None:
    """What the other axes leave for `data`; Accelerate, too, wants a product of all processes."""
    if devices is None:
        return
    others = _beside_data(fields)
    data = fields.setdefault("data", max(devices // math.prod(others.values()), 1))
    if data * math.prod(others.values()) != devices:
        product = " x ".join(f"{axis}={size}" for axis, size in {"data": data, **others}.items())
        raise keys.error("num_processes", str(devices), f"expected the product of {product}")
    keys.note("num_processes", devices, f"data={data}")


def _beside_data(fields: Mapping[str, Any]) -> dict[str, int]:
    return {axis: fields[axis] for axis in ("replica", "tensor", "context") if axis in fields}


def given_fields(plan: fz.Plan) -> dict[str, Any]:
    """`zero`, and what else of a plan is not the default."""
    default = fz.Plan()
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return {n: v for n, v in values.items() if n == "zero" or v != getattr(default, n)}


def _precision(keys: Keys, fields: dict[str, Any]) -> None:
    value = str(keys.take("mixed_precision", "no")).lower()
    if value in ("bf16", "fp16"):
        fields["precision"] = value
        keys.note("mixed_precision", value, f"precision={value!r}")
    elif value not in ("no", "false", "none"):
        raise keys.error("mixed_precision", repr(value), "expected no, bf16 or fp16")
    keys.without_effect({"downcast_bf16": "bf16 computes in bf16, float32 stays float32"})


def _parallelism(keys: Keys, fields: dict[str, Any]) -> None:
    own = keys.below("parallelism_config")
    if own is None:
        return
    names = {"dp_replicate": "replica", "dp_shard": "data", "tp": "tensor", "cp": "context"}
    for theirs, ours in names.items():
        key = f"parallelism_config_{theirs}_size"
        size = own.count(key, 1)
        if size == 1:
            continue
        if ours not in fz.Plan.__dataclass_fields__:
            raise own.error(key, str(size), f"this version's plan has no {ours}=: write 1")
        fields[ours] = size
        own.note(key, size, f"{ours}={size}")
    own.refuse({"parallelism_config_sp_size": "no counterpart; write 1"}, (None, 1))
    own.without_effect(
        dict.fromkeys(
            ("parallelism_config_cp_comm_strategy", "parallelism_config_sp_backend",
             "parallelism_config_cp_backend"), "the plan's axis chooses",
        )
    )  # fmt: skip
    own.done()


def _deepspeed(keys: Keys, config: Any, devices: int | None, auto: Any) -> Imported:
    own = keys.below("deepspeed_config") or keys.made("deepspeed_config", {})
    own.without_effect(
        dict.fromkeys(
            ("zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
             "deepspeed_hostfile", "deepspeed_moe_layer_cls_names"),
            "tb.restore reads into the sharding; tb.save writes from any",
        )
    )  # fmt: skip
    path = own.take("deepspeed_config_file")
    if path is not None:
        own.done()
        if not isinstance(config, Mapping):
            path = Path(config).parent / path
        return deepspeed_plan(path, devices, auto)
    zero: dict[str, Any] = {"stage": own.number("zero_stage", 2, int)}
    for name in ("optimizer", "param"):
        where = own.take(f"offload_{name}_device", "none")
        if where not in ("none", None):
            zero[f"offload_{name}"] = {"device": where}
            path = own.take(f"offload_{name}_nvme_path")
            if path is not None:
                zero[f"offload_{name}"]["nvme_path"] = path
    made = {
        "zero_optimization": zero,
        "gradient_accumulation_steps": own.count("gradient_accumulation_steps", 1),
        "gradient_clipping": own.number("gradient_clipping", 0.0),
    }
    own.done()
    return deepspeed_plan(made, devices, auto)


def _fsdp(keys: Keys, fields: dict[str, Any], devices: int | None, machines: int) -> None:
    own = keys.below("fsdp_config") or keys.made("fsdp_config", {})
    strategy = own.take("fsdp_sharding_strategy")
    strategy = _BY_NUMBER.get(strategy, strategy)
    again = own.take("fsdp_reshard_after_forward")
    if isinstance(again, str) and again.upper() in _STRATEGIES:
        strategy, again = again.upper(), None
    if strategy is None:
        strategy = "SHARD_GRAD_OP" if again in (False, "false") else "FULL_SHARD"
    if strategy not in _STRATEGIES:
        raise own.error(
            "fsdp_sharding_strategy", repr(strategy), f"expected one of {list(_STRATEGIES)}"
        )
    fields["zero"], hybrid = _STRATEGIES[strategy]
    own.note("fsdp_sharding_strategy", strategy, f"zero={fields['zero']}")
    if hybrid:
        if devices is None or devices % machines:
            raise keys.error(
                "num_processes", str(devices), f"{strategy} needs a multiple of num_machines"
            )
        replica = fields.setdefault("replica", machines)
        own.note("num_machines", machines, f"replica={replica}")
    if own.take("fsdp_offload_params", False):
        tiers = {"opt_state": "host"} | ({"params": "host"} if fields["zero"] == 3 else {})
        fields["tiers"] = tiers
        own.note("fsdp_offload_params", True, f"tiers={tiers}")
    fields["remat"] = "layer" if own.take("fsdp_activation_checkpointing", False) else "none"
    own.note("fsdp_activation_checkpointing", fields["remat"] == "layer",
              f"remat={fields['remat']!r}")  # fmt: skip
    own.refuse({"fsdp_ignored_modules": "every leaf has its split"}, (None, False, ""))
    own.without_effect(_FSDP)
    own.done()
