"""Steps: pure functions `(state, batch) -> (state, metrics)`, built once and compiled once.

A step has two halves. Gradients are computed under explicit collectives (`jax.shard_map`), so that
the compiled program holds the all-gathers and reduce-scatters of the ZeRO paper and nothing else.
The optimizer then sees whole, global-view arrays that happen to be sharded, so that any optax
transformation is right, whether it works leaf by leaf or not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from fzero.batch import BatchSpec, abstract_batch, check_batch, place_batch
from fzero.blueprint import Blueprint, blueprint
from fzero.errors import BatchError, StateError
from fzero.flags import compiler_options
from fzero.grads import local_evaluation, local_gradients, square_norm
from fzero.model import Mean, Model
from fzero.plan import AXES, Plan
from fzero.precision import cast_param, next_loss_scale
from fzero.state import (
    Pending,
    TrainState,
    logical_view,
    require_alive,
    require_fits,
    require_unaliased,
)
from fzero.tree import PyTree, same_object
from fzero.zero.collectives import gather
from fzero.zero.partition import map_splits
from fzero.zero.rules import Rules


Metrics = dict[str, jax.Array]
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
    return TrainStep(blueprint(model, tx, plan, devices), donate, apply=True)


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
    return TrainStep(blueprint(model, tx, plan, devices), donate, apply=False)


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
    return EvalStep(blueprint(model, None, plan, devices))


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
        )

    def _kept(self, fields: dict[str, Any]) -> PyTree:
        """What the forward pass reads."""
        return fields["compute"] if self.plan.keeps_compute_copy else fields["params"]

    def _kept_specs(self) -> PyTree:
        sharded = not self.plan.keeps_compute_copy and self.plan.shards("params")
        # Stages 1 and 2 keep a mixed-precision master sharded, but read the compute copy.
        return map_splits(lambda s: s.spec if sharded else PartitionSpec(), self.blueprint.params)

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        # check_vma=False: user code may start a loop from plain zeros, which the check would
        # refuse as "not varying"; gradients are taken inside, so nothing depends on the check.
        return jax.shard_map(
            function,
            mesh=self.blueprint.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(AXES),
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
        return place_batch(batch, self.blueprint.mesh)

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
        pending: Pending | None = fields["grads"]
        key = jax.random.fold_in(rng, step)
        if pending is not None:
            # Distinct from the first batch's keys, which are folded once less.
            key = jax.random.fold_in(key, pending.calls)
        sums, mean, own, buffers = self._gradients(fields, batch, key)
        if pending is not None:
            sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), pending.sums, sums)
            mean = Mean(pending.total + mean.total, pending.count + mean.count)
        metrics = {"loss": mean.total / mean.count, "count": mean.count}
        metrics |= {name: value.total / value.count for name, value in own.items()}
        if not self.apply:
            return self._accumulated(fields, step, sums, mean, buffers), metrics
        return self._applied(fields, step, sums, mean, buffers, metrics)

    def _gradients(self, fields: dict[str, Any], batch: PyTree, key: jax.Array) -> Any:
        rules, model = self._rules(), self.blueprint.model
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, key: Any, scale: Any) -> Any:
            out = local_gradients(model, rules, kept, buffers, batch, key, scale)
            _refuse_reserved(out[2])
            return out

        whole = PartitionSpec()
        grad_specs = map_splits(lambda s: s.spec, self.blueprint.params)
        run = self._shard_map(
            local,
            in_specs=(self._kept_specs(), whole, PartitionSpec(AXES), whole, whole),
            out_specs=(grad_specs, whole, whole, whole),
        )
        return run(self._kept(fields), fields["buffers"], batch, key, scale)

    def _accumulated(
        self, fields: dict[str, Any], step: jax.Array, sums: PyTree, mean: Mean, buffers: PyTree
    ) -> dict[str, Any]:
        pending: Pending | None = fields["grads"]
        calls = jnp.int32(0) if pending is None else pending.calls
        sums = jax.tree.map(lambda g: g.astype(jnp.float32), sums)
        sums = self._pin_shards(sums)
        grads = Pending(sums, mean.total, mean.count, calls + 1)
        return {**fields, "buffers": buffers, "grads": grads, "step": step}

    def _applied(
        self,
        fields: dict[str, Any],
        step: jax.Array,
        sums: PyTree,
        mean: Mean,
        buffers: PyTree,
        metrics: Metrics,
    ) -> tuple[dict[str, Any], Metrics]:
        plan, blue = self.plan, self.blueprint
        # The two halves of a step are compiled apart, so that each is the same in every stage.
        fence = self._rules().fence
        sums, mean, metrics = fence((sums, mean, metrics))
        # The norm gets a copy of its own, or it would be fused with what a stage does next.
        norm = fence(self._norm(fence(sums), mean.count))
        grads = self._mean_gradients(sums, mean.count, norm)
        new = {"step": step + 1, "buffers": buffers, "grads": None}
        new |= self._updated(fields, grads, metrics["loss"])
        finite = jnp.isfinite(norm)
        metrics = {**metrics, "grad_norm": norm, "nonfinite": 1.0 - finite.astype(jnp.float32)}
        new["loss_scale"] = None
        if plan.skips:
            old = {name: fields[name] for name in ("params", "compute", "opt_state", "buffers")}
            old["step"] = step
            for name, value in old.items():
                new[name] = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new[name], value)
            new["loss_scale"] = next_loss_scale(plan, fields["loss_scale"], finite)
            metrics["skipped"] = new["loss_scale"].skipped.astype(jnp.float32)
            metrics["loss_scale"] = fields["loss_scale"].scale
        shapes = blue.shapes()
        for name in ("step", "params", "compute", "opt_state", "buffers", "loss_scale"):
            new[name] = jax.tree.map(
                lambda leaf, to: jax.lax.with_sharding_constraint(leaf, to.sharding),
                new[name],
                shapes[name],
            )
        return new, metrics

    def _norm(self, sums: PyTree, count: jax.Array) -> jax.Array:
        """Global norm of the mean gradient, added up from shards in every stage."""
        layout, group = self.blueprint.params, self.blueprint.group

        def local(sums: PyTree, count: jax.Array) -> jax.Array:
            means = jax.tree.map(lambda g: g.astype(jnp.float32) / count, sums)
            return square_norm(layout, means, group)

        specs = map_splits(lambda s: s.spec, layout)
        run = self._shard_map(local, in_specs=(specs, PartitionSpec()), out_specs=PartitionSpec())
        return jnp.sqrt(run(sums, count))

    def _mean_gradients(self, sums: PyTree, count: jax.Array, norm: jax.Array) -> PyTree:
        """Mean gradients in logical shapes, clipped; whole in stage 0, sharded otherwise."""
        blue, clip = self.blueprint, self.plan.clip_norm
        if not self.plan.shards("opt_state"):
            sums = self._gather(sums)
        else:
            sums = map_splits(
                lambda s, g: blue.constrain(s, s.logical(g)) if s.pad else g, blue.params, sums
            )
        factor = None if clip is None else clip / jnp.maximum(norm, clip)

        def mean(split: Any, total: jax.Array) -> jax.Array:
            grad = total.astype(jnp.float32) / count
            grad = grad if factor is None else grad * factor
            return grad.astype(jnp.promote_types(split.dtype, jnp.float32))

        return map_splits(mean, blue.params, sums)

    def _updated(self, fields: dict[str, Any], grads: PyTree, loss: jax.Array) -> dict[str, Any]:
        """New parameters, compute copy and optimizer state."""
        plan, blue = self.plan, self.blueprint
        assert blue.tx is not None
        params = logical_view(blue, "params", fields["params"])
        sharded = plan.shards("opt_state")
        if sharded:
            params = map_splits(blue.constrain, blue.params, params)
        opt_state = logical_view(blue, "opt_state", fields["opt_state"])
        tx = optax.with_extra_args_support(blue.tx)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        updates = map_splits(
            lambda s, u: jnp.zeros_like(u) if s.path in blue.model.frozen else u,
            blue.params,
            updates,
        )
        params = optax.apply_updates(params, updates)
        if not sharded:
            compute = self._cast(params) if plan.keeps_compute_copy else None
            return {"params": params, "compute": compute, "opt_state": opt_state}
        opt_state = map_splits(lambda s, leaf: s.store(leaf), blue.opt_state, opt_state)
        shards = map_splits(lambda s, leaf: s.store(leaf), blue.params, params)
        shards = self._pin_shards(shards)
        compute = self._gather(self._cast(shards)) if plan.keeps_compute_copy else None
        params = shards if plan.shards("params") else self._gather(shards)
        return {"params": params, "compute": compute, "opt_state": opt_state}

    def _cast(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: cast_param(self.plan, leaf), tree)

    def _pin_shards(self, tree: PyTree) -> PyTree:
        return map_splits(self.blueprint.constrain, self.blueprint.params, tree)

    def _gather(self, shards: PyTree) -> PyTree:
        """Whole leaves from stored shards, by explicit all-gathers."""
        layout, group = self.blueprint.params, self.blueprint.group

        def local(shards: PyTree) -> PyTree:
            return map_splits(lambda s, leaf: gather(leaf, s, group), layout, shards)

        specs = map_splits(lambda s: s.spec, layout)
        whole = map_splits(lambda _: PartitionSpec(), layout)
        return self._shard_map(local, in_specs=(specs,), out_specs=whole)(shards)


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
        rules, model = self._rules(), self.blueprint.model

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array) -> Any:
            out = local_evaluation(model, rules, kept, buffers, batch, rng)
            _refuse_reserved(out[1])
            return out

        whole = PartitionSpec()
        run = self._shard_map(
            local,
            in_specs=(self._kept_specs(), whole, PartitionSpec(AXES), whole),
            out_specs=whole,
        )
        mean, own = run(kept, buffers, batch, rng)
        metrics = {"loss": mean.total / mean.count, "count": mean.count}
        return metrics | {name: value.total / value.count for name, value in own.items()}


def _forget(fields: PyTree) -> None:
    """Makes given-away arrays say so.

    jax cannot donate a shard that somebody else still looks at (a numpy view on CPU, say). It then
    donates the others and leaves the array as if it were whole.
    """
    for leaf in jax.tree.leaves(fields):
        if not leaf.is_deleted():
            leaf.delete()


def _refuse_reserved(metrics: dict[str, Any]) -> None:
    taken = sorted(set(metrics) & set(_RESERVED))
    if taken:
        raise StateError(
            f"loss: metrics {taken} are names that steps report themselves; rename them"
        )
