"""The update of a step: summed gradients in, new state out.

The optimizer sees whole, global-view arrays that happen to be sharded, so that any optax
transformation is right, whether it works leaf by leaf or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.links import Mean
from fzero.loss_scaling import next_loss_scale
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.buckets import OWNED
from fzero.sharding.group import Group
from fzero.sharding.split import (
    Split,
    flat_splits,
    layers_alone,
    map_splits,
    trained,
    update_dtype,
    wide,
    with_frozen,
)
from fzero.state import averages
from fzero.state.compute_copy import rounded
from fzero.state.logical import logical_view
from fzero.state.train_state import Pending
from fzero.step.skips import chosen, updated
from fzero.step.values import Gradients, Metrics, Values, metrics_of
from fzero.tree import PyTree, added
from fzero.zero.bits import apart
from fzero.zero.collectives import all_reduce, all_reduce_tree, gather, sum_over


class Update:
    """Applies (or accumulates) one step's gradients.

    Args:
        blue: the blueprint.
        fence: stops the compiler from fusing across; see `fzero.zero.bits`.
        labels: what each leaf is updated together with, if not as the blueprint has it.
    """

    def __init__(
        self,
        blue: Blueprint,
        fence: Callable[[PyTree], PyTree],
        labels: Mapping[str, PyTree] | None = None,
    ) -> None:
        self.blueprint, self.plan, self.fence = blue, blue.plan, fence
        self.splits = trained(blue.params)
        self.labels = blue.labels() if labels is None else labels
        # Whether parts are compiled by themselves. (Without a pipeline fences do, but for sums.)
        several = blue.stages is not None or bool(blue.buckets.parked)
        self.apart = (several or blue.adds_up) and blue.group.bits
        # Whether all that an optimizer does is. (On several meshes it is several programs.)
        self.all_apart = self.apart and not several

    def run(
        self,
        fields: Values,
        step: jax.Array,
        gradients: Gradients,
        apply: bool,
    ) -> tuple[Values, Metrics]:
        """New fields of the state, and the step's metrics.

        Args:
            fields: the state's fields, without step and key.
            step: steps taken so far.
            gradients: what the pass over the batch gave.
            apply: whether to take an optimizer step, or only to add to `fields["grads"]`.
        """
        gradients, metrics = self.totals(fields["grads"], gradients)
        if not apply:
            return self._accumulated(fields, step, gradients), metrics
        # Passes and update are compiled apart, so that each is the same in every stage.
        sums, mean, metrics = self.fence((gradients.sums, gradients.mean, metrics))
        gradients = gradients._replace(sums=sums, mean=mean)
        return self.applied(fields, step, gradients, metrics, self.norm(sums, mean))

    def totals(self, pending: Pending | None, gradients: Gradients) -> tuple[Gradients, Metrics]:
        """Sums and mean with those of an accumulation in progress, and the metrics so far."""
        sums, mean = gradients.sums, gradients.mean
        if pending is not None:
            sums = added(map_splits(Split.emptied, self.splits, pending.sums), sums)
            mean = Mean(pending.total + mean.total, pending.count + mean.count)
        return gradients._replace(sums=sums, mean=mean), metrics_of(mean, gradients.own)

    def _accumulated(self, fields: Values, step: jax.Array, gradients: Gradients) -> Values:
        pending: Pending | None = fields["grads"]
        calls = jnp.int32(0) if pending is None else pending.calls
        mean, sums = gradients.mean, jax.tree.map(wide, gradients.sums)
        grads = Pending(self._pin_shards(sums), mean.total, mean.count, calls + 1)
        buffers = gradients.changed["buffers"]
        if self.plan.skips and jax.tree.leaves(buffers):
            # The step will skip these sums: what spoilt them must not stay in statistics.
            finite = jnp.isfinite(self._norm(sums, jnp.where(mean.count == 0, 1, mean.count)))
            buffers = chosen(finite, buffers, fields["buffers"])
            buffers = jax.tree.map(_constrained, self.blueprint.shapes()["buffers"], buffers)
        return {**fields, "buffers": buffers, "grads": grads, "step": step}

    def norm(self, sums: PyTree, mean: Mean) -> jax.Array:
        """Global norm of the mean gradient."""
        # It gets a copy of the sums, or it would be fused with what a stage does next.
        return self.fence(self._norm(self.fence(sums), mean.count))

    def applied(
        self,
        fields: Values,
        step: jax.Array,
        gradients: Gradients,
        metrics: Metrics,
        norm: jax.Array,
    ) -> tuple[Values, Metrics]:
        """An optimizer step: new fields of the state, and the step's metrics.

        Args:
            fields: as for `run`.
            step: likewise.
            gradients: those of all batches of an accumulation, as `totals` gives them.
            metrics: likewise.
            norm: their global norm.
        """
        plan, blue = self.plan, self.blueprint
        if blue.updates_shards and not plan.shards("opt_state"):
            return self._as_stage_1(fields, step, gradients, metrics, norm)
        count = gradients.mean.count
        counts = count != 0
        shown = jnp.where(counts, norm, 0)
        finite = jnp.isfinite(shown)
        # A batch in which nothing counts, all padding, takes no step.
        taken = counts & finite if plan.skips else counts
        new = {**gradients.changed, "step": step + 1, "grads": None}
        new |= self._updated(fields, gradients.sums, count, norm, metrics["loss"], taken)
        metrics = {**metrics, "grad_norm": shown, "nonfinite": 1.0 - finite.astype(jnp.float32)}
        new["loss_scale"] = None
        old = {"step": step, "ema": fields["ema"], "buffers": fields["buffers"]}
        new |= {name: chosen(taken, new[name], value) for name, value in old.items()}
        if plan.skips:
            new["loss_scale"] = next_loss_scale(plan, fields["loss_scale"], finite)
            metrics["skipped"] = new["loss_scale"].skipped.astype(jnp.float32)
            metrics["loss_scale"] = fields["loss_scale"].scale
        shapes = blue.shapes()
        for name in ("step", "params", "compute", *OWNED, "buffers", "loss_scale"):
            new[name] = jax.tree.map(_constrained, shapes[name], new[name])
        return new, metrics

    def _as_stage_1(self, fields: Values, *rest: Any) -> tuple[Values, Metrics]:
        """The step of stage 1, for an optimizer that adds elements up; then all is gathered.

        Added up in the order of whole leaves, sums would round otherwise than in other stages.
        """
        blue, outer = self.blueprint, self.blueprint.shapes()
        sharded = dataclasses.replace(blue, plan=self.plan.replace(zero=1, tiers={}))
        inner = Update(sharded, self.fence, self.labels)
        of_fields = {name: getattr(blue, name) for name in ("params", *OWNED)}
        cut = [name for name in of_fields if sharded.plan.shards(name)]

        def store(name: str) -> PyTree:
            whole = map_splits(Split.store, of_fields[name], fields[name])
            return jax.tree.map(_constrained, sharded.shapes()[name], whole)

        new, metrics = inner.applied({**fields, **{name: store(name) for name in cut}}, *rest)
        for name in cut:
            shards = trained(blue.params, new[name]) if name == "params" else new[name]
            whole = self.gathered(shards, name)
            if name == "params":
                whole = with_frozen(blue.params, whole, new[name])
            new[name] = jax.tree.map(_constrained, outer[name], whole)
        return new, metrics

    def _norm(self, sums: PyTree, count: jax.Array) -> jax.Array:
        """Global norm of the mean gradient, added up from shards in every stage.

        Squares are added per leaf, or per layer of a stack, and then in the order of the chain, so
        that the norm does not depend on where a pipeline is cut.
        """
        group = self.blueprint.group

        def local(splits: list[Split], sums: list[jax.Array], count: jax.Array) -> list[jax.Array]:
            squares = [_squares(s, g, count, self.apart)
                       for s, g in zip(splits, sums, strict=True)]  # fmt: skip
            # Shards are the same in every replica group: sum over the data axis only.
            split = [i for i, s in enumerate(splits) if s.dim is not None]
            within = dataclasses.replace(group, replica=1)
            ways: list[tuple[list[int], Any]] = [(split, lambda flat, _: all_reduce(flat, within))]
            for axis, size in group.further:
                own = [i for i, s in enumerate(splits) if axis in (*s.axes, *s.over)]
                ways.append((own, partial(_along, axis, size)))
            for own, add in ways:
                reduced = all_reduce_tree([squares[i] for i in own], group, add)
                for i, square in zip(own, reduced, strict=True):
                    squares[i] = square
            return squares

        found = self._by_mesh(local, sums, lambda _: PartitionSpec(), count)

        def in_chain(split: Split, square: jax.Array) -> jax.Array:
            if split.home is None:
                return square
            # Left over the ranks, squares would be added by XLA's own collective, in another order
            # between processes than within one.
            whole = NamedSharding(self.blueprint.mesh_of(split.home), PartitionSpec())
            return jax.lax.with_sharding_constraint(split.home.restore(square), whole)

        in_order = [
            in_chain(split, square)
            for split, square in zip(flat_splits(self.splits), found, strict=True)
        ]
        return jnp.sqrt(jnp.sum(self.fence(jnp.concatenate(in_order))))

    def _mean_gradients(self, sums: PyTree, count: jax.Array, norm: jax.Array) -> PyTree:
        """Mean gradients in logical shapes, clipped; whole where whole leaves are updated.

        Where nothing counts they are NaN, and dropped: a guard here would round every step's
        division otherwise in one program than in those of a pipeline.
        """
        blue, clip = self.blueprint, self.plan.clip_norm
        if not self.plan.shards("opt_state"):
            sums = self.gathered(sums)
        else:
            sums = map_splits(
                lambda s, g: blue.constrain(s, s.logical(g)) if s.pad else g, self.splits, sums
            )
        factor = None if clip is None else clip / jnp.maximum(norm, clip)

        def mean(split: Any, total: jax.Array) -> jax.Array:
            grad = wide(total) / count
            grad = grad if factor is None else grad * factor
            return grad.astype(update_dtype(split.dtype))

        return map_splits(mean, self.splits, sums)

    def _updated(
        self,
        fields: Values,
        sums: PyTree,
        count: jax.Array,
        norm: jax.Array,
        loss: jax.Array,
        taken: jax.Array,
    ) -> Values:
        """New parameters, compute copy and optimizer state, which are the old ones unless the step
        is `taken`, and new averages."""
        plan, blue = self.plan, self.blueprint
        opt_state, ema = fields["opt_state"], fields["ema"]
        old = trained(blue.params, fields["params"])
        # Optimizers add up all rows, those that only fill up a shorter rank of a pipeline too.
        params, sums = (layers_alone(self.splits, tree) for tree in (old, sums))
        opt_state = layers_alone(blue.opt_state, opt_state)

        def whole(params: PyTree) -> PyTree:
            return with_frozen(blue.params, params, fields["params"])

        if not blue.updates_shards:
            grads = self._mean_gradients(sums, count, norm)
            updates, opt_state = updated(
                blue.optimizer.update, taken, grads, opt_state, params, loss
            )
            params = optax.apply_updates(params, updates)
            ema = self._averaged(ema, params, loss)
            params = chosen(taken, params, old)
            compute = self._cast(params, loss) if plan.keeps_compute_copy else None
            return {"params": whole(params), "compute": compute, "opt_state": opt_state, "ema": ema}
        if not plan.shards("params"):
            params, old = (
                map_splits(lambda s, x: blue.constrain(s, s.store(x)), self.splits, tree)
                for tree in (params, old)
            )
        given = sums, opt_state, ema, params, count, norm, loss, taken
        # What is fused with its sums, and so rounds, is then the same in every stage.
        run = partial(self._of_shards, given)
        shards, opt_state, ema = apart(run, loss, self.all_apart)
        # Before they are gathered: of whole ones the old would have to be there beside the new.
        shards = chosen(taken, shards, old)
        compute = self.gathered(self._cast(shards, loss)) if plan.keeps_compute_copy else None
        params = shards if plan.shards("params") else self.gathered(shards)
        return {"params": whole(params), "compute": compute, "opt_state": opt_state, "ema": ema}

    def _of_shards(self, given: tuple[Any, ...]) -> tuple[PyTree, PyTree, PyTree]:
        """New stored shards of parameters, optimizer state and averages."""
        blue = self.blueprint
        sums, opt_state, ema, params, count, norm, loss, taken = given
        grads = self._mean_gradients(sums, count, norm)
        params = map_splits(lambda s, x: blue.constrain(s, s.logical(x)), self.splits, params)
        opt_state = logical_view(blue, "opt_state", opt_state)
        updates, opt_state = updated(blue.optimizer.update, taken, grads, opt_state, params, loss)
        params = optax.apply_updates(params, updates)
        ema = self._averaged(logical_view(blue, "ema", ema), params, loss)
        opt_state = map_splits(Split.store, blue.opt_state, opt_state)
        ema = map_splits(Split.store, blue.ema, ema)
        shards = map_splits(Split.store, self.splits, params)
        return self._pin_shards(shards), opt_state, ema

    def _averaged(self, ema: PyTree, params: PyTree, loss: jax.Array) -> PyTree:
        """Averages with new parameters in them."""
        if ema is None:
            return None

        def moved(ema: PyTree, params: PyTree) -> PyTree:
            run = partial(averages.moved, ema, params, self.plan.ema)
            # Compiled by itself: fused with the update, it would round otherwise than elsewhere.
            return apart(run, loss, self.blueprint.group.bits)

        # Leaf by leaf where they may be in several programs.
        return jax.tree.map(moved, ema, params) if self.apart else moved(ema, params)

    def _cast(self, tree: PyTree, loss: jax.Array) -> PyTree:
        def cast(split: Split, leaf: jax.Array) -> jax.Array:
            run = partial(rounded, leaf, split.compute)
            # The update is compiled by itself, or it would round otherwise where a copy is kept.
            return apart(run, loss, self.apart)

        return map_splits(cast, self.splits, tree)

    def _pin_shards(self, tree: PyTree) -> PyTree:
        return map_splits(self.blueprint.constrain, self.splits, tree)

    def gathered(self, shards: PyTree, field: str = "params") -> PyTree:
        """Whole leaves from stored shards, by explicit all-gathers.

        Args:
            shards: of the parameters that are trained, or of another field of the state.
            field: the field.
        """
        group = self.blueprint.group

        def local(splits: list[Split], shards: list[jax.Array]) -> list[jax.Array]:
            return [gather(leaf, s, group) for s, leaf in zip(splits, shards, strict=True)]

        treedef = jax.tree.structure(shards)
        found = self._by_mesh(local, shards, lambda s: s.spec(False), field=field)
        return jax.tree.unflatten(treedef, found)

    def _by_mesh(
        self,
        function: Callable[..., list[Any]],
        shards: PyTree,
        out: Callable[[Split], PartitionSpec],
        *args: Any,
        field: str = "params",
    ) -> list[Any]:
        """Runs `function(splits, shards, *args)` once per mesh, with that mesh's leaves local.

        `shards` are of the trained parameters, or of another field of the state; `out` says how
        results lie, `args` are whole. (Without a pipeline all leaves are on one mesh.)
        """
        blue, labels = self.blueprint, self.labels[field]
        splits = self.splits if field == "params" else getattr(blue, field)
        if field == "params":
            labels = trained(blue.params, labels)
        flat, leaves = flat_splits(splits), jax.tree.leaves(shards)
        by_mesh: dict[Any, list[int]] = {}
        for index, (split, label) in enumerate(zip(flat, jax.tree.leaves(labels), strict=True)):
            where = split.home and split.home.ranks, label
            by_mesh.setdefault(where, []).append(index)
        found: list[Any] = [None] * len(leaves)
        for numbers in by_mesh.values():
            own = [flat[i] for i in numbers]
            mesh = blue.mesh_of(own[0].home)
            results = jax.shard_map(
                partial(function, own),
                mesh=mesh,
                in_specs=(
                    [blue.sharding(s.home, s.spec(True)).spec for s in own],
                    *(PartitionSpec(),) * len(args),
                ),
                out_specs=[blue.sharding(s.home, out(s)).spec for s in own],
                axis_names=set(mesh.axis_names),
                check_vma=False,
            )([leaves[i] for i in numbers], *args)
            for i, result in zip(numbers, results, strict=True):
                found[i] = result
        return found


def _constrained(to: jax.ShapeDtypeStruct, leaf: jax.Array | None) -> jax.Array | None:
    """A leaf in its sharding; frozen ones are not always among those at hand."""
    return None if leaf is None else jax.lax.with_sharding_constraint(leaf, to.sharding)


def _along(axis: str, size: int, flat: jax.Array, group: Group) -> jax.Array:
    """The sum over a further axis."""
    return sum_over(flat, axis, size, group)


def _squares(split: Split, total: jax.Array, count: jax.Array, alike: bool) -> jax.Array:
    """Sums of squares of a mean gradient, one per layer of a stack.

    How a layer is added up depends on how many there are on a rank, and on what it is fused with;
    both differ between schedules. `alike`: layer by layer, apart, it is the same in all of them.
    """

    def of(total: jax.Array, first: int = 0) -> jax.Array:
        grad = wide(total) / count
        return jnp.sum(jnp.square(grad), axis=tuple(range(first, grad.ndim)))

    if alike and split.stacked:
        return jax.lax.map(lambda row: apart(lambda: of(row), count), total)
    return apart(lambda: of(total, int(split.stacked)), count, alike).reshape(-1)
