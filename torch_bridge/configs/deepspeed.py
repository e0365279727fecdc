"""DeepSpeed's `ds_config.json` as a plan, an optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import optax

import fzero as fz
from fzero.errors import ConversionError
from torch_bridge.configs.keys import AUTO, Given, Keys, read
from torch_bridge.configs.optimizers import transformation
from torch_bridge.configs.outcome import Imported, Schedule
from torch_bridge.configs.schedules import BUILDERS
from torch_bridge.configs.zero import zero_fields


_LOGS = "what is printed or logged; metrics of a step are values that it returns"
_TOP = {
    "steps_per_print": _LOGS,
    "wall_clock_breakdown": _LOGS,
    "memory_breakdown": _LOGS,
    "dump_state": _LOGS,
    "log_level": _LOGS,
    "tensorboard": _LOGS,
    "wandb": _LOGS,
    "csv_monitor": _LOGS,
    "comet": _LOGS,
    "comms_logger": "fz.preflight counts collectives before the first step",
    "flops_profiler": "fz.preflight counts FLOPs before the first step",
    "zero_allow_untested_optimizer": "every optax transformation is right, or refused",
    "zero_force_ds_cpu_optimizer": "there are no kernels for one optimizer",
    "sparse_gradients": "gradients of embeddings are reduce-scattered with the others",
    "prescale_gradients": "means are exact at any number of devices",
    "gradient_predivide_factor": "means are exact at any number of devices",
    "disable_allgather": "which collectives run follows from the stage",
    "graph_harvesting": "a step is one compiled program",
    "compile": "a step is one compiled program",
    "checkpoint": "fz.save writes in parallel, whole or not at all",
    "autotuning": "fzero preflight --sweep compares plans without running them",
    "dataloader_drop_last": "fz.pad_batch fills up a short batch, with an exact mean",
    "elasticity": "fz.restore takes any number of devices",
    "use_data_before_expert_parallelism": "one mesh for all",
    "seq_parallel_communication_data_type": "there is no sequence-parallel group",
    "timers": _LOGS,
    "bfloat16": "an old name of bf16",
}
_REFUSED = {
    "amp": "Apex is no more: use bf16 or fp16",
    "sparse_attention": "write the mask into your model",
    "progressive_layer_drop": "it changes the model: write it into yours",
    "curriculum_learning": "choose your batches yourself",
    "data_efficiency": "choose your batches yourself",
    "compression_training": "it changes the model: write it into yours",
    "quantize_training": "it changes the model: write it into yours",
    "eigenvalue": "it belongs to quantize_training",
    "hybrid_engine": "one state serves training and generation: tb.generate",
    "aio": "fzero's disk tier chooses its own queue; take the part out",
    "tensor_parallel": "say it in the plan: fz.Plan(tensor=...) where your version has it",
    "torch_autocast": "use bf16: which operations stay in float32 follows from your module",
    "gradient_allreduce_op": "means are over the rows of the whole batch",
    "zenflow": "its updates are stale: no counterpart",
}


def from_deepspeed(
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    devices: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Imported:
    """A DeepSpeed configuration as fzero says it.

    Args:
        config: the file (`ds_config.json`), or its content.
        devices: how many the run has; needed where only the batch sizes say how many microbatches
            there are, and for `mics_shard_size`.
        auto: values of keys that say `auto` for the Hugging Face Trainer to fill in, by dotted
            name: `{"optimizer.params.lr": 3e-4}`.

    Returns:
        Plan, optimizer and schedule, and what became of each key.

    Raises:
        ConversionError: a key that would change numbers and has no counterpart, one that nothing
            knows, or a value that is missing: with the key, and what to do.

    Example:
        >>> got = from_deepspeed({
        ...     "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        ...     "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0})
        >>> got.plan.zero, got.plan.microbatches, got.plan.precision, got.plan.clip_norm
        (2, 2, 'bf16', 1.0)

    Source: DeepSpeed's configuration, deepspeed.ai/docs/config-json; its schedules,
        deepspeed/runtime/lr_schedules.py.
    """
    given = auto if isinstance(auto, Given) else Given(auto)
    found = deepspeed_plan(config, devices, given)
    if given is not auto:  # whoever gives its own looks itself
        given.warn_of_unasked(read(config)[0])
    return found


def deepspeed_plan(
    config: str | PathLike[str] | Mapping[str, Any], devices: int | None, auto: Mapping[str, Any]
) -> Imported:
    """As `from_deepspeed`, with values for all that may say `auto`."""
    source, values = read(config)
    keys = Keys(source, values, auto)
    if devices is not None and devices < 1:
        raise ConversionError(f"{source}: devices={devices}: expected how many the run has")
    fields: dict[str, Any] = {}
    _precision(keys, fields)
    batch_size = _batch(keys, fields, devices)
    _sent(keys, fields)
    clip = keys.number("gradient_clipping", 0.0, auto_is=0.0)
    if clip:
        fields["clip_norm"] = clip
        keys.note("gradient_clipping", clip, f"clip_norm={clip}")
    _checkpointing(keys, fields)
    zero_fields(keys, fields, devices)
    tx, schedule = _optimizer(keys)
    keys.refuse(_REFUSED)
    keys.without_effect(_TOP)
    keys.done()
    return Imported(fz.Plan(**fields), tx, schedule, batch_size, tuple(keys.notes))


def _precision(keys: Keys, fields: dict[str, Any]) -> None:
    on = []
    for name in ("bf16", "bfloat16", "fp16"):
        own = keys.below(name)
        if own is None:
            continue
        enabled = own.take("enabled", False)
        if enabled == AUTO:
            raise own.error("enabled", "'auto'", f"pass auto={{'{name}.enabled': True}} or False")
        if enabled:
            on.append(name)
            fields["precision"] = "fp16" if name == "fp16" else "bf16"
        own.note("enabled", enabled, f"precision={fields['precision']!r}" if enabled else "")
        if name == "fp16":
            _loss_scale(own, fields, bool(enabled))
        own.refuse({
            f"{own.prefix[:-1]}_master_weights_and_grads": "masters are float32",
            "bf16_optimizer_states": "moments are float32; optax.adamw(mu_dtype=...) for others",
        })  # fmt: skip
        own.without_effect({
            "auto_cast": "inputs are cast where a layer asks for it",
            "immediate_grad_update": "gradients are reduced as the backward pass makes them",
            "check_grad_overflow": "fz.Plan(skip_nonfinite=True) where it is wanted",
        })  # fmt: skip
        own.done()
    if len(on) > 1:
        raise keys.error(on[-1], "enabled", f"{on[0]} is, too: keep one")
    types = keys.below("data_types")
    if types is not None:
        types.without_effect({"grad_accum_dtype": "gradients are accumulated in float32"})
        types.done()


def _sent(keys: Keys, fields: dict[str, Any]) -> None:
    kind = keys.take("communication_data_type")
    if kind is None:
        return
    wide = kind == "fp32" and fields.get("precision", "fp32") != "fp32"
    if wide:
        fields["reduce_dtype"] = "fp32"
    why = "" if wide else "gradients are sent as the backward pass gives them"
    keys.note("communication_data_type", kind, "reduce_dtype='fp32'" if wide else "", why)


def _loss_scale(own: Keys, fields: dict[str, Any], enabled: bool) -> None:
    fixed = own.number("loss_scale", 0.0)
    power = own.number("initial_scale_power", 16, int)
    window = own.number("loss_scale_window", 1000, int)
    patience = own.number("hysteresis", 2, int)
    least = own.number("min_loss_scale", 1.0)
    own.refuse({"consecutive_hysteresis": "patience comes back when the scale grows: take it out"})
    if not enabled:
        return
    if fixed:
        raise own.error("loss_scale", f"{fixed:g}", "a fixed scale has no counterpart: write 0")
    scaling = fz.LossScaling(2.0**power, window, patience, least)
    fields["loss_scale"] = scaling
    own.note("loss_scale", 0, f"{scaling}")


def _batch(keys: Keys, fields: dict[str, Any], devices: int | None) -> int | None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: dict[str, int | None] = {name: keys.count(name, auto_is=None) for name in names}
    whole, micro, steps = sizes.values()
    if steps is None and whole is not None and micro is not None:
        if devices is None:
            raise keys.error(
                "gradient_accumulation_steps", "missing",
                "it follows from train_batch_size and the number of devices: pass devices=",
            )  # fmt: skip
        steps = max(1, whole // (micro * devices))
    steps = 1 if steps is None else steps
    if devices is not None and micro is not None:
        made = micro * steps * devices
        if whole not in (None, made):
            raise keys.error(
                "train_batch_size", str(whole),
                f"expected {micro} x {steps} x {devices} devices = {made}",
            )  # fmt: skip
        whole = made
    fields["microbatches"] = steps
    keys.note("gradient_accumulation_steps", steps, f"microbatches={steps}")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if sizes[name] is not None:
            keys.note(name, sizes[name], "rows of the batch", "a step takes all of them at once")
    keys.refuse({"managed_gradient_accumulation": "use fz.accumulate_step"}, (None, False, True))
    return whole


def _checkpointing(keys: Keys, fields: dict[str, Any]) -> None:
    own = keys.below("activation_checkpointing")
    if own is None:
        return
    if own.take("cpu_checkpointing", False):
        fields["remat"] = "offload"
        own.note("cpu_checkpointing", True, "remat='offload'")
    reason = "remat='layer' keeps each layer's input only; see fz.Plan(remat=)"
    own.without_effect(
        dict.fromkeys(
            ("partition_activations", "contiguous_memory_optimization", "number_checkpoints",
             "synchronize_checkpoint_boundary", "profile"), reason,
        )
    )  # fmt: skip
    own.done()


def _optimizer(keys: Keys) -> tuple[optax.GradientTransformation | None, Schedule | None]:
    own, scheduler = keys.below("optimizer"), keys.below("scheduler")
    if own is None:
        return None, None if scheduler is None else _scheduler(scheduler, None)
    params = own.below("params") or own.made("params", {})
    name = str(own.take("type", "missing"))
    own.without_effect({"legacy_fusion": "how it is computed, not what"})
    own.done()
    lr = params.number("lr", 1e-3, least=0)
    schedule = None if scheduler is None else _scheduler(scheduler, lr)
    tx = transformation(name.lower(), params, lr if schedule is None else schedule)
    params.done()
    own.note("type", name, "tx", f"lr={lr:g}" if schedule is None else "with the schedule in it")
    return tx, schedule


def _scheduler(keys: Keys, lr: float | None) -> Schedule:
    name = keys.take("type")
    params = keys.below("params") or keys.made("params", {})
    if name not in BUILDERS:
        raise keys.error("type", repr(name), f"expected one of {list(BUILDERS)}")
    schedule = BUILDERS[name](params, lr)
    params.refuse({"last_batch_iteration": "restore the state instead"}, (None, -1))
    params.done()
    keys.done()
    keys.note("type", name, "schedule", "in updates, as DeepSpeed counts them")
    return schedule
