"""Updates of leaves that are on several meshes or in several tiers: many programs, by site."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.offload.slabs import Cut
from fzero.offload.stream import Parkings, StreamedFunction
from fzero.programs.sites import Labels, PlacedFunction
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.buckets import OWNED, Parking, same_cut
from fzero.sharding.split import flat_splits, map_splits, trained, with_frozen
from fzero.step.update import Update
from fzero.step.values import Gradients, Metrics, Values
from fzero.storage.tiers import on_device
from fzero.tree import PyTree, named_leaves, owner_of, shape_at
from fzero.zero.options import deterministic_options


class PlacedUpdate:
    """An update that runs where its leaves are; where the plan parks leaves, they visit the device.

    Numbers are those of a plan without tiers but for a rounding or two: a product and a sum that
    one program fuses into one rounding may be two in slabs.

    Args:
        blue: the blueprint.
        donate: whether the old state's memory may be reused.
        apply: whether to take an optimizer step, or only to accumulate.
        name: of the step, for messages.

    Attributes:
        stream: what runs the update where the plan parks leaves, once a step was taken.
    """

    def __init__(self, blue: Blueprint, donate: bool, apply: bool, name: str) -> None:
        self.blueprint, self.plan = blue, blue.plan
        self.donate, self.apply, self.name = donate, apply, name
        # Leaves of several meshes or tiers: there is no common program to fence.
        self.update = Update(blue, lambda value: value)
        self.stream: StreamedFunction | None = None
        self._functions: dict[Any, Any] = {}

    def __call__(
        self, fields: Values, step: jax.Array, gradients: Gradients
    ) -> tuple[Values, Metrics]:
        """New fields of the state, and the step's metrics.

        Args:
            fields: the state's fields, without step and key.
            step: steps taken so far.
            gradients: what the passes computed.
        """
        splits = self.blueprint.params
        streams = self.apply and self.blueprint.buckets.parked
        # What is frozen stays where it is.
        own = {n: trained(splits, x) if n == "params" else x for n, x in fields.items()}
        new, metrics = (self._streamed if streams else self._updated)(own, step, gradients)
        if "params" in new:
            new["params"] = with_frozen(splits, new["params"], fields["params"])
        return new, metrics

    def lowered(
        self, fields: Values, step: jax.Array, gradients: Gradients
    ) -> list[tuple[Any, Any]]:
        """The programs of an update where nothing is parked, with their meshes, for shapes."""
        fields = {**fields, "params": trained(self.blueprint.params, fields["params"])}
        args = fields, gradients._asdict(), {"step": step}
        programs: list[tuple[Any, Any]] = self._whole(args).lowered()
        return programs

    def _updated(
        self, fields: Values, step: jax.Array, gradients: Gradients
    ) -> tuple[Values, Metrics]:
        args = fields, gradients._asdict(), {"step": step}
        new: tuple[Values, Metrics] = self._whole(args)(*args)
        return new

    def _whole(self, args: tuple[Values, ...]) -> PlacedFunction:
        def run(fields: Values, gradients: Values, at: Values) -> tuple[Values, Metrics]:
            return self.update.run(fields, at["step"], Gradients(**gradients), self.apply)

        def make(shapes: Any, **options: Any) -> PlacedFunction:
            return PlacedFunction(run, shapes, self._out_shardings, self.blueprint.mesh,
                                  donate=(0,) if self.donate else (), **options)  # fmt: skip

        made: PlacedFunction = self._made("update", make, args)
        return made

    def _streamed(
        self, fields: Values, step: jax.Array, gradients: Gradients
    ) -> tuple[Values, Metrics]:
        """The update where parked leaves visit the device in turn.

        What needs all gradients at once, their norm, comes first: the rest may see slabs.
        """
        blue, update = self.blueprint, self.update

        def totals(given: Values, pending: Values) -> tuple[Values, Metrics]:
            found, metrics = update.totals(pending["grads"], Gradients(**given, changed={}))
            sums, mean = found.sums, found.mean
            return {"sums": sums, "mean": mean, "norm": update.norm(sums, mean)}, metrics

        def make_totals(shapes: Any, **options: Any) -> PlacedFunction:
            return PlacedFunction(totals, shapes, self._out_shardings, blue.mesh, **options)

        given = {"sums": gradients.sums, "mean": gradients.mean, "own": gradients.own}
        first = (given, {"grads": fields["grads"]})
        total, metrics = self._made("totals", make_totals, first)(*first)

        def apply(fields: Values, spent: Values, rest: Values) -> tuple[Values, Metrics]:
            found = Gradients(spent["sums"], rest["mean"], {}, rest["changed"])
            fields = {**fields, "grads": None}
            return update.applied(fields, rest["step"], found, rest["metrics"], rest["norm"])

        def make(shapes: Any, **options: Any) -> StreamedFunction:
            parked = Parkings(
                self._cuts(shapes), self._parking(shapes), self._parking, self.plan.disk_path
            )
            return StreamedFunction(
                apply, shapes, self._out_shardings, blue.mesh, parked,
                donate=(0, 1) if self.donate else (1,), **options,
            )  # fmt: skip

        own = {name: fields[name] for name in fields if name != "grads"}
        rest = {"step": step, "mean": total["mean"], "norm": total["norm"], "metrics": metrics,
                "changed": gradients.changed}  # fmt: skip
        second = (own, {"sums": total["sums"]}, rest)
        self.stream = self._made("applied", make, second)
        return self.stream(*second)

    def _made(self, name: str, make: Callable[..., Any], args: tuple[Values, ...]) -> Any:
        """A function of leaves by their tree and dtypes, made when it is first called."""
        # Sums of several calls are float32, those of one the backward pass's. All else is settled
        # by the plan and the model.
        key = name, str(jax.tree.structure(args)), tuple(x.dtype for x in jax.tree.leaves(args))
        if key not in self._functions:
            shapes = jax.tree.map(lambda x: shape_at(x, on_device(x.sharding)), args)
            labels = tuple(
                {entry: self._labels(entry, tree) for entry, tree in values.items()}
                for values in args
            )
            options = deterministic_options(self.plan, self.blueprint.mesh.devices.flat[0].platform)
            self._functions[key] = make(
                shapes, labels=Labels(labels), what=self.name, compiler_options=options
            )
        return self._functions[key]

    def _labels(self, name: str, tree: PyTree) -> PyTree:
        """What each leaf is updated together with."""
        if name == "changed":
            return {entry: self._labels(entry, own) for entry, own in tree.items()}
        blue = self.blueprint
        known = blue.labels()
        known["params"] = known["sums"] = trained(blue.params, known["params"])
        if tree is not None and name in known:
            return known[name]
        return _with_sums(name, jax.tree.map(lambda _: "", tree), known["sums"])

    def _cuts(self, args: tuple[Values, ...]) -> list[Cut | None]:
        """How each leaf is cut where updates go slab by slab, whether it is parked or not."""
        blue = self.blueprint
        shapes = dict(named_leaves(blue.shapes()["params"]))

        owners = {
            (field, split.path): split.owner
            for field in OWNED for split in flat_splits(getattr(blue, field))
        }  # fmt: skip

        def cut(path: str, leaf: Any) -> Cut | None:
            _, name, *rest = path.split("/")
            own = "/".join(rest)
            owner = owners[name, own] if name in OWNED else owner_of(own, blue.buckets.cuts)
            if owner is None or owner not in blue.buckets.cuts:
                return None
            found = same_cut(blue.buckets.cuts[owner], shapes[owner], leaf)
            return None if found is None else Cut(*found)

        return [cut(path, leaf) for path, leaf in named_leaves(args)]

    def _parking(self, values: Any) -> list[Parking | None]:
        """How the leaves of a tuple of `Values` are parked."""
        parked = self.blueprint.buckets.parked

        def parking(path: str) -> Parking | None:
            _, name, *rest = path.split("/")
            return parked.get((name, "/".join(rest)))

        return [parking(path) for path, _ in named_leaves(values)]

    def _out_shardings(self, out: Any) -> Any:
        blue = self.blueprint
        whole = NamedSharding(blue.mesh, PartitionSpec())
        known = {name: jax.tree.map(lambda to: to.sharding, tree)
                 for name, tree in blue.shapes().items()}  # fmt: skip
        known["params"] = trained(blue.params, known["params"])
        known["sums"] = map_splits(
            lambda s: blue.sharding(s.home, s.spec(True)), trained(blue.params)
        )

        def shardings(name: str, tree: PyTree) -> PyTree:
            if name in known:
                return known[name]
            return _with_sums(name, jax.tree.map(lambda _: whole, tree), known["sums"])

        new, metrics = out
        found = {name: shardings(name, tree) for name, tree in new.items()}
        return found, jax.tree.map(lambda _: whole, metrics)


def _with_sums(name: str, tree: PyTree, sums: PyTree) -> PyTree:
    """Values of the leaves under a name; an accumulation in progress has those of its sums."""
    if name != "grads" or tree is None:
        return tree
    return dataclasses.replace(tree, sums=sums)
