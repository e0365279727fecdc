"""A new state: born in its sharding, or derived from parameters that are there."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fzero.compat import is_key, outside_of_meshes, switch
from fzero.errors import StateError, some_of, warn
from fzero.hosts.activity import doing
from fzero.keys import seed_key
from fzero.loss_scaling import initial_loss_scale
from fzero.model import Model
from fzero.offload.stream import Parkings, StreamedFunction
from fzero.plan import Plan
from fzero.processes import in_turn
from fzero.programs.sites import Labels, none_given, placed_with_key
from fzero.sharding.blueprint import Blueprint, blueprint
from fzero.sharding.initial import initial_shapes, initializer
from fzero.sharding.park import is_parked_so, park, unpark
from fzero.sharding.relayout import copy_leaf
from fzero.sharding.split import layers_alone, map_splits, trained, update_dtype
from fzero.state import compute_copy
from fzero.state.averages import start
from fzero.state.fingerprint import compare
from fzero.state.logical import logical_view, store
from fzero.state.train_state import TrainState
from fzero.storage.tiers import HOST, host_sharding
from fzero.tree import PyTree, map_named, named_leaves


@outside_of_meshes()
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
        rng: seed, `jax.random.key` or `jax.random.PRNGKey`.
        devices: devices to use; all by default.

    Returns:
        The state. Shapes and shardings are those of `abstract_state`.

    Raises:
        PlanError: the plan does not fit the devices.
        StateError: two initial leaves share memory, a parameter is not floating point, or
            `jax.disable_jit` is on.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> state = fz.init(model, optax.adam(1e-3), fz.Plan(zero=1, data=1), rng=0)
        >>> int(state.step), state.params["w"].shape
        (0, (8, 2))
    """
    if switch("jax_disable_jit"):
        raise StateError(
            "init: jax.disable_jit is on, but a program puts every leaf into its sharding; leave"
            " fz.init outside of it"
        )
    blue = blueprint(model, tx, plan, devices)
    blue.require_optimizer("init")
    _warn_of_narrow(blue)
    key = key_of(rng)
    compare("init", blue, model.init, seed=key)
    with doing("init"):
        if not callable(model.init):
            _require_values(*model.init)
            return state_of(blue, *_copied(blue, *model.init), key)
        fields = compiled_fields(blue, "born", born_fields(blue), key)(key)
        return _parked(blue, fields)


def _warn_of_narrow(blue: Blueprint) -> None:
    """Says which parameters are trained in 16 bits under a plan that promises float32 masters."""
    if blue.tx is None or not blue.plan.mixed:
        return
    leaves = named_leaves(trained(blue.params, initial_shapes(blue.model)[0]))
    narrow = [f"{path} ({leaf.dtype})" for path, leaf in leaves if leaf.dtype.itemsize == 2]
    if narrow:
        warn(
            f"init: the model gives {some_of(narrow, 4)}: trained parameters of 16 bits have no"
            " float32 master, and updates smaller than their last bit are lost. Give float32 ones,"
            f" which Plan(precision={blue.plan.precision!r}) rounds for each step (flax:"
            " param_dtype=jnp.float32, torch_bridge.convert: masters=True)"
        )


def _require_values(params: PyTree, buffers: PyTree) -> None:
    for path, leaf in named_leaves({"params": params, "buffers": buffers}):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise StateError(
                f"init: {path} is a shape without values ({leaf.dtype}{list(leaf.shape)}): expected"
                " an array. Shapes are enough for fz.layout, fz.describe and fz.preflight"
            )


def key_of(rng: int | jax.Array, operation: str = "init") -> jax.Array:
    """The random key that a user gave, or of the seed.

    Raises:
        StateError: it is neither.
    """
    if isinstance(rng, int | np.integer):
        try:
            return seed_key(rng)
        except ValueError as error:
            raise StateError(f"{operation}: rng: {error}") from None
    if not isinstance(rng, jax.Array | np.ndarray):
        raise StateError(
            f"{operation}: rng: expected a seed or one key of jax.random.key, got {rng!r}"
        )
    if isinstance(rng, jax.Array) and is_key(rng) and not rng.shape:
        return rng  # (as it lies: over several processes, say)
    if not rng.shape and jnp.issubdtype(rng.dtype, jnp.integer):
        return jax.random.key(rng)
    bits = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    if (rng.shape, rng.dtype) == (bits.shape, bits.dtype):  # of jax.random.PRNGKey
        return jax.random.wrap_key_data(rng)
    raise StateError(
        f"{operation}: rng: expected a seed or one key of jax.random.key, got {rng.dtype}"
        f"{list(rng.shape)}; make a key of the bits of another kind with jax.random.wrap_key_data"
    )


def state_of(blue: Blueprint, params: PyTree, buffers: PyTree, key: jax.Array) -> TrainState:
    """A new state of parameters and buffers that lie on the device as the plan keeps them."""

    def derived(kept: PyTree, key: jax.Array) -> dict[str, Any]:
        return _derived(blue, logical_view(blue, "params", kept), key)

    fields = compiled_fields(blue, "derived", derived, params, key)(params, key)
    fields |= {"params": params, "buffers": buffers}
    return _parked(blue, fields)


def _parked(blue: Blueprint, fields: dict[str, PyTree]) -> TrainState:
    """A new state with leaves where the plan keeps them; a parked `opt_state` was never made."""
    state = TrainState(**{"opt_state": (), **fields}, **blue.statics)
    if blue.parks("opt_state"):
        state = state.replace(opt_state=parked_opt_state(blue, state.params))
    if blue.buckets.parked:
        params = parked_field(blue, "params", state.params)
        averages = parked_field(blue, "ema", state.ema)
        state = dataclasses.replace(state, params=params, ema=averages)
    compute_copy.pair(state.params, state.compute)
    return state


def compiled_fields(
    blue: Blueprint, name: str, function: Callable[..., Any], *args: Any, by: Any = None
) -> Callable[..., Any]:
    """A function of the key and placed leaves that gives fields of the state, compiled once.

    `by` is what it depends on beside the blueprint: for another one it is compiled again.
    """
    shapes = blue.shapes()
    key = name, *(jax.random.key_impl(x) for x in jax.tree.leaves(args) if is_key(x))

    def shardings(out: dict[str, Any]) -> dict[str, Any]:
        return {n: jax.tree.map(lambda to: to.sharding, shapes[n]) for n in out}

    if key not in blue.programs or blue.programs[key][0] is not by:
        if blue.stages is None:
            out = shardings(jax.eval_shape(function, *args))
            program = in_turn(blue.mesh.devices.flat, jax.jit(function, out_shardings=out))
        else:
            program = placed_with_key(function, args, shardings, blue.mesh)
        blue.programs[key] = by, program
    found: Callable[..., Any] = blue.programs[key][1]
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


def born_fields(blue: Blueprint) -> Callable[[jax.Array], dict[str, Any]]:
    """What makes the fields of a new state of a key, for a model whose `init` is a function."""
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
        {name: jax.tree.map(homes[name].arrange, tree) for name, tree in trees.items()}
        for trees in (params, buffers)
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
        A `TrainState` of `jax.ShapeDtypeStruct`s, fit for `train_step(...).lower`. What the plan
        keeps on the host has that memory kind. On disk there are no shapes: leaves that it keeps
        there are those of the device (`fz.placement(plan, model, tx)` counts them where they are).
    """
    blue = blueprint(model, tx, plan, devices)

    def where(name: str, path: str, leaf: Any) -> Any:
        parking = blue.buckets.parked.get((name, path))
        if parking is None or parking.tier != HOST:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding(leaf.sharding))

    fields = {name: map_named(partial(where, name), tree) for name, tree in blue.shapes().items()}
    return TrainState(**fields, **blue.statics)


def compute_of(blue: Blueprint, params: PyTree) -> PyTree:
    """The compute copy of kept parameters, in any tier, where the plan has one."""
    if not blue.plan.keeps_compute_copy:
        return None
    return compute_copy.recast(params, blue.shapes()["compute"])


def _cast(blue: Blueprint, params: PyTree) -> PyTree:
    splits = trained(blue.params)
    return map_splits(
        lambda s, leaf: compute_copy.rounded(leaf, s.compute), splits, trained(blue.params, params)
    )


def _derived(blue: Blueprint, params: PyTree, key: jax.Array) -> dict[str, Any]:
    """All fields that follow from logical parameters and the key."""
    fields: dict[str, Any] = {}
    if not blue.parks("opt_state"):
        opt_state = () if blue.tx is None else new_opt_state(blue, params)
        fields["opt_state"] = store(blue, "opt_state", opt_state)
    averages = start(blue.ema, trained(blue.params, params))
    return fields | {
        "ema": None if averages is None else store(blue, "ema", averages),
        "step": jnp.zeros((), jnp.int32),
        "compute": _cast(blue, params) if blue.plan.keeps_compute_copy else None,
        "rng": key,
        "loss_scale": initial_loss_scale(blue.plan),
    }


def parking_folder(blue: Blueprint) -> str:
    """Where a plan's parked leaves go on disk."""
    return blue.plan.disk_path or tempfile.gettempdir()


def parked_field(blue: Blueprint, name: str, tree: PyTree) -> PyTree:
    """A field of the state with leaves where the plan keeps them; those on the device are given."""
    return map_named(lambda path, leaf: parked_leaf(blue, name, path, leaf), tree)


def parked_leaf(blue: Blueprint, name: str, path: str, leaf: Any) -> Any:
    """A leaf of a field where the plan keeps it; one on the device is given.

    One that a disk has not taken, or not in full, is brought back and given to it once more.
    """
    parking = blue.buckets.parked.get((name, path))
    if parking is None or is_parked_so(leaf, parking):
        return leaf
    return park(unpark(leaf), parking, parking_folder(blue))


def parked_opt_state(blue: Blueprint, params: PyTree) -> PyTree:
    """A new optimizer state, made bucket by bucket."""
    assert blue.tx is not None
    labels = blue.labels()
    shapes = blue.shapes()

    def make(params: PyTree) -> PyTree:
        return store(blue, "opt_state", new_opt_state(blue, logical_view(blue, "params", params)))

    def parked(out: PyTree) -> list[Any]:
        return [blue.buckets.parked.get(("opt_state", path)) for path, _ in named_leaves(out)]

    none = [None] * len(jax.tree.leaves(params))
    stream = StreamedFunction(
        make, (shapes["params"],),
        lambda _: jax.tree.map(lambda to: to.sharding, shapes["opt_state"]), blue.mesh,
        Parkings(none, none, parked, blue.plan.disk_path), what="init",
        labels=Labels((labels["params"],), lambda _: jax.tree.leaves(labels["opt_state"])),
    )  # fmt: skip
    # Initial parameters that an optimizer keeps are arrays of its own, parked as its others are.
    return parked_field(blue, "opt_state", none_given(stream(params), params))


def new_opt_state(blue: Blueprint, params: PyTree) -> PyTree:
    """The optimizer's state for logical parameters; gradients come in `update_dtype`."""
    own = layers_alone(trained(blue.params), trained(blue.params, params))
    return blue.optimizer.init(jax.tree.map(lambda p: p.astype(update_dtype(p.dtype)), own))
