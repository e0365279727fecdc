"""What a program sends, over which links, and what it computes meanwhile."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fzero.axes import DATA
from fzero.preflight.hlo.counts import Collective, Window, windows
from fzero.preflight.kernels import Kernels, Work
from fzero.preflight.rates import Rates


@dataclass(frozen=True)
class CollectiveUse:
    """One collective of a step, one device.

    Args:
        kind: `all-gather`, `reduce-scatter`, `all-reduce`, `send` (between pipeline stages), ...
        where: the program it is in; empty where a step is one program.
        dtype: XLA's name.
        axes: mesh axes it runs over, joined by `+`; `data / 8` for eighths of the data axis, each
            by itself; `?` where its groups fit none.
        bytes: full size of what is gathered or reduced, per execution.
        sent_bytes: what one device sends for it, per execution.
        times: executions per step.
        in_loop: whether it is inside a loop.
        crosses_hosts: whether its devices are in several hosts.
        network_bytes: what one device's network card carries of it, per execution: rings through
            several devices of a host share the cards of all of them.
        num_matmuls: matmuls between its start and its done.
        num_kernels: other kernels there.
        seconds: what it takes at the links' peak, per execution.
        exposed_best_seconds: of them, beyond the computation beside it, both at their peaks.
        exposed_seconds: the same, both at what programs reach.
        estimated: whether it is from the plan's arithmetic, not from a compiled program.
    """

    kind: str
    where: str
    dtype: str
    axes: str
    bytes: int
    sent_bytes: float
    times: int
    in_loop: bool
    crosses_hosts: bool
    network_bytes: float
    num_matmuls: int
    num_kernels: int
    seconds: float
    exposed_best_seconds: float
    exposed_seconds: float
    estimated: bool = False

    @property
    def exposed(self) -> bool:
        """Whether nothing is computed between its start and its done."""
        return self.num_matmuls + self.num_kernels == 0

    @property
    def total_bytes(self) -> float:
        """What one device sends for it in a step."""
        return self.times * self.sent_bytes

    def in_program(self, where: str, times: int) -> CollectiveUse:
        """The same in a program that runs so often in a step."""
        return dataclasses.replace(self, where=where, times=self.times * times)


@dataclass(frozen=True)
class Network:
    """The links between the devices of a program.

    Args:
        rates: of one device.
        hosts: the host of each device.
    """

    rates: Rates
    hosts: tuple[int, ...]

    def of(
        self, kind: str, groups: Sequence[tuple[int, ...]], sent_bytes: float
    ) -> tuple[bool, float, float]:
        """Of one execution: whether it crosses hosts, bytes per network card, seconds.

        Args:
            kind: of collective.
            groups: the devices that talk to each other, by number.
            sent_bytes: what each device sends.
        """
        shared, rate = self._sharing(kind, groups), self.rates
        seconds = sent_bytes / rate.host_link_bytes_per_s
        if shared is not None:
            seconds = max(seconds, sent_bytes / shared / rate.network_bytes_per_s)
        carried = 0.0 if shared is None else sent_bytes / shared
        return shared is not None, carried, seconds + rate.collective_latency_s

    def _sharing(self, kind: str, groups: Sequence[tuple[int, ...]]) -> int | None:
        """How many network cards a group shares on a host; `None` if it stays within one."""
        counts = [Counter(self.hosts[d] for d in group) for group in groups]
        across = [count for count in counts if len(count) > 1]
        if not across:
            return None
        if kind == "collective-permute":  # pairs: each device sends for itself
            return 1
        return min(min(count.values()) for count in across)


def uses(kernels: Kernels, axes: Mapping[str, int], network: Network) -> tuple[CollectiveUse, ...]:
    """The collectives of a compiled module, in the order of its schedule.

    Args:
        kernels: the module and what its kernels cost.
        axes: sizes of the mesh axes.
        network: what lies between its devices.
    """
    return tuple(
        _use(kernels, window, axes, network) for window in windows(kernels.module, mesh_axes=axes)
    )


def _axes(c: Collective, axes: Mapping[str, int]) -> str:
    if c.axes is not None:
        return "+".join(c.axes)
    # Neighbours on the data axis, which is the innermost.
    size = c.group_size
    neighbours = all(group == tuple(range(group[0], group[0] + size)) and group[0] % size == 0
                     for group in c.replica_groups)  # fmt: skip
    data = axes.get(DATA, 0)
    return f"{DATA} / {data // size}" if neighbours and data and not data % size else "?"


def _use(
    kernels: Kernels, window: Window, axes: Mapping[str, int], network: Network
) -> CollectiveUse:
    c, comp = window.collective, window.computation
    num_matmuls = num_kernels = 0
    beside = Work()
    for i in window.between:
        inside = kernels.matmuls.instructions_at(comp, i)
        num_matmuls += inside
        # A copy moves data; it computes nothing.
        num_kernels += inside == 0 and i.opcode != "copy"
        beside += kernels.at(comp, i)
    crosses, carried, seconds = network.of(c.kind, c.replica_groups, c.wire_bytes)
    return CollectiveUse(
        kind=c.kind,
        where="",
        dtype=c.dtype,
        axes=_axes(c, axes),
        bytes=c.bytes,
        sent_bytes=c.wire_bytes,
        # A loop of unknown length runs at least once.
        times=1 if c.times is None else c.times,
        in_loop=c.in_loop,
        crosses_hosts=crosses,
        network_bytes=carried,
        num_matmuls=num_matmuls,
        num_kernels=num_kernels,
        seconds=seconds,
        exposed_best_seconds=max(0.0, seconds - beside.best_seconds),
        exposed_seconds=max(0.0, seconds / network.rates.link_share - beside.likely_seconds),
    )


@dataclass(frozen=True)
class Traffic:
    """Sums over collectives, per device and step.

    Args:
        communicated_bytes: sent in all.
        exposed_bytes: of them, with nothing computed between start and done.
        without_matmul_bytes: of them, with no matmul there (exposed ones included).
        cross_host_bytes: of collectives whose devices are in several hosts.
        network_bytes: through the device's network card, at least.
        seconds: at the links' peak, one after the other.
        exposed_best_seconds: of them, not beside computation, all at the peaks.
        exposed_seconds: the same at what programs reach: what they add to the step.
    """

    communicated_bytes: float
    exposed_bytes: float
    without_matmul_bytes: float
    cross_host_bytes: float
    network_bytes: float
    seconds: float
    exposed_best_seconds: float
    exposed_seconds: float


def traffic(found: Iterable[CollectiveUse]) -> Traffic:
    """The sums of some collectives."""
    found = list(found)
    return Traffic(
        communicated_bytes=sum(c.total_bytes for c in found),
        exposed_bytes=sum(c.total_bytes for c in found if c.exposed),
        without_matmul_bytes=sum(c.total_bytes for c in found if not c.num_matmuls),
        cross_host_bytes=sum(c.total_bytes for c in found if c.crosses_hosts),
        network_bytes=sum(c.times * c.network_bytes for c in found),
        seconds=sum(c.times * c.seconds for c in found),
        exposed_best_seconds=sum(c.times * c.exposed_best_seconds for c in found),
        exposed_seconds=sum(c.times * c.exposed_seconds for c in found),
    )
