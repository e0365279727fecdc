"""How many devices a command uses; on a CPU, virtual ones, asked for before jax starts."""

from __future__ import annotations

import contextlib

import jax

from torch_bridge.run.errors import CommandError


def configure(num_devices: int | None, precision: str) -> int:
    """Makes `num_devices` devices available (None: all that jax sees); returns their number.

    On GPUs the first `num_devices` are used. The CPU count is set in any case: where a GPU is found
    it changes nothing, and asking first which of the two it is would start jax and make it too
    late.
    """
    if jax.distributed.is_initialized() and num_devices not in (None, jax.device_count()):
        raise CommandError(
            f"--devices {num_devices}: expected none, or all {jax.device_count()} devices of the"
            f" {jax.process_count()} processes (on CPUs JAX_NUM_CPU_DEVICES says how many each has)"
        )
    if num_devices is not None:
        if num_devices < 1:
            raise CommandError(f"--devices must be at least 1, got {num_devices}")
        # RuntimeError: jax already runs in this process; what it has is checked below.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", num_devices)
    if precision == "fp32":
        # As PyTorch has it: on GPUs jax would otherwise multiply fp32 matrices as TF32.
        jax.config.update("jax_default_matmul_precision", "highest")
    devices = jax.devices()
    if num_devices is None:
        return len(devices)
    if num_devices > len(devices):
        kind = devices[0].device_kind
        raise CommandError(
            f"--devices {num_devices} asked for, {len(devices)} found ({devices[0].platform}: "
            f"{kind}); use --devices {len(devices)}, or JAX_PLATFORMS=cpu for virtual CPU devices"
        )
    return num_devices


def describe(num_devices: int) -> dict[str, object]:
    """Number, platform and kind of the devices in use, for the summary."""
    first = jax.devices()[0]
    return {"count": num_devices, "platform": first.platform, "kind": first.device_kind}
