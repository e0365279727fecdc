"""Steps: pure functions `(state, batch) -> (state, metrics)`, built once and compiled once.

A step has two halves. Gradients are computed under explicit collectives (`jax.shard_map`), so that
the compiled program holds the all-gathers and reduce-scatters of the ZeRO paper and nothing else.
The optimizer then sees whole, global-view arrays that happen to be sharded, so that any optax
transformation is right, whether it works leaf by leaf or not.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.batch import BatchSpec, abstract_batch, check_batch, place_batch
from fzero.blueprint import Blueprint, blueprint
from fzero.errors import BatchError, PlanError, StateError
from fzero.flags import compiler_options
from fzero.grads import local_evaluation, local_gradients
from fzero.model import Mean, Model
from fzero.pipeline.execute import Executor
from fzero.pipeline.filling import require_rows_apart
from fzero.pipeline.spmd import spmd_evaluation, spmd_gradients
from fzero.places import PlacedFunction
from fzero.plan import AXES, Plan
from fzero.state import (
    TrainState,
    require_alive,
    require_fits,
    require_unaliased,
)
from fzero.tree import PyTree, same_object
from fzero.update import Metrics, Update, step_key
from fzero.zero.partition import Split, map_splits
from fzero.zero.rules import Rules


_RESERVED = ("loss", "count", "grad_norm", "nonfinite", "skipped", "loss_scale")


def train_step(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    donate: bool = True,
    devices: Sequence[Any] | None = None,
) -> TrainStep:
    """Builds a training step.

    Args:
        model: what to train.
        tx: any optax transformation. It sees the mean gradient, clipped as the plan says, and the
            float32 parameters, as global arrays.
        plan: how the state is laid out and stepped.
        donate: whether a step may reuse its input state's memory. The input is consumed then:
            touching it raises `StateConsumedError`.
        devices: devices to use; all by default.

    Returns:
        `step(state, batch) -> (state, metrics)`. `batch` is a pytree of arrays with a common
        leading dim of examples, a multiple of devices times microbatches. Metrics are float32
        scalars: `loss` and its `count`, `grad_norm` (before clipping), `nonfinite` (1 when a
        gradient was not finite), `skipped` and `loss_scale` where the plan has them, and the
        model's own. A state with an accumulation in progress (`accumulate_step`) is stepped with
        the accumulated gradient included.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: (when called) the state is not one of this model, optimizer and plan.
        StateConsumedError: (when called) the state was given to an earlier step.
        BatchError: (when called) the batch does not fit; the state is left as it was.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> model = fz.Model(
        ...     lambda rng: ({"w": jnp.zeros((2, 1))}, {}),
        ...     lambda p, b, batch, rng, train: (jnp.mean((batch["x"] @ p["w"] - 1) ** 2), b, {}))
        >>> plan, tx = fz.Plan(data=1), optax.sgd(0.1)
        >>> step = fz.train_step(model, tx, plan)
        >>> state, metrics = step(fz.init(model, tx, plan), {"x": np.ones((4, 2), np.float32)})
        >>> float(metrics["loss"]), int(state.step)
        (1.0, 1)
    """
    return _train_step(blueprint(model, tx, plan, devices), donate, apply=True)


def accumulate_step(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    *,
    donate: bool = True,
    devices: Sequence[Any] | None = None,
) -> TrainStep:
    """Builds a step that adds a batch's gradient to the state and applies nothing.

    `train_step(accumulate_step(state, a), b)` steps with the gradient of `a` and `b` together,
    exact by totals and counts. The accumulation is part of the state (`state.grads`): evaluation,
    offload and checkpoints in between see it and leave it alone.

    Args, Returns and Raises as for `train_step`.
    """
    return _train_step(blueprint(model, tx, plan, devices), donate, apply=False)


def _train_step(blue: Blueprint, donate: bool, apply: bool) -> TrainStep:
    if apply and blue.stages is not None:
        require_rows_apart(blue)
    kind = TrainStep if blue.one_mesh else PipelineTrainStep
    return kind(blue, donate, apply)


def eval_step(model: Model, plan: Plan, *, devices: Sequence[Any] | None = None) -> EvalStep:
    """Builds an evaluation step.

    Args:
        model: the model.
        plan: the plan of the states to evaluate.
        devices: devices to use; all by default.

    Returns:
        `step(state, batch) -> metrics`, with `loss`, its `count` and the model's own metrics as
        float32 scalars. The state is untouched. To average over batches, weight `loss` by `count`.

    Raises:
        As `train_step`.
    """
    blue = blueprint(model, None, plan, devices)
    return EvalStep(blue) if blue.one_mesh else PipelineEvalStep(blue)


class _Step:
    """What training and evaluation have in common: checks, placement, one compiled program."""

    def __init__(self, blue: Blueprint, name: str) -> None:
        self.blueprint = blue
        self.plan = blue.plan
        self.name = name
        self.num_traces = 0
        self._spec: BatchSpec | None = None
        self._fits: set[Any] = set()
        self._lock = threading.Lock()

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        blue = self.blueprint
        platform = blue.mesh.devices.flat[0].platform
        flags = compiler_options(self.plan, blue.params, blue.group.data, platform)
        return jax.jit(function, compiler_options=flags or None, **options)

    def _rules(self) -> Rules:
        plan, group = self.plan, self.blueprint.group
        return Rules(
            plan=plan,
            layout=self.blueprint.params,
            group=group,
            sharded=plan.zero == 3 and group.data > 1,
            reduce=plan.reduce == "microbatch",
            prefetch=self.blueprint.prefetch,
            halves=self.blueprint.stages is not None,
        )

    def _kept(self, fields: dict[str, Any]) -> PyTree:
        """What the forward pass reads."""
        return fields["compute"] if self.plan.keeps_compute_copy else fields["params"]

    def _kept_specs(self) -> PyTree:
        sharded = not self.plan.keeps_compute_copy and self.plan.shards("params")
        # Stages 1 and 2 keep a mixed-precision master sharded, but read the compute copy.
        return self._specs(lambda s: s.spec if sharded else PartitionSpec())

    def _specs(self, spec: Callable[[Split], PartitionSpec]) -> PyTree:
        """Specs over all mesh axes from specs over the data axis."""
        blue = self.blueprint
        return map_splits(lambda s: blue.sharding(s.home, spec(s)).spec, blue.params)

    def _buffer_specs(self) -> PyTree:
        return jax.tree.map(lambda x: x.sharding.spec, self.blueprint.shapes()["buffers"])

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        # check_vma=False: user code may start a loop from plain zeros, which the check would
        # refuse as "not varying"; gradients are taken inside, so nothing depends on the check.
        return jax.shard_map(
            function,
            mesh=self.blueprint.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.blueprint.mesh.axis_names),
            check_vma=False,
        )

    def _check(self, state: TrainState, batch: PyTree, donate: bool) -> PyTree:
        require_alive(state, self.name)
        structure = jax.tree.structure(state)
        leaves = jax.tree.leaves(state)
        key = (structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves))
        if key not in self._fits:
            self._require_fits(state)
            if donate:
                require_unaliased(state, self.name)
            self._fits.add(key)
        if donate and same_object(leaves):
            require_unaliased(state, self.name)
        self._check_batch(batch, self._spec)
        return self._place(batch)

    def _place(self, batch: PyTree) -> PyTree:
        return place_batch(batch, self.blueprint.mesh)

    def _traced(self) -> None:
        self.num_traces += 1

    def _require_fits(self, state: TrainState) -> None:
        require_fits(state, self.blueprint, self.name)

    def _check_batch(self, batch: PyTree, spec: BatchSpec | None) -> None:
        group = self.blueprint.group
        check_batch(batch, group.data * group.replica, self._microbatches(), spec)

    def _microbatches(self) -> int:
        return 1

    def _run(self, program: Any, *args: Any) -> Any:
        batch = args[-1]
        try:
            result = program(*args)
            # Only a batch that the model could use says what batches look like.
            self._spec = self._spec or BatchSpec.of(batch)
            return result
        except KeyError as error:
            keys = list(batch) if isinstance(batch, dict) else []
            if keys and error.args and isinstance(error.args[0], str) and error.args[0] not in keys:
                raise BatchError(
                    f"{self.name}: the model asked for {error.args[0]!r}, but the batch has {keys}."
                    " (If it asked another dict, see the KeyError above.)"
                ) from error
            raise


class TrainStep(_Step):
    """A compiled training (or accumulating) step; see `train_step`."""

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        super().__init__(blue, "train_step" if apply else "accumulate_step")
        self.donate = donate
        self.apply = apply
        self.update = Update(blue, self._rules().fence)
        self._program = self._jit(self._step, donate_argnums=(0,) if donate else ())

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one step; see `train_step`."""
        placed = self._check(state, batch, self.donate)
        fields, kept = self._parts(state)
        new, metrics = self._run(self._program, fields, kept, placed)
        if self.donate:
            _forget(fields)
        return TrainState(rng=state.rng, **new), metrics

    def lower(self, state: Any, batch: PyTree) -> Any:
        """The step lowered for a state and a batch, or for their shapes; as `jax.jit(...).lower`.

        Args:
            state: a `TrainState` of arrays or of `jax.ShapeDtypeStruct`s (`fz.abstract_state`).
            batch: arrays or shapes, global.
        """
        self._check_batch(batch, None)
        fields, kept = self._parts(state)
        return self._run(
            self._program.lower, fields, kept, abstract_batch(batch, self.blueprint.mesh)
        )

    def _microbatches(self) -> int:
        return self.plan.microbatches

    def _parts(self, state: TrainState) -> tuple[dict[str, Any], tuple[Any, Any]]:
        """What may be given away, and what is kept so that a consumed state knows its step."""
        fields = {
            name: getattr(state, name)
            for name in ("params", "compute", "opt_state", "buffers", "loss_scale", "grads")
        }
        return fields, (state.step, state.rng)

    def _step(
        self, fields: dict[str, Any], kept: tuple[jax.Array, jax.Array], batch: PyTree
    ) -> tuple[dict[str, Any], Metrics]:
        self.num_traces += 1
        step, rng = kept
        key = step_key(rng, step, fields["grads"])
        sums, mean, own, buffers = self._gradients(fields, batch, key)
        return self.update.run(fields, step, sums, mean, own, buffers, self.apply)

    def _gradients(self, fields: dict[str, Any], batch: PyTree, key: jax.Array) -> Any:
        rules, model = self._rules(), self.blueprint.model
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale

        stages = self.blueprint.stages

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, key: Any, scale: Any) -> Any:
            args = (rules, kept, buffers, batch, key, scale)
            out = spmd_gradients(stages, *args) if stages else local_gradients(model, *args)
            _refuse_reserved(out[2])
            return out

        whole = PartitionSpec()
        buffers = self._buffer_specs()
        run = self._shard_map(
            local,
            in_specs=(self._kept_specs(), buffers, PartitionSpec(AXES), whole, whole),
            out_specs=(self._specs(lambda s: s.spec), whole, whole, buffers),
        )
        return run(self._kept(fields), fields["buffers"], batch, key, scale)


class EvalStep(_Step):
    """A compiled evaluation step; see `eval_step`."""

    def __init__(self, blue: Blueprint) -> None:
        super().__init__(blue, "eval_step")
        self._program = self._jit(self._step)

    def __call__(self, state: TrainState, batch: PyTree) -> Metrics:
        """Evaluates; see `eval_step`."""
        placed = self._check(state, batch, donate=False)
        metrics: Metrics = self._run(self._program, *self._parts(state), placed)
        return metrics

    def lower(self, state: Any, batch: PyTree) -> Any:
        """The step lowered for a state and a batch, or for their shapes."""
        self._check_batch(batch, None)
        return self._run(
            self._program.lower, *self._parts(state), abstract_batch(batch, self.blueprint.mesh)
        )

    def _require_fits(self, state: TrainState) -> None:
        # Any optimizer (or none), any accumulation: evaluation reads neither.
        bare = state.replace(opt_state=(), grads=None)
        require_fits(bare, self.blueprint, self.name)

    def _parts(self, state: TrainState) -> tuple[PyTree, PyTree, jax.Array]:
        return self._kept(vars(state)), state.buffers, state.rng

    def _step(self, kept: PyTree, buffers: PyTree, rng: jax.Array, batch: PyTree) -> Metrics:
        self.num_traces += 1
        rules, model, stages = self._rules(), self.blueprint.model, self.blueprint.stages

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array) -> Any:
            args = (rules, kept, buffers, batch, rng)
            if stages is None:
                out = local_evaluation(model, *args)
            else:
                rows = jax.tree.leaves(batch)[0].shape[0]
                out = spmd_evaluation(stages, *args, math.gcd(rows, self.plan.microbatches))
            _refuse_reserved(out[1])
            return out

        whole = PartitionSpec()
        run = self._shard_map(
            local,
            in_specs=(self._kept_specs(), self._buffer_specs(), PartitionSpec(AXES), whole),
            out_specs=whole,
        )
        mean, own = run(kept, buffers, batch, rng)
        metrics = {"loss": mean.total / mean.count, "count": mean.count}
        return metrics | {name: value.total / value.count for name, value in own.items()}


class PipelineTrainStep(TrainStep):
    """A training step as a pipeline: one program per stage and kind of action.

    All schedules of the same stages and microbatches give the same bits. (Buffers change in the
    order in which a schedule runs forwards; every schedule with a name runs them in the order of
    microbatches.) Losses and gradients do not depend on where the chain is cut either; updates do,
    by a rounding, as leaves are updated in other programs. Without a pipeline a loss is the same to
    the bit, and gradients are within a rounding or two of each leaf's largest element: tied
    weights' gradients are added per stage first, and backward passes are compiled as two halves,
    where bias gradients add up in another order.

    Attributes:
        executor: what runs the schedule; `executor.observer` is told of every action.
    """

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        super().__init__(blue, donate, apply)
        self.executor = Executor(blue, self._traced)
        # Leaves of several meshes: there is no common program to fence.
        self.update = Update(blue, lambda value: value)
        self._key = jax.jit(step_key)
        self._finishes: dict[Any, PlacedFunction] = {}

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one step; see `train_step`."""
        placed = self._check(state, batch, self.donate)
        fields, (step, rng) = self._parts(state)
        kept, buffers, pending = self._kept(fields), fields["buffers"], fields["grads"]
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale
        key = self._key(rng, step, pending)
        sums, mean, own, buffers = self._run(
            lambda batch: self.executor.train(kept, buffers, batch, key, scale), placed
        )
        _refuse_reserved(own)
        args = (fields, step, sums, mean, own, buffers)
        new, metrics = self._finish(args)(*args)
        if self.donate:
            _forget(fields, (new, metrics))
        return TrainState(rng=state.rng, **new), metrics

    def _place(self, batch: PyTree) -> PyTree:
        return batch

    def _finish(self, args: tuple[Any, ...]) -> PlacedFunction:
        """The update, divided by where its leaves live."""
        fields, *_, own, _ = args
        # All else is settled by the plan and the model.
        key = fields["grads"] is None, tuple(own)
        if key not in self._finishes:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args
            )
            self._finishes[key] = PlacedFunction(
                partial(self.update.run, apply=self.apply), shapes, self._out_shardings,
                self.blueprint.mesh, donate=(0,) if self.donate else (),
                groups=self._groups(args), what=self.name,
            )  # fmt: skip
        return self._finishes[key]

    def _groups(self, args: tuple[Any, ...]) -> PyTree:
        """What each argument of the update is updated together with."""
        fields, step, sums, mean, own, buffers = args
        known = self.blueprint.groups()
        none = jax.tree.map(lambda _: "", (fields, step, sums, mean, own, buffers))
        found = none[0] | known
        if fields["grads"] is not None:
            found["grads"] = dataclasses.replace(found["grads"], sums=known["params"])
        return found, none[1], known["params"], none[3], none[4], known["buffers"]

    def _out_shardings(self, out: Any) -> Any:
        blue = self.blueprint
        new, metrics = out
        whole = NamedSharding(blue.mesh, PartitionSpec())
        shapes = blue.shapes()
        found = {
            name: jax.tree.map(lambda to: to.sharding, shapes[name]) for name in new
            if name in shapes
        }  # fmt: skip
        grads = map_splits(lambda s: blue.sharding(s.home, s.spec), blue.params)
        found["grads"] = jax.tree.map(lambda _: whole, new["grads"])
        if new["grads"] is not None:
            found["grads"] = dataclasses.replace(found["grads"], sums=grads)
        return found, dict.fromkeys(metrics, whole)

    def lower(self, state: Any, batch: PyTree) -> Any:
        """Refused: a pipeline's step is many programs."""
        raise PlanError(
            "train_step.lower: with pipe_backend='mpmd' a step is one program per stage and kind of"
            " action, and none of them is the step; lower the unpipelined plan"
            " (plan.replace(pipe=1)), or use pipe_backend='spmd'"
        )


class PipelineEvalStep(EvalStep):
    """An evaluation step as a pipeline."""

    def __init__(self, blue: Blueprint) -> None:
        super().__init__(blue)
        self.executor = Executor(blue, self._traced)

    def __call__(self, state: TrainState, batch: PyTree) -> Metrics:
        """Evaluates; see `eval_step`."""
        placed = self._check(state, batch, donate=False)
        kept, buffers, rng = self._parts(state)
        rows = jax.tree.leaves(placed)[0].shape[0]
        group = self.blueprint.group
        count = math.gcd(rows // (group.data * group.replica), self.plan.microbatches)
        mean, own = self._run(
            lambda batch: self.executor.evaluate(kept, buffers, batch, rng, count), placed
        )
        _refuse_reserved(own)
        divide = {"loss": mean, "count": Mean(mean.count, jnp.ones_like(mean.count))} | own
        whole = NamedSharding(self.blueprint.mesh, PartitionSpec())
        metrics: Metrics = jax.device_put(_divided(divide), whole)
        return metrics

    def _place(self, batch: PyTree) -> PyTree:
        return batch

    def lower(self, state: Any, batch: PyTree) -> Any:
        """Refused: see `PipelineTrainStep.lower`."""
        raise PlanError(
            "eval_step.lower: with pipe_backend='mpmd' an evaluation is one program per stage;"
            " lower the unpipelined plan (plan.replace(pipe=1))"
        )


@jax.jit
def _divided(means: dict[str, Mean]) -> Metrics:
    return {name: mean.total / mean.count for name, mean in means.items()}


def _forget(fields: PyTree, new: PyTree = None) -> None:
    """Makes given-away arrays say so.

    jax cannot donate a shard that somebody else still looks at (a numpy view on CPU, say). It then
    donates the others and leaves the array as if it were whole.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(new)}
    for leaf in jax.tree.leaves(fields):
        if id(leaf) not in kept and not leaf.is_deleted():
            leaf.delete()


def _refuse_reserved(metrics: dict[str, Any]) -> None:
    taken = sorted(set(metrics) & set(_RESERVED))
    if taken:
        raise StateError(
            f"loss: metrics {taken} are names that steps report themselves; rename them"
        )
