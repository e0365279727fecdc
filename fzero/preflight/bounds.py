"""How long a step takes: at best, likely, and with nothing in parallel."""

from __future__ import annotations

from dataclasses import dataclass

from fzero.preflight.kernels import Work
from fzero.preflight.network import Traffic
from fzero.preflight.rates import Rates


@dataclass(frozen=True)
class Bounds:
    """Seconds of one step, and the share of the matmul peak (MFU) that they mean.

    MFU counts the model's FLOPs, so what is computed twice lowers it.

    Args:
        compute_seconds: all matmuls, recomputed ones included, at the device's peak.
        memory_seconds: all bytes that kernels read and write, at the memory's peak; an estimate
            from the program's text, which does not show what caches spare.
        link_seconds: all collectives at the links' peak, one after the other.
        bubble_seconds: of a pipeline's rank, waiting for others, likely.
        best_seconds: the program takes at least that: its kernels one after the other, each at the
            peak that limits it, and of the collectives what is not beside them; a pipeline's
            makespan of that.
        likely_seconds: the same at the shares of the peaks that programs reach.
        serial_seconds: as likely, with nothing beside a collective.
        best_mfu: that of `best_seconds`; no run has more.
        likely_mfu: that of `likely_seconds`.
        serial_mfu: that of `serial_seconds`.
        limit: what takes longest: `compute`, `memory`, `links`, or the `bubble` of a pipeline.
    """

    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    bubble_seconds: float
    best_seconds: float
    likely_seconds: float
    serial_seconds: float
    best_mfu: float
    likely_mfu: float
    serial_mfu: float
    limit: str


def bounds(
    rates: Rates,
    precision: str,
    *,
    work: Work,
    traffic: Traffic,
    model_flops: float,
    makespans: tuple[float, float] | None = None,
) -> Bounds:
    """Bounds from one device's work in a step.

    Args:
        rates: the device.
        precision: what matmuls compute in.
        work: of its kernels.
        traffic: what it sends.
        model_flops: of the model, this device's part.
        makespans: of a pipeline's simulated step, best and likely; all else is one rank's own.

    Example:
        >>> from fzero.preflight.rates import default_rates
        >>> from fzero.preflight.topology import parse
        >>> work = Work(989_400_000_000_000, 10**9, best_seconds=1.25, likely_seconds=1.5)
        >>> found = bounds(default_rates(parse("h200:8")), "bf16", work=work,
        ...                traffic=Traffic(0, 0, 0, 0, 0, 0, 0, 0), model_flops=742_050_000_000_000)
        >>> found.compute_seconds, found.best_mfu, found.likely_mfu, found.limit
        (1.0, 0.6, 0.5, 'compute')
    """
    peak = rates.flops_of(precision)
    alone = {
        "compute": work.flops / peak,
        "memory": work.bytes / rates.memory_bytes_per_s,
        "links": traffic.seconds,
    }
    best = work.best_seconds + traffic.exposed_best_seconds
    busy = work.likely_seconds + traffic.exposed_seconds
    likely = busy
    if makespans is not None:
        best, likely = max(best, makespans[0]), max(busy, makespans[1])
    serial = likely - traffic.exposed_seconds + traffic.seconds / rates.link_share
    limit = max(alone, key=lambda name: alone[name])

    def mfu(seconds: float) -> float:
        return model_flops / (seconds * peak) if seconds else 0.0

    return Bounds(
        compute_seconds=alone["compute"],
        memory_seconds=alone["memory"],
        link_seconds=alone["links"],
        bubble_seconds=likely - busy,
        best_seconds=best,
        likely_seconds=likely,
        serial_seconds=serial,
        best_mfu=mfu(best),
        likely_mfu=mfu(likely),
        serial_mfu=mfu(serial),
        limit="bubble" if likely - busy > alone[limit] else limit,
    )
