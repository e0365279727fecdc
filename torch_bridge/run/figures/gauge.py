"""What a run shows of its devices: model FLOP/s, share of the peak, bytes in use."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import fzero as fz
from fzero.preflight.calibrate import kind_of
from fzero.preflight.rates import default_rates
from fzero.preflight.shapes import model_flops
from fzero.preflight.tables import size
from fzero.preflight.topology import parse


@dataclass(frozen=True)
class Gauge:
    """What turns tokens per second into a share of the devices' peak.

    Args:
        flops_per_token: of the model's matmuls in a training step, nothing computed twice; `None`
            where it is not known.
        peak_flops_per_s: of all devices in the plan's precision; `None` where no data sheet says.
        state_bytes: of the state, on the device that has the most of it.
    """

    flops_per_token: float | None
    peak_flops_per_s: float | None
    state_bytes: int

    def flops_per_s(self, tokens_per_s: float | None) -> float | None:
        """Model FLOP/s at a rate."""
        if tokens_per_s is None or self.flops_per_token is None:
            return None
        return tokens_per_s * self.flops_per_token

    def mfu(self, tokens_per_s: float | None) -> float | None:
        """Model FLOP/s as a share of the peak."""
        flops = self.flops_per_s(tokens_per_s)
        if flops is None or self.peak_flops_per_s is None:
            return None
        return flops / self.peak_flops_per_s

    def figures(self, tokens_per_s: float | None) -> dict[str, float]:
        """What is known, by name."""
        held = bytes_in_use()
        found = {
            "tokens_per_s": tokens_per_s,
            "flops_per_s": self.flops_per_s(tokens_per_s),
            "mfu": self.mfu(tokens_per_s),
            "bytes_per_device": self.state_bytes if held is None else held,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def words(self, tokens_per_s: float | None) -> str:
        """Both, for a line: `MFU 41%  20.5 GiB/device`; of devices without a peak, FLOP/s."""
        flops, mfu = self.flops_per_s(tokens_per_s), self.mfu(tokens_per_s)
        rate = "MFU -" if flops is None else f"{flops / 1e9:,.1f} GFLOP/s"
        if mfu is not None:
            rate = f"MFU {mfu:.0%}"
        in_use = bytes_in_use()
        held = self.state_bytes if in_use is None else in_use
        return f"{rate}  {size(held)}/device{' of state' if in_use is None else ''}"


def gauge_of(
    model: fz.Model, plan: fz.Plan, batch: Any, tokens: int, num_devices: int, state: fz.TrainState
) -> Gauge:
    """The gauge of a run; the forward pass is traced once more, nothing is computed.

    Args:
        model: the model.
        plan: the plan.
        batch: a global batch, or its shapes.
        tokens: in it.
        num_devices: devices in use.
        state: the state.
    """
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)
    times = (plan.data or 1) * plan.replica * plan.microbatches
    flops = model_flops(model, plan, rows, times) / tokens
    state_bytes = fz.placement(state).bytes_per_device["total"]
    peak = None
    with contextlib.suppress(fz.PreflightError):  # a device without a data sheet
        kind = kind_of(jax.devices()[0])
        if kind != "cpu":
            rates = default_rates(parse(f"{kind}:{num_devices}"))
            peak = num_devices * rates.flops_of(plan.precision)
    return Gauge(flops, peak, state_bytes)


def bytes_in_use() -> int | None:
    """Bytes that arrays take on the fullest device of this process; CPUs do not say."""
    return _most("bytes_in_use")


def peak_bytes() -> int | None:
    """The most that they took so far."""
    return _most("peak_bytes_in_use")


def _most(name: str) -> int | None:
    stats: list[dict[str, Any]] = [d.memory_stats() or {} for d in jax.local_devices()]
    return max((own[name] for own in stats if name in own), default=None)
