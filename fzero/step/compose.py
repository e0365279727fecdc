"""How passes and an update make a training step: in one program, or one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fzero.batch import Inputs
from fzero.keys import step_key
from fzero.processes import in_turn
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.split import with_frozen
from fzero.state.train_state import Pending
from fzero.step.host_update import HostUpdate
from fzero.step.looks import Look, looks_at_one_program, looks_at_stages
from fzero.step.passes import OneProgram, Passes, Pipeline, kept_by, read_by
from fzero.step.placed_update import PlacedUpdate
from fzero.step.update import Update
from fzero.step.values import Metrics, StepAndKey, Values
from fzero.tree import PyTree, memory
from fzero.zero.options import CompilerOptions, compiler_options


class Fused:
    """Gradients and update in one program.

    Args:
        passes: the gradients.
        apply: whether to take an optimizer step, or only to accumulate.
        donate: whether the fields' memory may be reused.
        on_trace: called whenever the program is traced.
    """

    def __init__(
        self, passes: OneProgram, apply: bool, donate: bool, on_trace: Callable[[], None]
    ) -> None:
        self.passes, self.apply, self.on_trace = passes, apply, on_trace
        self.update = Update(passes.blueprint, passes.rules().fence)
        shapes = jax.tree.leaves(passes.blueprint.shapes()) if donate else ()
        self._given_shapes = {(leaf.shape, leaf.dtype) for leaf in shapes}
        donated = (0,) if donate else ()
        self.program = compiled(passes.blueprint, self._run, donate_argnums=donated)

    def step(self, fields: Values, at: StepAndKey, batch: Inputs) -> tuple[Values, Metrics]:
        """New fields of the state, and metrics: the pure function."""
        self.on_trace()
        step, rng = at
        key = step_key(rng, step, _calls(fields["grads"]))
        gradients = self.passes.gradients(fields, batch.at(step), key)
        return self.update.run(fields, step, gradients, self.apply)

    def __call__(self, fields: Values, at: StepAndKey, batch: Inputs) -> tuple[Values, Metrics]:
        """Runs the program."""
        given = self._apart(fields)
        new, metrics = self.program(*given, at, self._own(batch, given))
        if given[0].get("params") is not fields.get("params"):
            whole = with_frozen(self.passes.blueprint.params, fields["params"], new["params"])
            new["params"] = whole
        return new, metrics

    def lower(self, fields: Values, at: StepAndKey, batch: Inputs) -> Any:
        """The program, lowered for arrays or shapes."""
        return self.program.lower(*self._apart(fields), at, batch)

    def _run(
        self, kept: Values, used: Values, at: StepAndKey, batch: Inputs
    ) -> tuple[Values, Metrics]:
        return self.step({**kept, **used}, at, batch)

    def _apart(self, fields: Values) -> tuple[Values, Values]:
        """Fields in whose memory new ones may lie, and sums that an update uses up: jax warns where
        nothing takes the place of what is donated.

        An accumulation is given what it reads alone: masters may be parked."""
        if not self.apply:
            return {**fields, **read_by(self.passes.blueprint, fields)}, {}
        return {**fields, "grads": None}, {"grads": fields["grads"]}

    def _own(self, batch: Inputs, fields: PyTree) -> Inputs:
        """The batch, without memory that the program gives away: a state's own average, say, as
        the teacher. The shapes tell of nearly all batches that there is none."""
        leaves, structure = jax.tree.flatten(batch)
        alike = [(leaf.shape, leaf.dtype) in self._given_shapes for leaf in leaves]
        if not any(alike):
            return batch
        shapes = {(x.shape, x.dtype) for x, suspect in zip(leaves, alike, strict=True) if suspect}
        held = (x for x in jax.tree.leaves(fields) if (x.shape, x.dtype) in shapes)
        given = {piece for leaf in held for piece in memory(leaf)}
        return jax.tree.unflatten(structure, [
            jnp.copy(x) if suspect and not given.isdisjoint(memory(x)) else x
            for x, suspect in zip(leaves, alike, strict=True)
        ])  # fmt: skip


class Separate:
    """Gradients first, then an update that is several programs.

    Args:
        passes: the gradients.
        update: takes fields and what the gradients gave; new fields and metrics.
        on_trace: called whenever the program of the gradients is traced.
    """

    def __init__(
        self,
        passes: Passes,
        update: PlacedUpdate | HostUpdate,
        on_trace: Callable[[], None],
    ) -> None:
        self.passes, self.update, self.on_trace = passes, update, on_trace
        self._key = jax.jit(step_key)
        self._gradients: Callable[..., Any] = passes.gradients
        if isinstance(passes, OneProgram):
            self._gradients = compiled(passes.blueprint, self._traced)

    def _traced(self, fields: Values, batch: Inputs, key: jax.Array) -> Any:
        self.on_trace()
        return self.passes.gradients(fields, batch, key)

    def __call__(self, fields: Values, at: StepAndKey, batch: Inputs) -> tuple[Values, Metrics]:
        """Runs all programs."""
        step, rng = at
        key = self._key(rng, step, _calls(fields["grads"]))
        read = read_by(self.passes.blueprint, fields)
        gradients = self._gradients(read, batch.at(step), key)
        try:
            return self.update(fields, step, gradients)
        except Exception:
            if isinstance(self.passes, Pipeline):
                self.passes.executor.wait()  # what it reads may be what failed
            raise


def look(passes: Passes, fields: Values, at: StepAndKey, batch: Inputs) -> list[Look]:
    """Whether what a step computes is finite, without its update; see `TrainStep.check_finite`."""
    step, rng = at
    key = jax.jit(step_key)(rng, step, _calls(fields["grads"]))
    read = read_by(passes.blueprint, fields)
    if isinstance(passes, Pipeline):
        scale = None if read["loss_scale"] is None else read["loss_scale"].scale
        kept = kept_by(passes.blueprint, read)
        args = kept, read["buffers"], batch.at(step), key, scale
        return looks_at_stages(passes.executor, passes.executor.marks(*args))
    run = compiled(passes.blueprint, passes.marks)
    return looks_at_one_program(passes.blueprint, run(read, batch.at(step), key))


def _calls(pending: Pending | None) -> jax.Array | int:
    """Batches accumulated so far."""
    return 0 if pending is None else pending.calls


Runner = Fused | Separate


def runner_of(
    blue: Blueprint, passes: Passes, apply: bool, donate: bool, name: str,
    on_trace: Callable[[], None],
) -> Runner:  # fmt: skip
    """What runs a training (or accumulating) step under a plan."""
    parks = apply and bool(blue.buckets.parked)
    if isinstance(passes, OneProgram) and not parks:
        return Fused(passes, apply, donate, on_trace)
    if apply and blue.plan.update_on == "host":
        return Separate(passes, HostUpdate(blue, donate), on_trace)
    return Separate(passes, PlacedUpdate(blue, donate, apply, name), on_trace)


def compiled(blue: Blueprint, function: Callable[..., Any], **options: Any) -> Any:
    """A program of a step, on the plan's devices and with its compiler options."""
    program = jax.jit(function, compiler_options=options_of(blue) or None, **options)
    return in_turn(blue.mesh.devices.flat, program)


def options_of(blue: Blueprint) -> CompilerOptions:
    """The compiler options of a plan's programs on its devices."""
    platform = blue.mesh.devices.flat[0].platform
    return compiler_options(blue.plan, blue.params, blue.group.shards, platform)
