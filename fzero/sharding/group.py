"""The devices over which one leaf is sharded and reduced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fzero.axes import DATA, REPLICA, rows_axis, shared_over
from fzero.errors import PlanError
from fzero.plan import Plan


@dataclass(frozen=True)
class Group:
    """The devices that collectives run over.

    Args:
        data: size of the data axis.
        replica: size of the replica axis.
        ordered: add contributions in device order with our own sums. Within a process the CPU
            backend already adds in that order; gloo's rings do not, and where there are several
            processes jax takes gloo among the devices of one, too: results would depend on how
            devices are spread over processes.
        bits: gather 16-bit floats as integers. The CPU backend widens 16-bit float collectives to
            float32 and then drops the casts around them, which moves twice the bytes and lets
            unrounded values through.
        secondary: neighbours on the data axis that keep a copy of a layer between its passes; 0
            where there is none.
        further: the mesh axes that XLA divides layers over, and their sizes.
    """

    data: int
    replica: int
    ordered: bool = False
    bits: bool = False
    secondary: int = 0
    further: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(plan: Plan, mesh: Mesh) -> Group:
        """The group of a plan on a mesh of devices.

        Raises:
            PlanError: as `secondary_size`.
        """
        sizes, devices = dict(mesh.shape), list(mesh.devices.flat)
        several = len({device.process_index for device in devices}) > 1
        cpu = devices[0].platform == "cpu"
        secondary = secondary_size(plan, sizes[DATA], devices)
        further = tuple(plan.further.items())
        return Group(sizes[DATA], sizes[REPLICA], several and cpu, cpu, secondary, further)

    @property
    def row_shares(self) -> int:
        """Shares that a batch's rows are dealt out in, over data and replicas."""
        return self.data * self.replica

    @property
    def shards(self) -> int:
        """Devices that ZeRO can share a leaf out over."""
        return math.prod(shared_over({DATA: self.data, **dict(self.further)}).values())

    def on_shards(self, function: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
        """A function that runs collectives, with each device's shard of its arguments alone.

        Around collectives over the data axis XLA would gather what it divides over further ones, so
        that whole leaves travelled; a `shard_map` over those as well leaves nothing to decide.

        Args:
            function: the function.
            specs: of its arguments, over the further axes; a tuple.
            out: of its results.
        """
        if not self.further:
            return function
        names = {name for name, _ in self.further}
        run: Callable[..., Any] = jax.shard_map(
            function, in_specs=specs, out_specs=out, axis_names=names, check_vma=False
        )
        return run

    def spread(self, rows: jax.Array) -> jax.Array:
        """A batch's rows, divided over the further axis that shares them out if it can."""
        axis = rows_axis(rows.shape[0]) if rows.ndim else None
        if axis is None:
            return rows
        return self.pin(
            rows, PartitionSpec(axis, *(PartitionSpec.UNCONSTRAINED,) * (rows.ndim - 1))
        )

    def pin(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A value divided so over the further axes."""
        return jax.lax.with_sharding_constraint(value, spec) if self.further else value


def secondary_size(plan: Plan, data: int, devices: Sequence[Any] | None) -> int:
    """Devices of a secondary group; 0 where the plan has none, or it would be all of them.

    Args:
        plan: the plan.
        data: devices on the data axis.
        devices: all devices in the order of the mesh; only `secondary="host"` asks them.

    Raises:
        PlanError: hosts do not divide the data axis into equal neighbours.
    """
    wanted = plan.secondary
    if wanted == "host":
        hosts = [device.process_index for device in devices or jax.devices()]
        runs = [len(list(run)) for _, run in itertools.groupby(hosts[:data])]
        wanted, starts = runs[0], range(0, plan.pipe * plan.replica * data, runs[0])
        rows = [set(hosts[at : at + wanted]) for at in starts]
        if data % wanted or any(len(row) > 1 for row in rows):
            raise PlanError(
                "plan: secondary='host' needs equally many neighbours of each host on the data"
                f" axis, whose first {data} devices are on hosts {hosts[:data]}; order the"
                " devices by host, or give the number that divides them"
            )
        if wanted == 1 < data:
            raise PlanError(
                "plan: secondary='host', but neighbours on the data axis are on different hosts"
                f" ({hosts[:data]}): each device would keep whole layers; order the devices by"
                " host, or leave it out"
            )
    return wanted if isinstance(wanted, int) and wanted < data else 0
