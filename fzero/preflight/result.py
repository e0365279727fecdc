"""The prediction as a value: bytes, collectives, FLOPs, seconds; per device and step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fzero.plan import Plan
from fzero.preflight.bounds import Bounds
from fzero.preflight.links import CollectiveUse, Traffic
from fzero.preflight.rates import Rates
from fzero.preflight.topology import Topology


# What jax gives XLA of a GPU's memory unless told otherwise.
_XLA_SHARE = 0.75


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a step runs; of the fullest one where they differ.

    Args:
        state: kept between steps, by state class.
        batch: its rows of the batch.
        saved_activations: what forward passes leave for backward passes.
        secondary: of the weights, what they leave (`Plan.secondary`); in a pipeline it is part of
            the saved activations.
        gradients: summed, as far as a device keeps them.
        temporaries: everything else: gathered layers, a layer's own values, the optimizer's.
        peak: all of it, as the compiler says.
        gathered: most gathered weights alive at once, as they were sent; part of the temporaries.
        gathered_in_loops: of them, in the loops over a stack's layers.
    """

    state: dict[str, int]
    batch: int
    saved_activations: int
    secondary: int
    gradients: int
    temporaries: int
    peak: int
    gathered: int
    gathered_in_loops: int

    @property
    def state_total(self) -> int:
        """Bytes of all state classes."""
        return sum(self.state.values())

    def parts(self) -> list[tuple[str, int]]:
        """What the peak is made of, in words, with its bytes."""
        state = [(f"state: {name}", count) for name, count in self.state.items() if count]
        secondary = [("secondary shards", self.secondary)] if self.secondary else []
        return [
            *state, ("batch", self.batch), ("saved activations", self.saved_activations),
            *secondary, ("gradients", self.gradients), ("temporaries", self.temporaries),
        ]  # fmt: skip


@dataclass(frozen=True)
class PipelineSummary:
    """The simulated step of a pipeline.

    Args:
        schedule: its name, or `custom`.
        makespan_seconds: from the first start to the last end.
        bubble_fraction: idle share of the ranks.
        peak_live_per_rank: most live activations at once, one per microbatch and stage.
        peak_bytes_per_rank: state, batch, activations, gradients and temporaries.
        stage_seconds: per stage, seconds of each kind of action.
        events: `(rank, kind, stage, microbatch, start_s, end_s)` of every action.
    """

    schedule: str
    makespan_seconds: float
    bubble_fraction: float
    peak_live_per_rank: tuple[int, ...]
    peak_bytes_per_rank: tuple[int, ...]
    stage_seconds: tuple[dict[str, float], ...]
    events: tuple[tuple[int, str, int, int, float, float], ...]


@dataclass(frozen=True)
class Preflight:
    """What a step will need and how long it may take, per device; prints as tables.

    Args:
        plan: the plan.
        topology: the devices.
        rates: what seconds were computed with.
        num_elements: elements in all parameters, Ψ.
        memory: bytes.
        collectives: everything that one device sends in a step.
        traffic: their sums.
        model_flops: of the model's matmuls, this device's part of a step.
        compiled_flops: of the compiled program's; more where layers are computed again.
        unknown_flops: what the program's text does not show.
        bounds: seconds and MFU.
        pipeline: the simulated timeline, in a pipeline of several programs.
        compile_seconds: what XLA took.
        trace_seconds: what tracing and lowering took.
        notes: what to know about these numbers.
    """

    plan: Plan
    topology: Topology
    rates: Rates
    num_elements: int
    memory: Memory
    collectives: tuple[CollectiveUse, ...]
    traffic: Traffic
    model_flops: float
    compiled_flops: int
    unknown_flops: tuple[str, ...]
    bounds: Bounds
    pipeline: PipelineSummary | None
    compile_seconds: float
    trace_seconds: float
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the peak and the reserve are within the device's memory."""
        return self.spare_bytes >= 0

    @property
    def spare_bytes(self) -> int:
        """Bytes to spare beside peak and reserve; negative where it does not fit."""
        return self.rates.memory_bytes - self.rates.reserve_bytes - self.memory.peak

    @property
    def recomputed_fraction(self) -> float:
        """FLOPs computed beyond the model's, as a share of the model's."""
        return self.compiled_flops / self.model_flops - 1 if self.model_flops else 0.0

    @property
    def memory_fraction_needed(self) -> float | None:
        """The `XLA_PYTHON_CLIENT_MEM_FRACTION` that a step needs, where jax's own is too small."""
        share = self.memory.peak / self.rates.memory_bytes
        too_small = self.topology.is_gpu and self.fits and share > _XLA_SHARE
        return min(0.99, round(share + 0.01, 2)) if too_small else None

    def to_json(self) -> dict[str, Any]:
        """The prediction as a JSON-able dict; bytes and seconds per device and step."""
        sums = dataclasses.asdict(self.traffic)
        return {
            "topology": str(self.topology),
            "num_devices": self.topology.num_devices,
            "plan": self.plan.to_json(),
            "num_elements": self.num_elements,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "memory_bytes": self.rates.memory_bytes,
            "reserve_bytes": self.rates.reserve_bytes,
            "peak_bytes": self.memory.peak,
            "state_bytes": self.memory.state_total,
            "state_bytes_by_class": dict(self.memory.state),
            "batch_bytes": self.memory.batch,
            "saved_activation_bytes": self.memory.saved_activations,
            "secondary_bytes": self.memory.secondary,
            "gradient_bytes": self.memory.gradients,
            "temporary_bytes": self.memory.temporaries,
            "gathered_bytes": self.memory.gathered,
            "gathered_in_loops_bytes": self.memory.gathered_in_loops,
            **{name: value for name, value in sums.items() if name.endswith("_bytes")},
            "collectives": [
                dataclasses.asdict(c) | {"exposed": c.exposed, "total_bytes": c.total_bytes}
                for c in self.collectives
            ],
            "model_flops": self.model_flops,
            "compiled_flops": self.compiled_flops,
            "recomputed_fraction": self.recomputed_fraction,
            "unknown_flops": list(self.unknown_flops),
            "bounds": dataclasses.asdict(self.bounds),
            "pipeline": None if self.pipeline is None else dataclasses.asdict(self.pipeline),
            "rates": self.rates.to_json(),
            "compile_seconds": self.compile_seconds,
            "trace_seconds": self.trace_seconds,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from fzero.preflight.tables import rendered

        return rendered(self)
