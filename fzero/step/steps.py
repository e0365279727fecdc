"""The steps themselves: shells that check and place, around what runs."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import jax

from fzero.batch import Inputs, abstract_batch, constrain_batch, pad_batch
from fzero.compat import outside_of_meshes
from fzero.errors import BatchError, PlanError, StateError
from fzero.exchange.rows import noted
from fzero.offload.stream import StreamedFunction
from fzero.processes import copied
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.buckets import OWNED
from fzero.sharding.homes import stages_of_outputs
from fzero.sharding.initial import memo
from fzero.sharding.split import flat_splits
from fzero.state import compute_copy
from fzero.state.comparison import check_finite
from fzero.state.selection import reads_of, require_known, with_chosen
from fzero.state.train_state import TrainState, fields_of
from fzero.step.checks import Checks, require_finite
from fzero.step.compose import Fused, Separate, compiled, look, options_of, runner_of
from fzero.step.looks import require_finite_batch, require_finite_looks
from fzero.step.passes import OneProgram, Pipeline, kept_by, passes_of
from fzero.step.placed_update import PlacedUpdate
from fzero.step.values import Gradients, Metrics, StepAndKey, Values, metrics_of
from fzero.tree import PyTree, is_traced, leaves_of
from fzero.zero.options import CompilerOptions


if TYPE_CHECKING:
    from fzero.pipeline.execute import Executor


_MANY = (
    "with pipe > 1, with tiers or with update_on='host' a step is many programs, none of which is"
    " the step, so it cannot be part of another; call it in a Python loop, or use"
    " plan.replace(pipe=1, tiers={}, update_on='device')"
)


class _Step:
    """What all steps have.

    Args:
        blue: the blueprint.
        name: of the step, for messages.
    """

    def __init__(self, blue: Blueprint, name: str) -> None:
        self.blueprint, self.plan, self.name = blue, blue.plan, name
        self.num_traces = 0
        self.passes = passes_of(blue, self._traced)

    @property
    def compiler_options(self) -> CompilerOptions:
        """What the step's own programs are compiled with, for `jax.jit(compiler_options=)`."""
        return options_of(self.blueprint)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, as of a function."""
        return self

    @property
    def executor(self) -> Executor:
        """What runs a pipeline's schedule."""
        assert isinstance(self.passes, Pipeline)
        return self.passes.executor

    def _traced(self) -> None:
        self.num_traces += 1


class TrainStep(_Step):
    """A training (or accumulating) step; see `fzero.train_step`.

    Args:
        blue: the blueprint.
        donate: whether the input state's memory may be reused.
        apply: whether to take an optimizer step, or only to accumulate.

    Attributes:
        num_traces: how often a program of it was traced.
    """

    def __repr__(self) -> str:
        traces = f"{self.num_traces} programs traced"
        if self.plan.remat is None and self.num_traces:
            traces += f", keeping {' and '.join(self.passes.keeps)}"
        return (
            f"{self.name}({self.plan!r}, donate={self.donate}; {traces})\n{self.blueprint.model!r}"
        )

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        splits = flat_splits(blue.params)
        if all(split.frozen for split in splits):
            why = "every parameter is frozen (Model.frozen)" if splits else "the model has none"
            raise StateError(f"train_step: expected parameters to train: {why}")
        if apply:
            if blue.tx is None:
                raise PlanError(
                    "train_step: expected an optimizer, such as optax.adam(1e-3), got None: a state"
                    " without one is only evaluated (fz.eval_step)"
                )
            blue.require_optimizer("train_step")
        super().__init__(blue, "train_step" if apply else "accumulate_step")
        self.donate, self.apply = donate, apply
        self.runner = runner_of(blue, self.passes, apply, donate, self.name, self._traced)
        reads = [*blue.reads, "buffers"]
        # An accumulation leaves the rest alone, wherever it is.
        reads += ["loss_scale", "grads"]
        reads += ["params", "compute", *OWNED] if apply else []
        self._reads = tuple(dict.fromkeys(reads))
        frozen_alone = not apply and blue.reads[0] != "params"
        self._checks = Checks(blue, self.name, self._reads, donate, False, frozen_alone)

    @outside_of_meshes()
    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one step; see `fzero.train_step`."""
        leaves = jax.tree.leaves(state)
        if is_traced([*leaves, *leaves_of(batch)]):
            return self.pure(state, batch)
        was, state = state, self._checks.state(state, leaves)
        self._checks.batch(batch, self.plan.microbatches)
        fields, at = self._arguments(state)
        with self._checks.running(state, batch, self.apply):
            new, metrics = self.runner(fields, at, self.passes.place(batch))
        if self.donate:
            given = leaves if state is was else jax.tree.leaves(state)
            rest = [value for name, value in fields_of(state).items() if name not in fields]
            forget(given, rest, (new, metrics))
        require_finite(self.name, metrics)
        state = dataclasses.replace(state, **new)
        compute_copy.pair(state.params, state.compute)
        self._checks.trust(state)
        if self.stream is not None:
            self.stream.require_written(state)
        return state, metrics

    def check_finite(self, state: TrainState, batch: PyTree) -> None:
        """Looks for the first value of this step that is not finite; the state stays as it is.

        Looked at are the state's leaves, the batch, and for one microbatch after the other what
        each layer gives and the gradient of each leaf. Takes the time of about two steps and
        compiles programs of its own: call it after `metrics["nonfinite"]`, with the state from
        before the step. That is what a step gives back which the plan skipped
        (`Plan(skip_nonfinite=True)`); otherwise restore it.

        Every process calls this. Gradients are looked at when they are reduced, so that the devices
        named for one are those that keep it, not those whose rows spoilt it.

        Args:
            state: the state that the step was given.
            batch: its batch.

        Raises:
            NonFiniteError: in every process alike: names leaf or layer, microbatch, stage and rank
                of a pipeline, devices and processes.

        Example:
            >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
            >>> def loss(p, b, batch, rng, train):
            ...     return jnp.mean(jnp.log(batch["x"] @ p["w"])), b, {}
            >>> model = fz.Model(lambda rng: ({"w": jnp.ones((2, 1))}, {}), loss)
            >>> plan, tx = fz.Plan(data=1, microbatches=2, skip_nonfinite=True), optax.sgd(0.1)
            >>> step = fz.train_step(model, tx, plan)
            >>> batch = {"x": np.float32([[1, 1], [0, 0]])}
            >>> state, metrics = step(fz.init(model, tx, plan), batch)
            >>> try:
            ...     if metrics["nonfinite"]:
            ...         step.check_finite(state, batch)
            ... except fz.NonFiniteError as error:
            ...     print(str(error).split(",")[0])
            check_finite: microbatch 1: the loss is not finite
        """
        state = self._checks.state(state)
        self._checks.batch(batch, self.plan.microbatches)
        check_finite(state)
        require_finite_batch(batch)
        fields, at = self._arguments(state)
        with self._checks.running(state, batch):
            looks = look(self.passes, fields, at, self.passes.place(batch))
        require_finite_looks(self.blueprint, looks)

    def pure(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """The step as a pure function, to be part of a program of your own.

        For `jax.jit`, `jax.lax.scan`, `jax.vmap` (of a plan for one device), `jax.eval_shape` and
        the like, which calling the step does by itself where its arguments are traced. Shapes are
        checked; nothing is placed or given away (`donate_argnums` of your own `jit` does that), and
        compiler options are those of your program (`step.compiler_options` are the step's own).

        Raises:
            PlanError: such a step is many programs.
            StateError: the state's leaves are not those of this model, optimizer and plan.
            BatchError: the batch does not fit.

        Example:
            >>> import jax, jax.numpy as jnp, optax, fzero as fz
            >>> def loss(p, b, batch, rng, train):
            ...     return jnp.mean((batch["x"] @ p["w"] - 1) ** 2), b, {}
            >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((2, 1))}, {}), loss)
            >>> plan, tx = fz.Plan(data=1), optax.sgd(0.1)
            >>> step = fz.train_step(model, tx, plan)
            >>> batches = {"x": jnp.ones((3, 4, 2))}
            >>> state, metrics = jax.lax.scan(step, fz.init(model, tx, plan), batches)
            >>> int(state.step), metrics["loss"].shape
            (3, (3,))
        """
        runner = self.runner
        if not isinstance(runner, Fused):
            raise PlanError(f"{self.name}.pure: {_MANY}")
        self._checks.traced(state)
        self._checks.batch(batch, self.plan.microbatches)
        fields, at = self._arguments(_recast(state, self.blueprint))
        new, metrics = runner.step(fields, at, constrain_batch(batch, self.blueprint.mesh))
        return dataclasses.replace(state, **new), metrics

    def lower(self, state: Any, batch: PyTree) -> Any:
        """The step lowered for a state and a batch, or for their shapes; as `jax.jit(...).lower`.

        Args:
            state: a `TrainState` of arrays or of `jax.ShapeDtypeStruct`s (`fz.abstract_state`).
            batch: arrays or shapes, global.

        Raises:
            PlanError: such a step is many programs.
        """
        if not isinstance(self.runner, Fused):
            raise PlanError(f"{self.name}.lower: {_MANY}")
        self._checks.batch(batch, self.plan.microbatches)
        placed = abstract_batch(batch, self.blueprint.mesh).at(None)
        return self.runner.lower(*self._arguments(state), placed)

    @property
    def stream(self) -> StreamedFunction | None:
        """What runs the update where the plan parks leaves, once a step was taken."""
        update = self.runner.update if isinstance(self.runner, Separate) else None
        return update.stream if isinstance(update, PlacedUpdate) else None

    def lower_update(self, state: Any, gradients: Gradients) -> list[tuple[Any, Any]]:
        """The programs of a pipeline's update, each with its mesh, lowered for shapes.

        Args:
            state: a `TrainState` of shapes.
            gradients: shapes of what the passes give.
        """
        assert isinstance(self.runner, Separate)
        assert isinstance(self.runner.update, PlacedUpdate)
        fields, (step, _) = self._arguments(state)
        return self.runner.update.lowered(fields, step, gradients)

    def _arguments(self, state: TrainState) -> tuple[Values, StepAndKey]:
        """What may be given away, and what is kept."""
        return {name: getattr(state, name) for name in self._reads}, (state.step, state.rng)


class _ReadingStep(_Step, ABC):
    """A step that leaves the state as it is.

    Args:
        blue: the blueprint.
        name: of the step, for messages.
        which: the parameters that it reads.

    Attributes:
        num_traces: how often a program of it was traced.
    """

    def __init__(self, blue: Blueprint, name: str, which: str) -> None:
        require_known(which, blue, name)
        super().__init__(blue, name)
        self.which = which
        self._program: Any = self._dispatched
        if isinstance(self.passes, OneProgram):
            self._program = compiled(blue, self._one_program)
        reads = reads_of(blue, which)
        frozen_alone = reads[0] != "params"
        self._checks = Checks(blue, name, (*reads, "buffers"), False, True, frozen_alone)

    def __repr__(self) -> str:
        traces = f"{self.num_traces} programs traced"
        return f"{self.name}({self.plan!r}; {traces})\n{self.blueprint.model!r}"

    def pure(self, state: TrainState, batch: PyTree) -> PyTree:
        """The step as a pure function; see `TrainStep.pure`. Rows must divide over the devices.
        Derivatives pass through it:
        `jax.grad(lambda p: step(state.replace(params=p), batch)["loss"])(state.params)`.

        Raises:
            PlanError: such a step is many programs.
            StateError: the state's leaves are not those of this model and plan.
            BatchError: the batch does not fit.
        """
        if not isinstance(self.passes, OneProgram) or self.blueprint.parks("params"):
            raise PlanError(f"{self.name}.pure: {_MANY}")
        self._checks.traced(state)
        self._checks.batch(batch, 1)
        state = with_chosen(state, self.blueprint, self.which)
        arguments = self._arguments(_recast(state, self.blueprint))
        return self._one_program(*arguments, constrain_batch(batch, self.blueprint.mesh))

    def lower(self, state: Any, batch: PyTree) -> Any:
        """The step lowered for a state and a batch, or for their shapes.

        Raises:
            PlanError: such a step is many programs.
        """
        if not isinstance(self.passes, OneProgram):
            raise PlanError(f"{self.name}.lower: {_MANY}")
        self._checks.batch(batch, 1)
        return self._program.lower(
            *self._arguments(state), abstract_batch(batch, self.blueprint.mesh).at(None)
        )

    def _arguments(self, state: TrainState) -> tuple[PyTree, PyTree, StepAndKey]:
        return kept_by(self.blueprint, vars(state)), state.buffers, (state.step, state.rng)

    @abstractmethod
    def _one_program(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> PyTree:
        """What the step gives, to be traced as one program."""

    @abstractmethod
    def _dispatched(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> PyTree:
        """The same where passes are many programs."""


class EvalStep(_ReadingStep):
    """An evaluation step; see `fzero.eval_step`, and `_ReadingStep` for its attributes.

    Args:
        blue: the blueprint.
        which: the parameters that it reads.
    """

    def __init__(self, blue: Blueprint, which: str) -> None:
        super().__init__(blue, "eval_step", which)

    @outside_of_meshes()
    def __call__(self, state: TrainState, batch: PyTree) -> Metrics:
        """Evaluates; see `fzero.eval_step`."""
        if is_traced([*jax.tree.leaves(state), *leaves_of(batch)]):
            traced: Metrics = self.pure(state, batch)
            return traced
        state = with_chosen(self._checks.state(state), self.blueprint, self.which)
        self._checks.batch(batch, 1)
        with self._checks.running(state, batch):
            metrics: Metrics = self._program(*self._arguments(state), self.passes.place(batch))
        require_finite(self.name, metrics)
        return metrics

    def _one_program(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> Metrics:
        self._traced()
        step, rng = at
        return metrics_of(*self.passes.evaluation(kept, buffers, batch.at(step), rng))

    def _dispatched(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> Metrics:
        step, rng = at
        found = self.passes.evaluation(kept, buffers, batch.at(step), rng)
        everywhere = jax.tree.map(lambda x: copied(x, self.blueprint.mesh), found)
        metrics: Metrics = _means(*everywhere)
        return metrics


class PredictStep(_ReadingStep):
    """A step that gives outputs for each example; see `fzero.predict_step`.

    Args:
        blue: the blueprint.
        which: the parameters that it reads.

    Raises:
        PlanError: the model does not say what its outputs are, or not for a pipeline.
    """

    def __init__(self, blue: Blueprint, which: str) -> None:
        _ = blue.model.predictor  # says so now if there is none
        if blue.stages is not None:
            stages = stages_of_outputs(blue.stages, blue.model)
            blue = dataclasses.replace(blue, stages=stages)
        super().__init__(blue, "predict_step", which)
        # Of the model, not of this step: what a user compiled is not traced again for another step.
        self._of_all: list[bool] = memo(blue.model).setdefault("outputs of all rows", [])

    @outside_of_meshes()
    def __call__(self, state: TrainState, batch: PyTree) -> PyTree:
        """Outputs of a batch; see `fzero.predict_step`."""
        if is_traced([*jax.tree.leaves(state), *leaves_of(batch)]):
            return self.pure(state, batch)
        state = with_chosen(self._checks.state(state), self.blueprint, self.which)
        self._checks.rows(batch)
        shares = self.blueprint.group.row_shares
        full, mask = pad_batch(batch, shares)
        with self._checks.running(state, batch, outputs=True):
            found = self._program(*self._arguments(state), self.passes.place(full))
        real = int(mask.sum())
        if real == len(mask):
            return found
        if self._of_all:
            raise BatchError(
                f"predict_step: {real} rows, filled up to {len(mask)}, of which fz.all_rows has the"
                f" filling too: expected a multiple of {shares} rows; fill them"
                " up yourself (fz.pad_batch) and give the mask along, to count what is real"
            )
        return jax.tree.map(lambda x: x[:real], found)

    def _one_program(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> PyTree:
        self._traced()
        return self._dispatched(kept, buffers, at, batch)

    def _dispatched(self, kept: PyTree, buffers: PyTree, at: StepAndKey, batch: Inputs) -> PyTree:
        step, rng = at
        with noted(self._of_all):
            return self.passes.outputs(kept, buffers, batch.at(step), rng)


def _recast(state: TrainState, blue: Blueprint) -> TrainState:
    """A traced state whose compute copy, if there is one, is made from its parameters."""
    if not blue.plan.keeps_compute_copy:
        return state
    like = blue.shapes()["compute"]
    compute = jax.tree.map(
        lambda x, to: jax.lax.with_sharding_constraint(
            compute_copy.cast_like(x, to), to.sharding
        ),
        compute_copy.beside(state.params, like), like,
    )  # fmt: skip
    return dataclasses.replace(state, compute=compute)


_means = jax.jit(metrics_of)


def forget(given: Iterable[Any], *alive: PyTree) -> None:
    """Makes given-away arrays say so, but for leaves of what is kept.

    jax cannot donate a shard that somebody else still looks at (a numpy view on CPU, say). It then
    donates the others and leaves the array as if it were whole.
    """
    left = [leaf for leaf in given if not leaf.is_deleted()]
    for tree in alive:  # the first mostly has all that is left
        own = {id(leaf) for leaf in jax.tree.leaves(tree)} if left else set()
        left = [leaf for leaf in left if id(leaf) not in own]
    for leaf in left:
        leaf.delete()
