"""What a plan will do with a model, as a value.

`describe` works from shapes alone, so a plan for 64 devices can be read on a laptop. All sizes are
bytes unless a name says elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from fzero.axes import DATA, REPLICA
from fzero.model import Model
from fzero.pieces import Piece
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint, planned, secondary_size
from fzero.sharding.chunks import OWNED
from fzero.sharding.homes import Stages, stage_tree
from fzero.sharding.relayout import Kept
from fzero.sharding.split import Home, Split, flat_splits, trained
from fzero.storage.tiers import DEVICE
from fzero.summary import as_html
from fzero.tree import PyTree, found_in, leaf_bytes, named_leaves
from fzero.zero.quantize import BLOCK, encoded_bytes


# Leaves that a printed description shows; `Description.leaves` has all.
ROWS = 30


@dataclass(frozen=True)
class LeafPlan:
    """How one leaf will be kept between steps.

    Args:
        state_class: `params`, `compute`, `opt_state`, `ema` or `buffers`.
        path: path in its tree.
        shape: logical shape.
        dtype: dtype it is kept in.
        dim: the dim that is split, as `over` says; `None` for a leaf kept whole.
        pad_rows: rows of zeros at the end of `dim`, so that it divides.
        why: the reason, in words.
        bytes_per_device: bytes that each device which holds it keeps.
        ranks: in a pipeline, the ranks that hold it; of a stack that is cut, each holds its own
            layers, and zeros where others have more.
        tier: where it is kept: `device`, `host` or `disk`.
        axes: the further mesh axis that each dim lies along, as far as there are any.
        over: the mesh axes that `dim` is split over, if it is.
        shards: devices along them.
    """

    state_class: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    pad_rows: int
    why: str
    bytes_per_device: int
    ranks: tuple[int, ...] = ()
    tier: str = "device"
    axes: tuple[str | None, ...] = ()
    over: tuple[str, ...] = ()
    shards: int = 1


@dataclass(frozen=True, repr=False)
class Description:
    """What a plan does with a model; prints as a table.

    Args:
        plan: the plan.
        num_devices: devices it is for.
        num_data: devices along the mesh axis `data`.
        num_replica: sharding groups (mesh axis `replica`).
        num_elements: elements in all parameters, Ψ.
        leaves: every leaf of every state class.
        bytes_per_device: kept on the device between steps, by state class (`opt_state` if known)
            and in `total`; in a pipeline by the device that keeps the most of it.
        parked_bytes: the same for other tiers that the plan uses: `{"host": {"total": 123, ...}}`.
        reduction: when gradients are reduced, in words.
        secondary_bytes: of the weights, what a device keeps from a forward to its backward pass
            (`Plan.secondary`), per microbatch under way; at most, as a backward pass may not read
            all. `host` is a number only where `devices` say which are on one host, and counts as
            none otherwise.
        elements_gathered: elements that one device receives in all-gathers, per step; at most,
            as a compiled step may keep for the backward pass what the forward pass ends with.
        elements_reduced: elements that one device sends to reduce gradients, per step. (What XLA
            sends along further axes, such as `tensor`, follows from activations: `fz.preflight`.)

    In a pipeline the last two are those of the device with the most of both. What stages send to
    each other is not among them: activations, their gradients, and tied weights.
    """

    plan: Plan
    num_devices: int
    num_data: int
    num_replica: int
    num_elements: int
    leaves: tuple[LeafPlan, ...]
    bytes_per_device: dict[str, int]
    parked_bytes: dict[str, dict[str, int]]
    reduction: str
    secondary_bytes: int
    elements_gathered: int
    elements_reduced: int

    @property
    def elements_communicated(self) -> int:
        """Elements that one device sends, or receives, per step; scalars aside."""
        return self.elements_gathered + self.elements_reduced

    def to_json(self) -> dict[str, Any]:
        """The description as a JSON-able dict."""
        return dataclasses.asdict(self) | {"elements_communicated": self.elements_communicated}

    def __repr__(self) -> str:
        kept = ", ".join(f"{name} {size:,}" for name, size in self.bytes_per_device.items())
        return (
            f"Description({self.plan!r}, {self.num_devices} devices, {len(self.leaves)} leaves,"
            f" {self.num_elements:,} parameters; bytes per device: {kept})"
        )

    def _repr_html_(self) -> str:
        return as_html(str(self))

    def __str__(self) -> str:
        cut = self.plan.pipe > 1
        ranks = ("ranks",) if cut else ()
        rows = [("leaf", "shape", "dtype", *ranks, "kept", "bytes/device", "why")]
        for leaf in _shown(self.leaves):
            if leaf is None:
                rows.append((f"... {len(self.leaves) - ROWS:,} more", *[""] * (len(rows[0]) - 1)))
                continue
            over = "" if leaf.over in ((), (DATA,)) else f" ({', '.join(leaf.over)})"
            parts = [] if leaf.dim is None else [f"dim {leaf.dim} / {leaf.shards}{over}"]
            parts += [f"dim {dim} / {self.plan.further[axis]} ({axis})"
                      for dim, axis in enumerate(leaf.axes) if axis is not None]  # fmt: skip
            kept = ", ".join(parts) or "whole"
            kept += "" if leaf.tier == "device" else f", {leaf.tier}"
            name, shape = f"{leaf.state_class}/{leaf.path}", str(list(leaf.shape))
            ranks = (_ranges(leaf.ranks),) if cut else ()
            size = f"{leaf.bytes_per_device:,}"
            rows.append((name, shape, leaf.dtype, *ranks, kept, size, leaf.why))
        totals = [("kept between steps, per device", "bytes")]
        totals += [(name, f"{size:,}") for name, size in self.bytes_per_device.items()]
        if "opt_state" not in self.bytes_per_device:
            totals.insert(-1, ("opt_state", "unknown: pass tx to count it"))
        for tier, sizes in self.parked_bytes.items():
            totals += [(f"{name} ({tier})", f"{size:,}") for name, size in sizes.items() if size]
        ratio = self.elements_communicated / max(self.num_elements, 1)
        pipe = f"pipe={self.plan.pipe} x " if cut else ""
        inner = "".join(f" x {name}={size}" for name, size in self.plan.further.items())
        return (
            f"{self.plan}\n{self.num_devices} devices: {pipe}replica={self.num_replica} x"
            f" data={self.num_data}{inner}; Ψ = {self.num_elements:,} parameters\n\n"
            f"{table(rows, right=(4 + cut,))}\n\n{table(totals, right=(1,))}\n\n"
            f"gradients: {self.reduction} (reduce={self.plan.reduce!r})\n"
            f"communication per step and device: {ratio:.3f} Ψ = {self.elements_communicated:,}"
            f" elements ({self.elements_gathered:,} gathered, {self.elements_reduced:,} reduced)"
            f"{self._sent_as()}"
        )

    def _sent_as(self) -> str:
        """What the plan changes about what is sent and computed, in words."""
        lines = ""
        if self.plan.tensor > 1 and self.plan.sequence_parallel is not False:
            where = (
                "where they divide"
                if self.plan.sequence_parallel
                else ("where tokens are many (sequence_parallel=None)")
            )
            lines += f"\npositions between layers of a stack: shared out over tensor, {where}"
        if self.plan.further:
            lines += (
                f"\nover {', '.join(self.plan.further)}: what a layer's work asks for, not counted"
                " here; fz.preflight counts it, for each axis, its links and what waits for it"
            )
        if self.plan.remat is None:
            lines += (
                "\nkept for the backward pass (remat=None): layers' inputs on CPUs; on GPUs the"
                " most of all, products, layers' inputs that memory has room for with the batch"
            )
        if self.plan.deterministic:
            lines += "\ndeterministic: on GPUs, kernels of fixed order, none picked by timing"
        if self.plan.keep_fp32:
            kept = [
                leaf
                for leaf in self.leaves
                if leaf.state_class == "params" and found_in(self.plan.keep_fp32, leaf.path)
            ]
            count = sum(math.prod(leaf.shape) for leaf in kept)
            lines += (
                f"\nused and sent in float32: {len(kept)} leaves, {count:,} elements (keep_fp32)"
            )
        if self.plan.gather_dtype is not None:
            part = encoded_bytes(BLOCK) / BLOCK
            lines += f"\ngathers send int8: {part:.3f} bytes an element"
        if self.plan.gathers_float8 and any(leaf.shards > 1 for leaf in self.leaves):
            lines += "\ngathers of what only products in 8 bits read send float8: 1 byte an element"
        if self.plan.reduce_dtype is not None:
            lines += "\nreductions send and add float32: 4 bytes an element"
        if self.secondary_bytes:
            lines += f"\nkept for the backward pass (secondary): {self.secondary_bytes:,} bytes"
        return lines


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
        ways = math.prod(plan.further.values())
        named = plan.pipe * plan.data * plan.replica * ways if plan.data else None
        num_devices = len(devices) if devices is not None else named or len(jax.devices())
    blue = planned(model, tx, plan, num_devices)
    sizes, stages, splits = dict(blue.mesh.shape), blue.stages, blue.params
    leaves = tuple(_planned(blue))
    trains = {"opt_state": tx is not None, "ema": plan.ema is not None}
    counted = ["params", "compute", *(name for name in OWNED if trains[name]), "buffers"]
    known = plan.secondary != "host" or devices is not None
    secondary = secondary_size(plan, sizes[DATA], devices) if known else 0
    gathered, reduced = _communication(plan, splits, sizes, secondary, stages)
    gathered += _gathered_state(blue)
    return Description(
        plan=plan,
        num_devices=plan.pipe * sizes[DATA] * sizes[REPLICA] * math.prod(plan.further.values()),
        num_data=sizes[DATA],
        num_replica=sizes[REPLICA],
        num_elements=sum(math.prod(Kept.of(split).logical) for split in flat_splits(splits)),
        leaves=leaves,
        bytes_per_device=_fullest(plan, leaves, counted),
        parked_bytes={
            tier: _fullest(plan, leaves, counted, tier)
            for tier in sorted({leaf.tier for leaf in leaves} - {"device"})
        },
        reduction=_reduction(plan),
        secondary_bytes=_secondary_bytes(plan, splits, secondary, stages),
        elements_gathered=gathered,
        elements_reduced=reduced,
    )


def _fullest(
    plan: Plan, leaves: Sequence[LeafPlan], counted: Sequence[str], tier: str = "device"
) -> dict[str, int]:
    """Bytes of a tier for the device that has the most of them, by state class and in total."""
    held: list[Counter[str]] = [Counter() for _ in range(plan.pipe)]
    for leaf in leaves:
        for rank in (leaf.ranks or range(plan.pipe)) if leaf.tier == tier else ():
            held[rank].update(dict.fromkeys((leaf.state_class, "total"), leaf.bytes_per_device))
    return {name: max(by[name] for by in held) for name in (*counted, "total")}


def _planned(blue: Blueprint) -> Iterator[LeafPlan]:
    """Every leaf of a state: how it is split, and of which shape in which sharding."""
    shapes = blue.shapes()

    def row(name: str, path: str, to: Any, split: Split | None, home: Home | None) -> LeafPlan:
        sharded = split is not None and blue.plan.shards(name)
        why = "buffers stay whole" if split is None else split.reason
        dim = split.dim if split is not None and sharded else None
        if split is not None and split.dim is not None and not sharded:
            why = f"zero={blue.plan.zero} keeps {name} whole"
        kept = Kept.at(home, to.shape) if split is None else Kept.of(split, sharded)
        parking = blue.chunks.parked.get((name, path))
        return LeafPlan(
            name, path, kept.logical, str(to.dtype), dim,
            0 if dim is None or split is None else split.pad, why + _layers(home),
            leaf_bytes(to, to.sharding.shard_shape(to.shape)), () if home is None else home.ranks,
            DEVICE if parking is None else parking.tier,
            () if split is None else split.axes,
            () if dim is None or split is None else split.over,
            1 if dim is None or split is None else split.shards,
        )  # fmt: skip

    own = {name: getattr(blue, name) for name in OWNED}
    of_fields = {"params": blue.params, "compute": trained(blue.params), **own}
    for name, splits in of_fields.items():
        if shapes[name] is None:
            continue
        leaves = jax.tree.leaves(shapes[name])
        for split, to in zip(flat_splits(splits), leaves, strict=True):
            yield row(name, split.path, to, split, split.home)
    for path, to in named_leaves(shapes["buffers"]):
        yield row("buffers", path, to, None, blue.home_of(path.split("/")[0]))


def _layers(home: Home | None) -> str:
    """How many layers of a stack that is cut each rank has, in words."""
    if home is None or not home.rows:
        return ""
    count = np.sum(np.reshape(home.rows, (len(home.ranks), -1)) >= 0, axis=1).tolist()
    filled = f", filled up to {max(count)}" if len(set(count)) > 1 else ""
    return f"; layers per rank: {', '.join(map(str, count))}{filled}"


def _shown(leaves: Sequence[LeafPlan]) -> Sequence[LeafPlan | None]:
    """The leaves of a table; of a long one the first and the last."""
    return leaves if len(leaves) <= ROWS else [*leaves[: ROWS // 2], None, *leaves[-ROWS // 2 :]]


def _ranges(ranks: tuple[int, ...]) -> str:
    """Ranks in words: `0-3`, `0,2`."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _reduction(plan: Plan) -> str:
    if plan.reduce == "step":
        return f"one reduction per step, of {plan.microbatches} microbatches' whole local sums"
    if plan.microbatches == 1:
        return "one reduction per step (a step is one microbatch)"
    return f"one reduction per microbatch, {plan.microbatches} per step; only shards accumulate"


def _secondary_bytes(plan: Plan, splits: PyTree, secondary: int, stages: Stages | None) -> int:
    """Bytes of weights that a device keeps for a backward pass; of the stage with the most."""
    if not secondary:
        return 0
    links = [flat_splits(splits)] if stages is None else [
        [split for own in _by_owner(pieces, splits).values() for split in own]
        for pieces in stages.pieces
    ]  # fmt: skip
    return max(
        sum(
            math.prod(s.stored_shape) // s.ways * s.compute.itemsize // secondary
            for s in own_splits
            if s.dim is not None
        )
        for own_splits in links
    )


def _by_owner(pieces: tuple[Piece, ...], splits: PyTree) -> dict[bool, list[Split]]:
    """A stage's leaves: of its own links (`True`), or tied to those of others."""
    num_layers = {piece.layer.name: piece.num_layers for piece in pieces}
    parts: dict[bool, list[Split]] = {True: [], False: []}
    for split in flat_splits(stage_tree(pieces, splits)):
        name = split.path.split("/")[0]
        if split.stacked and name in num_layers:
            shape = (num_layers[name], *split.shape[1:])
            split = dataclasses.replace(split, shape=shape)
        parts[name in num_layers].append(split)
    return parts


def _communication(
    plan: Plan, splits: PyTree, sizes: dict[str, int], secondary: int, stages: Stages | None
) -> tuple[int, int]:
    """Elements that one device (gathers, reduces) per step, with ring collectives."""
    if stages is None:
        return _of_parts(plan, flat_splits(splits), sizes, secondary, 2)
    # A backward pass in halves gathers for both, where weight gradients read weights at all.
    halves = any(action.kind == "W" for action in stages.schedule.actions)
    ranks = [[0, 0] for _ in range(plan.pipe)]
    for stage, pieces in enumerate(stages.pieces):
        parts, passes = _by_owner(pieces, splits), 3 if halves else 2
        own, tied = (_of_parts(plan, parts[own], sizes, secondary, passes) for own in (True, False))
        rank = ranks[stages.rank_of(stage)]
        # Tied weights are gathered with their own link, or where they are read.
        rank[0] += own[0] + (tied[0] if plan.zero == 3 else 0)
        rank[1] += own[1] + tied[1]
    gathered, reduced = max(ranks, key=sum)
    return gathered, reduced


def _gathered_state(blue: Blueprint) -> int:
    """Elements that one device receives where stage 0 updates shards of what it keeps whole."""
    if not blue.updates_shards or blue.plan.shards("opt_state"):
        return 0
    # Of a master beside a compute copy, both are gathered.
    master = trained(blue.params) if blue.plan.mixed else None
    splits = [*flat_splits(blue.opt_state), *flat_splits(blue.ema), *flat_splits(master)]

    def of(rank: int) -> float:
        own = [s for s in splits if s.dim is not None and (not s.home or rank in s.home.ranks)]
        sizes = (math.prod(s.stored_shape) // (len(s.home.ranks) if s.home and s.home.rows else 1)
                 * (s.shards - 1) / s.shards for s in own)  # fmt: skip
        return sum(sizes)

    return round(max(of(rank) for rank in range(blue.plan.pipe)))


def _of_parts(
    plan: Plan, splits: list[Split], sizes: dict[str, int], secondary: int, passes: int
) -> tuple[int, int]:
    data, replica = sizes[DATA], sizes[REPLICA]
    # Stages 0 to 2 gather once a step, lazily or not; stage 3 for every pass of every microbatch,
    # and after the forward pass from the secondary group if there is one.
    gathered = 0.0
    for s in (s for s in splits if s.dim is not None):
        size, again = math.prod(s.stored_shape) // s.ways, secondary or s.shards
        gathered += size * (s.shards - 1) / s.shards
        if plan.zero == 3:
            gathered += (passes - 1) * size * (again - 1) / again
    gathered *= plan.microbatches if plan.zero == 3 else 1
    # A reduce-scatter within a group, then only the shard crosses groups. Leaves kept whole are
    # all-reduced: a reduce-scatter and an all-gather.
    learnt = [s for s in splits if not s.frozen]
    # (Over further axes XLA adds up: what is left there is a part of each leaf.)
    split = sum(
        math.prod(s.stored_shape) // (s.ways * s.shards // data)
        for s in learnt if s.dim is not None
    )  # fmt: skip
    whole = sum(math.prod(s.shape) // s.ways for s in learnt if s.dim is None)
    scattered = split * (data - 1) / data + 2 * (split / data) * (replica - 1) / replica
    everywhere = 2 * whole * ((data - 1) / data + (replica - 1) / replica)
    reductions = plan.microbatches if plan.reduce == "microbatch" else 1
    return round(gathered), round(reductions * (scattered + everywhere))


def table(rows: Sequence[Sequence[str]], right: tuple[int, ...] = ()) -> str:
    """Aligned columns under a ruled header."""
    widths = [max(len(row[col]) for row in rows) for col in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.rjust(width) if col in right else text.ljust(width)
            for col, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * width for width in widths]), *map(line, rows[1:])])
