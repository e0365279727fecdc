"""Batches: rows and what is shared; checked before anything is compiled, then laid out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero import host_arrays
from fzero.axes import AXES, CONTEXT
from fzero.compat import has_explicit_axes
from fzero.errors import BatchError
from fzero.host_arrays import received
from fzero.processes import view
from fzero.summary import Printed, summary
from fzero.tree import PyTree, is_plain, named_leaves, shape_at, shape_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Shared(Printed):
    """A part of a batch that is no rows: whole on every device and for every microbatch.

    The model sees the value itself. For what changes from step to step and belongs to no example:
    a temperature, a schedule's value, another model's parameters.

    Args:
        value: an array, a number, or a pytree of them.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax, fzero as fz
        >>> def loss(p, buffers, batch, rng, train):
        ...     return jnp.mean(batch["x"] @ p["w"]) * batch["weight"], buffers, {}
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones(2)}, {}), loss)
        >>> plan = fz.Plan(data=1)
        >>> batch = {"x": np.ones((4, 2), np.float32), "weight": fz.Shared(0.5)}
        >>> float(fz.eval_step(model, plan)(fz.init(model, None, plan), batch)["loss"])
        1.0
    """

    value: PyTree

    def _summary(self) -> str:
        return summary("Shared", {"value": self.value})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """A batch taken apart, and the step it is for.

    Args:
        rows: the batch with `None` for what is shared.
        shared: the batch with `None` for rows.
        step: int32 scalar, optimizer steps taken; `None` where nobody asks.
    """

    rows: PyTree
    shared: PyTree
    step: Any = None

    @staticmethod
    def of(batch: PyTree) -> Inputs:
        """The inputs that a user's batch is."""
        if isinstance(batch, Inputs):
            return batch
        batch = taken(batch)

        def shared(leaf: Any) -> Any:
            return value_of(leaf) if is_shared(leaf) else None

        def value_of(leaf: Any) -> Any:  # `Shared` within another is the same
            if not is_shared(leaf):
                return _as_array(leaf)
            return jax.tree.map(value_of, leaf.value, is_leaf=is_shared)

        rows = jax.tree.map(lambda x: None if is_shared(x) else x, batch, is_leaf=is_shared)
        return Inputs(rows, jax.tree.map(shared, batch, is_leaf=is_shared))

    @staticmethod
    def specs(rows: Any, whole: Any) -> Any:
        """A prefix of the tree with one thing for rows and another for the rest."""
        return Inputs(rows, whole, whole)

    @property
    def batch(self) -> PyTree:
        """What the model sees."""
        return jax.tree.map(
            lambda row, other: other if row is None else row,
            self.rows, self.shared, is_leaf=lambda x: x is None,
        )  # fmt: skip

    def map_rows(self, function: Callable[[Any], Any]) -> Inputs:
        """The same with a function of each row leaf."""
        return dataclasses.replace(self, rows=jax.tree.map(function, self.rows))

    def in_microbatches(self, count: int) -> Inputs:
        """The same with dim 0 of each row leaf cut in two: microbatches, and rows of each."""

        def cut(leaf: Any) -> Any:  # (not -1: a leaf may have no elements)
            return leaf.reshape(count, leaf.shape[0] // count, *leaf.shape[1:])

        return self.map_rows(cut)

    def at(self, step: Any) -> Inputs:
        """The same for another step."""
        return dataclasses.replace(self, step=step)


def taken(batch: PyTree) -> PyTree:
    """A batch of arrays of numpy and jax, of one that has those of other libraries, too.

    Mappings that jax does not look into (transformers' `BatchEncoding`) become dicts.

    Raises:
        BatchError: one of them cannot be handed over; it is named.
    """
    batch = jax.tree.map(_opened, batch)
    try:
        return jax.tree.map(received, batch)
    except ValueError:
        for path, leaf in named_leaves(batch):
            _told(received, leaf, path)
        raise


def _opened(leaf: Any) -> Any:
    return jax.tree.map(_opened, dict(leaf)) if isinstance(leaf, Mapping) else leaf


def is_shared(node: Any) -> bool:
    """Whether a node of a batch is no rows."""
    return isinstance(node, Shared)


def _as_array(value: Any) -> Any:
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)


def opened(inputs: Any) -> tuple[PyTree, Any]:
    """The user's batch and the step number, of `Inputs` or of a batch that is nothing more."""
    return (inputs.batch, inputs.step) if isinstance(inputs, Inputs) else (inputs, None)


def check_batch(
    batch: PyTree, num_devices: int, microbatches: int, no_empty: str | None = None
) -> None:
    """Checks a global batch; a pytree of arrays with one leading dim of examples in common.

    Args:
        batch: the batch.
        num_devices: devices it is spread over.
        microbatches: how many each device's rows are cut into.
        no_empty: why no leaf may be without elements, if none may (`compat.why_no_empty`).

    Raises:
        BatchError: a leaf is no array or a scalar, is masked or of a dtype that jax does not have,
            has no elements where none may, or leading dims differ or do not divide.
    """
    leaves = named_leaves(Inputs.of(batch).rows)
    if not leaves:
        raise BatchError("batch: expected a pytree of arrays, got one without leaves (of rows)")
    for path, leaf in leaves:
        if not _is_array(leaf):
            kind = f"{type(leaf).__module__}.".removeprefix("builtins.") + type(leaf).__name__
            raise BatchError(
                f"batch: {path or 'it'} is a {kind}: expected an array of numpy or jax, or one that"
                " DLPack hands over (use np.asarray; of a DataLoader's: torch_bridge.batch)"
            )
        if not leaf.shape:
            raise BatchError(
                f"batch: {path or 'it'} is a scalar: every leaf needs a leading dim of examples;"
                " what is no rows is wrapped: fz.Shared(value)"
            )
    for path, leaf in (*leaves, *named_leaves(Inputs.of(batch).shared)):
        _told(host_arrays.require_numbers, leaf, path)
        if no_empty and 0 in np.shape(leaf)[1:]:
            raise BatchError(f"batch: {path or 'it'} has shape {np.shape(leaf)}, {no_empty}")
    rows = {path: leaf.shape[0] for path, leaf in leaves}
    if len(set(rows.values())) > 1:
        raise BatchError(
            f"batch: leaves have different numbers of examples (dim 0): {rows}; what is no rows is"
            " wrapped: fz.Shared(value)"
        )
    size = next(iter(rows.values()))
    if size == 0 or size % (num_devices * microbatches):
        raise BatchError(
            f"batch: {size} examples cannot be split evenly over {num_devices} devices x"
            f" {microbatches} microbatches; expected a positive multiple of"
            f" {num_devices * microbatches}. Pad the batch (fz.pad_batch)"
            " and leave the padding out of the loss's fz.Mean count, or cut it off predictions"
        )


def pad_batch(batch: PyTree, multiple: int) -> tuple[PyTree, np.ndarray[Any, Any]]:
    """A short batch filled up with copies of its first row, and which rows are real.

    Leave the filling out of the loss's total and count: a mean is then exactly that of the real
    rows, however they are divided.

    Args:
        batch: a pytree of host arrays with a leading dim of examples, at least one; `fz.Shared`
            parts stay as they are.
        multiple: what the number of examples must be a multiple of
            (`fz.layout(model, tx, plan).batch_multiple`).

    Returns:
        `(batch, mask)`; the mask is bool, one value for each row.

    Raises:
        BatchError: leaves have different numbers of rows, or none; `multiple` is no number of rows.

    Example:
        >>> import jax.numpy as jnp, numpy as np, fzero as fz
        >>> def loss(p, buffers, batch, rng, train):
        ...     error = (batch["x"] @ p["w"] - 3) ** 2
        ...     return fz.Mean(jnp.sum(error * batch["mask"]), batch["mask"].sum()), buffers, {}
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones(1)}, {}), loss)
        >>> batch, mask = fz.pad_batch({"x": np.float32([[1], [2], [3]])}, 8)
        >>> batch["x"].shape, int(mask.sum())
        ((8, 1), 3)
        >>> plan = fz.Plan(data=1)
        >>> evaluate = fz.eval_step(model, plan)
        >>> metrics = evaluate(fz.init(model, None, plan), {**batch, "mask": mask})
        >>> round(float(metrics["loss"]), 4), float(metrics["count"])
        (1.6667, 3.0)
    """
    whole = isinstance(multiple, int | np.integer) and not isinstance(multiple, bool)
    if not whole or multiple < 1:
        raise BatchError(f"pad_batch: multiple={multiple!r}: expected a whole number from 1 on")
    batch = taken(batch)
    inputs = Inputs.of(batch)
    check_batch(inputs, 1, 1)
    size = jax.tree.leaves(inputs.rows)[0].shape[0]
    fill = -size % multiple

    def filled(leaf: Any) -> Any:
        if is_shared(leaf) or not fill:
            return leaf
        if not is_plain(leaf):  # random keys
            real = np.arange(size + fill)
            return leaf[np.where(real < size, real, 0)]
        host = np.asarray(leaf)
        return np.concatenate([host, np.repeat(host[:1], fill, axis=0)])

    return jax.tree.map(filled, batch, is_leaf=is_shared), np.arange(size + fill) < size


def batch_sharding(mesh: Mesh, shape: tuple[int, ...] = ()) -> NamedSharding:
    """Examples spread over all devices, replica-major, and sequences over those that share them.

    Args:
        mesh: the devices.
        shape: a leaf's; its dim 1 is divided, where there is an axis for it that divides it.
    """
    size = dict(mesh.shape).get(CONTEXT, 0)
    divided = size and len(shape) > 1 and not shape[1] % size
    return NamedSharding(mesh, PartitionSpec(AXES, CONTEXT) if divided else PartitionSpec(AXES))


def place_batch(batch: PyTree, mesh: Mesh) -> Inputs:
    """Lays a global batch out over the devices; what already lies there is not copied.

    With several processes every process passes the same global batch and keeps its own rows, or a
    global `jax.Array` of which it holds some. Host arrays are copied first: steps run
    asynchronously, and a loader that refills its buffer must not change a batch under way.

    Raises:
        BatchError: an array of several processes lies on other devices, or a host array has values
            that its dtype in jax does not hold.
    """
    inputs, whole = Inputs.of(batch), NamedSharding(mesh, PartitionSpec())
    return Inputs(
        _each_placed(inputs.rows, lambda x: batch_sharding(mesh, np.shape(x))),
        _each_placed(inputs.shared, lambda _: whole),
        inputs.step,
    )


def _each_placed(tree: PyTree, sharding: Callable[[Any], NamedSharding]) -> PyTree:
    leaves = [_placed(leaf, sharding(leaf), path) for path, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _placed(leaf: Any, sharding: NamedSharding, path: str) -> jax.Array:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise BatchError(
            f"batch: {path or 'it'} is a shape; expected an array (shapes: step.lower)"
        )
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise BatchError(
                f"batch: {path or 'it'} was deleted: its memory was given to a call that it was"
                " donated to; pass what that returned, or a copy"
            )
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            # A program over the plan's mesh does not know axes that are part of an array's type.
            explicit = has_explicit_axes(leaf.sharding)
            return jax.device_put(leaf, sharding) if explicit else leaf
        if not leaf.is_fully_addressable and _is_of_all(sharding, leaf.sharding):
            return view(leaf, sharding)
        if not leaf.is_fully_addressable and leaf.sharding.device_set != sharding.device_set:
            raise BatchError(
                f"batch: an array of {leaf.dtype}{list(leaf.shape)} lies on"
                f" {len(leaf.sharding.device_set)} devices of several processes, which are not"
                f" those of the plan; make it in fz.layout(model, tx, plan).batch_sharding"
            )
        if jax.process_count() == 1 or not leaf.is_fully_addressable:
            moved: jax.Array = jax.device_put(leaf, sharding)
            return moved
    host = _told(host_arrays.own_copy, leaf, path)
    if jax.process_count() == 1:
        placed: jax.Array = jax.device_put(host, sharding)
        return placed
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index], dtype=host.dtype
    )


def _is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or its shape; those of other frameworks are none."""
    known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return known or (hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), np.dtype))


def require_held(leaf: Any, path: str) -> None:
    """Raises `BatchError` if jax has no such numbers as a leaf's, or would cut one of them."""
    _told(host_arrays.require_held, leaf, path)


def _told(check: Callable[[Any], Any], leaf: Any, path: str) -> Any:
    """What a check of a leaf gives; its error names the leaf."""
    try:
        return check(leaf)
    except ValueError as error:
        raise BatchError(f"batch: {path or 'it'} {error}") from None


def _is_of_all(rank: NamedSharding, of: Any) -> bool:
    """Whether one rank's rows are what its devices hold of an array of all ranks."""
    return (
        isinstance(of, NamedSharding) and rank.device_set < of.device_set and rank.spec == of.spec
    )


def constrain_batch(batch: PyTree, mesh: Mesh) -> Inputs:
    """A traced batch, its rows over all devices."""

    def constrained(x: Any) -> jax.Array:
        at = jax.typeof(x).sharding
        if has_explicit_axes(at):
            raise BatchError(
                f"batch: in a program of your own it lies along {at.spec} of a mesh with explicit"
                " axes, which is not the plan's; put it into"
                " fz.layout(model, tx, plan).batch_sharding, or make your mesh with"
                " axis_types=(jax.sharding.AxisType.Auto, ...)"
            )
        return jax.lax.with_sharding_constraint(jnp.asarray(x), batch_sharding(mesh, x.shape))

    return Inputs.of(batch).map_rows(constrained)


def abstract_batch(batch: PyTree, mesh: Mesh) -> Inputs:
    """Shapes of a batch with their shardings, from arrays or from shapes."""
    inputs, whole = Inputs.of(batch), NamedSharding(mesh, PartitionSpec())

    return Inputs(
        jax.tree.map(
            lambda x: shape_at(shape_of(x), batch_sharding(mesh, np.shape(x))), inputs.rows
        ),
        jax.tree.map(lambda x: shape_at(shape_of(x), whole), inputs.shared),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    )
