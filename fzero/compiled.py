"""Steps that are one compiled program.

A step has two halves. Gradients are computed under explicit collectives (`jax.shard_map`), so that
the compiled program holds the all-gathers and reduce-scatters of the ZeRO paper and nothing else.
The optimizer then sees whole, global-view arrays that happen to be sharded, so that any optax
transformation is right, whether it works leaf by leaf or not.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fzero.batch import BatchSpec, abstract_batch, check_batch, place_batch
from fzero.blueprint import Blueprint
from fzero.errors import BatchError, StateError
from fzero.flags import compiler_options
from fzero.grads import local_evaluation, local_gradients
from fzero.offload.tiers import settled, tier_of
from fzero.pipeline.spmd import spmd_evaluation, spmd_gradients
from fzero.plan import AXES
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


class CompiledStep:
    """What training and evaluation have in common: checks, placement, one compiled program."""

    def __init__(self, blue: Blueprint, name: str) -> None:
        self.blueprint = blue
        self.plan = blue.plan
        self.name = name
        self.num_traces = 0
        self._reads: tuple[str, ...] = ("compute" if blue.plan.keeps_compute_copy else "params",
                                        "buffers")  # fmt: skip
        self._spec: BatchSpec | None = None
        self._fits: set[Any] = set()
        self._lock = threading.Lock()

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        blue = self.blueprint
        platform = blue.mesh.devices.flat[0].platform
        flags = compiler_options(self.plan, blue.params, blue.group.data, platform)
        return jax.jit(function, compiler_options=flags or None, **options)

    def rules(self) -> Rules:
        """How the step fetches parameters and reduces gradients."""
        plan, group = self.plan, self.blueprint.group
        return Rules(
            plan=plan,
            layout=self.blueprint.params,
            group=group,
            sharded=plan.gathers_at_use and group.data > 1,
            reduce=plan.reduce == "microbatch",
            prefetch=self.blueprint.prefetch,
            halves=self.blueprint.stages is not None,
        )

    def kept(self, fields: dict[str, Any]) -> PyTree:
        """What the forward pass reads."""
        return fields["compute"] if self.plan.keeps_compute_copy else fields["params"]

    def kept_specs(self) -> PyTree:
        """Specs of what the forward pass reads."""
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
        key = (structure, tuple((x.shape, x.dtype, x.sharding, tier_of(x)) for x in leaves))
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
        require_fits(state, self.blueprint, self.name, self._reads)

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


class TrainStep(CompiledStep):
    """A compiled training (or accumulating) step; see `train_step`."""

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        super().__init__(blue, "train_step" if apply else "accumulate_step")
        self.donate = donate
        self.apply = apply
        # An accumulation leaves the rest alone, wherever it is.
        self._reads += ("loss_scale", "grads")
        self._reads += ("params", "compute", "opt_state") if apply else ()
        self.update = Update(blue, self.rules().fence)
        self._program = self._jit(self._step, donate_argnums=(0,) if donate else ())

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one step; see `train_step`."""
        state = settled(state)
        placed = self._check(state, batch, self.donate)
        fields, kept = self._parts(state)
        new, metrics = self._run(self._program, fields, kept, placed)
        if self.donate:
            forget(fields)
        return state.replace(**new), metrics

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
        fields = {name: getattr(state, name) for name in dict.fromkeys(self._reads)}
        return fields, (state.step, state.rng)

    def _step(
        self, fields: dict[str, Any], kept: tuple[jax.Array, jax.Array], batch: PyTree
    ) -> tuple[dict[str, Any], Metrics]:
        self.num_traces += 1
        step, rng = kept
        key = step_key(rng, step, fields["grads"])
        sums, mean, own, changed = self._gradients(fields, batch, key)
        return self.update.run(fields, step, sums, mean, own, changed, self.apply)

    def _gradients(self, fields: dict[str, Any], batch: PyTree, key: jax.Array) -> Any:
        """Summed gradients, mean loss, the model's metrics, and the fields that change here."""
        rules, model = self.rules(), self.blueprint.model
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale

        stages = self.blueprint.stages

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, key: Any, scale: Any) -> Any:
            args = (rules, kept, buffers, batch, key, scale)
            if stages is None:
                *out, buffers = local_gradients(model, *args)
            else:
                *out, buffers = spmd_gradients(stages, *args)
            refuse_reserved(out[2])
            return *out, {"buffers": buffers}

        whole, rows = PartitionSpec(), PartitionSpec(AXES)
        buffers = self._buffer_specs()
        run = self._shard_map(
            local,
            in_specs=(self.kept_specs(), buffers, rows, whole, whole),
            out_specs=(self._specs(lambda s: s.spec), whole, whole, {"buffers": buffers}),
        )
        return run(self.kept(fields), fields["buffers"], batch, key, scale)


class EvalStep(CompiledStep):
    """A compiled evaluation step; see `eval_step`."""

    def __init__(self, blue: Blueprint) -> None:
        super().__init__(blue, "eval_step")
        self._program = self._jit(self._step)

    def __call__(self, state: TrainState, batch: PyTree) -> Metrics:
        """Evaluates; see `eval_step`."""
        state = settled(state)
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
        # Any optimizer (or none) and any accumulation: evaluation reads neither.
        bare = state.replace(opt_state=(), grads=None)
        require_fits(bare, self.blueprint, self.name, self._reads)

    def _parts(self, state: TrainState) -> tuple[PyTree, PyTree, jax.Array]:
        return self.kept(vars(state)), state.buffers, state.rng

    def _step(self, kept: PyTree, buffers: PyTree, rng: jax.Array, batch: PyTree) -> Metrics:
        self.num_traces += 1
        rules, model, stages = self.rules(), self.blueprint.model, self.blueprint.stages

        def local(kept: PyTree, buffers: PyTree, batch: PyTree, rng: jax.Array) -> Any:
            args = (rules, kept, buffers, batch, rng)
            if stages is None:
                out = local_evaluation(model, *args)
            else:
                rows = jax.tree.leaves(batch)[0].shape[0]
                out = spmd_evaluation(stages, *args, math.gcd(rows, self.plan.microbatches))
            refuse_reserved(out[1])
            return out

        whole = PartitionSpec()
        run = self._shard_map(
            local,
            in_specs=(self.kept_specs(), self._buffer_specs(), PartitionSpec(AXES), whole),
            out_specs=whole,
        )
        mean, own = run(kept, buffers, batch, rng)
        metrics = {"loss": mean.total / mean.count, "count": mean.count}
        return metrics | {name: value.total / value.count for name, value in own.items()}


def forget(fields: PyTree, new: PyTree = None) -> None:
    """Makes given-away arrays say so.

    jax cannot donate a shard that somebody else still looks at (a numpy view on CPU, say). It then
    donates the others and leaves the array as if it were whole.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(new)}
    for leaf in jax.tree.leaves(fields):
        if id(leaf) not in kept and not leaf.is_deleted():
            leaf.delete()


def refuse_reserved(metrics: dict[str, Any]) -> None:
    """Raises `StateError` if the model's metrics have names that steps report themselves."""
    taken = sorted(set(metrics) & set(_RESERVED))
    if taken:
        raise StateError(
            f"loss: metrics {taken} are names that steps report themselves; rename them"
        )
