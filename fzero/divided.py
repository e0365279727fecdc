"""Steps that are many programs: those of a pipeline, and those whose state is partly parked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fzero.blueprint import Blueprint
from fzero.compiled import EvalStep, TrainStep, forget, refuse_reserved
from fzero.errors import PlanError
from fzero.host_update import HostUpdate
from fzero.model import Mean
from fzero.offload.chunks import Parking
from fzero.offload.piecewise import Cut
from fzero.offload.stream import StreamedFunction
from fzero.offload.tiers import on_device, settled
from fzero.pipeline.execute import Executor
from fzero.places import PlacedFunction
from fzero.state import TrainState
from fzero.tree import PyTree, named_leaves
from fzero.update import Metrics, Update, step_key
from fzero.zero.partition import map_splits, owner_of


# Parts of a state, or of what a step computes for one, by name.
Values = dict[str, Any]


class DividedTrainStep(TrainStep):
    """A training step whose update runs as several programs, each where its leaves are.

    Attributes:
        stream: what runs the update where the plan parks leaves, once a step was taken.
    """

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        super().__init__(blue, donate, apply)
        # Leaves of several meshes or tiers: there is no common program to fence.
        self.update = Update(blue, lambda value: value)
        self.stream: StreamedFunction | None = None
        self._key = jax.jit(step_key)
        self._divided: dict[Any, Any] = {}
        on_host = apply and blue.plan.update_on == "host"
        self._host = HostUpdate(blue, donate) if on_host else None

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one step; see `train_step`."""
        state = settled(state)
        placed = self._check(state, batch, self.donate)
        fields, (step, rng) = self._parts(state)
        key = self._key(rng, step, fields["grads"])
        sums, mean, own, changed = self._run(lambda batch: self._summed(fields, batch, key), placed)
        refuse_reserved(own)
        kept = {"step": step, "sums": sums, "mean": mean, "own": own, "changed": changed}
        streams = self.apply and self.blueprint.chunks.parked
        finish = self._host or (self._streamed if streams else self._updated)
        new, metrics = finish(fields, kept)
        if self.donate:
            forget(fields, (new, metrics))
        return state.replace(**new), metrics

    def _summed(self, fields: Values, batch: PyTree, key: jax.Array) -> Any:
        """Summed gradients, mean loss, the model's metrics, and the fields that change here."""
        raise NotImplementedError

    def _updated(self, fields: Values, kept: Values) -> tuple[Values, Metrics]:
        def run(fields: Values, kept: Values) -> tuple[Values, Metrics]:
            return self.update.run(
                fields, kept["step"], kept["sums"], kept["mean"], kept["own"], kept["changed"],
                self.apply,
            )  # fmt: skip

        def make(shapes: Any, **options: Any) -> PlacedFunction:
            return PlacedFunction(run, shapes, self._out_shardings, self.blueprint.mesh,
                                  donate=(0,) if self.donate else (), **options)  # fmt: skip

        return self._made("update", make, (fields, kept))(fields, kept)

    def _streamed(self, fields: Values, kept: Values) -> tuple[Values, Metrics]:
        """The update where parked leaves visit the device in turn.

        What needs all gradients at once, their norm, comes first: the rest may see pieces.
        """
        blue, update = self.blueprint, self.update
        step, changed = kept["step"], kept["changed"]

        def totals(kept: Values, grads: Values) -> tuple[Values, Metrics]:
            sums, mean, metrics = update.totals(
                grads["grads"], kept["sums"], kept["mean"], kept["own"]
            )
            return {"sums": sums, "mean": mean, "norm": update.norm(sums, mean)}, metrics

        def make_totals(shapes: Any, **options: Any) -> PlacedFunction:
            return PlacedFunction(totals, shapes, self._out_shardings, blue.mesh, **options)

        first = ({name: kept[name] for name in ("sums", "mean", "own")}, {"grads": fields["grads"]})
        total, metrics = self._made("totals", make_totals, first)(*first)

        def apply(fields: Values, spent: Values, rest: Values) -> tuple[Values, Metrics]:
            return update.applied(
                {**fields, "grads": None}, rest["step"], spent["sums"], rest["mean"],
                rest["changed"], rest["metrics"], rest["norm"],
            )  # fmt: skip

        def make(shapes: Any, **options: Any) -> StreamedFunction:
            return StreamedFunction(
                apply, shapes, self._out_shardings, blue.mesh,
                cuts=self._cuts(shapes), parked=self._parking(shapes), out_parked=self._parking,
                donate=(0, 1) if self.donate else (1,), path=self.plan.disk_path, **options,
            )  # fmt: skip

        own = {name: fields[name] for name in fields if name != "grads"}
        rest = {"step": step, "mean": total["mean"], "norm": total["norm"], "metrics": metrics,
                "changed": changed}  # fmt: skip
        second = (own, {"sums": total["sums"]}, rest)
        self.stream = self._made("applied", make, second)
        return self.stream(*second)

    def _made(self, name: str, make: Callable[..., Any], args: tuple[Values, ...]) -> Any:
        """A function of leaves by their shapes, made when it is first called."""
        # All else is settled by the plan and the model.
        key = name, str(jax.tree.structure(args))
        if key not in self._divided:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device(x.sharding)),
                args,
            )
            groups = tuple(
                {part: self._labels(part, tree) for part, tree in values.items()} for values in args
            )
            self._divided[key] = make(shapes, groups=groups, what=self.name)
        return self._divided[key]

    def _labels(self, name: str, tree: PyTree) -> PyTree:
        """What each leaf is updated together with."""
        if name == "changed":
            return {part: self._labels(part, own) for part, own in tree.items()}
        known = self.blueprint.groups()
        known |= {"sums": known["params"]}
        if tree is not None and name in known:
            return known[name]
        return _with_sums(name, jax.tree.map(lambda _: "", tree), known["params"])

    def _cuts(self, args: tuple[Values, ...]) -> list[Cut | None]:
        """How each leaf is cut where updates go piece by piece, whether it is parked or not."""
        blue = self.blueprint
        shapes = dict(named_leaves(blue.shapes()["params"]))

        def cut(path: str, leaf: Any) -> Cut | None:
            owner = owner_of(path, blue.chunks.cuts)
            if owner is None:
                return None
            found = Cut(*blue.chunks.cuts[owner])
            rows = shapes[owner].shape[found.dim]
            like = leaf.ndim == len(shapes[owner].shape) and leaf.shape[found.dim] == rows
            return found if like else None

        return [cut(path, leaf) for path, leaf in named_leaves(args)]

    def _parking(self, values: Any) -> list[Parking | None]:
        """How the leaves of a tuple of `Values` are parked."""
        parked = self.blueprint.chunks.parked

        def parking(path: str) -> Parking | None:
            _, name, *rest = path.split("/")
            return parked.get((name, "/".join(rest)))

        return [parking(path) for path, _ in named_leaves(values)]

    def _out_shardings(self, out: Any) -> Any:
        blue = self.blueprint
        whole = NamedSharding(blue.mesh, PartitionSpec())
        known = {name: jax.tree.map(lambda to: to.sharding, tree)
                 for name, tree in blue.shapes().items()}  # fmt: skip
        known["sums"] = map_splits(lambda s: blue.sharding(s.home, s.spec), blue.params)

        def shardings(name: str, tree: PyTree) -> PyTree:
            if name in known:
                return known[name]
            return _with_sums(name, jax.tree.map(lambda _: whole, tree), known["sums"])

        new, metrics = out
        found = {name: shardings(name, tree) for name, tree in new.items()}
        return found, jax.tree.map(lambda _: whole, metrics)

    def lower(self, state: Any, batch: PyTree) -> Any:
        """Refused: such a step is many programs."""
        raise PlanError(
            "train_step.lower: with pipe_backend='mpmd', or with tiers, a step is many programs,"
            " none of which is the step; lower plan.replace(pipe=1, tiers={}), or use"
            " pipe_backend='spmd'"
        )


class StreamedTrainStep(DividedTrainStep):
    """A training step of a plan with tiers: gradients, then an update that streams, or on the host.

    Numbers are those of the plan without tiers but for a rounding or two: a product and a sum that
    one program fuses into one rounding may be two in the pieces.
    """

    def __init__(self, blue: Blueprint, donate: bool, apply: bool) -> None:
        super().__init__(blue, donate, apply)
        self._program = self._jit(self._sums)

    def _sums(
        self,
        kept: PyTree,
        buffers: PyTree,
        loss_scale: Any,
        key: jax.Array,
        batch: PyTree,
    ) -> Any:
        self._traced()
        name = "compute" if self.plan.keeps_compute_copy else "params"
        fields = {name: kept, "buffers": buffers, "loss_scale": loss_scale}
        return self._gradients(fields, batch, key)

    def _summed(self, fields: Values, batch: PyTree, key: jax.Array) -> Any:
        read = (fields[name] for name in ("buffers", "loss_scale"))
        return self._program(self.kept(fields), *read, key, batch)


class PipelineTrainStep(DividedTrainStep):
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

    def _place(self, batch: PyTree) -> PyTree:
        return batch

    def _summed(self, fields: Values, batch: PyTree, key: jax.Array) -> Any:
        scale = None if fields["loss_scale"] is None else fields["loss_scale"].scale
        *out, buffers = self.executor.train(self.kept(fields), fields["buffers"], batch, key, scale)
        return *out, {"buffers": buffers}


class PipelineEvalStep(EvalStep):
    """An evaluation step as a pipeline."""

    def __init__(self, blue: Blueprint) -> None:
        super().__init__(blue)
        self.executor = Executor(blue, self._traced)

    def __call__(self, state: TrainState, batch: PyTree) -> Metrics:
        """Evaluates; see `eval_step`."""
        state = settled(state)
        placed = self._check(state, batch, donate=False)
        kept, buffers, rng = self._parts(state)
        rows = jax.tree.leaves(placed)[0].shape[0]
        group = self.blueprint.group
        count = math.gcd(rows // (group.data * group.replica), self.plan.microbatches)
        mean, own = self._run(
            lambda batch: self.executor.evaluate(kept, buffers, batch, rng, count), placed
        )
        refuse_reserved(own)
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


def _with_sums(name: str, tree: PyTree, sums: PyTree) -> PyTree:
    """Values of one part's leaves; an accumulation in progress has those of its sums."""
    if name != "grads" or tree is None:
        return tree
    return dataclasses.replace(tree, sums=sums)


@jax.jit
def _divided(means: dict[str, Mean]) -> Metrics:
    return {name: mean.total / mean.count for name, mean in means.items()}
