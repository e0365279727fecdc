"""Reports: what a plan will do with a model, and where a state really is. Both are values.

`describe` works from shapes alone, so a plan for 64 devices can be read on a laptop. `placement`
reads the arrays of a state. All sizes are bytes unless a name says elements.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from fzero.blueprint import initial_shapes
from fzero.model import Model
from fzero.plan import DATA, REPLICA, Plan
from fzero.precision import compute_dtype
from fzero.state import TrainState, require_alive
from fzero.tree import PyTree, leaf_bytes, named_leaves, shape_of
from fzero.zero.partition import Split, is_split, map_splits, split_opt_state, split_params


CLASSES = ("params", "compute", "opt_state", "buffers", "grads")


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf will be kept between steps.

    Args:
        state_class: `params`, `compute`, `opt_state` or `buffers`.
        path: path in its tree.
        shape: logical shape.
        dtype: dtype it is kept in.
        dim: the dim that is split over the data axis; `None` for a leaf kept whole.
        pad_rows: rows of zeros at the end of `dim`, so that it divides.
        why: the reason, in words.
        bytes_per_device: bytes that each device keeps.
    """

    state_class: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    pad_rows: int
    why: str
    bytes_per_device: int


@dataclass(frozen=True)
class Description:
    """What a plan does with a model; prints as a table.

    Args:
        plan: the plan.
        num_devices: devices it is for.
        num_data: devices in a sharding group (mesh axis `data`).
        num_replica: sharding groups (mesh axis `replica`).
        num_elements: elements in all parameters, Ψ.
        leaves: every leaf of every state class.
        bytes_per_device: kept between steps, by state class (`opt_state` if known) and in `total`.
        reduction: when gradients are reduced, in words.
        elements_gathered: elements that one device receives in all-gathers, per step; at most,
            as a compiled step may keep for the backward pass what the forward pass ends with.
        elements_reduced: elements that one device sends to reduce gradients, per step.
    """

    plan: Plan
    num_devices: int
    num_data: int
    num_replica: int
    num_elements: int
    leaves: tuple[LeafPlan, ...]
    bytes_per_device: dict[str, int]
    reduction: str
    elements_gathered: int
    elements_reduced: int

    @property
    def elements_communicated(self) -> int:
        """Elements that one device sends, or receives, per step; scalars aside."""
        return self.elements_gathered + self.elements_reduced

    def to_json(self) -> dict[str, Any]:
        """The description as a JSON-able dict."""
        return dataclasses.asdict(self) | {"elements_communicated": self.elements_communicated}

    def __str__(self) -> str:
        rows = [("leaf", "shape", "dtype", "kept", "bytes/device", "why")]
        for leaf in self.leaves:
            kept = "whole" if leaf.dim is None else f"dim {leaf.dim} / {self.num_data}"
            name, shape = f"{leaf.state_class}/{leaf.path}", str(list(leaf.shape))
            rows.append((name, shape, leaf.dtype, kept, f"{leaf.bytes_per_device:,}", leaf.why))
        totals = [("kept between steps, per device", "bytes")]
        totals += [(name, f"{size:,}") for name, size in self.bytes_per_device.items()]
        if "opt_state" not in self.bytes_per_device:
            totals.insert(-1, ("opt_state", "unknown: pass tx to count it"))
        ratio = self.elements_communicated / max(self.num_elements, 1)
        return (
            f"{self.plan}\n{self.num_devices} devices: replica={self.num_replica} x"
            f" data={self.num_data}; Ψ = {self.num_elements:,} parameters\n\n"
            f"{_table(rows, right=(4,))}\n\n{_table(totals, right=(1,))}\n\n"
            f"gradients: {self.reduction} (reduce={self.plan.reduce!r})\n"
            f"communication per step and device: {ratio:.3f} Ψ = {self.elements_communicated:,}"
            f" elements ({self.elements_gathered:,} gathered, {self.elements_reduced:,} reduced)"
        )


def describe(
    plan: Plan,
    model: Model,
    tx: optax.GradientTransformation | None = None,
    *,
    devices: Sequence[Any] | None = None,
    num_devices: int | None = None,
) -> Description:
    """What a plan will do with a model: layout, bytes and communication, from shapes alone.

    Args:
        plan: the plan.
        model: the model; nothing of it is computed.
        tx: the optimizer, to count its state too.
        devices: devices to plan for.
        num_devices: how many devices to plan for; they need not exist. By default as many as
            the plan names, or else as many as there are.

    Returns:
        The description; `str()` of it is a table.

    Raises:
        PlanError: the plan does not fit that many devices.
        StateError: two initial leaves share memory.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((1024, 512)), "b": jnp.zeros(512)}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
        >>> about = fz.describe(fz.Plan(zero=3), model, optax.adam(1e-3), num_devices=64)
        >>> about.bytes_per_device["params"] == 1024 * 512 * 4 // 64 + 512 * 4
        True
        >>> about.reduction
        'one reduction per step (a step is one microbatch)'

    Source: ZeRO, arXiv:1910.02054, sections 5 (bytes kept) and 7 (elements communicated).
    """
    if num_devices is None:
        named = plan.data * plan.replica if plan.data else None
        num_devices = len(devices) if devices is not None else named or len(jax.devices())
    sizes = plan.sizes(num_devices)
    shapes, buffers = initial_shapes(model)
    layout = split_params(model, shapes, plan, sizes[DATA])
    leaves = _planned(plan, layout, buffers, tx, sizes[DATA])
    counted = ["params", "compute", *(["opt_state"] if tx is not None else []), "buffers"]
    totals = {n: sum(x.bytes_per_device for x in leaves if x.state_class == n) for n in counted}
    splits = _splits(layout)
    gathered, reduced = _communication(plan, splits, sizes[DATA], sizes[REPLICA])
    return Description(
        plan=plan,
        num_devices=sizes[DATA] * sizes[REPLICA],
        num_data=sizes[DATA],
        num_replica=sizes[REPLICA],
        num_elements=sum(_size(split.shape) for split in splits),
        leaves=leaves,
        bytes_per_device=totals | {"total": sum(totals.values())},
        reduction=_reduction(plan),
        elements_gathered=gathered,
        elements_reduced=reduced,
    )


def _planned(
    plan: Plan, layout: PyTree, buffers: PyTree, tx: optax.GradientTransformation | None, parts: int
) -> tuple[LeafPlan, ...]:
    def row(name: str, split: Split, dtype: Any = None) -> LeafPlan:
        sharded, why = plan.shards(name), split.reason
        dim = split.dim if sharded else None
        if split.dim is not None and not sharded:
            why = f"zero={plan.zero} keeps {name} whole"
        dtype = np.dtype(split.dtype if dtype is None else dtype)
        shape = split.shape if dim is None else split.stored_shape
        size = _size(shape) * dtype.itemsize // (1 if dim is None else parts)
        pad = 0 if dim is None else split.pad
        return LeafPlan(name, split.path, split.shape, str(dtype), dim, pad, why, size)

    params = _splits(layout)
    rows = [row("params", split) for split in params]
    if plan.keeps_compute_copy:
        rows += [row("compute", split, compute_dtype(plan, split.dtype)) for split in params]
    if tx is not None:
        logical = map_splits(shape_of, layout)
        state = split_opt_state(jax.eval_shape(tx.init, logical), layout, plan, parts)
        rows += [row("opt_state", split) for split in _splits(state)]
    for path, leaf in named_leaves(buffers):
        of_leaf = (tuple(leaf.shape), str(leaf.dtype), None, 0, "buffers stay whole")
        rows.append(LeafPlan("buffers", path, *of_leaf, leaf_bytes(leaf)))
    return tuple(rows)


def _reduction(plan: Plan) -> str:
    if plan.reduce == "step":
        return f"one reduction per step, of {plan.microbatches} microbatches' whole local sums"
    if plan.microbatches == 1:
        return "one reduction per step (a step is one microbatch)"
    return f"one reduction per microbatch, {plan.microbatches} per step; only shards accumulate"


def _communication(plan: Plan, splits: list[Split], data: int, replica: int) -> tuple[int, int]:
    """Elements that one device (gathers, reduces) per step, with ring collectives."""
    split = sum(_size(s.stored_shape) for s in splits if s.dim is not None)
    whole = sum(_size(s.shape) for s in splits if s.dim is None)
    # Stages 0 to 2 gather once a step; stage 3 for both passes of every microbatch.
    gathers = 2 * plan.microbatches if plan.zero == 3 else 1
    gathered = gathers * split * (data - 1) / data
    # A reduce-scatter within a group, then only the shard crosses groups. Leaves kept whole are
    # all-reduced: a reduce-scatter and an all-gather.
    scattered = split * (data - 1) / data + 2 * (split / data) * (replica - 1) / replica
    everywhere = 2 * whole * ((data - 1) / data + (replica - 1) / replica)
    reductions = plan.microbatches if plan.reduce == "microbatch" else 1
    return round(gathered), round(reductions * (scattered + everywhere))


@dataclass(frozen=True)
class LeafPlacement:
    """Where one leaf is.

    Args:
        state_class: `params`, `compute`, `opt_state`, `buffers` or `grads`.
        path: path in its tree.
        shape: shape as stored, padding included.
        dtype: its dtype.
        spec: how it is split over mesh axes.
        memory_kind: kind of memory it is in.
        bytes_per_device: bytes of its largest shard.
        bytes_all_devices: bytes of all shards, copies counted.
    """

    state_class: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    memory_kind: str
    bytes_per_device: int
    bytes_all_devices: int


@dataclass(frozen=True)
class Placement:
    """Where a state is, in bytes; prints as a table.

    Args:
        bytes_per_device: bytes that the fullest device holds, by state class and in `total`.
        bytes_all_devices: bytes in all devices together, copies counted, likewise.
        memory_kinds: kinds of memory that a state class is in.
        num_devices: devices that hold some of it.
        leaves: every leaf.
    """

    bytes_per_device: dict[str, int]
    bytes_all_devices: dict[str, int]
    memory_kinds: dict[str, tuple[str, ...]]
    num_devices: int
    leaves: tuple[LeafPlacement, ...]

    def to_json(self) -> dict[str, Any]:
        """The placement as a JSON-able dict."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [("state class", "bytes/device", f"bytes in {self.num_devices} devices", "memory")]
        for name, size in self.bytes_per_device.items():
            kinds = ", ".join(self.memory_kinds.get(name, ()))
            rows.append((name, f"{size:,}", f"{self.bytes_all_devices[name]:,}", kinds))
        return _table(rows, right=(1, 2))


def placement(state: TrainState) -> Placement:
    """Where a state is: bytes per device and kind of memory, for every state class and leaf.

    Args:
        state: a state; one of shapes (`fz.abstract_state`) will do.

    Returns:
        The placement; `str()` of it is a table.

    Raises:
        StateConsumedError: the state was given to a step.

    Example:
        >>> import jax.numpy as jnp, optax, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.zeros((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> where = fz.placement(fz.init(model, optax.sgd(0.1), fz.Plan(data=1)))
        >>> where.bytes_per_device["params"], where.bytes_all_devices["total"]
        (64, 64)
    """
    require_alive(state, "placement")
    rows: list[LeafPlacement] = []
    held: dict[Any, Counter[str]] = defaultdict(Counter)  # bytes by device and state class
    for name in CLASSES:
        for path, leaf in named_leaves(getattr(state, name)):
            sharding, shape = leaf.sharding, tuple(leaf.shape)
            size = leaf_bytes(leaf, sharding.shard_shape(shape))
            for device in sharding.device_set:
                held[device].update({name: size, "total": size})
            where = (_spec(sharding), sharding.memory_kind or "device")
            sizes = (size, size * len(sharding.device_set))
            rows.append(LeafPlacement(name, path, shape, str(leaf.dtype), *where, *sizes))
    names = (*CLASSES, "total")
    kinds = {n: tuple(sorted({r.memory_kind for r in rows if r.state_class == n})) for n in CLASSES}
    return Placement(
        bytes_per_device={n: max((by[n] for by in held.values()), default=0) for n in names},
        bytes_all_devices={n: sum(by[n] for by in held.values()) for n in names},
        memory_kinds=kinds,
        num_devices=len(held),
        leaves=tuple(rows),
    )


def _spec(sharding: Any) -> str:
    axes = ["-" if axis is None else str(axis) for axis in getattr(sharding, "spec", ())]
    return ", ".join(axes) or "whole"


def _splits(layout: PyTree) -> list[Split]:
    return jax.tree.leaves(layout, is_leaf=is_split)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> str:
    """Aligned columns under a ruled header."""
    widths = [max(len(row[col]) for row in rows) for col in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.rjust(width) if col in right else text.ljust(width)
            for col, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * width for width in widths]), *map(line, rows[1:])])
