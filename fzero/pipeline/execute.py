"""Runs a schedule: one compiled program per stage and kind of action, dispatched asynchronously.

There are no buffers, only values: what a forward action leaves is held in a slot until its last
reader has been dispatched, and then dropped. Stages overlap because dispatch returns at once and
each stage has its own devices.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fzero.errors import PipelineError
from fzero.links import Mean
from fzero.pipeline.programs import StagePrograms, with_same
from fzero.pipeline.stage_inputs import StageInputs
from fzero.processes import from_host
from fzero.schedule.actions import Action, Schedule
from fzero.schedule.builders import inference
from fzero.schedule.kinds import WORDS
from fzero.schedule.simulate import simulate
from fzero.sharding.blueprint import Blueprint
from fzero.tree import PyTree


# Actions of a rank that may be under way.
_AHEAD = 4

Observer = Callable[["Action", "HeldValues"], None]


class HeldValues:
    """Everything that is held between the actions of one step.

    Attributes:
        saved: what forwards left, by (stage, microbatch): the live activations.
        halves: what weight gradients wait for.
        sent: what was sent and not yet read.
        last: a result of the last action, to wait for it.
    """

    def __init__(self) -> None:
        self.saved: dict[tuple[int, int], Any] = {}
        self.halves: dict[tuple[int, int], Any] = {}
        self.sent: dict[tuple[str, int, int], Any] = {}
        self.last: Any = None

    def live(self, stage: int) -> int:
        """Live activations of a stage, one per microbatch."""
        return len({m for held in (self.saved, self.halves) for s, m in held if s == stage})


class Executor:
    """A model's pipeline under one plan.

    Args:
        blue: the blueprint; `blue.stages` says how the model is cut.
        on_trace: called whenever a program is traced.

    Attributes:
        observer: told of every action when it was dispatched.
        ahead: how many actions may be under way. With more, the host waits for the oldest: what
            later ones receive would be allocated long before it is read, and a failure would be
            told far from where it happened.
        settles: whether a step ends when its actions have: where a failure has to be told before
            the update takes the state. Else the last ones are waited for in the next step, which
            then tells of theirs.
    """

    def __init__(self, blue: Blueprint, on_trace: Callable[[], None]) -> None:
        assert blue.stages is not None
        self.blue, self.plan, self.stages = blue, blue.plan, blue.stages
        self.schedule = self.stages.schedule
        self.programs = [
            StagePrograms(blue, stage, on_trace) for stage in range(self.schedule.num_stages)
        ]
        self.gatherer = StageInputs(blue, self.programs)
        self.order = dispatch_order(self.schedule)
        self.observer: Observer | None = None
        # A few for each rank: enough that no device waits for the host.
        self.ahead = _AHEAD * self.schedule.num_ranks
        # On CPUs nothing is gained by running on: the host is the device.
        self.settles = blue.mesh.devices.flat[0].platform == "cpu"
        self._under_way: deque[tuple[Action, StagePrograms, Any]] = deque()
        self._numbers: dict[tuple[int, int], jax.Array] = {}

    def train(
        self, kept: PyTree, buffers: PyTree, batch: PyTree, key: jax.Array, scale: Any
    ) -> tuple[PyTree, Mean, dict[str, Mean], PyTree]:
        """One step's gradients: `(sums, loss, metrics, buffers)`, as `local_gradients` gives them.

        Args:
            kept: what the forward pass reads, every leaf at home.
            buffers: likewise.
            batch: host arrays, or arrays anywhere.
            key: the step's key.
            scale: fp16's loss scale, or `None`.
        """
        return _ScheduleRun(self, kept, buffers, batch, key, scale).train()

    def evaluate(
        self, kept: PyTree, buffers: PyTree, batch: PyTree, key: jax.Array, count: int
    ) -> tuple[Mean, dict[str, Mean]]:
        """Loss and metrics over `count` microbatches, forwards only."""
        return _ScheduleRun(self, kept, buffers, batch, key, None).evaluate(count)

    def marks(
        self, kept: PyTree, buffers: PyTree, batch: PyTree, key: jax.Array, scale: Any
    ) -> dict[Action, jax.Array]:
        """Where values are not finite (`fzero.zero.finite_marks`), on each stage's devices.

        Marks of a microbatch's layers are with its forward action, those of its gradients with the
        action that gives them.
        """
        return _ScheduleRun(self, kept, buffers, batch, key, scale).look()

    def outputs(
        self, kept: PyTree, buffers: PyTree, batch: PyTree, key: jax.Array, count: int
    ) -> PyTree:
        """What the last stage gives for each row, on its rank; as `evaluate`."""
        return _ScheduleRun(self, kept, buffers, batch, key, None).outputs(count)

    def dispatched(self, action: Action, program: StagePrograms, result: Any) -> None:
        """Takes note of an action under way, and waits for the oldest where there are too many.

        Raises:
            PipelineError: that one failed.
        """
        self._under_way.append((action, program, result))
        self.wait(self.ahead)

    def wait(self, left: int = 0) -> None:
        """Waits until at most so many actions are under way.

        Raises:
            PipelineError: one of them failed; those after it are forgotten, as they read of it.
        """
        while len(self._under_way) > left:
            action, program, result = self._under_way.popleft()
            try:
                jax.block_until_ready(result)
            except Exception as error:
                self._under_way.clear()
                raise failed(action, program, error) from error

    def number(self, rank: int, microbatch: int) -> jax.Array:
        """A microbatch's number on a rank's devices."""
        if (rank, microbatch) not in self._numbers:
            whole = NamedSharding(self.blue.rank_mesh(rank), PartitionSpec())
            self._numbers[rank, microbatch] = from_host(np.int32(microbatch), whole)
        return self._numbers[rank, microbatch]


def dispatch_order(schedule: Schedule) -> list[Action]:
    """All actions in an order in which each can be dispatched, ranks side by side."""
    events = simulate(schedule).events
    return [e.action for e in sorted(events, key=lambda e: (e.start_s, e.rank))]


class _ScheduleRun:
    """One step under way."""

    def __init__(
        self, executor: Executor, kept: PyTree, buffers: PyTree, batch: PyTree, key: Any, scale: Any
    ) -> None:
        self.executor, self.gatherer = executor, executor.gatherer
        self.programs, self.plan = executor.programs, executor.plan
        self.kept = self.gatherer.kept(kept)
        self.batch = self.gatherer.batch(batch)
        self.keys = self.gatherer.everywhere(key)
        self.buffers = self.gatherer.buffers(buffers)
        self.scale = None
        if scale is not None and self.plan.precision == "fp16":
            self.scale = self.gatherer.everywhere(scale)[self.programs[-1].rank]
        self.slots = HeldValues()
        self.gradients: _Sums | _Marks
        self.results: dict[int, Any] = {}

    def train(self) -> tuple[PyTree, Mean, dict[str, Mean], PyTree]:
        before = self.buffers
        self.gradients = sums = _Sums(self.programs, self.plan.microbatches)
        self._run_actions(self._forward)
        mean, metrics = self._totals()
        found = self.gatherer.home_sums(sums.of_stage)
        return found, mean, metrics, self.gatherer.home_buffers(before, self.buffers)

    def look(self) -> dict[Action, jax.Array]:
        self.gradients = marks = _Marks()

        def forward(program: StagePrograms, action: Action) -> Any:
            x = self.slots.sent.get(("F", action.stage, action.microbatch))
            marks.found[action], _ = program.marks(*self._forward_inputs(program, action, x))
            return self._forward(program, action)

        self._run_actions(forward)
        return marks.found

    def _run_actions(self, forward: Callable[[StagePrograms, Action], Any]) -> None:
        self.buffers = self.gatherer.pack_buffers(self.buffers)
        run = {
            "F": forward, "B": self._backward, "I": self._input_backward,
            "W": self._weight_backward,
        }  # fmt: skip
        for action in self.executor.order:
            self._dispatch(action, run[action.kind])
        self._settle()

    def evaluate(self, count: int) -> tuple[Mean, dict[str, Mean]]:
        self._run_forwards(count, outputs=False)
        return self._totals()

    def outputs(self, count: int) -> PyTree:
        self._run_forwards(count, outputs=True)
        found, _ = self.programs[-1].rows([self.results[m] for m in sorted(self.results)])
        return found

    def _run_forwards(self, count: int, outputs: bool) -> None:
        stages = len(self.programs)
        ranks = self.executor.schedule.num_ranks
        for action in dispatch_order(inference(stages, count, stages // ranks)):
            self._dispatch(action, lambda p, a: self._evaluate(p, a, count, outputs))
        self._settle()

    def _totals(self) -> tuple[Mean, dict[str, Mean]]:
        (mean, metrics), _ = self.programs[-1].totals(
            [self.results[m] for m in sorted(self.results)]
        )
        return mean, metrics

    def _dispatch(self, action: Action, run: Callable[[StagePrograms, Action], Any]) -> None:
        program = self.programs[action.stage]
        try:
            self.slots.last = run(program, action)
        except Exception as error:
            self.executor.wait()  # an earlier action may be what failed
            raise failed(action, program, error) from error
        self.executor.dispatched(action, program, self.slots.last)
        if self.executor.observer is not None:
            self.executor.observer(action, self.slots)

    def _settle(self) -> None:
        if self.executor.settles:
            self.executor.wait()

    def _inputs(self, program: StagePrograms, action: Action) -> tuple[Any, Any, Any]:
        rank = program.rank
        number = self.executor.number(rank, action.microbatch)
        return self.batch[rank], self.keys[rank], number

    def _forward_inputs(self, program: StagePrograms, action: Action, x: Any) -> tuple[Any, ...]:
        buffers = {name: self.buffers[program.rank][name] for name in program.stateful}
        return self.kept[action.stage], buffers, *self._inputs(program, action), x

    def _forward(self, program: StagePrograms, action: Action) -> Any:
        _, stage, m = action
        x = self.slots.sent.pop(("F", stage, m), None)
        (out, saved, new), done = program.forward(
            *self._forward_inputs(program, action, x), self.scale if program.last else None
        )
        self.buffers[program.rank] |= new
        self.slots.saved[stage, m] = saved
        if program.last:
            seed, unscale, *self.results[m] = out
            self.results[m] = tuple(self.results[m])
            self.slots.sent["B", stage, m] = seed, unscale
        else:
            self.slots.sent["F", stage + 1, m] = self.programs[stage + 1].place(out)
        return done

    def _cotangent(self, program: StagePrograms, m: int) -> tuple[Any, Any]:
        cotangent, unscale = self.slots.sent.pop(("B", program.stage, m))
        return cotangent, unscale

    def _send_back(self, program: StagePrograms, m: int, cotangent: Any, unscale: Any) -> None:
        if not program.first:
            before = self.programs[program.stage - 1]
            self.slots.sent["B", before.stage, m] = before.place((cotangent, unscale))

    def _backward(self, program: StagePrograms, action: Action) -> Any:
        _, stage, m = action
        cotangent, unscale = self._cotangent(program, m)
        saved = self.slots.saved.pop((stage, m))
        sums = self.gradients.taken(stage, m)
        (back, sums), done = program.backward(sums is not None)(
            self.kept[stage], *self._inputs(program, action), saved, cotangent, unscale, sums
        )
        self.gradients.add(program, m, sums)
        self._send_back(program, m, back, unscale)
        return done

    def _input_backward(self, program: StagePrograms, action: Action) -> Any:
        _, stage, m = action
        cotangent, unscale = self._cotangent(program, m)
        saved = self.slots.saved.pop((stage, m))
        (back, halves), done = program.input_backward(
            self.kept[stage], *self._inputs(program, action), saved, cotangent
        )
        self.slots.halves[stage, m] = with_same(halves, saved), unscale
        self._send_back(program, m, back, unscale)
        return done

    def _weight_backward(self, program: StagePrograms, action: Action) -> Any:
        _, stage, m = action
        halves, unscale = self.slots.halves.pop((stage, m))
        sums = self.gradients.taken(stage, m)
        sums, done = program.weight_backward(sums is not None)(
            self.kept[stage], *self._inputs(program, action), halves, unscale, sums
        )
        self.gradients.add(program, m, sums)
        return done

    def _evaluate(self, program: StagePrograms, action: Action, count: int, outputs: bool) -> Any:
        _, stage, m = action
        x = self.slots.sent.pop(("F", stage, m), None)
        out, done = program.evaluate(count, outputs)(*self._forward_inputs(program, action, x))
        if program.last:
            self.results[m] = out
        else:
            self.slots.sent["F", stage + 1, m] = self.programs[stage + 1].place(out)
        return done


class _Sums:
    """The gradients of every stage, added up.

    Microbatches are added in order of their numbers whatever the schedule, so that all schedules
    give the same bits. One alone is added to nothing.
    """

    def __init__(self, programs: list[StagePrograms], microbatches: int) -> None:
        self.several = microbatches > 1
        self.of_stage = {p.stage: p.zeros() for p in programs} if self.several else {}
        self.early: dict[int, dict[int, Any]] = defaultdict(dict)
        self.next: dict[int, int] = defaultdict(int)

    def taken(self, stage: int, m: int) -> Any:
        """The sums that a microbatch's gradients are added to, if it is their turn."""
        return self.of_stage.pop(stage) if self.several and self.next[stage] == m else None

    def add(self, program: StagePrograms, m: int, result: Any) -> None:
        """What a backward action gave: new sums, or a microbatch's gradients."""
        stage = program.stage
        if self.next[stage] != m:
            self.early[stage][m] = result
            return
        self.next[stage] += 1
        while self.next[stage] in self.early[stage]:
            result, _ = program.add(result, self.early[stage].pop(self.next[stage]))
            self.next[stage] += 1
        self.of_stage[stage] = result


class _Marks:
    """Gradients that are looked at, one microbatch at a time, and added to nothing."""

    def __init__(self) -> None:
        self.found: dict[Action, jax.Array] = {}

    def taken(self, stage: int, m: int) -> None:
        """Nothing."""

    def add(self, program: StagePrograms, m: int, result: Any) -> None:
        """Marks of what a backward action gave."""
        self.found[Action("B", program.stage, m)], _ = program.gradient_marks(result)


def failed(action: Action, program: StagePrograms, error: Exception) -> PipelineError:
    """The error of an action that failed."""
    names = ", ".join(dict.fromkeys(piece.layer.name for piece in program.pieces))
    return PipelineError(
        f"pipeline: the {WORDS[action.kind]} of microbatch {action.microbatch} on stage"
        f" {action.stage} (rank {program.rank}, layers {names}; action {action}) failed:"
        f" {type(error).__name__}: {error}"
    )
