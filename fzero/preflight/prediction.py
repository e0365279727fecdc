"""Compiles a training step for devices that need not exist, and reads it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax

from fzero.axes import TOKENS
from fzero.batch import Inputs, abstract_batch, check_batch
from fzero.model import Model
from fzero.plan import Plan
from fzero.preflight.bounds import bounds
from fzero.preflight.kernels import Work
from fzero.preflight.network import CollectiveUse, Traffic, traffic
from fzero.preflight.parking import moved_bytes, on_the_device, parked, room_of_parked
from fzero.preflight.pipeline import (
    PipelineRun,
    StageCompiler,
    rank_collectives,
    tied_gradients,
    tied_weights,
)
from fzero.preflight.program import Compiled, Target
from fzero.preflight.rates import Rates, rates_of
from fzero.preflight.result import XLA_SHARE, Memory, PipelineSummary, Preflight
from fzero.preflight.shapes import batch_bytes, model_flops, saved_in_a_step
from fzero.preflight.stage_traffic import update_gathers
from fzero.preflight.topology import Topology, parse
from fzero.report.report import CLASSES, Report
from fzero.sharding.blueprint import Blueprint, blueprint, planned
from fzero.sharding.initial import initial_shapes
from fzero.state.train_state import TrainState
from fzero.step.passes import OneProgram
from fzero.step.steps import TrainStep
from fzero.storage.tiers import DEVICE
from fzero.tree import PyTree, shape_of
from fzero.zero.keeping import gradient_bytes, held_bytes


def predicted(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    topology: str | Topology,
    rates: Rates | None,
) -> Preflight:
    """As `fzero.preflight`."""
    where = parse(topology)
    target = Target(where, where.devices(), rates_of(where, rates), plan.precision)
    started = time.perf_counter()
    sizes = plan.sizes(where.num_devices)
    devices = target.devices[: math.prod(sizes.values())]
    blue = blueprint(model, tx, on_the_device(plan), devices)
    elsewhere = Report.of_plan(planned(model, tx, plan, sizes)) if plan.tiers else None
    if where.is_gpu:  # described devices do not say how much of their memory jax may take
        memory = int(XLA_SHARE * target.rates.memory_bytes)
        blue = dataclasses.replace(blue, memory=memory + room_of_parked(elsewhere))
    step = TrainStep(blue, donate=True, apply=True)
    fields = step.blueprint.shapes()
    shapes = jax.tree.map(shape_of, Inputs.of(batch))
    num_shares = sizes["data"] * sizes["replica"]
    check_batch(shapes, num_shares, plan.microbatches)
    predictor = _Predictor(target, step, fields, shapes, num_shares, (plan, elsewhere))
    found = predictor.one_program() if step.blueprint.stages is None else predictor.pipeline()
    if elsewhere is not None or plan.remat == "offload":
        moving = gradient_bytes(step.blueprint), predictor.on_host_bytes
        found = _parking(found, plan, elsewhere or Report(()), moving)
    spent = time.perf_counter() - started - found.compile_seconds

    def again(plan: Plan) -> Preflight:
        return predicted(model, tx, plan, batch, where, target.rates)

    return dataclasses.replace(found, trace_seconds=spent, again=again)


def _parking(found: Preflight, plan: Plan, where: Report, moving: tuple[int, int]) -> Preflight:
    """The prediction of a plan that parks leaves, or layers' inputs, from that of the same with all
    on the device."""
    b = found.bounds
    away = parked(plan, where, found.rates, moving, found.work.likely_seconds)
    moved = away.host_bytes + away.disk_bytes
    scale = {
        name: seconds / (seconds + away.seconds)
        for name in ("best", "likely", "serial")
        for seconds in (getattr(b, f"{name}_seconds"),)
    }
    later = {f"{name}_seconds": getattr(b, f"{name}_seconds") + away.seconds for name in scale}
    slower = {f"{name}_mfu": getattr(b, f"{name}_mfu") * share for name, share in scale.items()}
    longest = max(b.compute_seconds, b.memory_seconds, b.link_seconds, b.bubble_seconds)
    limit = "parked" if away.seconds > longest else b.limit
    note = (
        f"{moved:,} bytes are kept elsewhere; what they take is the plan's arithmetic at"
        f" {found.rates.pinned_bytes_per_s / 1e9:.0f} GB/s to the host"
        + (f" and {found.rates.disk_bytes_per_s / 1e9:.0f} GB/s to disk" if away.disk_bytes else "")
        + (
            "; the optimizer's own time on the host's cores is not known"
            if plan.update_on == "host" else ""
        )
    )  # fmt: skip
    return dataclasses.replace(
        found,
        plan=plan,
        parked=away,
        bounds=dataclasses.replace(b, **later, **slower, limit=limit),
        notes=(*found.notes, note) if plan.tiers else found.notes,
    )


def _makespans(
    run: PipelineRun, beside: Sequence[Traffic], updates: Sequence[Work]
) -> tuple[float, float]:
    """Seconds of a pipeline's step, at best and likely: its schedule, then the optimizer's turn.

    Args:
        run: the schedule.
        beside: of what is sent before and after it, each one after the other.
        updates: of the optimizer, per rank.
    """
    best = run.best_seconds + sum(sums.exposed_best_seconds for sums in beside)
    likely = run.timeline.makespan_s + sum(sums.exposed_seconds for sums in beside)
    return (
        best + max(own.best_seconds for own in updates),
        likely + max(own.likely_seconds for own in updates),
    )


class _Predictor:
    def __init__(
        self,
        target: Target,
        step: TrainStep,
        fields: dict[str, Any],
        batch: PyTree,
        num_shares: int,
        asked: tuple[Plan, Report | None],
    ) -> None:
        self.target, self.step, self.fields = target, step, fields
        # The plan with what it parks, and where its leaves then are.
        self.asked, self.elsewhere = asked
        self.on_host_bytes = 0
        self.batch = batch
        self.plan: Plan = step.plan
        self.blue: Blueprint = step.blueprint
        self.where_kept = Report.of_plan(self.blue)
        # Before anything is compiled: what cannot be traced is said at once.
        times = self.plan.microbatches * num_shares
        traced = model_flops(self.blue.model, self.plan, batch, times)
        self.model_flops = traced / self.blue.mesh.size

    def one_program(self) -> Preflight:
        """The prediction of a step that is one program."""
        assert isinstance(self.step.passes, OneProgram)
        mesh = self.blue.mesh
        lowered = self.step.lower(TrainState(**self.fields, **self.blue.statics), self.batch)
        compiled = self.target.compile(lowered, mesh)
        kept = self._state_bytes(range(mesh.size))
        left = saved_in_a_step(self.step.passes, self.fields, abstract_batch(self.batch, mesh))
        saved, secondary, self.on_host_bytes = left.activations, left.secondary, left.on_host
        notes: list[str] = []
        if self.plan.remat == "offload":
            notes.append(
                f"remat='offload' keeps {left.on_host:,} bytes of layer inputs in host memory; a"
                " described GPU has none, so they count for the device here; what their ways take"
                f" is arithmetic at {self.target.rates.pinned_bytes_per_s / 1e9:.0f} GB/s"
            )
        features = [axis for axis in self.plan.further if axis not in TOKENS]
        if features:  # traced with whole ones
            notes.append(
                f"what forward passes leave for backward passes, {saved:,} bytes with whole"
                f" features, is divided along {', '.join(features)} as XLA decides: it is among"
                " the temporaries"
            )
            saved = self.on_host_bytes = 0
        if self.plan.gather == "lazy" and self.blue.group.shards > 1:
            held = held_bytes(self.blue)
            notes.append(
                "gather='lazy' holds whole parameters from the first forward pass to the last"
                f" backward pass: {held:,} bytes of the temporaries"
            )
        own = batch_bytes(self.batch, mesh)
        gradients = gradient_bytes(self.blue)
        peak = compiled.peak_bytes
        known = sum(kept.values()) + own + saved + secondary + gradients
        whole = Memory(
            state=kept,
            batch=own,
            saved_activations=saved,
            secondary=secondary,
            gradients=gradients,
            temporaries=max(0, peak - known),
            peak=peak,
            gathered=compiled.gathered.most_bytes,
            gathered_in_loops=compiled.gathered.in_loop_bytes,
        )
        return self._result(
            [compiled],
            self._without_parked(whole, range(mesh.size)),
            compiled.collectives,
            compiled.work,
            compiled.compile_seconds,
            notes,
        )

    def pipeline(self) -> Preflight:
        """The prediction of a step that is many programs."""
        compiler, ranks = StageCompiler(self.step.executor, self.target), range(self.plan.pipe)
        run = compiler.run(self.fields, abstract_batch(self.batch, self.blue.rank_mesh(0)))
        updating = compiler.update_bytes(self.step, self.fields, run)
        programs = [
            [run.stages[e.action.stage].programs[e.action.kind] for e in row]
            for row in run.timeline.rank_events
        ]
        memory = [self._rank_memory(run, rank, updating[rank], programs[rank]) for rank in ranks]
        work = [
            sum((program.work for program in own), update)
            for own, update in zip(programs, compiler.update_work, strict=True)
        ]
        # Before the schedule, after it, and in the update.
        beside = [
            [tied_weights(compiler, run, rank) for rank in ranks],
            [tied_gradients(compiler, run, rank) for rank in ranks],
            [update_gathers(self.target, self.blue, rank) for rank in ranks],
        ]
        sent = [
            sum((by_rank[rank] for by_rank in beside), rank_collectives(compiler, run.stages, rank))
            for rank in ranks
        ]
        slowest = [
            max(map(traffic, found), key=lambda sums: sums.exposed_seconds) for found in beside
        ]
        notes = [
            "bytes are those of the fullest rank, traffic that of the rank with the most, work that"
            " of the busiest; the optimizer's programs run one after the other (collectives marked"
            " * are arithmetic)"
        ]
        found = self._result(
            [program for own in programs for program in own],
            max(memory, key=lambda own: own.peak),
            max(sent, key=lambda found: traffic(found).communicated_bytes),
            max(work, key=lambda own: own.likely_seconds),
            compiler.seconds,
            notes,
            _makespans(run, slowest, compiler.update_work),
        )
        mean = sum(own.flops for own in work) // len(work)
        summary = self._summary(run, [own.peak for own in memory])
        return dataclasses.replace(found, compiled_flops=mean, pipeline=summary)

    def _rank_memory(
        self, run: PipelineRun, rank: int, updating: int, programs: Sequence[Compiled]
    ) -> Memory:
        """Bytes of a rank of a pipeline, at its peak: while passes run, or in the update."""
        per_rank = self.blue.mesh.size // self.plan.pipe
        devices = range(rank * per_rank, (rank + 1) * per_rank)
        kept = self._state_bytes(devices)
        own = batch_bytes(self.batch, self.blue.rank_mesh(0))
        working, saved = max(run.working_bytes[rank], updating), run.saved_bytes[rank]
        gradients = sum(stage.sums_bytes for stage in run.stages if stage.rank == rank)
        whole = Memory(
            state=kept,
            batch=own,
            saved_activations=saved,
            secondary=0,
            gradients=gradients,
            temporaries=max(0, working - saved - gradients),
            peak=sum(kept.values()) + own + working,
            gathered=max(program.gathered.most_bytes for program in programs),
            gathered_in_loops=max(program.gathered.in_loop_bytes for program in programs),
        )
        return self._without_parked(whole, devices)

    def _without_parked(self, whole: Memory, devices: range) -> Memory:
        """The bytes of some devices, with what the plan parks away and visiting in turn."""
        if self.elsewhere is None:
            return whole
        moved, visiting = moved_bytes(self.asked, self.elsewhere, devices)
        held = self.elsewhere.fullest(DEVICE, devices)
        return dataclasses.replace(
            whole,
            state={name: held[name] for name in whole.state},
            temporaries=whole.temporaries + visiting,
            peak=max(0, whole.peak - moved) + visiting,
        )

    def _result(
        self,
        programs: Sequence[Compiled],
        memory: Memory,
        collectives: Sequence[CollectiveUse],
        work: Work,
        compile_seconds: float,
        notes: Sequence[str],
        makespans: tuple[float, float] | None = None,
    ) -> Preflight:
        plan, blue = self.plan, self.blue
        keeps = tuple(self.step.passes.keeps)
        if plan.remat is None:
            notes = [*notes, f"remat=None keeps {' and '.join(keeps)} here, by memory's room"]
        logical = initial_shapes(blue.model)
        unknown = dict.fromkeys(u for program in programs for u in program.flops.unknown)
        sums = traffic(collectives)
        found = bounds(
            self.target.rates,
            plan.precision,
            work=work,
            traffic=sums,
            model_flops=self.model_flops,
            makespans=makespans,
        )
        return Preflight(
            plan=plan,
            topology=self.target.topology,
            rates=self.target.rates,
            num_elements=sum(leaf.size for leaf in jax.tree.leaves(logical[0])),
            memory=memory,
            collectives=tuple(collectives),
            traffic=sums,
            model_flops=self.model_flops,
            compiled_flops=work.flops,
            unknown_flops=tuple(unknown),
            bounds=found,
            pipeline=None,
            compile_seconds=compile_seconds,
            trace_seconds=0.0,
            notes=tuple(notes),
            work=work,
            keeps=keeps,
        )

    def _state_bytes(self, devices: range) -> dict[str, int]:
        """Bytes of each state class on the fullest of some devices."""
        held = self.where_kept.fullest(DEVICE, among=devices)
        return {name: held[name] for name in CLASSES}

    def _summary(self, run: PipelineRun, peaks: Sequence[int]) -> PipelineSummary:
        timeline, schedule = run.timeline, self.plan.schedule
        events = tuple(
            (e.rank, str(e.action.kind), e.action.stage, e.action.microbatch, e.start_s, e.end_s)
            for e in timeline.events
        )
        seconds: list[dict[str, float]] = [{} for _ in run.stages]
        for _, kind, stage, _, start, end in events:
            seconds[stage].setdefault(kind, end - start)
        return PipelineSummary(
            schedule=schedule
            if isinstance(schedule, str)
            else "1f1b"
            if not schedule
            else "custom",
            makespan_seconds=timeline.makespan_s,
            bubble_fraction=timeline.bubble_fraction,
            peak_live_per_rank=timeline.peak_live_per_rank,
            peak_bytes_per_rank=tuple(peaks),
            stage_seconds=tuple(seconds),
            events=events,
        )
