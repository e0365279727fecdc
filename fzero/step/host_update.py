"""The update on the host: where the link to the optimizer state is slower than the host's cores.

Streaming brings the optimizer state to the device and back, for Adam eight bytes a parameter each
way, and a master four more. An update on the host moves gradients down and parameters up; the rest
is copied within host memory, from pinned memory and back. It runs on jax's CPU devices, one for
each device of the plan, laid out like those: the same function of the same shards, compiled for
other devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from fzero.errors import PlanError
from fzero.processes import in_turn
from fzero.sharding.blueprint import Blueprint, blueprint
from fzero.sharding.buckets import OWNED
from fzero.sharding.split import Split, map_splits, stored_shapes, trained, with_frozen
from fzero.state.compute_copy import rounded
from fzero.step.update import Update
from fzero.step.values import Gradients, Metrics, Values
from fzero.storage.tiers import host_sharding
from fzero.tree import PyTree, named_leaves


class HostUpdate:
    """The update of a step, computed on the host.

    Args:
        blue: the blueprint of the state; its plan has `update_on="host"`.
        donate: whether the old optimizer state may be released before the new one is kept.

    Attributes:
        host: the blueprint of the update.

    Raises:
        PlanError: there are fewer CPU devices than devices of the plan.
    """

    def __init__(self, blue: Blueprint, donate: bool) -> None:
        self.blueprint, self.donate = blue, donate
        # Every parameter is a shard there, in any stage: the least that has to be moved.
        plan = blue.plan.replace(
            zero=3, gather="eager", reduce="microbatch", tiers={}, update_on="device", remat="layer"
        )
        twins = host_devices(list(blue.mesh.devices.flat))
        self.host = blueprint(blue.model, blue.tx, plan, twins)
        self._update = Update(self.host, lambda value: value)
        self._program = in_turn(twins, jax.jit(self._run, donate_argnums=(0,)))
        # What is frozen stays where it is.
        self._splits = trained(blue.params)
        self._shards = stored_shapes(self._splits, blue.sharding, sharded=True)
        store = partial(map_splits, Split.store, self._splits)
        divide = jax.jit(store, out_shardings=_shardings(self._shards))
        self._divide = in_turn(blue.mesh.devices.flat, divide)
        whole = _shardings(stored_shapes(self._splits, blue.sharding, sharded=False))
        gather = jax.jit(Update(blue, lambda value: value).gathered, out_shardings=whole)
        self._gather = in_turn(blue.mesh.devices.flat, gather)

    def __call__(
        self, fields: Values, step: jax.Array, gradients: Gradients
    ) -> tuple[Values, Metrics]:
        """New fields of the state, and the step's metrics.

        Args:
            fields: the state's fields, without step and key.
            step: steps taken so far.
            gradients: what the passes computed.
        """
        whole = not self.blueprint.plan.shards("params")
        params = trained(self.blueprint.params, fields["params"])
        params = self._divide(params) if whole else params
        # A copy in any case: the program writes the new state over it.
        old = {name: fields[name] for name in OWNED}
        owned = self._down(old, may_alias=False)
        if self.donate:
            jax.block_until_ready(owned)
            for leaf in jax.tree.leaves(old):
                leaf.delete()
        rest = {name: fields[name] for name in ("buffers", "grads", "loss_scale")}
        rest = self._down({"params": params, **rest})
        new, metrics = self._program(owned, rest, *self._down((step, gradients)))
        new = self._up(new)
        if "params" in new:
            new["params"] = with_frozen(self.blueprint.params, new["params"], fields["params"])
        return new, self._on_device(metrics)

    def _run(
        self, owned: Values, rest: Values, step: jax.Array, gradients: Gradients
    ) -> tuple[Values, Metrics]:
        fields = {**rest, **owned, "compute": None}
        new, metrics = self._update.run(fields, step, gradients, apply=True)
        if self.blueprint.plan.keeps_compute_copy:
            new["compute"] = map_splits(
                lambda split, x: rounded(x, split.compute), self._splits, new["params"]
            )
        return new, metrics

    def _down(self, tree: PyTree, **options: bool) -> PyTree:
        """Copies on the host's devices, laid out as they are here."""
        mesh = self.host.mesh
        to = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), tree)
        return jax.device_put(tree, to, **options)

    def _up(self, new: Values) -> Values:
        """New fields where the plan keeps them."""
        plan, shapes = self.blueprint.plan, self.blueprint.shapes()
        out = {name: self._on_device(new[name]) for name in ("step", "buffers", "loss_scale")}
        out["grads"], out["compute"] = None, None
        for name in ("params", *OWNED):
            if name in OWNED or plan.shards("params"):
                kept = self._kept(name, shapes[name])
                kept = trained(self.blueprint.params, kept) if name == "params" else kept
                out[name] = jax.device_put(new[name], kept)
        # What forward passes read whole goes up in shards, and is put together there.
        whole = "compute" if plan.keeps_compute_copy else "params"
        if whole not in out or out[whole] is None:
            out[whole] = self._gather(jax.device_put(new[whole], _shardings(self._shards)))
        return out

    def _kept(self, name: str, shapes: PyTree) -> PyTree:
        """Where the leaves of a field are kept."""
        parked = self.blueprint.buckets.parked
        found = [
            host_sharding(leaf.sharding) if (name, path) in parked else leaf.sharding
            for path, leaf in named_leaves(shapes)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    def _on_device(self, tree: PyTree) -> PyTree:
        mesh = self.blueprint.mesh
        to = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), tree)
        return jax.device_put(tree, to)


def host_devices(devices: Sequence[Any]) -> list[Any]:
    """A CPU device for each device, of the same process.

    Raises:
        PlanError: there are too few.
    """
    if devices[0].platform == "cpu":
        return list(devices)
    own = defaultdict(list)
    for device in jax.devices("cpu"):
        own[device.process_index].append(device)
    found = []
    for device in devices:
        if not own[device.process_index]:
            have = len(jax.local_devices(backend="cpu"))
            raise PlanError(
                f"plan: update_on='host' computes on one CPU device for each of {len(devices)}"
                f" devices, and this process has {have}: say jax.config.update("
                f"'jax_num_cpu_devices', {len(devices)}) before the first use of jax"
            )
        found.append(own[device.process_index].pop(0))
    return found


def _shardings(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.sharding, shapes)
