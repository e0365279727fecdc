"""The prediction as a value: bytes, collectives, FLOPs, seconds; per device and step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fzero.errors import PreflightError
from fzero.plan import Plan
from fzero.preflight.bounds import Bounds
from fzero.preflight.costs import Explanation, costs_of, explain
from fzero.preflight.kernels import Work
from fzero.preflight.network import CollectiveUse, Traffic, traffic
from fzero.preflight.parking import Parked
from fzero.preflight.rates import Rates
from fzero.preflight.tables import duration, merged, size, table_of, text_of
from fzero.preflight.topology import Topology
from fzero.summary import Boxed


if TYPE_CHECKING:
    from rich.table import Table


# What jax gives XLA of a GPU's memory unless told otherwise.
XLA_SHARE = 0.75


# Collectives of a smaller share of the bytes (norms, losses, counters) are told in one line.
_SMALL_SHARE = 1e-3


@dataclass(frozen=True)
class Memory:
    """Bytes of one device while a step runs; of the fullest one where they differ.

    Args:
        state: kept between steps, by state class.
        batch: its rows of the batch.
        saved_activations: what forward passes leave for backward passes; XLA divides it along
            `tensor`, so that with it this is among the temporaries.
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
class Preflight(Boxed):
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
        work: of one device's kernels, the busiest rank's in a pipeline.
        parked: what is kept elsewhere, where the plan has tiers.
        keeps: what forward passes keep (`Plan.remat`), of all stages of a pipeline.
        again: predicts the same step under another plan; see `explain`.
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
    work: Work = field(default_factory=Work)
    parked: Parked | None = None
    keeps: tuple[str, ...] = ()
    again: Callable[[Plan], Preflight] | None = field(default=None, repr=False, compare=False)

    @property
    def parked_seconds(self) -> float:
        """What parking likely adds to the step."""
        return 0.0 if self.parked is None else self.parked.seconds

    @property
    def by_axes(self) -> dict[str, Traffic]:
        """The traffic over each mesh axis (or axes, joined by `+`) by itself."""
        names = dict.fromkeys(c.axes for c in self.collectives)
        return {
            name: traffic(c for c in self.collectives if c.axes == name) for name in sorted(names)
        }

    def explain(self, most: int = 6) -> Explanation:
        """Where the step's time goes, and plans that would take less, each compiled and ranked.

        Args:
            most: plans to try against the three largest costs (and the memory, where the plan does
                not fit). Each takes as long as this prediction did.

        Returns:
            Costs and plans; `str()` of it is tables.

        Raises:
            PreflightError: this prediction was not made by `fz.preflight`.

        Example:
            >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
            >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((64, 64))}, {}),
            ...     lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
            >>> batch = {"x": np.ones((8, 64), np.float32)}
            >>> found = fz.preflight(model, optax.sgd(0.1), fz.Plan(data=1), batch, "cpu:1")
            >>> found.explain(most=1).costs[0].seconds > 0
            True
        """
        if self.again is None:
            raise PreflightError("explain: expected a prediction that fz.preflight made")
        return explain(self, self.again, most)

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
        too_small = self.topology.is_gpu and self.fits and share > XLA_SHARE
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
            "by_axes": {axes: dataclasses.asdict(own) for axes, own in self.by_axes.items()},
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
            "costs": [dataclasses.asdict(cost) for cost in costs_of(self)],
            "parked": None if self.parked is None else dataclasses.asdict(self.parked),
            "compile_seconds": self.compile_seconds,
            "trace_seconds": self.trace_seconds,
            "notes": list(self.notes),
            "keeps": list(self.keeps),
        }

    def __str__(self) -> str:
        return rendered(self)


def _share(own: float, whole: float) -> str:
    return f"{own / whole:.1%}" if whole else "0 %"


def rendered(found: Preflight) -> str:
    """The prediction as text."""
    tables = [heading(found), memory_table(found), collectives_table(found), time_table(found)]
    if found.parked is not None:
        tables.append(parked_table(found.parked))
    if found.pipeline is not None:
        tables.append(pipeline_table(found))
    return text_of(*tables, *(f"note: {note}" for note in found.notes))


def heading(found: Preflight) -> str:
    """What was asked, and the answer."""
    verb = "fits" if found.fits else "does NOT fit"
    spare = size(abs(found.spare_bytes))
    by = f"{spare} to spare" if found.fits else f"{spare} too much"
    lines = [
        f"{describe_plan(found)} on {found.topology}: {found.num_elements:,} parameters",
        f"{verb}: peak {size(found.memory.peak)} of {size(found.rates.memory_bytes)} per device,"
        f" {size(found.rates.reserve_bytes)} kept in reserve, {by}",
    ]
    fraction = found.memory_fraction_needed
    if fraction is not None:
        lines.append(f"set XLA_PYTHON_CLIENT_MEM_FRACTION={fraction:.2f}: jax's own 0.75 is less")
    return "\n".join(lines)


def describe_plan(found: Preflight) -> str:
    """The plan's sizes in words."""
    plan = found.plan
    sizes = [f"ZeRO-{plan.zero}"]
    for name in ("pipe", "replica"):
        if getattr(plan, name) > 1:
            sizes.append(f"{name}={getattr(plan, name)}")
    sizes.append(f"data={plan.sizes(found.topology.num_devices)['data']}")
    sizes += [f"{name}={size}" for name, size in plan.further.items()]
    sizes += [f"microbatches={plan.microbatches}", plan.precision]
    sizes += [f"fp32 kept where {' or '.join(plan.keep_fp32)}"] if plan.keep_fp32 else []
    return ", ".join(sizes)


def memory_table(found: Preflight) -> Table:
    """Bytes per device."""
    table = table_of("memory per device", "what", "bytes", "")
    memory = found.memory
    for name, count in memory.parts():
        table.add_row(name, f"{count:,}", size(count))
    table.add_section()
    table.add_row("peak", f"{memory.peak:,}", size(memory.peak))
    return table


def collectives_table(found: Preflight) -> Table:
    """What is sent, over which links, and what is computed meanwhile."""
    table = table_of(
        "collectives per device and step, and the kernels beside each", "kind", "axis", "links",
        "size", "times", "sent", "matmuls", "other", "adds", left=3,
    )  # fmt: skip
    rows = merged(found.collectives)
    least = _SMALL_SHARE * found.traffic.communicated_bytes
    small = [c for c in rows if c.total_bytes < least]
    for c in rows:
        if c.total_bytes < least:
            continue
        links = "across hosts" if c.crosses_hosts else "in a host"
        where = "*" if c.estimated else ""
        table.add_row(
            c.kind + where, c.axes, links, size(c.bytes), str(c.times), size(c.total_bytes),
            str(c.num_matmuls), str(c.num_kernels), duration(c.times * c.exposed_seconds),
        )  # fmt: skip
    if small:
        total = sum(c.total_bytes for c in small)
        count = str(sum(c.times for c in small))
        table.add_row("small ones", "", "", "", count, size(total), "", "", "")
    table.add_section()
    by_axes = found.by_axes
    for axes, own in by_axes.items() if len(by_axes) > 1 else ():
        links = "across hosts" if own.cross_host_bytes else "in a host"
        exposed = f"{_share(own.exposed_bytes, own.communicated_bytes)} exposed"
        table.add_row(
            "all", axes, links, exposed, "", size(own.communicated_bytes), "", "",
            duration(own.exposed_seconds),
        )  # fmt: skip
    sums = found.traffic
    share = f"{_share(sums.without_matmul_bytes, sums.communicated_bytes)} without matmuls"
    exposed = f"{_share(sums.exposed_bytes, sums.communicated_bytes)} exposed"
    table.add_row(
        "all", "", "", "", "", size(sums.communicated_bytes), "", "",
        duration(sums.exposed_seconds),
    )  # fmt: skip
    table.caption = f"{exposed}, {share}"
    if sums.cross_host_bytes:
        table.caption += (
            f"; {size(sums.cross_host_bytes)} in collectives across hosts, of which each network"
            f" card carries {size(sums.network_bytes)}"
        )
    table.caption_justify = "left"
    return table


def parked_table(away: Parked) -> Table:
    """What is kept elsewhere, and what bringing it costs."""
    table = table_of("kept elsewhere, per device", "what", "")
    table.add_row("in host memory", size(away.host_bytes))
    table.add_row("on disk", size(away.disk_bytes))
    table.add_row("on the device at once", size(away.visiting_bytes))
    table.add_row("to the device, in a step", duration(away.up_seconds))
    table.add_row("from the device", duration(away.down_seconds))
    table.add_row("of that beside computation", duration(away.hidden_seconds))
    table.add_row("adds", duration(away.seconds))
    return table


def time_table(found: Preflight) -> Table:
    """Seconds of a step and MFU."""
    table = table_of("time of a step", "what", "seconds", "MFU")
    b = found.bounds
    again = f"{found.compiled_flops / 1e12:.2f} TFLOP, {found.recomputed_fraction:.0%} recomputed"
    table.add_row(f"matmuls at the peak ({again})", duration(b.compute_seconds), "")
    table.add_row("device memory at its peak", duration(b.memory_seconds), "")
    table.add_row("links at their peak", duration(b.link_seconds), "")
    if b.bubble_seconds:
        table.add_row("a rank waits for others", duration(b.bubble_seconds), "")
    table.add_section()
    for name, seconds, mfu in (
        (f"at best ({b.limit} is the most)", b.best_seconds, b.best_mfu),
        ("likely", b.likely_seconds, b.likely_mfu),
        ("nothing beside collectives", b.serial_seconds, b.serial_mfu),
    ):
        table.add_row(name, duration(seconds), f"{mfu:.0%}")
    table.caption = f"compiled in {found.compile_seconds:.1f} s; rates: {found.rates.source}"
    table.caption_justify = "left"
    return table


def pipeline_table(found: Preflight) -> Table:
    """What each rank of a pipeline does and holds."""
    assert found.pipeline is not None
    own = found.pipeline
    title = (
        f"pipeline {own.schedule}: {duration(own.makespan_seconds)},"
        f" {own.bubble_fraction:.1%} idle (simulated)"
    )
    table = table_of(title, "rank", "live activations", "peak")
    for rank, (live, peak) in enumerate(
        zip(own.peak_live_per_rank, own.peak_bytes_per_rank, strict=True)
    ):
        table.add_row(str(rank), str(live), size(peak))
    table.add_section()
    for stage, seconds in enumerate(own.stage_seconds):
        words = ", ".join(f"{kind} {duration(s)}" for kind, s in seconds.items())
        table.add_row(f"stage {stage}", words, "")
    return table
