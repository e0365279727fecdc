"""`preflight`: what a training step will need. What works it out is imported when it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import optax

from fzero.model import Model
from fzero.plan import Plan
from fzero.tree import PyTree


if TYPE_CHECKING:
    from fzero.preflight.rates import Rates
    from fzero.preflight.result import Preflight
    from fzero.preflight.topology import Topology


def preflight(
    model: Model,
    tx: optax.GradientTransformation,
    plan: Plan,
    batch: PyTree,
    topology: str | Topology = "h200:8",
    *,
    rates: Rates | None = None,
) -> Preflight:
    """What a training step will need and how long it may take, before anyone pays for it.

    The step is compiled for the topology as it would be there, from shapes alone: no parameter is
    allocated and no GPU is needed, only jax's CUDA plugin (the extra `preflight`).

    Args:
        model: the model; nothing of it is computed.
        tx: the optimizer.
        plan: the plan. With `data=None` the topology's devices are all used.
        batch: a global batch, or its shapes (`jax.ShapeDtypeStruct`s).
        topology: `<gpu>:<gpus per host>` or `<gpu>:<hosts>x<gpus per host>` with a gpu among
            `a100-40`, `a100-80`, `h100`, `h200` and `b200`; or `cpu:<devices>`.
        rates: what seconds are computed with; the device's own by default.

    Returns:
        The prediction, per device and step; `str()` of it is tables, `.to_json()` a dict.

    Raises:
        PreflightError: an unknown topology, no compiler for it, or rates of another kind of device.
        PlanError: the plan does not fit the devices.
        BatchError: the batch does not fit the plan.

    Example:
        >>> import jax, jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((256, 8))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> batch = {"x": jax.ShapeDtypeStruct((16, 256), jnp.float32)}
        >>> found = fz.preflight(model, optax.adam(0.1), fz.Plan(data=1), batch, "cpu:1")
        >>> found.fits, found.memory.state["params"], found.to_json()["communicated_bytes"]
        (True, 8192, 0)
    """
    from fzero.preflight.prediction import predicted

    return predicted(model, tx, plan, batch, topology, rates)
