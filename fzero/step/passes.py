"""Passes over a batch: summed gradients, or means in evaluation mode.

`OneProgram` is traceable: collectives are explicit (`jax.shard_map`), so that what it compiles to
holds the all-gathers and reduce-scatters of the ZeRO paper and nothing else. `Pipeline` dispatches
the programs of its stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from fzero.axes import AXES, manual_axes
from fzero.batch import Inputs, place_batch
from fzero.errors import PlanError, StateError, warn
from fzero.float8.products import products_found
from fzero.keys import eval_key
from fzero.links import Mean
from fzero.plan import Plan
from fzero.processes import repeated
from fzero.programs.partitioner_faults import partitioned, partitioned_where_differentiated
from fzero.programs.trace_memo import one_trace
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.split import Split, frozen_of, map_splits, trained, with_frozen
from fzero.step.row_buffers import require_counts_told
from fzero.step.row_sums import warn_of_rows_together
from fzero.step.values import Gradients, Values
from fzero.tree import PyTree
from fzero.zero.finite_marks import local_marks
from fzero.zero.grads import keeping_rules, local_evaluation, local_gradients, local_outputs
from fzero.zero.keeping import keeps, room_for
from fzero.zero.rules import Rules


if TYPE_CHECKING:
    from fzero.pipeline.execute import Executor


# Metrics that steps report themselves.
RESERVED = ("loss", "count", "grad_norm", "nonfinite", "skipped", "loss_scale")


_NO_PRODUCT = (
    "plan: precision='fp8', but no product of this training step runs in 8 bits: of each, an"
    " operand is float32 (a plain loss casts its inputs: fz.cast(batch['x'], like=params)), or it"
    " is a convolution, has a batch dim, or is kept in 16 bits by name or size. Change what the"
    " model computes or float8=fz.Float8(...), or say precision='bf16'"
)


class OneProgram:
    """Passes over a model whose leaves are all on one mesh; pure functions to trace.

    Args:
        blue: the blueprint.

    Attributes:
        keeps: what forward passes keep (`Plan.remat`), as the last program that was traced has it.
    """

    def __init__(self, blue: Blueprint) -> None:
        self.blueprint, self.plan = blue, blue.plan
        self.keeps = [keeps(self.rules())]

    def rules(self) -> Rules:
        """How parameters are fetched and gradients reduced."""
        rules = Rules.of(self.blueprint)
        return dataclasses.replace(rules, room=room_for(self.blueprint))

    def kept_specs(self) -> PyTree:
        """Specs of what the forward pass reads."""
        # Stages 1 and 2 keep a mixed-precision master sharded, but read the compute copy.
        return self._specs(lambda s: s.spec(self.plan.gathers_at_use, AXES), self.blueprint.params)

    def place(self, batch: PyTree) -> Inputs:
        """A user's batch over the devices."""
        return place_batch(batch, self.blueprint.mesh)

    @one_trace()
    def gradients(self, fields: Values, batch: Inputs, key: jax.Array) -> Gradients:
        """Gradients of the loss's total, summed over the batch.

        Args:
            fields: the state's fields, without step and key.
            batch: the batch.
            key: the step's key.
        """
        rules, model = self.rules(), self.blueprint.model
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale
        require_counts_told(self.blueprint, batch)
        warn_of_rows_together(self.blueprint, batch, True, self.plan.microbatches)

        def local(kept: PyTree, buffers: PyTree, batch: Inputs, key: Any, scale: Any) -> Any:
            keeping = keeping_rules(model, rules, kept, buffers, batch, key)
            self.keeps = [keeps(keeping)]
            with products_found() as in_8_bits:
                sums, mean, own, buffers = local_gradients(
                    model, keeping, kept, buffers, batch, key, scale
                )
            refuse_reserved(own)
            if self.plan.products and not in_8_bits:
                warn(_NO_PRODUCT)
            return Gradients(sums, mean, own, {"buffers": buffers})

        whole = PartitionSpec()
        buffers, sums = self._buffer_specs(), trained(self.blueprint.params)
        # Of a mean, the spec is that of all its leaves.
        specs: Any = (
            self._specs(lambda s: s.spec(True, AXES), sums),
            whole,
            whole,
            {"buffers": buffers},
        )
        run = self.on_devices(local, Gradients(*specs), 2)
        kept = kept_by(self.blueprint, fields)
        run = partitioned(run, self.blueprint.mesh, differentiates=True)
        run = _not_differentiated(run, self.plan)
        found: Gradients = run(kept, fields["buffers"], batch, key, scale)
        return found

    def marks(self, fields: Values, batch: Inputs, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `fzero.zero.finite_marks.local_marks` says of each device, a row for each."""
        plan = self.plan.replace(gather="eager")
        rules = dataclasses.replace(self.rules(), plan=plan, reduce=True)
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale

        def local(kept: PyTree, buffers: PyTree, batch: Inputs, key: Any, scale: Any) -> Any:
            found = local_marks(self.blueprint.model, rules, kept, buffers, batch, key, scale)
            return jax.tree.map(lambda x: x[None], found)

        manual = manual_axes(self.blueprint.mesh)
        devices = tuple(axis for axis in self.blueprint.mesh.axis_names if axis in manual)
        run = self.on_devices(local, PartitionSpec(devices), 2)
        run = partitioned(run, self.blueprint.mesh)
        kept = kept_by(self.blueprint, fields)
        found: tuple[jax.Array, jax.Array] = run(kept, fields["buffers"], batch, key, scale)
        return found

    @one_trace()
    def evaluation(
        self, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
    ) -> tuple[Mean, dict[str, Mean]]:
        """Loss and metrics of a batch, in evaluation mode."""
        warn_of_rows_together(self.blueprint, batch, False)
        rules, model = self.rules(), self.blueprint.model

        def local(kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array) -> Any:
            out = local_evaluation(model, rules, kept, buffers, batch, rng)
            refuse_reserved(out[1])
            return out

        run = self.on_devices(local, PartitionSpec())
        run = partitioned_where_differentiated(run, self.blueprint.mesh, self.plan.gathers_at_use)
        found: tuple[Mean, dict[str, Mean]] = run(kept, buffers, batch, eval_key(rng))
        return found

    @one_trace()
    def outputs(self, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array) -> PyTree:
        """What the model gives for each row of a batch, rows spread as the batch's are."""
        rules, model = self.rules(), self.blueprint.model

        def local(kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array) -> Any:
            return local_outputs(model, rules, kept, buffers, batch, rng)

        run = self.on_devices(local, PartitionSpec(AXES))
        run = partitioned_where_differentiated(run, self.blueprint.mesh, self.plan.gathers_at_use)
        return run(kept, buffers, batch, eval_key(rng))

    def _specs(self, spec: Callable[[Split], PartitionSpec], splits: PyTree) -> PyTree:
        """Specs over all mesh axes from specs over the data axis."""
        blue = self.blueprint
        return map_splits(lambda s: blue.sharding(s.home, spec(s)).spec, splits)

    def _buffer_specs(self) -> PyTree:
        return jax.tree.map(lambda x: x.sharding.spec, self.blueprint.shapes()["buffers"])

    def on_devices(self, function: Callable[..., Any], out_specs: Any, num_whole: int = 1) -> Any:
        """A function of `(kept, buffers, batch)` and `num_whole` more, of what each device has."""
        whole = PartitionSpec()
        rows = Inputs.specs(PartitionSpec(AXES), whole)
        # check_vma=False: user code may start a loop from plain zeros, which the check would
        # refuse as "not varying"; gradients are taken inside, so nothing depends on the check.
        mesh = self.blueprint.mesh
        return jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(self.kept_specs(), self._buffer_specs(), rows, *(whole,) * num_whole),
            out_specs=out_specs,
            axis_names=manual_axes(mesh),
            check_vma=False,
        )


def _not_differentiated(run: Callable[..., Any], plan: Plan) -> Callable[..., Any]:
    """A function that gives gradients, refused under a derivative where these are of 8 bits: they
    have none, and zeros would be taken for it."""
    found = jax.custom_jvp(run)
    if plan.products:
        has, instead = "precision='fp8'", "precision='bf16', gather_dtype=None"
    elif plan.gather_dtype:
        has, instead = f"gather_dtype={plan.gather_dtype!r}", "gather_dtype=None"
    else:
        return run

    @found.defjvp
    def _(*_: Any) -> Any:
        raise PlanError(
            f"plan: {has}: derivatives through a training step are those of gradients, and what is"
            f" rounded to 8 bits has none; use plan.replace({instead}), or differentiate eval_step"
        )

    return found


class Pipeline:
    """Passes over a model whose stages are programs of their own, each on its rank's devices.

    All schedules of the same stages and microbatches give the same bits. (Buffers change in the
    order in which a schedule runs forwards; every schedule with a name runs them in the order of
    microbatches.) Losses and gradients do not depend on where the chain is cut either; updates do,
    by a rounding, as leaves are updated in other programs. Without a pipeline a loss is the same to
    the bit, and gradients are within a rounding or two of each leaf's largest element: tied
    weights' gradients are added per stage first, and backward passes are compiled as two halves,
    where bias gradients add up in another order.

    Args:
        blue: the blueprint.
        on_trace: called whenever a program is traced.

    Attributes:
        executor: what runs the schedule; `executor.observer` is told of every action.
    """

    def __init__(self, blue: Blueprint, on_trace: Callable[[], None]) -> None:
        self.blueprint, self.plan = blue, blue.plan
        from fzero.pipeline.execute import Executor

        self.executor: Executor = Executor(blue, on_trace)

    @property
    def keeps(self) -> list[str]:
        """As that of `OneProgram`, of all stages."""
        return sorted({stage.keeps for stage in self.executor.programs})

    def place(self, batch: PyTree) -> Inputs:
        """The batch as it is: each rank that reads it takes its rows."""
        return Inputs.of(batch)

    @one_trace()
    def gradients(self, fields: Values, batch: Inputs, key: jax.Array) -> Gradients:
        """As `OneProgram.gradients`."""
        require_counts_told(self.blueprint, batch)
        warn_of_rows_together(self.blueprint, batch, True, self.plan.microbatches)
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale
        sums, mean, own, buffers = self.executor.train(
            kept_by(self.blueprint, fields), fields["buffers"], batch, key, scale
        )
        refuse_reserved(own)
        return Gradients(sums, mean, own, {"buffers": buffers})

    @one_trace()
    def evaluation(
        self, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array
    ) -> tuple[Mean, dict[str, Mean]]:
        """As `OneProgram.evaluation`."""
        microbatches = self._count(batch)
        warn_of_rows_together(self.blueprint, batch, False, microbatches)
        args = (kept, buffers, batch, _eval_key(rng), microbatches)
        mean, own = self.executor.evaluate(*args)
        refuse_reserved(own)
        return mean, own

    @one_trace()
    def outputs(self, kept: PyTree, buffers: PyTree, batch: Inputs, rng: jax.Array) -> PyTree:
        """As `OneProgram.outputs`; every rank gets a copy."""
        args = (kept, buffers, batch, _eval_key(rng), self._count(batch))
        mesh = self.blueprint.mesh
        return jax.tree.map(lambda x: repeated(x, mesh), self.executor.outputs(*args))

    def _count(self, batch: Inputs) -> int:
        """The largest divisor of the plan's microbatches that the batch divides into."""
        rows = jax.tree.leaves(batch.rows)[0].shape[0]
        shares = self.blueprint.group.row_shares
        return math.gcd(rows // shares, self.plan.microbatches)


_eval_key = jax.jit(eval_key)

Passes = OneProgram | Pipeline


def passes_of(blue: Blueprint, on_trace: Callable[[], None]) -> Passes:
    """The passes of a plan."""
    return OneProgram(blue) if blue.stages is None else Pipeline(blue, on_trace)


def kept_by(blue: Blueprint, fields: Values) -> PyTree:
    """What the forward pass reads: parameters; or their compute copy, beside those frozen."""
    if len(blue.reads) == 1:
        return fields[blue.reads[0]]
    return with_frozen(blue.params, fields["compute"], fields["params"])


def read_by(blue: Blueprint, fields: Values) -> Values:
    """The fields that gradients are computed from, without parameters that they do not read."""
    read = {name: fields[name] for name in (*blue.reads, "buffers", "loss_scale")}
    if len(blue.reads) > 1:
        read["params"] = frozen_of(blue.params, fields["params"])
    return read


def refuse_reserved(metrics: dict[str, Any]) -> None:
    """Raises `StateError` if the model's metrics have names that steps report themselves."""
    taken = sorted(set(metrics) & set(RESERVED))
    if taken:
        raise StateError(
            f"loss: metrics {taken} are names that steps report themselves; rename them"
        )
