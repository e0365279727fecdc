"""How long a step takes: at best, likely, and with nothing in parallel."""

from __future__ import annotations

from dataclasses import dataclass

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
        bubble_seconds: of a pipeline's rank, waiting for others.
        best_seconds: no step is faster: the longest of the first three.
        likely_seconds: kernels one after the other at the shares of the peaks that programs reach,
            and what collectives add to them.
        serial_seconds: as likely, with nothing beside a collective.
        best_mfu, likely_mfu, serial_mfu: of these three.
        limit: what takes longest: `compute`, `memory` or `links`; `bubble` where a pipeline waits
            for longer than that.
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
    flops: int,
    moved_bytes: int,
    model_flops: float,
    kernel_seconds: float,
    link_seconds: float,
    exposed_seconds: float,
    makespan_seconds: float | None = None,
) -> Bounds:
    """Bounds from one device's work in a step.

    Args:
        rates: the device.
        precision: what matmuls compute in.
        flops: of the compiled matmuls.
        moved_bytes: read and written by kernels.
        model_flops: of the model, this device's part.
        kernel_seconds: of kernels one after the other, likely.
        link_seconds: of collectives at the links' peak.
        exposed_seconds: of them, likely not hidden.
        makespan_seconds: of a pipeline's simulated step; the rest is one rank's own.

    Example:
        >>> from fzero.preflight.topology import parse
        >>> from fzero.preflight.rates import default_rates
        >>> found = bounds(default_rates(parse("h200:8")), "bf16", flops=989_400_000_000_000,
        ...                moved_bytes=10**9, model_flops=742_050_000_000_000, kernel_seconds=1.5,
        ...                link_seconds=0.4, exposed_seconds=0.0)
        >>> found.best_seconds, found.best_mfu, found.likely_mfu, found.limit
        (1.0, 0.75, 0.5, 'compute')
    """
    peak = rates.flops_of(precision)
    parts = {
        "compute": flops / peak,
        "memory": moved_bytes / rates.memory_bytes_per_s,
        "links": link_seconds,
    }
    busy = kernel_seconds + exposed_seconds
    likely = busy if makespan_seconds is None else max(busy, makespan_seconds)
    best = max(parts.values())
    serial = likely - exposed_seconds + link_seconds / rates.link_share
    limit = max(parts, key=lambda name: parts[name])

    def mfu(seconds: float) -> float:
        return model_flops / (seconds * peak) if seconds else 0.0

    return Bounds(
        compute_seconds=parts["compute"],
        memory_seconds=parts["memory"],
        link_seconds=parts["links"],
        bubble_seconds=likely - busy,
        best_seconds=best,
        likely_seconds=likely,
        serial_seconds=max(serial, likely),
        best_mfu=mfu(best),
        likely_mfu=mfu(likely),
        serial_mfu=mfu(max(serial, likely)),
        limit="bubble" if likely - busy > parts[limit] else limit,
    )
