"""Where every leaf of a state lives under a plan: computed from shapes, nothing allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.axes import DATA, PIPE, shared_over, zero_sizes
from fzero.compat import abstract_mesh, ranks_mesh, why_no_empty
from fzero.errors import PlanError, StateError
from fzero.links import Stack
from fzero.loss_scaling import initial_loss_scale
from fzero.model import Model
from fzero.optimizer.adds_up import adds_up
from fzero.optimizer.layers import Rows, Scope
from fzero.optimizer.optimizer import Optimizer
from fzero.optimizer.stacks import require_layers_apart
from fzero.plan import Plan
from fzero.processes import require_transfers
from fzero.sharding.buckets import OWNED, Buckets, plan_buckets
from fzero.sharding.buffers import check_buffers
from fzero.sharding.device_memory import device_memory
from fzero.sharding.group import Group, secondary_size
from fzero.sharding.homes import StackRows, Stages, cut_into_stages
from fzero.sharding.initial import initial_shapes as initial_shapes
from fzero.sharding.initial import memo, tracing_context
from fzero.sharding.relayout import Kept
from fzero.sharding.split import (
    Home,
    OwnShapes,
    flat_splits,
    frozen_names,
    kept_shape,
    map_splits,
    split_params,
    stored_shapes,
    trained,
    update_dtype,
)
from fzero.sharding.split_state import split_averages, split_opt_state
from fzero.tree import PyTree, is_floating, key_name, named_leaves, shape_at


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A plan carried out for one model on one mesh.

    Args:
        model: the model.
        tx: the optimizer, or `None` for a state that is never trained.
        plan: the plan.
        mesh: the devices.
        params: a `Split` for every parameter.
        buffers: shapes of the buffers as kept (whole on every device, or every device of the ranks
            that use them).
        stages: how the model is cut, in a pipeline.
        memory: bytes that jax may take of a device; `None` where nobody says.
    """

    model: Model
    tx: optax.GradientTransformation | None
    plan: Plan
    mesh: Mesh
    params: PyTree
    buffers: PyTree
    stages: Stages | None = None
    memory: int | None = None

    def mesh_of(self, home: Home | None) -> Mesh:
        """The devices of some ranks of a pipeline; those of one rank have axes as without one."""
        if home is None or self.stages is None or len(home.ranks) == self.plan.pipe:
            return self.mesh
        if home.ranks not in self._meshes:
            self._meshes[home.ranks] = ranks_mesh(self.mesh, home.ranks)
        return self._meshes[home.ranks]

    @cached_property
    def programs(self) -> dict[Any, Any]:
        """Compiled functions of states of this layout, by what they do."""
        return {}

    @cached_property
    def _meshes(self) -> dict[tuple[int, ...], Mesh]:
        return {}

    def home_of(self, link: str) -> Home | None:
        """The ranks of a pipeline that hold a link's leaves."""
        return None if self.stages is None else self.stages.homes[link]

    @property
    def rows(self) -> StackRows:
        """What `TrainState.rows` is of this layout."""
        return () if self.stages is None else self.stages.rows

    @cached_property
    def padded(self) -> OwnShapes:
        """What `TrainState.padded` is of this layout."""
        splits = flat_splits(self.params) if self.plan.shards("params") else []
        return tuple((split.path, Kept.of(split).logical) for split in splits if split.pad)

    @property
    def statics(self) -> dict[str, Any]:
        """What a state of this layout says in no array."""
        return {"rows": self.rows, "padded": self.padded}

    def rank_mesh(self, rank: int) -> Mesh:
        """The devices of one rank of a pipeline: all axes of the mesh but `pipe`."""
        return self.mesh_of(Home((rank,)))

    def sharding(self, home: Home | None, spec: PartitionSpec) -> NamedSharding:
        """The sharding of a leaf at a home."""
        if home is not None and home.rows:
            spec = PartitionSpec(PIPE, *spec[1:])
        return NamedSharding(self.mesh_of(home), spec)

    @property
    def zero_sizes(self) -> dict[str, int]:
        """The axes that ZeRO shares leaves out over, and how many devices are along each."""
        return zero_sizes(dict(self.mesh.shape))

    @cached_property
    def group(self) -> Group:
        """The devices that collectives run over."""
        return Group.of(self.plan, self.mesh)

    @property
    def prefetch(self) -> bool:
        """Whether stacks gather one layer ahead: as the plan says, or where it can hide."""
        if self.group.shards * self.group.replica == 1:
            return False
        wanted = self.plan.prefetch
        return self.mesh.devices.flat[0].platform != "cpu" if wanted is None else wanted

    @cached_property
    def opt_state(self) -> PyTree:
        """A `Split` for every leaf of the optimizer state; the empty tuple without an optimizer."""
        if self.tx is None:
            return ()
        return split_opt_state(self.optimizer.init, self.params, self.plan, self.zero_sizes)

    @cached_property
    def ema(self) -> PyTree:
        """A `Split` for every average of the plan's; `None` where it has none."""
        return None if self.plan.ema is None else split_averages(self.params)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer, told which leaves are stacks."""
        assert self.tx is not None

        def rows(stack: Stack) -> Rows:
            home = self.home_of(stack.name)
            if home is None or not home.rows:
                return Rows.in_order(stack.num)
            return Rows(len(home.rows), tuple(home.order.tolist()))

        stacks = {link.name: rows(link) for link in self.model.layers if isinstance(link, Stack)}
        return Optimizer(self.tx, Scope(stacks, self._spread))

    def require_optimizer(self, operation: str) -> None:
        """Raises `PlanError` if a step cannot use the optimizer, or it would mix layers."""
        if self.tx is None:
            return
        shapes = self._updated_shapes()
        self.optimizer.traced(shapes)
        require_layers_apart(self.tx, shapes, self.optimizer.scope.stacks, operation)

    def _spread(self, stack: str, value: jax.Array) -> jax.Array:
        """Divides a stack's layers over the devices that share leaves out, unevenly if need be."""
        if self.group.shards == 1:
            return value
        home = self.home_of(stack)
        cut = (PIPE,) if home is not None and home.rows else ()
        spec = PartitionSpec((*cut, *shared_over(self.zero_sizes)))
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh_of(home), spec))

    @cached_property
    def buckets(self) -> Buckets:
        """What the plan parks between steps, and how it visits the device."""
        owned = {name: getattr(self, name) for name in OWNED}
        return plan_buckets(self.plan, self.params, owned, self.shapes())

    @cached_property
    def adds_up(self) -> bool:
        """Whether the optimizer adds up elements that several devices of the data axis hold.

        (Plans with further axes add up parts of leaves in every stage: they are left alone.)
        """
        if self.tx is None or dict(self.mesh.shape)[DATA] == 1 or self.plan.further:
            return False
        return adds_up(self.optimizer, self._updated_shapes())

    def _updated_shapes(self) -> PyTree:
        """What an optimizer sees of the parameters."""
        return map_splits(
            lambda split: jax.ShapeDtypeStruct(split.shape, update_dtype(split.dtype)),
            trained(self.params),
        )

    @property
    def updates_shards(self) -> bool:
        """Whether a device updates its shard of each leaf, and not all of it.

        Stages that keep optimizer state in shards do. Stage 0 has everything whole, and may as well
        update it whole, which sends nothing; but an optimizer that adds up elements would add them
        in another order than other stages do. So there it updates shards, as they do, and gathers.
        """
        return self.plan.shards("opt_state") or self.adds_up

    @property
    def reads(self) -> tuple[str, ...]:
        """The fields of a state that passes over the model read parameters from."""
        if not self.plan.keeps_compute_copy:
            return ("params",)
        frozen = any(split.frozen for split in flat_splits(self.params))
        return ("compute", "params") if frozen else ("compute",)

    def splits(self, field: str) -> PyTree:
        """A `Split` for every leaf of a field of the state that has them (all but buffers)."""
        return trained(self.params) if field in ("compute", "grads") else getattr(self, field)

    def kept(self, field: str) -> PyTree:
        """A `Kept` for every leaf of a field of the state, as `relayout` takes it."""
        if field == "buffers":
            return self._map_buffers(lambda home, leaf: Kept.at(home, leaf.shape))
        sharded = self.plan.shards(field)
        return map_splits(lambda split: Kept.of(split, sharded), self.splits(field))

    def parks(self, field: str) -> bool:
        """Whether the plan parks leaves of a field of the state."""
        return any(name == field for name, _ in self.buckets.parked)

    def replicated(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """The leaf's shape, whole on every device."""
        return shape_at(leaf, NamedSharding(self.mesh, PartitionSpec()))

    def shapes(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of every field of the state, as if all on the device."""
        return dict(self._shapes)

    @cached_property
    def _shapes(self) -> dict[str, Any]:
        plan, sharding = self.plan, self.sharding
        compute = None
        if plan.keeps_compute_copy:
            compute = stored_shapes(
                trained(self.params),
                sharding,
                plan.shards("compute"),
                lambda split: split.compute,
            )
        scale = jax.eval_shape(lambda: initial_loss_scale(plan))
        return {
            "step": self.replicated(jax.ShapeDtypeStruct((), jnp.int32)),
            "params": stored_shapes(self.params, sharding, plan.shards("params")),
            "compute": compute,
            **{
                name: stored_shapes(getattr(self, name), sharding, plan.shards(name))
                for name in OWNED
            },
            "buffers": self._map_buffers(
                lambda home, leaf: shape_at(leaf, sharding(home, PartitionSpec()))
            ),
            "rng": self.replicated(jax.eval_shape(lambda: jax.random.key(0))),
            "loss_scale": jax.tree.map(self.replicated, scale),
        }

    def _map_buffers(self, function: Callable[[Home | None, Any], Any]) -> PyTree:
        """`function(home, shape)` for every buffer."""

        def at(path: tuple[Any, ...], leaf: Any) -> Any:
            return function(self.home_of(key_name(path[0]) if path else ""), leaf)

        return jax.tree_util.tree_map_with_path(at, self.buffers)

    def labels(self) -> dict[str, PyTree]:
        """For every leaf of a state, what it is updated together with."""
        known = self.buckets.labels

        def at(home: Home | None, owner: str | None = None) -> str:
            return (home.label if home else "") + known.get(owner or "", "")

        params = map_splits(lambda split: at(split.home, split.path), self.params)
        return {
            "params": params,
            "compute": trained(self.params, params) if self.plan.keeps_compute_copy else None,
            **{
                name: map_splits(lambda split: at(split.home, split.owner), getattr(self, name))
                for name in OWNED
            },
            "buffers": self._map_buffers(lambda home, _: at(home)),
        }

    def constrain(self, split: Any, leaf: jax.Array) -> jax.Array:
        """Asks the compiler to keep a logical leaf split (unevenly where it would be padded)."""
        to = self.sharding(split.home, split.spec(True))
        try:
            return jax.lax.with_sharding_constraint(leaf, to)
        except ValueError:
            # Differentiated outside of any program a leaf has to divide evenly, and lies anywhere.
            if not split.pad:
                raise
            return leaf


def blueprint(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    devices: Sequence[Any] | None = None,
) -> Blueprint:
    """The layout of a model's state under a plan, worked out once for all that ask.

    It holds shapes instead of the model's initial arrays.

    Raises:
        PlanError: the plan does not fit the devices, or an argument is something else.
        StateError: initial values share memory, a parameter is not floating point, or an array has
            no elements where this jaxlib would end the process.
    """
    require_in_order(model, plan)
    mesh = plan.mesh(devices)
    secondary_size(plan, dict(mesh.shape)[DATA], list(mesh.devices.flat))
    if plan.pipe > 1:
        require_transfers(list(mesh.devices.flat))  # asked anew: it depends on jax's settings
    known = memo(model)
    key: tuple[Any, ...] = "blueprint", tx, plan, tuple(mesh.devices.flat), tracing_context()
    try:
        if key in known:
            found: Blueprint = known[key]
            return found
    except TypeError:  # an optimizer that is no tuple of functions need not be hashable
        known, key = {}, ()
    shapes = initial_shapes(model)
    if why := why_no_empty(mesh):
        _require_elements(*shapes, why)
    held = model if callable(model.init) else model.with_init(shapes)
    blue = _blueprint(held, tx, plan, mesh, *shapes)
    blue = replace(blue, memory=device_memory(mesh.devices.flat))
    known[key] = blue
    return blue


def _require_elements(params: PyTree, buffers: PyTree, why: str) -> None:
    for name, tree in (("params", params), ("buffers", buffers)):
        for path, leaf in named_leaves(tree):
            if not leaf.size:
                raise StateError(f"init: {name}/{path} has shape {tuple(leaf.shape)}, {why}")


def require_in_order(
    model: Any, plan: Any, order: str = "the model, its optimizer and the plan"
) -> None:
    """Refuses arguments of other kinds, as in another order.

    Raises:
        PlanError: one is something else.
    """
    for value, kind in ((model, Model), (plan, Plan)):
        if not isinstance(value, kind):
            raise PlanError(
                f"expected an fz.{kind.__name__}, got a {type(value).__name__}; arguments are"
                f" {order}, in this order"
            )


def planned(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    sizes: Mapping[str, int],
    rows: Mapping[str, Sequence[int]] | None = None,
) -> Blueprint:
    """The layout of a model's state on devices that need not exist: what follows from shapes.

    Args and Raises as for `blueprint`, but for `sizes`: of the mesh (`plan.sizes`), and `rows`: of
    stacks whose layers lie in other rows than the plan's (`Stages.with_rows`).
    """
    mesh = abstract_mesh(dict(sizes))
    return _blueprint(model, tx, plan, mesh, *initial_shapes(model), rows)


def _blueprint(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    mesh: Mesh,
    params: PyTree,
    buffers: PyTree,
    rows: Mapping[str, Sequence[int]] | None = None,
) -> Blueprint:
    frozen = frozen_names(model, [path for path, _ in named_leaves(params)])
    for path, leaf in named_leaves(params):
        if path not in frozen:
            _require_trainable(path, leaf, tx)
    check_buffers(model, buffers)
    sizes = zero_sizes(dict(mesh.shape))
    if plan.pipe == 1:
        splits = split_params(model, params, plan, sizes)
        return Blueprint(model, tx, plan, mesh, splits, buffers)
    stages = cut_into_stages(model, plan)
    stages = stages if rows is None else stages.with_rows(rows)
    splits = split_params(model, params, plan, sizes, stages.homes)
    kept = {
        name: jax.tree.map(lambda x, home=stages.homes[name]: kept_shape(x, home), tree)
        for name, tree in buffers.items()
    }
    return Blueprint(model, tx, plan, mesh, splits, kept, stages)


def _require_trainable(path: str, leaf: Any, tx: optax.GradientTransformation | None) -> None:
    """Raises `StateError` for a parameter without gradients, or that no update can be added to."""
    if not is_floating(leaf):
        raise StateError(
            f"init: params/{path} has dtype {leaf.dtype}: parameters are floating-point arrays,"
            " because gradients must exist for them; freeze it (Model.frozen), or move it into"
            " buffers"
        )
    if tx is not None and leaf.dtype.itemsize < 2:
        raise StateError(
            f"init: params/{path} has dtype {leaf.dtype}, to which no update can be added; freeze"
            " it (Model.frozen), or give float32 (Plan(precision='fp8') has products in 8 bits)"
        )
