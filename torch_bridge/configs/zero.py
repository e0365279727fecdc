"""DeepSpeed's `zero_optimization`: stage, offload, and knobs that nothing here needs."""

from __future__ import annotations

from typing import Any

import fzero as fz
from torch_bridge.configs.keys import AUTO, Keys


_BUCKETS = "there are no buckets: XLA joins collectives, layer by layer"
_LAYERS = "a layer is gathered one ahead of its use; see fz.Plan(prefetch=)"
_EXPORT = "tb.save writes 16 bits or 32, from any stage"
NO_EFFECT = {
    "contiguous_gradients": "gradients are values, not a buffer",
    "reduce_scatter": "every stage reduces by a reduce-scatter",
    "reduce_bucket_size": _BUCKETS,
    "use_multi_rank_bucket_allreduce": _BUCKETS,
    "allgather_partitions": _BUCKETS,
    "allgather_bucket_size": _BUCKETS,
    "overlap_comm": "communication beside computation is in the compiled step",
    "load_from_fp32_weights": "masters are float32",
    "elastic_checkpoint": "fz.restore takes any plan",
    "sub_group_size": "see fz.Plan(stream_bytes=)",
    "stage3_prefetch_bucket_size": _LAYERS,
    "stage3_max_live_parameters": _LAYERS,
    "stage3_max_reuse_distance": _LAYERS,
    "stage3_module_granularity_threshold": _LAYERS,
    "stage3_use_all_reduce_for_fetch_params": _LAYERS,
    "stage3_allgather_sequential": _LAYERS,
    "stage3_model_persistence_threshold": "small leaves stay whole one by one",
    "stage3_gather_16bit_weights_on_model_save": _EXPORT,
    "stage3_gather_fp16_weights_on_model_save": _EXPORT,
    "ignore_unused_parameters": "an unused parameter has a gradient of zeros",
    "legacy_stage1": "there is one stage 1",
    "round_robin_gradients": "gradients stay where they are reduced to",
    "memory_efficient_linear": "the backward pass reads the gathered weight itself",
    "pipeline_loading_checkpoint": "tb.restore reads slice by slice",
    "override_module_apply": "modules are not changed",
    "log_trace_cache_warnings": "there is no trace cache",
    "enable_sanity_checks": "an edit of a state is another state",
    "leaf_module": "layers are gathered leaf by leaf",
    "zero_quantized_nontrainable_weights": "see gather_dtype for all weights",
    "mics_hierarchical_params_gather": "XLA chooses the way between hosts",
    "cpu_offload_use_pin_memory": "the host tier is always pinned",
}
REFUSED = {
    "zero_quantized_gradients": "there are no 8-bit reductions; write false",
    "zeropp_loco_param": "there are no 8-bit reductions; take it out",
    "zenflow": "its updates are stale: no counterpart",
    "save_muon_momentum_buffer_in_memory": "take it out",
}


def zero_fields(keys: Keys, fields: dict[str, Any], devices: int | None) -> None:
    """Writes what `zero_optimization` says into a plan's fields."""
    own = keys.below("zero_optimization")
    if own is None:
        fields["zero"] = 0
        keys.note("zero_optimization", "missing", "zero=0")
        return
    stage = own.number("stage", 0, int)
    fields["zero"] = stage
    own.note("stage", stage, f"zero={stage}")
    _offload(own, fields)
    _small(own, fields)
    if own.take("zero_quantized_weights", False):
        fields["gather_dtype"] = "int8"
        own.note("zero_quantized_weights", True, "gather_dtype='int8'")
    size = own.number("zero_hpz_partition_size", 1, int)
    if size > 1:
        fields["secondary"] = size
        own.note("zero_hpz_partition_size", size, f"secondary={size}")
    size = own.number("mics_shard_size", -1, int)
    if size > 0:
        if devices is None or devices % size:
            raise own.error("mics_shard_size", str(size), "pass devices=, a multiple of it")
        fields |= {"data": size, "replica": devices // size}
        own.note("mics_shard_size", size, f"data={size}, replica={devices // size}")
    own.refuse(REFUSED)
    own.without_effect(NO_EFFECT)
    own.done()


def _offload(own: Keys, fields: dict[str, Any]) -> None:
    tiers: dict[str, Any] = {}
    if below := _offloaded(own, "offload_optimizer", "cpu_offload"):
        tier, share = _tier(below, fields), below.number("ratio", 1.0)
        if tier is not None:
            tiers["opt_state"] = tier if share == 1.0 else (tier, share)
            # DeepSpeed parks the float32 parameters with the moments.
            if fz.Plan(**fields).keeps_compute_copy:
                tiers["master"] = tiers["opt_state"]
            own.note(
                "offload_optimizer", tier, f"tiers={tiers}",
                "visits the device in buckets; update_on='host' computes on the host's cores",
            )  # fmt: skip
        _rest(below)
    if below := _offloaded(own, "offload_param", "cpu_offload_param"):
        tier = _tier(below, {})
        if tier == "disk":
            raise own.error(
                "offload_param", "on nvme", "parameters visit from the host: device 'cpu'"
            )
        if tier is not None:
            tiers["params"] = tier
            own.note("offload_param", tier, "tiers={'params': 'host'}")
        _rest(below)
    if tiers:
        fields["tiers"] = tiers


def _offloaded(own: Keys, key: str, old: str) -> Keys | None:
    """What is said of a part that is offloaded; of old, true stood for the CPU."""
    switched, below = own.take(old, False), own.below(key)
    return own.made(key, {"device": "cpu"}) if below is None and switched else below


def _tier(own: Keys, fields: dict[str, Any]) -> str | None:
    device = own.take("device", "none")
    known = {"none": None, None: None, "cpu": "host", "nvme": "disk"}
    if device not in known:
        raise own.error("device", repr(device), "expected 'none', 'cpu' or 'nvme'")
    path = own.take("nvme_path")
    if device == "nvme" and path is not None:
        fields["disk_path"] = str(path)
        own.note("nvme_path", path, f"disk_path={path!r}")
    return known[device]


def _rest(own: Keys) -> None:
    own.take("ratio")
    own.refuse({"super_offload": "no counterpart; write false"})
    buckets = "buckets of fz.Plan(stream_bytes=) visit the device, two at a time"
    own.without_effect({
        "pin_memory": "the host tier is always pinned", "buffer_count": buckets,
        "buffer_size": buckets, "max_in_cpu": buckets, "pipeline_read": buckets,
        "pipeline_write": buckets, "fast_init": "nothing is copied twice",
        "cpuadam_cores_perc": "see update_on='host'",
    })  # fmt: skip
    own.done()


def _small(own: Keys, fields: dict[str, Any]) -> None:
    name = "stage3_param_persistence_threshold"
    count = own.take(name)
    if count is None or count == AUTO or fields["zero"] != 3:
        if count is not None:
            own.note(name, count, why="fz.Plan(min_shard_bytes=) has a default")
        return
    size = int(count) * (4 if fields.get("precision", "fp32") == "fp32" else 2)
    fields["min_shard_bytes"] = size
    own.note(name, count, f"min_shard_bytes={size}", "bytes, not elements")
