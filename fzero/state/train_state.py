"""The state: one immutable pytree for training, evaluation, offload, checkpoints and export."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from fzero.axes import PIPE
from fzero.compat import is_key
from fzero.errors import PlanError, StateConsumedError, StateError
from fzero.hosts.doing import doing
from fzero.model import Model
from fzero.offload.park import is_parked_so, park
from fzero.offload.stream import StreamedFunction
from fzero.plan import Plan
from fzero.precision import LossScale, cast_param, initial_loss_scale
from fzero.programs.places import placed_with_key
from fzero.sharding.blueprint import Blueprint, blueprint, initial_shapes
from fzero.sharding.homes import cut_into_stages
from fzero.sharding.initial import initializer
from fzero.sharding.relayout import Kept, copy_leaf, relayout
from fzero.sharding.split import Split, map_splits, trained, update_dtype
from fzero.state import compute_copy
from fzero.state.consumed import given_to
from fzero.state.fingerprint import compare
from fzero.storage.tiers import on_device, require_on_device, settled
from fzero.summary import Printed, summary
from fzero.tree import PyTree, aliased_leaves, key_name, map_named, named_leaves, path_name


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Pending(Printed):
    """Gradients accumulated by `accumulate_step` and not yet applied.

    Args:
        sums: float32 gradients of the summed loss total, one per parameter, sharded.
        total: float32 sum of the losses so far.
        count: float32 sum of their counts.
        calls: int32, batches accumulated.
    """

    sums: PyTree
    total: jax.Array
    count: jax.Array
    calls: jax.Array

    def _summary(self) -> str:
        return summary("Pending", vars(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class TrainState(Printed):
    """Everything that training changes, as one value.

    Args:
        step: int32 scalar, optimizer steps taken.
        params: the parameters; the fp32 master under mixed precision.
        compute: a cast copy of `params` that the forward pass reads, or `None` when it reads
            `params` (fp32) or casts them as it gathers (stage 3).
        opt_state: the optax state.
        buffers: whatever else the model changes (running statistics); replicated.
        rng: key from which every layer's key is folded; never changes.
        loss_scale: fp16's loss scale and the count of skipped steps, or `None`.
        grads: an accumulation in progress, or `None`.

    A leaf of `params` or `opt_state` that no dim divides is stored with zeros at its end;
    `fz.describe` names such leaves, `fz.logical` gives their own shapes back.
    """

    step: jax.Array
    params: PyTree
    compute: PyTree
    opt_state: PyTree
    buffers: PyTree
    rng: jax.Array
    loss_scale: LossScale | None
    grads: Pending | None = None

    def _summary(self) -> str:
        return summary("TrainState", vars(self))

    def replace(self, **changes: Any) -> TrainState:
        """The same state with some fields changed.

        New `params` are cast into a new `compute` where the state has one, unless it is given too.
        """
        new = dataclasses.replace(self, **changes)
        if "params" not in changes or "compute" in changes or self.compute is None:
            return new
        return dataclasses.replace(new, compute=compute_copy.refreshed(new.params, new.compute))


def init(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    rng: int | jax.Array = 0,
    *,
    devices: Sequence[Any] | None = None,
) -> TrainState:
    """A new state, every array born in its sharding.

    Args:
        model: what to train.
        tx: any optax transformation; `None` for a state that is only evaluated.
        plan: how to lay it out.
        rng: seed or `jax.random.key`.
        devices: devices to use; all by default.

    Returns:
        The state. Shapes and shardings are those of `abstract_state`.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: two initial leaves share memory, or a parameter is not floating point.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> state = fz.init(model, optax.adam(1e-3), fz.Plan(zero=1, data=1), rng=0)
        >>> int(state.step), state.params["w"].shape
        (0, (8, 2))
    """
    blue = blueprint(model, tx, plan, devices)
    blue.require_optimizer("init")
    key = key_of(rng)
    compare("init", blue, model.init, seed=key)
    with doing("init"):
        if not callable(model.init):
            return state_of(blue, *_copied(blue, *model.init), key)
        fields = compiled_fields(blue, "born", _born(blue), key)(key)
        return _parked(blue, TrainState(**{"opt_state": (), **fields}))


def key_of(rng: int | jax.Array) -> jax.Array:
    """The random key that a user gave, or of the seed.

    Raises:
        StateError: it is neither.
    """
    if not isinstance(rng, jax.Array | np.ndarray):
        return jax.random.key(rng)
    if is_key(rng) and not rng.shape:
        return jnp.asarray(rng)
    if not rng.shape and jnp.issubdtype(rng.dtype, jnp.integer):
        return jax.random.key(rng)
    raise StateError(
        f"init: rng: expected a seed or one key of jax.random.key, got {rng.dtype}"
        f"{list(rng.shape)}; make a key of jax.random.PRNGKey with jax.random.wrap_key_data"
    )


def state_of(blue: Blueprint, params: PyTree, buffers: PyTree, key: jax.Array) -> TrainState:
    """A new state of parameters and buffers that lie on the device as the plan keeps them."""
    derived = partial(_derived_from_kept, blue)
    fields = compiled_fields(blue, "derived", derived, params, key)(params, key)
    fields |= {"params": params, "buffers": buffers}
    return _parked(blue, TrainState(**{"opt_state": (), **fields}))


def _parked(blue: Blueprint, state: TrainState) -> TrainState:
    """A new state with leaves where the plan keeps them; a parked `opt_state` was never made."""
    if blue.parks("opt_state"):
        state = state.replace(opt_state=parked_opt_state(blue, state.params))
    if blue.chunks.parked:
        params = parked_field(blue, "params", state.params)
        state = dataclasses.replace(state, params=params)
    compute_copy.pair(state.params, state.compute)
    return state


def compiled_fields(
    blue: Blueprint, name: str, function: Callable[..., Any], *args: Any
) -> Callable[..., Any]:
    """A function of the key and placed leaves that gives fields of the state, compiled once."""
    shapes = blue.shapes()
    key = name, *(jax.random.key_impl(x) for x in jax.tree.leaves(args) if is_key(x))

    def shardings(out: dict[str, Any]) -> dict[str, Any]:
        return {n: jax.tree.map(lambda to: to.sharding, shapes[n]) for n in out}

    if key not in blue.programs:
        if blue.one_mesh:
            out = shardings(jax.eval_shape(function, *args))
            blue.programs[key] = jax.jit(function, out_shardings=out)
        else:
            blue.programs[key] = placed_with_key(function, args, shardings, blue.mesh)
    found: Callable[..., Any] = blue.programs[key]
    return found


def _copied(blue: Blueprint, params: PyTree, buffers: PyTree) -> tuple[PyTree, PyTree]:
    shapes = blue.shapes()
    kept = map_splits(
        lambda split, leaf, to: copy_leaf(leaf, to, split.home), blue.params, params,
        shapes["params"],
    )  # fmt: skip
    if blue.stages is None:
        return kept, jax.tree.map(lambda x, to: copy_leaf(x, to), buffers, shapes["buffers"])
    homes = blue.stages.homes
    return kept, {
        name: jax.tree.map(
            lambda x, to, home=homes[name]: copy_leaf(x, to, home), tree, shapes["buffers"][name]
        )
        for name, tree in buffers.items()
    }


def lower_init(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
) -> Any:
    """The program that `init` runs for a model whose `init` is a function, lowered.

    For reading its memory before it runs. Args and Raises as for `init`.
    """
    blue = blueprint(model, tx, plan, devices)
    if not blue.one_mesh:
        raise PlanError("lower_init: a pipeline's state is made by several programs; use pipe=1")
    key = jax.random.key(0)
    return compiled_fields(blue, "born", _born(blue), key).lower(key)  # type: ignore[attr-defined]


def _born(blue: Blueprint) -> Callable[[jax.Array], dict[str, Any]]:
    make = initializer(blue.model)

    def born(key: jax.Array) -> dict[str, Any]:
        params, buffers = make(key)
        params, buffers = _arranged(blue, params, buffers)
        kept = {"params": store(blue, "params", params), "buffers": buffers}
        return kept | _derived(blue, params, key)

    return born


def _arranged(blue: Blueprint, params: PyTree, buffers: PyTree) -> tuple[PyTree, PyTree]:
    """A model's leaves with the layers of cut stacks in the rows where they are kept."""
    if blue.stages is None:
        return params, buffers
    homes = blue.stages.homes
    return tuple(
        {name: jax.tree.map(homes[name].arrange, tree) for name, tree in part.items()}
        for part in (params, buffers)
    )  # type: ignore[return-value]


def abstract_state(
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    devices: Sequence[Any] | None = None,
) -> TrainState:
    """The state's shapes, dtypes and shardings, without allocating anything.

    Args and Raises as for `init`.

    Returns:
        A `TrainState` of `jax.ShapeDtypeStruct`s, fit for `train_step(...).lower`.
    """
    return TrainState(**blueprint(model, tx, plan, devices).shapes())


def compute_of(blue: Blueprint, params: PyTree) -> PyTree:
    """The compute copy of kept parameters, in any tier, where the plan has one."""
    if not blue.plan.keeps_compute_copy:
        return None
    return compute_copy.recast(params, blue.shapes()["compute"])


def _cast(blue: Blueprint, params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: cast_param(blue.plan, leaf), trained(blue.params, params))


def _derived(blue: Blueprint, params: PyTree, key: jax.Array) -> dict[str, Any]:
    """All fields that follow from logical parameters and the key."""
    fields: dict[str, Any] = {}
    if not blue.parks("opt_state"):
        opt_state = () if blue.tx is None else new_opt_state(blue, params)
        fields["opt_state"] = store(blue, "opt_state", opt_state)
    return fields | {
        "step": jnp.zeros((), jnp.int32),
        "compute": _cast(blue, params) if blue.plan.keeps_compute_copy else None,
        "rng": key,
        "loss_scale": initial_loss_scale(blue.plan),
    }


def _derived_from_kept(blue: Blueprint, kept: PyTree, key: jax.Array) -> dict[str, Any]:
    return _derived(blue, logical_view(blue, "params", kept), key)


def folder_of(blue: Blueprint) -> str:
    """Where a plan's parked leaves go on disk."""
    return blue.plan.disk_path or tempfile.gettempdir()


def parked_field(blue: Blueprint, name: str, tree: PyTree) -> PyTree:
    """A field of the state with leaves where the plan keeps them; those on the device are given."""
    return map_named(lambda path, leaf: parked_leaf(blue, name, path, leaf), tree)


def parked_leaf(blue: Blueprint, name: str, path: str, leaf: Any) -> Any:
    """A leaf of a field where the plan keeps it; one on the device is given."""
    parking = blue.chunks.parked.get((name, path))
    if parking is None or is_parked_so(leaf, parking):
        return leaf
    return park(leaf, parking, folder_of(blue))


def parked_opt_state(blue: Blueprint, params: PyTree) -> PyTree:
    """A new optimizer state, made chunk by chunk."""
    assert blue.tx is not None
    groups = blue.groups()
    shapes = blue.shapes()

    def make(params: PyTree) -> PyTree:
        return store(blue, "opt_state", new_opt_state(blue, logical_view(blue, "params", params)))

    def parked(out: PyTree) -> list[Any]:
        return [blue.chunks.parked.get(("opt_state", path)) for path, _ in named_leaves(out)]

    none = [None] * len(jax.tree.leaves(params))
    stream = StreamedFunction(
        make, (shapes["params"],),
        lambda _: jax.tree.map(lambda to: to.sharding, shapes["opt_state"]), blue.mesh,
        groups=(groups["params"],), cuts=none, parked=none, out_parked=parked,
        out_groups=lambda _: jax.tree.leaves(groups["opt_state"]), what="init",
        path=blue.plan.disk_path,
    )  # fmt: skip
    return stream(params)


def new_opt_state(blue: Blueprint, params: PyTree) -> PyTree:
    """The optimizer's state for logical parameters; gradients come in `update_dtype`."""
    own = trained(blue.params, params)
    return blue.optimizer.init(jax.tree.map(lambda p: p.astype(update_dtype(p.dtype)), own))


def store(blue: Blueprint, name: str, logical: PyTree) -> PyTree:
    """Logical leaves of a state class as they are kept."""
    if not blue.plan.shards(name):
        return logical
    return map_splits(lambda split, leaf: split.store(leaf), getattr(blue, name), logical)


def logical_view(blue: Blueprint, name: str, stored: PyTree, layout: PyTree = None) -> PyTree:
    """Kept leaves of a state class in their own shapes (inside jit).

    Args:
        blue: the blueprint.
        name: the state class.
        stored: its leaves.
        layout: a `Split` for each, if they are not all.
    """
    if not blue.plan.shards(name):
        return stored

    def view(split: Split, leaf: jax.Array) -> jax.Array:
        return blue.constrain(split, split.logical(leaf)) if split.pad else leaf

    return map_splits(view, getattr(blue, name) if layout is None else layout, stored)


def logical(model: Model, state: TrainState, plan: Plan | None = None) -> PyTree:
    """The parameters in their own shapes, without the padding of sharded leaves.

    Args:
        model: the state's model.
        state: the state.
        plan: its plan; needed in a pipeline, to put the layers of cut stacks in order.

    Returns:
        A params tree; leaves without padding are the state's own arrays. No dim of a padded leaf
        divides by the devices: without its padding every device has all of it.

    Raises:
        StateConsumedError: the state was given to a step.
        StateError: the state is a pipeline's and no plan was given.
    """
    state = settled(state)
    require_alive(state, "logical")
    require_on_device(named_leaves({"params": state.params}), "logical")
    shapes, _ = initial_shapes(model)
    homes = None
    if plan is not None and plan.pipe > 1:
        homes = cut_into_stages(model, plan).homes

    def own(path: Any, leaf: Any, to: Any) -> jax.Array:
        home = homes[key_name(path[0])] if homes else None
        if home is None and PIPE in getattr(leaf.sharding, "spec", ()):
            raise StateError(
                f"logical: the layers of {path_name(path)} are spread over the ranks of a pipeline:"
                " pass the state's plan as well, or bring the state to one rank with"
                " fz.replan(state, model, tx, plan, plan.replace(pipe=1))"
            )
        spec = PartitionSpec(None, *leaf.sharding.spec[1:]) if home and home.rows else None
        shape = (len(home.rows), *to.shape[1:]) if home and home.rows else to.shape
        if leaf.shape == to.shape and spec is None:
            return leaf
        if leaf.shape != shape:
            spec = PartitionSpec()
        whole = NamedSharding(leaf.sharding.mesh, spec or PartitionSpec())
        old = Kept(shape, leaf.shape, home.rows if home else ())
        there = jax.ShapeDtypeStruct(to.shape, leaf.dtype, sharding=whole)
        return relayout(leaf, old, Kept.whole(to.shape), there)

    return jax.tree_util.tree_map_with_path(own, state.params, shapes)


def consumed_by(state: TrainState) -> str | None:
    """What consumed a state, in words; `None` for a live one."""
    leaves = jax.tree.leaves((state.params, state.compute, state.opt_state, state.buffers))
    for leaf in (*leaves, *jax.tree.leaves(state.grads)):
        if given_to(leaf):
            return given_to(leaf)
        if hasattr(leaf, "is_deleted") and leaf.is_deleted():
            # Steps keep the step count and the key, so a consumed state still knows.
            return (
                f"step {int(state.step) + 1} (train_step or accumulate_step), taken with it or with"
                " a state that shares its arrays (by fz.replan or replace)"
            )
    return None


def require_alive(state: TrainState, operation: str) -> None:
    """Raises `StateConsumedError` if the state was given away."""
    by = consumed_by(state)
    if by is not None:
        raise StateConsumedError(
            f"{operation}: this state was consumed by {by}: its memory now belongs to the state"
            " which that returned, or to its error's .state. Use that one, or pass donate=False"
            " there to keep both"
        )


def require_fits(
    state: TrainState,
    blue: Blueprint,
    operation: str,
    reads: Sequence[str] | None = None,
    abstract: bool = False,
) -> None:
    """Raises `StateError` if the state is not one of this model, optimizer and plan.

    And `PlacementError` if leaves of the fields in `reads` (all by default) are parked, other than
    those which the plan parks. Of an `abstract` state only shapes and dtypes are known.
    """
    expected = TrainState(**blue.shapes(), grads=None)
    want = dict(named_leaves(expected))
    have = dict(named_leaves(state.replace(grads=None)))
    problems = [f"{path}: expected, but missing" for path in want if path not in have]
    problems += [f"{path}: not expected" for path in have if path not in want]
    if not isinstance(state.grads, Pending | None):
        kind = type(state.grads).__name__
        problems.append(f"grads: expected None or what accumulate_step left there, got {kind}")
    for path, to in want.items():
        leaf = have.get(path)
        if leaf is None:
            continue
        if not hasattr(leaf, "aval" if abstract else "sharding"):
            kind = type(leaf)
            problems.append(
                f"{path}: expected a jax.Array {to.dtype}{list(to.shape)}, got"
                f" {kind.__module__}.{kind.__qualname__}"
            )
            continue
        same = leaf.dtype == to.dtype or (is_key(leaf) and is_key(to))  # keys of any kind
        if tuple(leaf.shape) != tuple(to.shape) or not same:
            problems.append(
                f"{path}: expected {to.dtype}{list(to.shape)}, got {leaf.dtype}{list(leaf.shape)}"
            )
        elif abstract:
            continue
        elif not on_device(leaf.sharding).is_equivalent_to(to.sharding, len(to.shape)):
            mesh = dict(to.sharding.mesh.shape)
            problems.append(f"{path}: expected {to.sharding.spec} on {mesh}, got {leaf.sharding}")
    if problems:
        shown = "\n  ".join(problems[:8])
        more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateError(
            f"{operation}: the state is not one of this model, optimizer and plan:\n  {shown}{more}"
            "\nMake it with fz.init(model, tx, plan), or bring it over with"
            " fz.replan(state, model, tx, old_plan, new_plan). A leaf put in by hand goes where the"
            " old one is: jax.device_put(new, old.sharding)"
        )
    if abstract:
        return
    # What the plan parks may be anywhere: it visits the device in any case.
    fields = [
        name for name in vars(state)
        if not blue.parks(name) and (reads is None or name in reads)
    ]  # fmt: skip
    needed = named_leaves({name: getattr(state, name) for name in fields})
    require_on_device(needed, operation)


def require_unaliased(state: TrainState, operation: str) -> None:
    """Raises `StateError` if two leaves of a state are one array."""
    given = state.replace(step=None, rng=None)
    groups = aliased_leaves(given)
    if groups:
        raise StateError(
            f"{operation}: these leaves are one array: "
            + "; ".join(" = ".join(paths) for paths in groups)
            + ". Donating the state would give one buffer away twice: copy one of them"
            " (jnp.array(leaf, copy=True)), or build the step with donate=False"
        )
