"""Where every leaf of a state lives under a plan: computed from shapes, nothing allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.errors import StateError
from fzero.initial import initial_shapes as initial_shapes
from fzero.model import Model
from fzero.plan import DATA, REPLICA, Plan
from fzero.precision import compute_dtype, initial_loss_scale
from fzero.tree import PyTree, is_floating, named_leaves
from fzero.zero.collectives import Group
from fzero.zero.partition import map_splits, split_opt_state, split_params, stored_shapes


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A plan carried out for one model on one mesh.

    Args:
        model: the model.
        tx: the optimizer, or `None` for a state that is never trained.
        plan: the plan.
        mesh: the devices.
        params: a `Split` for every parameter.
        buffers: shapes of the buffers (always whole on every device).
    """

    model: Model
    tx: optax.GradientTransformation | None
    plan: Plan
    mesh: Mesh
    params: PyTree
    buffers: PyTree

    @cached_property
    def group(self) -> Group:
        """The devices that collectives run over."""
        sizes = dict(self.mesh.shape)
        devices = self.mesh.devices.flat
        several = len({device.process_index for device in devices}) > 1
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        return Group(sizes[DATA], sizes[REPLICA], ordered=several and cpu, bits=cpu)

    @property
    def prefetch(self) -> bool:
        """Whether stacks gather one layer ahead: as the plan says, or where it can hide."""
        if self.group.data * self.group.replica == 1:
            return False
        wanted = self.plan.prefetch
        return self.mesh.devices.flat[0].platform != "cpu" if wanted is None else wanted

    @cached_property
    def opt_state(self) -> PyTree:
        """A `Split` for every leaf of the optimizer state; the empty tuple without an optimizer."""
        if self.tx is None:
            return ()
        logical = map_splits(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), self.params)
        shapes = jax.eval_shape(self.tx.init, logical)
        return split_opt_state(shapes, self.params, self.plan, self.group.data)

    def replicated(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The leaf's shape, whole on every device."""
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, PartitionSpec())
        )

    def shapes(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of every field of the state."""
        plan, mesh = self.plan, self.mesh
        compute = None
        if plan.keeps_compute_copy:
            compute = stored_shapes(
                self.params, mesh, plan.shards("compute"), lambda dtype: compute_dtype(plan, dtype)
            )
        scale = jax.eval_shape(lambda: initial_loss_scale(plan))
        return {
            "step": self.replicated(jax.ShapeDtypeStruct((), jnp.int32)),
            "params": stored_shapes(self.params, mesh, plan.shards("params")),
            "compute": compute,
            "opt_state": stored_shapes(self.opt_state, mesh, plan.shards("opt_state")),
            "buffers": jax.tree.map(self.replicated, self.buffers),
            "rng": self.replicated(jax.eval_shape(lambda: jax.random.key(0))),
            "loss_scale": jax.tree.map(self.replicated, scale),
        }

    def constrain(self, split: Any, leaf: jax.Array, sharded: bool = True) -> jax.Array:
        """Asks the compiler to keep a logical leaf split (unevenly where it would be padded)."""
        spec = split.spec if sharded else PartitionSpec()
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))


def blueprint(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    devices: Sequence[Any] | None = None,
) -> Blueprint:
    """Works out the layout of a model's state under a plan.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: initial values share memory, or a parameter is not floating point.
    """
    mesh = plan.mesh(devices)
    params, buffers = initial_shapes(model)
    for path, leaf in named_leaves(params):
        if not is_floating(leaf):
            raise StateError(
                f"init: params/{path} has dtype {leaf.dtype}: parameters are floating-point arrays,"
                " because gradients must exist for them; move it into buffers"
            )
    unknown = sorted(model.frozen - {path for path, _ in named_leaves(params)})
    if unknown:
        raise StateError(
            f"init: frozen names {unknown}, which are no parameters; there are"
            f" {[path for path, _ in named_leaves(params)][:20]}"
        )
    layout = split_params(model, params, plan, dict(mesh.shape)[DATA])
    return Blueprint(model, tx, plan, mesh, layout, buffers)
