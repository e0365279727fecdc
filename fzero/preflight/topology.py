"""Which devices to plan for: GPUs that need not be here, or this machine's CPU devices."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax

from fzero.errors import PreflightError


CPU = "cpu"
# Names of the target configurations in `topologies/`: what XLA must know of a GPU to compile.
GPUS = ("a100-40", "a100-80", "b200", "h100", "h200")
_SPEC = re.compile(r"(?P<kind>[a-z][a-z0-9-]*):(?:(?P<hosts>\d+)x)?(?P<per_host>\d+)")
# jax's CUDA plugins, any of which brings the compiler; the extra `preflight` installs the first.
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


@dataclass(frozen=True)
class Topology:
    """Devices to plan for.

    Args:
        kind: `cpu`, or a GPU of `GPUS`.
        num_hosts: machines.
        per_host: devices in each; those of one machine have numbers in a row.
    """

    kind: str
    num_hosts: int
    per_host: int

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return self.num_hosts * self.per_host

    @property
    def is_gpu(self) -> bool:
        """Whether programs are compiled for GPUs."""
        return self.kind != CPU

    def __str__(self) -> str:
        hosts = f"{self.num_hosts}x" if self.num_hosts > 1 else ""
        return f"{self.kind}:{hosts}{self.per_host}"

    def config(self) -> str:
        """XLA's description of the GPU (text of a `GpuTargetConfigProto`)."""
        folder = resources.files("fzero.preflight") / "topologies"
        return (folder / f"{self.kind}.txtpb").read_text()

    def devices(self) -> Sequence[Any]:
        """The devices: described ones for GPUs, which need not exist; real ones for the CPU.

        Raises:
            PreflightError: no CUDA plugin is installed, or there are fewer CPU devices.
        """
        if not self.is_gpu:
            return self._cpu_devices()
        require_plugin(self)
        from jax.experimental import topologies

        shape = f"1x{self.num_hosts}x{self.per_host}"
        try:
            found = topologies.get_topology_desc(
                "", platform="cuda", target_config=self.config(), topology=shape
            )
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise PreflightError(
                f"preflight: jax's CUDA plugin cannot describe {self}: {error}. Without a GPU set"
                " JAX_PLATFORMS=cpu before jax is first used; the plugin must have the version of"
                f" jax. Or use topology='cpu:{self.per_host}'"
            ) from error
        return list(found.devices)

    def _cpu_devices(self) -> Sequence[Any]:
        found = jax.devices(CPU)
        if len(found) < self.num_devices:
            raise PreflightError(
                f"preflight: topology {self} needs {self.num_devices} CPU devices, there are"
                f" {len(found)}; call jax.config.update('jax_num_cpu_devices', {self.num_devices})"
                " before jax is first used"
            )
        return found[: self.num_devices]


def parse(spec: str | Topology) -> Topology:
    """Reads a topology.

    Args:
        spec: `<kind>:<devices per host>` or `<kind>:<hosts>x<devices per host>`.

    Returns:
        The topology; a `Topology` is given back.

    Raises:
        PreflightError: it has another form, an unknown GPU, or no device.

    Example:
        >>> parse("h200:8x8")
        Topology(kind='h200', num_hosts=8, per_host=8)
        >>> str(parse("a100-80:1x8")), parse("cpu:8").is_gpu
        ('a100-80:8', False)
    """
    if isinstance(spec, Topology):
        return spec
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise PreflightError(
            f"preflight: topology={spec!r}: expected <gpu>:<gpus per host> or"
            f" <gpu>:<hosts>x<gpus per host>, such as h200:8 or h100:8x8"
        )
    made = Topology(match["kind"], int(match["hosts"] or 1), int(match["per_host"]))
    if made.kind not in (CPU, *GPUS):
        raise PreflightError(
            f"preflight: topology={spec!r}: unknown device {made.kind!r}; known are"
            f" {', '.join(GPUS)} and {CPU}"
        )
    if not made.num_devices:
        raise PreflightError(f"preflight: topology={spec!r} has no device; ask for at least one")
    if made.kind == CPU and made.num_hosts > 1:
        raise PreflightError(
            f"preflight: topology={spec!r}: CPU devices are those of this machine; use"
            f" {CPU}:{made.num_devices}"
        )
    return made


def has_plugin() -> bool:
    """Whether jax's CUDA plugin, which brings the compiler for GPUs, is installed."""
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(name) is not None:
                return True
        except ModuleNotFoundError:  # the namespace package itself is not there
            return False
    return False


def require_plugin(topology: Topology) -> None:
    """Raises `PreflightError`, in one line, where programs for GPUs cannot be compiled."""
    if not has_plugin():
        raise PreflightError(
            f"preflight: {topology} needs jax's compiler for GPUs (no GPU):"
            f' pip install "fzero[preflight]"; without it, --topology cpu:{topology.per_host}'
            " compiles for CPU devices"
        )
