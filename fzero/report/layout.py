"""The layout of a state as a public value: what `init` would make, and where batches go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.batch import batch_sharding
from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import blueprint
from fzero.state.train_state import TrainState
from fzero.summary import Boxed


@dataclass(frozen=True)
class Layout(Boxed):
    """Where everything lies under a plan; nothing is allocated.

    Args:
        mesh: the devices: axes `replica` and `data`, with `pipe` before them in a pipeline.
        state: a `jax.ShapeDtypeStruct` with sharding for every leaf of a state, as if all were on
            the device: for `jax.jit(out_shardings=)`, checkpoint libraries, `train_step.lower`.
        batch_sharding: of a batch's row leaves (dim 1 is divided over `context` as well). A global
            `jax.Array` in it, or in an equivalent one, is taken as it is: make one with
            `jax.make_array_from_process_local_data`.
        shared_sharding: of what is wrapped in `fz.Shared`.
        batch_multiple: what the number of rows of a training batch must be a multiple of: devices
            times microbatches.
    """

    mesh: Mesh
    state: TrainState
    batch_sharding: NamedSharding
    shared_sharding: NamedSharding
    batch_multiple: int

    @property
    def shardings(self) -> Any:
        """The state's shardings alone, in its tree."""
        return jax.tree.map(lambda to: to.sharding, self.state)


def layout(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
) -> Layout:
    """The layout of a model's state and batches under a plan.

    Args:
        model: the model; nothing of it is computed.
        tx: the optimizer; `None` for a state that is only evaluated.
        plan: the plan.
        devices: devices to use; all by default.

    Returns:
        The layout.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: initial values share memory, or a parameter is not floating point.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fzero as fz
        >>> def loss(p, b, batch, rng, train):
        ...     return jnp.mean(batch["x"] @ p["w"]), b, {}
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}), loss)
        >>> plan = fz.Plan(data=1)
        >>> found = fz.layout(model, None, plan)
        >>> found.state.params["w"].shape, found.batch_multiple
        ((8, 2), 1)
        >>> x = jax.make_array_from_process_local_data(
        ...     found.batch_sharding, np.ones((4, 8), np.float32))
        >>> float(fz.eval_step(model, plan)(fz.init(model, None, plan), {"x": x})["loss"])
        8.0
    """
    blue = blueprint(model, tx, plan, devices)
    return Layout(
        mesh=blue.mesh,
        state=TrainState(**blue.shapes(), **blue.statics),
        batch_sharding=batch_sharding(blue.mesh),
        shared_sharding=NamedSharding(blue.mesh, PartitionSpec()),
        batch_multiple=blue.group.row_shares * plan.microbatches,
    )
