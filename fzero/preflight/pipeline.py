"""The programs of a pipeline's stages, compiled, and the step that its schedule makes of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from fzero.batch import Inputs, batch_sharding
from fzero.pipeline.execute import Executor
from fzero.pipeline.programs import LOCAL, WHOLE, StagePrograms, with_same
from fzero.preflight.kernels import Work
from fzero.preflight.network import CollectiveUse, traffic
from fzero.preflight.program import Compiled, Target
from fzero.preflight.stage_traffic import handed
from fzero.schedule.actions import Action, Kind
from fzero.schedule.simulate import Cost, Timeline, simulate
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.homes import stage_tree
from fzero.sharding.split import Split, flat_splits, map_splits, stored_shapes, trained
from fzero.state.train_state import TrainState
from fzero.step.passes import kept_by
from fzero.step.steps import TrainStep
from fzero.step.values import Gradients
from fzero.tree import PyTree, device_bytes, shape_at


@dataclass(frozen=True)
class StageRun:
    """One stage's programs in numbers, one device.

    Args:
        stage: which stage.
        rank: the rank that runs it.
        programs: by kind of action.
        slot_bytes: what a forward leaves for its backward pass.
        half_bytes: what an input gradient leaves for its weight gradient, what it keeps of that
            included; 0 where backward passes are whole.
        sums_bytes: of its summed gradients.
        sent_bytes: what it hands to the next stage, per microbatch.
        back_bytes: what it hands to the stage before, per microbatch.
        gradient_bytes: of one microbatch's gradients, where they wait to be added.
        tied_bytes: of weights that it reads and another rank keeps, by that rank.
        tied_sums_bytes: of their summed gradients, which go back there.
    """

    stage: int
    rank: int
    programs: dict[Kind, Compiled]
    slot_bytes: int
    half_bytes: int
    sums_bytes: int
    sent_bytes: int
    back_bytes: int
    gradient_bytes: int
    tied_bytes: dict[int, int]
    tied_sums_bytes: dict[int, int]


@dataclass(frozen=True)
class PipelineRun:
    """A pipeline's step in numbers.

    Args:
        stages: every stage.
        timeline: the schedule with what its actions likely cost.
        best_seconds: its makespan with all at the peaks.
        working_bytes: per rank, the most bytes beside state and batch: live activations, sums of
            gradients, gradients and activations that wait, and what the running program needs.
        saved_bytes: per rank, the most bytes of live activations.
        compile_seconds: what compiling took, tracing aside.
    """

    stages: tuple[StageRun, ...]
    timeline: Timeline
    best_seconds: float
    working_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    compile_seconds: float


class StageCompiler:
    """Compiles the programs of all stages; those of like stages once.

    Args:
        executor: of a training step.
        target: what to compile for.
    """

    def __init__(self, executor: Executor, target: Target) -> None:
        self.executor, self.target = executor, target
        self.blue: Blueprint = executor.blue
        self.plan = executor.plan
        self.seconds = 0.0
        # Of the update's programs, per rank; known once `update_bytes` compiled them.
        self.update_work = [Work()] * self.plan.pipe
        self._known: dict[str, Compiled] = {}

    def run(self, fields: dict[str, Any], batch: Inputs) -> PipelineRun:
        """Compiles every stage and simulates the step.

        Args:
            fields: shapes of the state's fields.
            batch: shapes of the global batch.
        """
        kinds: dict[int, set[Kind]] = {}
        for action in self.executor.schedule.actions:
            kinds.setdefault(action.stage, set()).add(action.kind)
        forwards = self._forwards(fields, batch)
        sent: Any = None
        made: dict[int, StageRun] = {}
        self._ends = forwards[-1].out[2:]
        for program in reversed(self.executor.programs):
            at = forwards[program.stage]
            if program.last:
                sent = at.out[0], at.out[1]
            else:
                sent = jax.tree.map(lambda x, p=program: self._local(p, x), sent)
            made[program.stage], back = self._stage(program, at, sent, kinds[program.stage])
            sent = back, sent[1]
        runs = tuple(made[stage] for stage in sorted(made))
        schedule = self.executor.schedule
        timeline = simulate(schedule, self._cost(runs, likely=True))
        best = simulate(schedule, self._cost(runs, likely=False)).makespan_s
        working, saved = _held(timeline, runs)
        return PipelineRun(runs, timeline, best, working, saved, self.seconds)

    def update_bytes(
        self, step: TrainStep, fields: dict[str, Any], run: PipelineRun
    ) -> tuple[int, ...]:
        """Per rank, the most bytes beside state and batch while the update runs.

        Args:
            step: the executor's step.
            fields: shapes of the state's fields.
            run: the rest of the step.
        """
        blue, last = self.blue, self.executor.programs[-1]
        several = self.plan.microbatches > 1
        ends, _ = jax.eval_shape(last.totals, [self._ends] * self.plan.microbatches)
        mean, own = jax.tree.map(lambda leaf: self._whole(last, leaf), ends)
        sums = stored_shapes(
            trained(blue.params), blue.sharding, True,
            lambda split: np.dtype("float32") if several else split.compute,
        )  # fmt: skip
        gradients = Gradients(sums, mean, own, {"buffers": fields["buffers"]})
        ranks = range(self.plan.pipe)
        sums_of = [sum(s.sums_bytes for s in run.stages if s.rank == rank) for rank in ranks]
        most = list(sums_of)
        for mesh, lowered in step.lower_update(TrainState(**fields, **blue.statics), gradients):
            text = lowered.as_text()
            if text not in self._known:
                self._known[text] = self.target.compile(lowered, mesh)
                self.seconds += self._known[text].compile_seconds
            found, devices = self._known[text], set(mesh.devices.flat)
            size = found.temporary_bytes + found.output_bytes - found.alias_bytes
            for rank in ranks:
                if not devices.isdisjoint(blue.rank_mesh(rank).devices.flat):
                    self.update_work[rank] += found.work
                    most[rank] = max(most[rank], sums_of[rank] + size)
        return tuple(most)

    def _forwards(self, fields: dict[str, Any], batch: Inputs) -> list[_Forward]:
        kept = kept_by(self.blue, fields)
        scale = fields["loss_scale"].scale if self.plan.precision == "fp16" else None
        found: list[_Forward] = []
        x: Any = None
        for program in self.executor.programs:
            own = self._kept(program, kept)
            inputs = (
                Inputs(
                    *(
                        jax.tree.map(lambda leaf, put=put, p=program: put(p, leaf), tree)
                        for put, tree in (
                            (self._rows, batch.rows),
                            (self._whole, batch.shared),
                            (self._whole, batch.step),
                        )
                    )
                ),
                self._whole(program, fields["rng"]),
                self._whole(program, jax.ShapeDtypeStruct((), "int32")),
            )
            buffers = {
                name: jax.tree.map(
                    lambda leaf, p=program: self._packed(p, leaf), fields["buffers"][name]
                )
                for name in program.stateful
            }
            last_scale = self._whole(program, scale) if program.last and scale is not None else None
            args = (own, buffers, *inputs, x, last_scale)
            (out, saved, _), _ = jax.eval_shape(program.forward, *args)
            out = jax.tree.map(lambda leaf, p=program: self._local(p, leaf), out)
            at = self._compile(program, program.forward, args).outputs_at[0][1]
            saved = self._lying(program, saved, at)
            found.append(_Forward(own, inputs, args, out, saved))
            if not program.last:
                following = self.executor.programs[program.stage + 1]
                x = jax.tree.map(lambda leaf, p=following: self._local(p, leaf), out)
        return found

    def _stage(
        self, program: StagePrograms, at: _Forward, sent: Any, kinds: set[Kind]
    ) -> tuple[StageRun, Any]:
        """A stage's programs, and what its backward pass sends."""
        cotangent, unscale = sent
        sums = None
        if self.plan.microbatches > 1:
            sums = self._lying(program, jax.eval_shape(program.zeros), program.grads_at)
        compiled: dict[Kind, Compiled] = {"F": self._compile(program, program.forward, at.args)}
        args = (at.kept, *at.inputs)
        back, half_bytes, grads = None, 0, None
        if "B" in kinds:
            run = program.backward(sums is not None)
            full = (*args, at.saved, cotangent, unscale, sums)
            compiled["B"] = self._compile(program, run, full)
            (back, grads), _ = jax.eval_shape(program.backward(False), *full[:-1], None)
        if "I" in kinds:
            first = (*args, at.saved, cotangent)
            compiled["I"] = self._compile(program, program.input_backward, first)
            (back, halves), _ = jax.eval_shape(program.input_backward, *first)
            halves = self._lying(program, halves, compiled["I"].outputs_at[0][1])
            halves = with_same(halves, at.saved)
            half_bytes = self._bytes(halves)
            run = program.weight_backward(sums is not None)
            rest = (*args, halves, unscale)
            compiled["W"] = self._compile(program, run, (*rest, sums))
            grads, _ = jax.eval_shape(program.weight_backward(False), *rest, None)
        back = jax.tree.map(lambda leaf: self._local(program, leaf), back)
        grads = self._lying(program, grads, program.grads_at)
        total = grads if sums is None else sums
        return StageRun(
            stage=program.stage,
            rank=program.rank,
            programs=compiled,
            slot_bytes=self._bytes(at.saved),
            half_bytes=half_bytes,
            sums_bytes=self._bytes(sums),
            sent_bytes=0 if program.last else self._bytes(at.out),
            back_bytes=0 if program.first else self._bytes((back, unscale)),
            gradient_bytes=self._bytes(grads),
            tied_bytes=_tied(program.rank, program.splits, at.kept),
            tied_sums_bytes=_tied(program.rank, trained(program.splits), total),
        ), back

    def _compile(self, program: StagePrograms, run: Any, args: Any) -> Compiled:
        lowered = run.lower(*args)
        text = lowered.as_text()
        if text not in self._known:
            self._known[text] = self.target.compile(lowered, program.mesh)
            self.seconds += self._known[text].compile_seconds
        return self._known[text]

    def _kept(self, program: StagePrograms, kept: PyTree) -> PyTree:
        """What a stage's forward pass reads, as its rank holds it."""

        def on_rank(split: Split, to: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
            home = split.home
            shape = leaf.shape
            if home is not None and home.rows:
                shape = (home.rows_per_rank, *shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=to)

        return map_splits(
            on_rank, program.splits, program.kept_at, stage_tree(program.pieces, kept)
        )

    def _lying(self, program: StagePrograms, tree: PyTree, at: PyTree) -> PyTree:
        """Shapes with shardings, on the stage's own devices.

        Stages that are alike are compiled once, so `at` may be another one's: its leaves count.
        """
        leaves, structure = jax.tree.flatten(tree)
        placed = [
            shape_at(leaf, NamedSharding(program.mesh, to.spec))
            for leaf, to in zip(leaves, jax.tree.leaves(at), strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def _local(self, program: StagePrograms, leaf: Any) -> jax.ShapeDtypeStruct:
        return shape_at(leaf, NamedSharding(program.mesh, LOCAL))

    def _rows(self, program: StagePrograms, leaf: Any) -> jax.ShapeDtypeStruct:
        return shape_at(leaf, batch_sharding(program.mesh, leaf.shape))

    def _packed(self, program: StagePrograms, leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(program.mesh, LOCAL)
        shape = self.blue.group.row_shares, *leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    def _whole(self, program: StagePrograms, leaf: Any) -> jax.ShapeDtypeStruct:
        return shape_at(leaf, NamedSharding(program.mesh, WHOLE))

    def _bytes(self, tree: PyTree) -> int:
        """Bytes per device."""
        return sum(device_bytes(leaf) for leaf in jax.tree.leaves(tree))

    def _cost(self, runs: tuple[StageRun, ...], likely: bool) -> Cost:
        """Seconds of every action: its kernels, and of its collectives what they do not hide."""
        per_stage = []
        for run in runs:
            seconds: dict[Kind, float] = {}
            for kind, compiled in run.programs.items():
                sums, work = traffic(compiled.collectives), compiled.work
                seconds[kind] = (
                    work.likely_seconds + sums.exposed_seconds
                    if likely
                    else work.best_seconds + sums.exposed_best_seconds
                )
            i, w = seconds.get("I"), seconds.get("W")
            b = seconds.get("B", None if i is None or w is None else i + w)
            send = self.send(run).seconds if run.sent_bytes else 0.0
            send /= self.target.rates.link_share if likely else 1.0
            per_stage.append(Cost(f=seconds["F"], b=b, i=i, w=w, send=send))
        return Cost(
            per_stage=tuple(per_stage), activation_bytes=tuple(run.slot_bytes for run in runs)
        )

    def send(self, run: StageRun, back: bool = False) -> CollectiveUse:
        """What a stage hands to its neighbour, once."""
        here, there = self.executor.programs[run.stage : run.stage + 2]
        made = handed(
            self.target, here.mesh, there.mesh, run.sent_bytes,
            where=f"stage {run.stage + back} to {run.stage + (not back)}",
        )  # fmt: skip
        # A send delays its receiver: the timeline has what that costs. Within a rank there is none.
        moves = here.rank != there.rank
        return dataclasses.replace(
            made, times=self.plan.microbatches * moves, seconds=made.seconds * moves,
            num_kernels=1, estimated=False,
        )  # fmt: skip

    def handing_s(self, run: PipelineRun, stage: StageRun) -> float:
        """Likely seconds that a stage's links are taken by what passes from or to the one before:
        nothing else hides behind them."""
        if not stage.stage:
            return 0.0
        return self.send(run.stages[stage.stage - 1]).seconds / self.target.rates.link_share

    def tie(self, rank: int, to: int, size: int, what: str, free: float) -> CollectiveUse:
        """What a rank sends to another of tied weights, once a step, in seconds that are free."""
        here, there = self.blue.rank_mesh(rank), self.blue.rank_mesh(to)
        where = f"tied {what}, rank {rank} to {to}"
        return handed(self.target, here, there, size, where=where, hidden=max(0.0, free))


@dataclass(frozen=True)
class _Forward:
    """Shapes of what a stage's forward takes and gives."""

    kept: PyTree
    inputs: tuple[Any, Any, Any]
    args: tuple[Any, ...]
    out: Any
    saved: Any


def _tied(rank: int, splits: PyTree, tree: PyTree) -> dict[int, int]:
    """Bytes per device of the leaves that a rank reads and others keep, by the rank that does."""
    found: Counter[int] = Counter()
    for split, leaf in zip(flat_splits(splits), jax.tree.leaves(tree), strict=True):
        if split.home is not None and rank not in split.home.ranks:
            found[split.home.ranks[0]] += device_bytes(leaf)
    return dict(found)


def tied_weights(compiler: StageCompiler, run: PipelineRun, rank: int) -> list[CollectiveUse]:
    """What a rank sends to stages of others that read its weights, before their first action."""
    found = []
    for stage in run.stages:
        if rank in stage.tied_bytes:
            first = min(e.start_s for e in run.timeline.events if e.action.stage == stage.stage)
            free = first - compiler.handing_s(run, stage)
            found.append(compiler.tie(rank, stage.rank, stage.tied_bytes[rank], "weights", free))
    return found


def tied_gradients(compiler: StageCompiler, run: PipelineRun, rank: int) -> list[CollectiveUse]:
    """What a rank sends home of weights that others keep, after the last action of its stage."""
    found = []
    for stage in run.stages:
        for home, size in stage.tied_sums_bytes.items() if stage.rank == rank else ():
            last = max(e.end_s for e in run.timeline.events if e.action.stage == stage.stage)
            free = max(e.end_s for e in run.timeline.rank_events[home]) - last
            free -= compiler.handing_s(run, stage)
            found.append(compiler.tie(rank, home, size, "gradients", free))
    return found


def rank_collectives(
    compiler: StageCompiler, runs: tuple[StageRun, ...], rank: int
) -> list[CollectiveUse]:
    """Everything that a rank's programs send in a step, per device."""
    counts: dict[tuple[int, Kind], int] = {}
    for action in compiler.executor.schedule.actions:
        at = action.stage, action.kind
        counts[at] = counts.get(at, 0) + 1
    found: list[CollectiveUse] = []
    for run in runs:
        if run.rank == rank:
            for kind, compiled in run.programs.items():
                times = counts.get((run.stage, kind), 0)
                where = f"stage {run.stage} {kind}"
                found += [c.in_program(where, times) for c in compiled.collectives]
            if run.sent_bytes:
                found.append(compiler.send(run))
        if run.sent_bytes and compiler.executor.programs[run.stage + 1].rank == rank:
            found.append(compiler.send(run, back=True))
    return [c for c in found if c.times]


def _held(
    timeline: Timeline, runs: tuple[StageRun, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per rank: the most bytes beside state and batch, and the most of live activations.

    Replays what the executor holds: activations until their last reader has ended, what was sent
    and not yet read, and gradients that wait for those of earlier microbatches.
    """
    held = [_Held(runs, rank) for rank in range(len(timeline.rank_events))]
    # What ends makes room, or fills it, for what starts at the same time.
    ends = [(event.end_s, 0, at) for at, event in enumerate(timeline.events)]
    starts = [(event.start_s, 1, at) for at, event in enumerate(timeline.events)]
    for _, starting, at in sorted(ends + starts):
        event = timeline.events[at]
        own = held[event.rank]
        if starting:
            own.start(event.action)
            continue
        sent = own.end(event.action)
        if sent is not None:
            key, size = sent
            held[runs[key[1]].rank].values[key] = size
    return tuple(own.most for own in held), tuple(own.most_saved for own in held)


class _Held:
    """Bytes that one rank holds beside state and batch."""

    def __init__(self, runs: tuple[StageRun, ...], rank: int) -> None:
        self.runs = runs
        own = [run for run in runs if run.rank == rank]
        # All step long: sums, and copies of weights that other ranks keep.
        self.throughout = sum(run.sums_bytes + sum(run.tied_bytes.values()) for run in own)
        self.values: dict[tuple[str, int, int], int] = {}
        self.next_sum = {run.stage: 0 for run in own}
        self.most, self.most_saved = self.throughout, 0

    def start(self, action: Action) -> None:
        run = self.runs[action.stage]
        program = run.programs[action.kind]
        # Arguments other than state are held already; the output of a forward is what it saved.
        fresh = program.output_bytes - program.alias_bytes + self._waiting(action)
        held = self.throughout + sum(self.values.values())
        self.most = max(self.most, held + program.temporary_bytes + fresh)

    def end(self, action: Action) -> tuple[tuple[str, int, int], int] | None:
        """Takes note of what an action leaves; what it sends to which stage."""
        kind, stage, m = action
        run, waiting = self.runs[stage], self._waiting(action)
        self.values.pop(("F" if kind == "F" else "B", stage, m), None)
        self.values["saved", stage, m] = {"F": run.slot_bytes, "I": run.half_bytes}.get(kind, 0)
        if waiting:
            self.values["gradients", stage, m] = waiting
        elif kind in ("B", "W"):
            self.next_sum[stage] += 1
            while self.values.pop(("gradients", stage, self.next_sum[stage]), 0):
                self.next_sum[stage] += 1
        saved = (size for (what, *_), size in self.values.items() if what == "saved")
        self.most_saved = max(self.most_saved, sum(saved))
        self.most = max(self.most, self.throughout + sum(self.values.values()))
        if kind == "F" and stage + 1 < len(self.runs):
            return ("F", stage + 1, m), run.sent_bytes
        if kind in ("B", "I") and stage:
            return ("B", stage - 1, m), run.back_bytes
        return None

    def _waiting(self, action: Action) -> int:
        """Bytes of gradients that an action gives before it is their turn to be added."""
        kind, stage, m = action
        early = kind in ("B", "W") and self.next_sum[stage] != m
        return self.runs[stage].gradient_bytes if early else 0
