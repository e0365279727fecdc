"""One program, compiled for devices that need not be there, and what its text says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from fzero.preflight.gather_memory import Gathered, gathered
from fzero.preflight.hlo.counts import Flops, Module, matmul_flops
from fzero.preflight.kernels import Kernels, Work
from fzero.preflight.network import CollectiveUse, Network, uses
from fzero.preflight.rates import Rates
from fzero.preflight.topology import Topology


# Kernels cannot be timed without the device: the compiler takes its first choice of each.
# (Among kernels of fixed order jax 0.11 has no first choice without a device: any are as fast.)
GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_deterministic_ops": False}


@dataclass(frozen=True)
class Compiled:
    """A compiled program in numbers, one device.

    Args:
        argument_bytes: of its arguments.
        output_bytes: of its results.
        alias_bytes: of results that take the place of arguments.
        temporary_bytes: of everything else that it needs meanwhile.
        flops: of matmuls, recomputed ones included.
        work: of all kernels.
        collectives: everything it sends.
        gathered: most bytes of gathered weights alive at once.
        compile_seconds: what compiling took, tracing aside.
        outputs_at: the sharding of each result.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    flops: Flops
    work: Work
    collectives: tuple[CollectiveUse, ...]
    gathered: Gathered
    compile_seconds: float
    outputs_at: Any

    @property
    def peak_bytes(self) -> int:
        """Most bytes while it runs, arguments included."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclass(frozen=True)
class Target:
    """What programs are compiled for.

    Args:
        topology: the devices in words.
        devices: the devices.
        rates: of one device.
        precision: what matmuls compute in.
    """

    topology: Topology
    devices: Sequence[Any]
    rates: Rates
    precision: str

    def network(self, *meshes: Mesh) -> Network:
        """The links between the devices of some meshes, numbered one mesh after the other."""
        numbers = {device.id: i for i, device in enumerate(self.devices)}
        devices = [device for mesh in meshes for device in mesh.devices.flat]
        return Network(self.rates, tuple(numbers[d.id] // self.topology.per_host for d in devices))

    def compile(self, lowered: Any, mesh: Mesh) -> Compiled:
        """Compiles a lowered program of a mesh and reads it."""
        started = time.perf_counter()
        options = GPU_OPTIONS if self.topology.is_gpu else None
        compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - started
        return self.read(compiled, mesh, seconds)

    def read(self, compiled: Any, mesh: Mesh, seconds: float = 0.0) -> Compiled:
        """What a compiled program says."""
        rates, memory, text = self.rates, compiled.memory_analysis(), compiled.as_text()
        module = Module(text)
        kernels = Kernels(module, rates, self.precision)
        return Compiled(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temporary_bytes=memory.temp_size_in_bytes,
            flops=matmul_flops(text),
            work=kernels.total(),
            collectives=uses(kernels, dict(mesh.shape), self.network(mesh)),
            gathered=gathered(module),
            compile_seconds=seconds,
            outputs_at=compiled.output_shardings,
        )
