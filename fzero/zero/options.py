"""Compiler options as data, each with its reason. Nothing is set globally: they ride on one jit."""

from __future__ import annotations

from collections.abc import Callable

from fzero.plan import Plan
from fzero.sharding.split import Split, flat_splits, trained
from fzero.tree import PyTree, num_bytes
from fzero.zero.quantize import encoded_bytes


CompilerOptions = dict[str, str | int | bool]

_GPUS = ("gpu", "cuda")


def compiler_options(plan: Plan, splits: PyTree, shards: int, platform: str) -> CompilerOptions:
    """XLA options for a step.

    Args:
        plan: the plan.
        splits: a `Split` per parameter.
        shards: devices that ZeRO shares leaves out over.
        platform: platform of the devices, such as `cpu`, `gpu` or `cuda`.

    Returns:
        Options for `jax.jit(..., compiler_options=...)`; empty where the defaults are right.
    """
    options = deterministic_options(plan, platform)
    if platform not in _GPUS or shards == 1:
        return options
    # XLA schedules collectives beside computation by itself on Hopper and later; on an A100 it
    # leaves all of them exposed unless asked (Llama 8B, 8 A100: 6 % of a step).
    options["xla_gpu_enable_latency_hiding_scheduler"] = True
    layer = largest_layer_bytes(splits)
    if not layer:
        return options
    reduced = largest_layer_bytes(trained(splits))
    # By default XLA joins gathers up to about 30 MiB, cuts a larger layer into several, and leaves
    # one of them without a matmul to hide behind. One gather and one reduce-scatter a layer hide
    # completely; above that, layers are joined with their neighbours and memory grows.
    # (tests/gpu_programs: no byte in the loops is exposed.)
    options["xla_gpu_all_gather_combine_threshold_bytes"] = gathered_layer_bytes(
        plan, splits, shards
    )
    # Counts the scattered result, which is one part of the layer.
    options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = max(reduced // shards, 1)
    if plan.replica > 1:
        # Sums over replicas cross hosts while gathers stay within one: other links, so both may be
        # under way. One at a time, which is XLA's default, the gather of the next layer waits
        # until nothing is left to hide it. (Llama 8B, 8 x 8 H200: a third of the bytes have no
        # matmul beside them with 1, 14 % of an 8-layer model's with 2, all of it outside loops.)
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    return options


def deterministic_options(plan: Plan, platform: str) -> CompilerOptions:
    """XLA options for any program under a plan, so that it gives the same bits in every run."""
    if not plan.deterministic or platform not in _GPUS:
        return {}
    return {
        # No sums by atomic additions, whose order is that of the threads' arrival.
        "xla_gpu_deterministic_ops": True,
        # Kernels that are picked by timing them differ from run to run, and so does their rounding.
        "xla_gpu_autotune_level": 0,
    }


def largest_layer_bytes(splits: PyTree) -> int:
    """Bytes of the largest layer of a stack in the compute dtype, counting split leaves."""
    return _largest_layer(splits, lambda split, size: num_bytes((size,), split.compute))


def gathered_layer_bytes(plan: Plan, splits: PyTree, shards: int) -> int:
    """Bytes that the gathers of the largest layer of a stack give, of the pass that has the most.

    Secondary shards are gathered in the compute dtype, whatever travels between all devices.
    """
    if plan.gather_dtype != "int8" or plan.secondary is not None:
        return largest_layer_bytes(splits)
    return _largest_layer(splits, lambda _, size: shards * encoded_bytes(size // shards))


def _largest_layer(splits: PyTree, bytes_of: Callable[[Split, int], int]) -> int:
    layers: dict[str, int] = {}
    for split in flat_splits(splits):
        if split.stacked and split.dim is not None:
            name = split.path.split("/")[0]
            size = bytes_of(split, split.elements() // split.stored_shape[0])
            layers[name] = layers.get(name, 0) + size
    return max(layers.values(), default=0)
