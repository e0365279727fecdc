"""Checkpoints: a state on disk, restored under any plan.

Orbax writes them: every process its own shards, in the background, into a directory that gets its
name when it is complete. So a kill at any moment leaves the checkpoint before. What is written is
each leaf as it is kept, and how that was: the plan and the mesh. `restore` works out both layouts
from shapes and brings every leaf from one to the other; those that lie alike are read straight into
their sharding.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from fzero.blueprint import Blueprint, blueprint, bound_optimizer, initial_shapes
from fzero.copies import copy_shards
from fzero.errors import CheckpointError
from fzero.model import Model
from fzero.offload import disk
from fzero.offload.disk import DiskArray
from fzero.offload.tiers import Pieces, require_on_device, settled
from fzero.pipeline.homes import cut_into_stages
from fzero.plan import DATA, Plan
from fzero.precision import LossScale, initial_loss_scale
from fzero.state import (
    Pending,
    TrainState,
    compute_copy,
    parked_field,
    require_alive,
)
from fzero.tree import PyTree, leaf_bytes, named_leaves
from fzero.zero.partition import (
    Home,
    Split,
    layout_leaves,
    map_splits,
    split_opt_state,
    split_params,
)


FORMAT = 1
# What follows from other fields is not written.
FIELDS = ("params", "opt_state", "buffers", "loss_scale", "grads")
_OPEN: dict[str, ocp.CheckpointManager] = {}
# Python 3.12.0 and 3.12.1 start no thread once the main one has ended: a writer could not finish.
_EXIT_IS_ABRUPT = (3, 12) <= sys.version_info < (3, 12, 2)


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint without reading its arrays.

    Args:
        path: the directory given to `save`.
        number: checkpoints of a directory are numbered.
        step: optimizer steps taken.
        plan: the plan of the state.
        data_position: what `save` was given.
        leaves: shape and dtype of every leaf by path, as it was kept.
    """

    path: Path
    number: int
    step: int
    plan: Plan
    data_position: Any
    leaves: dict[str, tuple[tuple[int, ...], str]]


def save(
    path: str | os.PathLike[str],
    state: TrainState,
    plan: Plan,
    *,
    data_position: Any = None,
    keep: int | None = None,
    asynchronous: bool = True,
) -> int:
    """Writes a checkpoint. The state stays as it is and may be stepped at once.

    Args:
        path: a directory for checkpoints of one run; made if it is not there.
        state: the state. Leaves that the plan parks are read where they are.
        plan: its plan.
        data_position: anything JSON-able that says where the data was, for `checkpoint`.
        keep: how many of the newest checkpoints stay; all by default.
        asynchronous: return when the state has been copied, and write in the background. The next
            `save` or `restore` of the path, `wait`, and the end of the process wait for it.

    Returns:
        The checkpoint's number.

    Raises:
        CheckpointError: the directory cannot be written, or the data position is nothing that JSON
            holds. Earlier checkpoints are untouched.
        PlacementError: a leaf was parked by hand.
        StateConsumedError: the state was given away.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> tx, plan = optax.adam(1e-3), fz.Plan(data=1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     number = fz.save(path, fz.init(model, tx, plan), plan, data_position={"row": 7})
        ...     state = fz.restore(path, model, tx, plan.replace(zero=0))
        ...     position = fz.checkpoint(path).data_position
        >>> number, int(state.step), position
        (0, 0, {'row': 7})

    Source: orbax.checkpoint.CheckpointManager.
    """
    state = settled(state)
    require_alive(state, "save")
    if keep is not None and keep < 1:
        raise CheckpointError(f"save: keep={keep}: expected at least 1, or None for all")
    fields = {name: getattr(state, name) for name in FIELDS}
    _require_json(data_position)
    by_hand = {name: tree for name, tree in fields.items() if plan.tier(name)[0] == "device"}
    require_on_device(named_leaves(by_hand), "save")
    leaves = dict(named_leaves(fields))
    mesh = getattr(state.step.sharding, "mesh")  # noqa: B009 (states live on meshes)
    meta = {
        "format": FORMAT,
        "step": int(state.step),
        "plan": plan.to_json(),
        "data": int(mesh.shape[DATA]),
        "data_position": data_position,
        "leaves": {p: [list(x.shape), str(x.dtype)] for p, x in leaves.items()},
        "rng": [
            str(jax.random.key_impl(state.rng)),
            np.asarray(jax.random.key_data(state.rng)).tolist(),
        ],
    }
    arrays = {
        _key(i): _readable(leaf) for i, leaf in enumerate(leaves.values()) if leaf_bytes(leaf)
    }
    try:
        manager = _manager(path, keep)
        number = (manager.latest_step() if manager.latest_step() is not None else -1) + 1
        manager.save(
            number,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)
            ),
        )
        if not asynchronous or _EXIT_IS_ABRUPT:
            wait(path)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"save: expected to write a checkpoint to {os.fspath(path)}: {error}. Earlier"
            " checkpoints are untouched"
        ) from error
    return number


def wait(path: str | os.PathLike[str]) -> None:
    """Waits until all checkpoints of a path are written.

    Args:
        path: the directory given to `save`.

    Raises:
        CheckpointError: one could not be written. Those before are untouched.

    Example:
        >>> import fzero as fz
        >>> fz.wait("nothing/is/being/written/here")
    """
    manager = _OPEN.pop(_absolute(path), None)
    if manager is None:
        return
    try:
        manager.wait_until_finished()
        manager.close()
    except Exception as error:  # whatever the background writer met
        raise CheckpointError(
            f"save: writing a checkpoint to {os.fspath(path)} failed: {error}. Earlier checkpoints"
            " are untouched"
        ) from error


def checkpoint(path: str | os.PathLike[str], number: int | None = None) -> Checkpoint:
    """What a checkpoint holds, without its arrays.

    Args:
        path: the directory given to `save`.
        number: which one; the newest by default.

    Returns:
        Its step, plan, data position, and the shapes of its leaves.

    Raises:
        CheckpointError: there is none, or another version of fzero wrote it.

    Example:
        >>> import tempfile, jax.numpy as jnp, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> plan = fz.Plan(data=1)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     number = fz.save(path, fz.init(model, None, plan), plan)
        ...     print(fz.checkpoint(path).leaves)
        {'params/w': ((8, 2), 'float32')}
    """
    wait(path)
    folder = Path(_absolute(path))
    found = (
        sorted(int(x.name) for x in folder.iterdir() if x.name.isdigit()) if folder.is_dir() else []
    )
    if not found or number not in (None, *found):
        raise CheckpointError(
            f"restore: expected a checkpoint {'' if number is None else f'{number} '}in {folder},"
            f" found {found or 'none'}"
        )
    number = found[-1] if number is None else number
    meta = _meta(folder, number)
    return Checkpoint(
        folder, number, meta["step"], _plan_of(meta), meta["data_position"],
        {path: (tuple(shape), dtype) for path, (shape, dtype) in meta["leaves"].items()},
    )  # fmt: skip


def restore(
    path: str | os.PathLike[str],
    model: Model,
    tx: optax.GradientTransformation | None,
    plan: Plan,
    *,
    number: int | None = None,
    devices: Sequence[Any] | None = None,
) -> TrainState:
    """A state from a checkpoint, under any plan: other stage, devices, pipeline, tiers, precision.

    Values are bit-identical. What 8-bit reductions of fzero 0.1 still owed (`state.error`) is left
    out, with a `UserWarning`.

    Args:
        path: the directory given to `save`.
        model: the model of the state.
        tx: its optimizer; `None` restores a state that is only evaluated.
        plan: the plan wanted.
        number: which checkpoint; the newest by default.
        devices: devices to use; all by default.

    Returns:
        The state.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not one of this model and optimizer.
        PlanError: the plan does not fit the devices.

    Example: see `save`.
    """
    about = checkpoint(path, number)
    meta = _meta(about.path, about.number)
    if any(path.startswith("error/") for path in about.leaves):
        warnings.warn(
            f"restore: checkpoint {about.number} in {about.path} has what 8-bit reductions"
            " (reduce_dtype='int8' of fzero 0.1) had not sent yet: less than a step's rounding. It"
            " is left out; everything else is restored",
            stacklevel=2,
        )
    blue = blueprint(model, tx, plan, devices)
    reader = _Reader(about, meta, blue)
    params = reader.field("params", reader.old_params, blue.params)
    opt_state = (
        () if tx is None else reader.field("opt_state", reader.old_opt_state, blue.opt_state)
    )
    shapes = blue.shapes()
    impl, data = meta["rng"]
    key = jax.device_put(np.asarray(data, np.uint32), shapes["rng"].sharding)
    state = TrainState(
        step=copy_shards(np.asarray(about.step), shapes["step"]),
        params=params,
        compute=compute_copy(blue, params),
        opt_state=opt_state,
        buffers=reader.buffers(),
        rng=jax.random.wrap_key_data(key, impl=impl),
        loss_scale=reader.loss_scale(),
        grads=reader.grads(),
    )
    for name in ("params", "opt_state"):
        if blue.parks(name):
            state = state.replace(**{name: parked_field(blue, name, getattr(state, name))})
    return state


class _Reader:
    """Leaves of one checkpoint as a blueprint keeps them."""

    def __init__(self, about: Checkpoint, meta: dict[str, Any], blue: Blueprint) -> None:
        self.about, self.blue, self.old = about, blue, about.plan
        model, parts = blue.model, meta["data"]
        shapes, _ = initial_shapes(model)
        stages = cut_into_stages(model, self.old) if self.old.pipe > 1 else None
        self.homes = None if stages is None else stages.homes
        self.old_params = split_params(model, shapes, self.old, parts, self.homes)
        self.old_opt_state: PyTree = ()
        if blue.tx is not None:
            self.old_opt_state = split_opt_state(
                bound_optimizer(blue.tx, model, self.homes).init, self.old_params, self.old, parts
            )
        self.numbers = {path: i for i, path in enumerate(about.leaves)}
        self._require_same_leaves()

    def _require_same_leaves(self) -> None:
        expected = {
            f"{name}/{split.path}": split
            for name, layout in (("params", self.old_params), ("opt_state", self.old_opt_state))
            for split in layout_leaves(layout)
        }
        have = {
            path for path in self.numbers
            if path.startswith("params/") or (self.blue.tx and path.startswith("opt_state/"))
        }  # fmt: skip
        problems = [f"{path}: in the checkpoint only" for path in sorted(have - set(expected))]
        for path, split in expected.items():
            shape = split.stored_shape if self.old.shards(path.split("/")[0]) else split.shape
            found = self.about.leaves.get(path)
            if found is None:
                problems.append(f"{path}: not in the checkpoint")
            elif found[0] != shape:
                problems.append(
                    f"{path}: expected {list(shape)}, the checkpoint has {list(found[0])}"
                )
        if problems:
            shown = "\n  ".join(problems[:8])
            raise CheckpointError(
                f"restore: checkpoint {self.about.number} in {self.about.path} is not one of this"
                f" model and optimizer:\n  {shown}\nRestore with the model and optimizer that it"
                " was saved with (tx=None for the parameters alone)"
            )

    def field(self, name: str, old: PyTree, new: PyTree) -> PyTree:
        """Parameters or optimizer state."""
        was, now = self.old.shards(name), self.blue.plan.shards(name)
        wanted: dict[str, Any] = {}
        shapes = self.blue.shapes()[name]

        def want(a: Split, b: Split, to: Any) -> None:
            wanted[f"{name}/{a.path}"] = (to, _Change(a, b, was, now))

        map_splits(want, old, new, shapes)
        values = self._read(wanted)
        return map_splits(lambda a, _: values[f"{name}/{a.path}"], old, shapes)

    def grads(self) -> Pending | None:
        """The accumulation in progress, if there was one."""
        if "grads/total" not in self.numbers:
            return None
        blue = self.blue
        wanted: dict[str, tuple[Any, Any]] = {}

        def want(a: Split, b: Split) -> None:
            _, dtype = self.about.leaves[f"grads/sums/{a.path}"]
            sharding = blue.sharding(b.home, b.spec)
            to = jax.ShapeDtypeStruct(b.stored_shape, dtype, sharding=sharding)
            wanted[f"grads/sums/{a.path}"] = (to, _Change(a, b, True, True))

        map_splits(want, self.old_params, blue.params)
        for name in ("total", "count", "calls"):
            shape, dtype = self.about.leaves[f"grads/{name}"]
            wanted[f"grads/{name}"] = (blue.replicated(jax.ShapeDtypeStruct(shape, dtype)), None)
        values = self._read(wanted)
        sums = map_splits(lambda a: values[f"grads/sums/{a.path}"], self.old_params)
        return Pending(sums, *(values[f"grads/{name}"] for name in ("total", "count", "calls")))

    def loss_scale(self) -> LossScale | None:
        """The loss scale, or a new one for a precision that had none."""
        scale = self.blue.shapes()["loss_scale"]
        if scale is None:
            return None
        names = [path for path, _ in named_leaves({"loss_scale": scale})]
        if self.old.precision != self.blue.plan.precision or set(names) - set(self.numbers):
            fresh = initial_loss_scale(self.blue.plan)
            assert fresh is not None
            if "loss_scale/skipped" in self.numbers:  # it counts steps, whatever their precision
                to = scale.skipped
                kept = self._read({"loss_scale/skipped": (to, None)})["loss_scale/skipped"]
                fresh = dataclasses.replace(fresh, skipped=kept)
            return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), fresh, scale)
        values = self._read({path: (to, None) for path, to in named_leaves({"loss_scale": scale})})
        return jax.tree.unflatten(jax.tree.structure(scale), list(values.values()))

    def buffers(self) -> PyTree:
        """Buffers, with the layers of cut stacks in the rows of the new plan."""
        shapes = self.blue.shapes()["buffers"]
        new = None if self.blue.stages is None else self.blue.stages.homes
        wanted = {}
        for path, to in named_leaves(shapes):
            name = path.split("/")[0]
            homes = tuple(None if h is None else h[name] for h in (self.homes, new))
            if f"buffers/{path}" not in self.numbers:
                raise CheckpointError(
                    f"restore: the checkpoint in {self.about.path} has no buffers/{path}, which"
                    " this model has"
                )
            wanted[f"buffers/{path}"] = (to, _Rows(*homes))
        values = self._read(wanted)
        return jax.tree.unflatten(jax.tree.structure(shapes), list(values.values()))

    def _read(self, wanted: dict[str, tuple[Any, Any]]) -> dict[str, jax.Array]:
        """Leaves by path: straight into their sharding, or changed on the host."""
        items: dict[str, Any] = {}
        how: dict[str, Any] = {}
        for path, (to, change) in wanted.items():
            shape, dtype = self.about.leaves[path]
            if 0 in shape:
                continue
            key = _key(self.numbers[path])
            if change is None or change.none:
                items[key] = jax.ShapeDtypeStruct(shape, dtype, sharding=to.sharding)
                how[key] = ocp.ArrayRestoreArgs(
                    sharding=to.sharding, global_shape=shape, dtype=np.dtype(dtype)
                )
            else:
                items[key] = np.zeros(shape, dtype)
                how[key] = ocp.RestoreArgs(restore_type=np.ndarray)
        found = _restored(self.about, items, how)
        out = {}
        for path, (to, change) in wanted.items():
            shape, dtype = self.about.leaves[path]
            if 0 in shape:
                out[path] = copy_shards(np.zeros(to.shape, to.dtype), to)
                continue
            value = found[_key(self.numbers[path])]
            direct = change is None or change.none
            out[path] = value if direct else copy_shards(change.apply(value), to)
        return out


@dataclass(frozen=True)
class _Rows:
    """Layers of a stack from one plan's rows to another's."""

    old: Home | None
    new: Home | None

    @property
    def none(self) -> bool:
        """Whether there is nothing to do."""
        before, after = (() if home is None else home.rows for home in (self.old, self.new))
        return before == after

    def apply(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The change of a whole leaf."""
        if self.none:
            return value
        value = value if self.old is None else np.asarray(self.old.restore(value))
        return value if self.new is None else np.asarray(self.new.arrange(value))


@dataclass(frozen=True)
class _Change:
    """A leaf from one layout to another."""

    old: Split
    new: Split
    was: bool
    now: bool

    @property
    def none(self) -> bool:
        """Whether both keep the same array."""
        before = self.old.stored_shape if self.was else self.old.shape
        after = self.new.stored_shape if self.now else self.new.shape
        return before == after and self.rows.none

    @property
    def rows(self) -> _Rows:
        """The change of rows."""
        return _Rows(self.old.home, self.new.home)

    def apply(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The change of a whole leaf."""
        value = self.rows.apply(value[tuple(map(slice, self.old.shape))])
        after = self.new.stored_shape if self.now else self.new.shape
        return np.pad(value, [(0, b - a) for a, b in zip(value.shape, after, strict=True)])


def _readable(leaf: Any) -> Any:
    """A leaf as something that can be written, wherever it is; without the device."""
    if isinstance(leaf, DiskArray):
        return disk.read([leaf], "pinned_host")[0]
    if isinstance(leaf, Pieces):
        return np.concatenate([np.asarray(_readable(piece)) for piece in leaf.pieces], leaf.dim)
    return leaf


def _key(number: int) -> str:
    return f"{number:06}"


def _absolute(path: str | os.PathLike[str]) -> str:
    return str(Path(path).absolute())


def _manager(path: str | os.PathLike[str], keep: int | None) -> ocp.CheckpointManager:
    """A writer for a path; the one before has finished."""
    wait(path)
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
    _OPEN[_absolute(path)] = ocp.CheckpointManager(_absolute(path), options=options)
    return _OPEN[_absolute(path)]


def _restored(about: Checkpoint, items: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    if not items:
        return {}
    try:
        return ocp.PyTreeCheckpointer().restore(
            about.path / str(about.number) / "state",
            args=ocp.args.PyTreeRestore(item=items, restore_args=how, partial_restore=True),
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"restore: checkpoint {about.number} in {about.path} cannot be read: {error}"
        ) from error


def _meta(folder: Path, number: int) -> dict[str, Any]:
    try:
        meta = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(folder / str(number) / "meta")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder} cannot be read: {error}"
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise CheckpointError(
            f"restore: checkpoint {number} in {folder}: expected format {FORMAT} of fzero, got"
            f" {meta.get('format') if isinstance(meta, dict) else type(meta).__name__}"
        )
    return meta


def _plan_of(meta: dict[str, Any]) -> Plan:
    """The plan of a checkpoint, in today's words: no layout followed from what is left out."""
    values = dict(meta["plan"])
    if values.get("reduce_dtype") == "int8":  # fzero 0.1
        values["reduce_dtype"] = None
    return Plan.from_json(values)


def _require_json(data_position: Any) -> None:
    try:
        json.dumps(data_position)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"save: data_position: expected something that JSON holds, got {data_position!r}:"
            f" {error}. Nothing was written"
        ) from error


def _finish() -> None:
    for path in list(_OPEN):
        wait(path)


# At exit the interpreter first ends all thread pools, and only then calls what `atexit` knows: too
# late for a writer that still needs a pool. What is registered here is called before the pools end.
getattr(threading, "_register_atexit", atexit.register)(_finish)
