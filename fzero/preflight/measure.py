"""The same step on devices that are there: what was predicted beside what is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fzero.model import Model
from fzero.plan import Plan
from fzero.preflight.result import Preflight
from fzero.preflight.tables import duration, size, table_of, text_of
from fzero.report.report import CLASSES, Report
from fzero.state.init import init
from fzero.step import train_step
from fzero.storage.tiers import DEVICE
from fzero.tree import PyTree


# The first steps compile, and on GPUs pick kernels and warm up the links.
_WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """A step as it ran, per device.

    Args:
        state_bytes: by state class, of the arrays on the fullest device.
        peak_bytes: the most that the device's allocator had in use; `None` where devices do not
            say, as CPUs.
        seconds: of a step, the median.
        steps: steps measured.
        loss: of the last one.
    """

    state_bytes: dict[str, int]
    peak_bytes: int | None
    seconds: float
    steps: int
    loss: float


def measure(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    *,
    devices: Sequence[Any] | None = None,
    steps: int = 5,
) -> Measured:
    """Runs some steps and measures them.

    Args:
        model: the model; its parameters are initialised.
        tx: the optimizer.
        plan: the plan.
        batch: a global batch; of shapes, one of zeros is made.
        devices: devices to run on; all by default.
        steps: steps to measure, after two that are not.

    Returns:
        What they took.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> batch = {"x": np.ones((2, 8), np.float32)}
        >>> measure(model, optax.sgd(0.1), fz.Plan(data=1), batch, steps=1).state_bytes["params"]
        64
    """
    made = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, batch
    )
    state = init(model, tx, plan, 0, devices=devices)
    fullest = Report.of_state(state).fullest(DEVICE)
    held = {name: fullest[name] for name in CLASSES}
    step = train_step(model, tx, plan, devices=devices)
    seconds: list[float] = []
    loss = 0.0
    for _ in range(_WARM_UP + steps):
        started = time.perf_counter()
        state, metrics = step(state, made)
        loss = float(jax.block_until_ready((state, metrics["loss"]))[1])
        seconds.append(time.perf_counter() - started)
    own = sorted(seconds[_WARM_UP:])
    used = list(devices) if devices is not None else jax.devices()
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in used]
    known = [peak for peak in peaks if peak is not None]
    return Measured(held, max(known, default=None), own[len(own) // 2], steps, loss)


def compared(found: Preflight, measured: Measured) -> str:
    """Both columns as a table."""
    table = table_of("predicted and measured, per device", "what", "predicted", "measured")
    for name, count in found.memory.state.items():
        if count or measured.state_bytes[name]:
            table.add_row(f"state: {name}", f"{count:,}", f"{measured.state_bytes[name]:,}")
    peak = "not told" if measured.peak_bytes is None else size(measured.peak_bytes)
    table.add_row("peak", size(found.memory.peak), peak)
    b = found.bounds
    span = f"{duration(b.best_seconds)} or more, likely {duration(b.likely_seconds)}"
    table.add_row("step", span, duration(measured.seconds))
    return text_of(table)
