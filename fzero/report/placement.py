"""Where a state is, or will be: bytes in every tier, for every state class and leaf."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import optax

from fzero.errors import PlacementError
from fzero.model import Model
from fzero.plan import Plan
from fzero.report.description import LeafPlan, describe, table
from fzero.state.require import require_alive, require_arrays
from fzero.state.train_state import TrainState
from fzero.storage.tiers import DEVICE, DISK, HOST, TIERS, on_device, tier_of
from fzero.summary import as_html
from fzero.tree import leaf_bytes, named_leaves


CLASSES = ("params", "compute", "opt_state", "ema", "buffers", "grads")


@dataclass(frozen=True)
class LeafPlacement:
    """Where one leaf is.

    Args:
        state_class: `params`, `compute`, `opt_state`, `ema`, `buffers` or `grads`.
        path: path in its tree.
        shape: shape as stored, padding included.
        dtype: its dtype.
        spec: how it is split over mesh axes.
        tier: `device`, `host` or `disk`.
        bytes_per_device: bytes of its largest shard.
        bytes_in_all: bytes of all shards, copies counted; on disk there are none.
        devices: ids of the devices that it belongs to; in a pipeline not all of them.
    """

    state_class: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    tier: str
    bytes_per_device: int
    bytes_in_all: int
    devices: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Placement:
    """Where a state is, in bytes; prints as a table.

    Every dict has the state classes and `total` as keys. What is parked counts for the device that
    it will return to.

    Args:
        bytes_per_device: bytes in the memory of the fullest device.
        bytes_all_devices: bytes in the memory of all devices together, copies counted.
        host_bytes_per_device: bytes in host memory, of the device with the most.
        host_bytes: bytes in host memory, of all devices.
        disk_bytes_per_device: bytes on disk, of the device with the most.
        disk_bytes: bytes on disk in all.
        tiers: the tiers that a state class is in.
        num_devices: devices that it belongs to.
        leaves: every leaf.
    """

    bytes_per_device: dict[str, int]
    bytes_all_devices: dict[str, int]
    host_bytes_per_device: dict[str, int]
    host_bytes: dict[str, int]
    disk_bytes_per_device: dict[str, int]
    disk_bytes: dict[str, int]
    tiers: dict[str, tuple[str, ...]]
    num_devices: int
    leaves: tuple[LeafPlacement, ...]

    def to_json(self) -> dict[str, Any]:
        """The placement as a JSON-able dict."""
        return dataclasses.asdict(self)

    def require(self, **tiers: str) -> Placement:
        """The placement itself, if every leaf of the classes named is in the tier named.

        Leaves of one element do not count: steps keep counters at hand.

        Args:
            **tiers: such as `params="device", opt_state="host"`.

        Raises:
            PlacementError: a leaf is elsewhere, or a name is unknown.
        """
        for name, tier in tiers.items():
            if name not in CLASSES or tier not in TIERS:
                raise PlacementError(
                    f"require: {name}={tier!r}: expected one of {CLASSES} in one of {TIERS}"
                )
        wrong = [
            x for x in self.leaves
            if x.tier != tiers.get(x.state_class, x.tier) and math.prod(x.shape) != 1
        ]  # fmt: skip
        if wrong:
            size = sum(leaf.bytes_in_all for leaf in wrong)
            shown = ", ".join(f"{x.state_class}/{x.path} in {x.tier}" for x in wrong[:6])
            more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
            raise PlacementError(
                f"require: expected {tiers}, but {len(wrong)} leaves ({size:,} bytes) are"
                f" elsewhere: {shown}{more}. Move them with fz.offload or fz.reload"
            )
        return self

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        number = f"bytes in {self.num_devices} device{'s' * (self.num_devices != 1)}"
        columns = {"bytes/device": self.bytes_per_device, number: self.bytes_all_devices}
        if self.host_bytes["total"]:
            columns["host bytes/device"] = self.host_bytes_per_device
            columns["host bytes in all"] = self.host_bytes
        if self.disk_bytes["total"]:
            columns["disk bytes in all"] = self.disk_bytes
        rows = [("state class", *columns, "tier")]
        for name in self.bytes_per_device:
            sizes = [f"{column[name]:,}" for column in columns.values()]
            rows.append((name, *sizes, ", ".join(self.tiers.get(name, ()))))
        return table(rows, right=tuple(range(1, len(columns) + 1)))


@overload
def placement(state: TrainState, /) -> Placement: ...
@overload
def placement(
    plan: Plan,
    model: Model,
    tx: optax.GradientTransformation | None = None,
    /,
    *,
    devices: Sequence[Any] | None = None,
    num_devices: int | None = None,
) -> Placement: ...
def placement(
    state_or_plan: TrainState | Plan,
    model: Model | None = None,
    tx: optax.GradientTransformation | None = None,
    /,
    *,
    devices: Sequence[Any] | None = None,
    num_devices: int | None = None,
) -> Placement:
    """Where a state is, or where a plan will have it: bytes in every tier.

    Args:
        state_or_plan: a state; one of shapes (`fz.abstract_state`) will do. Or a plan, before
            anything is allocated.
        model: with a plan, the model.
        tx: with a plan, the optimizer, to count its state too.
        devices: with a plan, devices to plan for.
        num_devices: with a plan, how many devices to plan for; they need not exist.

    Returns:
        The placement; `str()` of it is a table.

    Raises:
        StateConsumedError: the state was given away.
        PlanError: the plan does not fit that many devices.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> tx, plan = optax.adam(0.1), fz.Plan(data=1)
        >>> where = fz.placement(fz.offload(fz.init(model, tx, plan), "opt_state"))
        >>> where.bytes_per_device["opt_state"], where.host_bytes["opt_state"]
        (0, 132)
        >>> fz.placement(plan, model, tx).bytes_per_device["total"]
        196
    """
    if isinstance(state_or_plan, Plan):
        if model is None:
            raise PlacementError("placement: a plan alone has no leaves: pass the model as well")
        about = describe(state_or_plan, model, tx, devices=devices, num_devices=num_devices)
        per_rank = about.num_devices // about.plan.pipe
        return _summed([_of_plan(leaf, about.plan, per_rank) for leaf in about.leaves])
    require_alive(state_or_plan, "placement")
    require_arrays(state_or_plan, "placement")
    return _summed(
        [
            _of_leaf(name, path, leaf)
            for name in CLASSES
            for path, leaf in named_leaves(getattr(state_or_plan, name))
        ]
    )


def _of_leaf(name: str, path: str, leaf: Any) -> LeafPlacement:
    tier, shape, sharding = tier_of(leaf), tuple(leaf.shape), on_device(leaf.sharding)
    size = leaf_bytes(leaf, sharding.shard_shape(shape))
    devices = tuple(sorted(device.id for device in sharding.device_set))
    distinct = len({str(index) for index in sharding.devices_indices_map(shape).values()})
    copies = distinct if tier == DISK else len(devices)
    axes = ["-" if axis is None else axis if isinstance(axis, str) else "+".join(axis)
            for axis in getattr(sharding, "spec", ())]  # fmt: skip
    spec = ", ".join(axes) or "whole"
    return LeafPlacement(
        name, path, shape, str(leaf.dtype), spec, tier, size, size * copies, devices
    )


def _of_plan(leaf: LeafPlan, plan: Plan, per_rank: int) -> LeafPlacement:
    ranks = leaf.ranks or range(plan.pipe)
    devices = tuple(rank * per_rank + i for rank in ranks for i in range(per_rank))
    axes = [axis or "-" for axis in leaf.axes]
    if leaf.dim is not None:
        axes += ["-"] * (leaf.dim + 1 - len(axes))
        axes[leaf.dim] = "+".join(leaf.over)
    spec = ", ".join(axes) or "whole"
    groups = math.prod(plan.further[axis] for axis in leaf.axes if axis is not None)
    groups *= leaf.shards
    copies = groups * len(ranks) if leaf.tier == DISK else len(devices)
    size = leaf.bytes_per_device
    return LeafPlacement(
        leaf.state_class, leaf.path, leaf.shape, leaf.dtype, spec, leaf.tier, size, size * copies,
        devices,
    )  # fmt: skip


def _summed(leaves: Sequence[LeafPlacement]) -> Placement:
    held: dict[str, dict[int, Counter[str]]] = {t: defaultdict(Counter) for t in TIERS}
    in_all: dict[str, Counter[str]] = {tier: Counter() for tier in TIERS}
    for leaf in leaves:
        for device in leaf.devices:
            held[leaf.tier][device].update(
                {leaf.state_class: leaf.bytes_per_device, "total": leaf.bytes_per_device}
            )
        in_all[leaf.tier].update({leaf.state_class: leaf.bytes_in_all, "total": leaf.bytes_in_all})
    names = (*CLASSES, "total")

    def most(tier: str) -> dict[str, int]:
        return {n: max((by[n] for by in held[tier].values()), default=0) for n in names}

    def everything(tier: str) -> dict[str, int]:
        return {name: in_all[tier][name] for name in names}

    return Placement(
        bytes_per_device=most(DEVICE),
        bytes_all_devices=everything(DEVICE),
        host_bytes_per_device=most(HOST),
        host_bytes=everything(HOST),
        disk_bytes_per_device=most(DISK),
        disk_bytes=everything(DISK),
        tiers={n: tuple(t for t in TIERS if any(x.tier == t for x in leaves if x.state_class == n))
               for n in CLASSES},
        num_devices=len({device for leaf in leaves for device in leaf.devices}),
        leaves=tuple(leaves),
    )  # fmt: skip
