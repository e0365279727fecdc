"""Where a state is, or will be: bytes in every tier, for every state class and leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import optax

from fzero.errors import PlacementError, some_of
from fzero.model import Model
from fzero.plan import Plan
from fzero.report.report import CLASSES, LeafReport, Report, planned_on, table
from fzero.state.require import require_alive, require_arrays
from fzero.state.train_state import TrainState
from fzero.storage.tiers import DEVICE, DISK, HOST, TIERS
from fzero.summary import Boxed


@dataclass(frozen=True, repr=False)
class Placement(Boxed):
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
        leaves: a row for every leaf (`fzero.report.report.LeafReport`).
    """

    bytes_per_device: dict[str, int]
    bytes_all_devices: dict[str, int]
    host_bytes_per_device: dict[str, int]
    host_bytes: dict[str, int]
    disk_bytes_per_device: dict[str, int]
    disk_bytes: dict[str, int]
    tiers: dict[str, tuple[str, ...]]
    num_devices: int
    leaves: tuple[LeafReport, ...]

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
            shown = [f"{x.state_class}/{x.path} in {x.tier}" for x in wrong]
            raise PlacementError(
                f"require: expected {tiers}, but {len(wrong)} leaves ({size:,} bytes) are"
                f" elsewhere: {some_of(shown, 6)}. Move them with fz.offload or fz.reload"
            )
        return self

    def __repr__(self) -> str:
        return str(self)

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
        state_or_plan: a state; one of shapes (`fz.abstract_state`) will do where nothing is on
            disk. Or a plan, before anything is allocated.
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
        report = Report.of_plan(planned_on(state_or_plan, model, tx, devices, num_devices))
    else:
        require_alive(state_or_plan, "placement")
        require_arrays(state_or_plan, "placement")
        report = Report.of_state(state_or_plan)
    leaves = report.leaves
    tiers = {n: {leaf.tier for leaf in leaves if leaf.state_class == n} for n in CLASSES}
    return Placement(
        bytes_per_device=report.fullest(DEVICE),
        bytes_all_devices=report.in_all(DEVICE),
        host_bytes_per_device=report.fullest(HOST),
        host_bytes=report.in_all(HOST),
        disk_bytes_per_device=report.fullest(DISK),
        disk_bytes=report.in_all(DISK),
        tiers={name: tuple(t for t in TIERS if t in used) for name, used in tiers.items()},
        num_devices=len({device for leaf in leaves for device in leaf.devices}),
        leaves=leaves,
    )
