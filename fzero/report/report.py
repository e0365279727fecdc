"""The one report of where a state's leaves are, or will be; all that is printed is read off it.

Its rows come from a state, or from a plan carried out for a model (a `Blueprint`): shapes with
shardings in both cases.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from fzero.model import Model
from fzero.plan import Plan
from fzero.sharding.blueprint import Blueprint, planned, require_in_order
from fzero.sharding.buckets import OWNED
from fzero.sharding.relayout import Kept
from fzero.sharding.split import Home, flat_splits
from fzero.state.train_state import TrainState
from fzero.storage.tiers import DEVICE, DISK, on_device, tier_of
from fzero.summary import axes_in_words
from fzero.tree import leaf_bytes, named_leaves


CLASSES = ("params", "compute", "opt_state", "ema", "buffers", "grads")


@dataclass(frozen=True)
class LeafReport:
    """One leaf between steps.

    Args:
        state_class: `params`, `compute`, `opt_state`, `ema`, `buffers` or `grads`.
        path: path in its tree.
        shape: logical shape; of a leaf of a state, which does not know its padding, as stored.
        dtype: dtype it is kept in.
        spec: the mesh axes that each dim lies along, in words.
        tier: where it is kept: `device`, `host` or `disk`.
        bytes_per_device: bytes of its largest shard.
        bytes_in_all: bytes of all shards, copies counted; on disk there are none.
        devices: ids of the devices that it belongs to; in a pipeline not all of them. Of a plan,
            their positions.
        dim: by a plan, the dim that is split, as `over` says; `None` for a leaf kept whole.
        pad_rows: by a plan, rows of zeros at the end of `dim`, so that it divides.
        why: by a plan, the reason, in words.
        ranks: by a plan for a pipeline, the ranks that hold it; of a stack that is cut, each holds
            its own layers, and zeros where others have more.
        axes: by a plan, the further mesh axis that each dim lies along, as far as there are any.
        over: by a plan, the mesh axes that `dim` is split over, if it is.
        shards: by a plan, devices along them.
    """

    state_class: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    tier: str
    bytes_per_device: int
    bytes_in_all: int
    devices: tuple[int, ...]
    dim: int | None = None
    pad_rows: int = 0
    why: str = ""
    ranks: tuple[int, ...] = ()
    axes: tuple[str | None, ...] = ()
    over: tuple[str, ...] = ()
    shards: int = 1


@dataclass(frozen=True)
class Report:
    """Where every leaf of a state is, and what that adds up to.

    Sums have the state classes and `total` as keys. What is parked counts for the device that it
    will return to.

    Args:
        leaves: a row for every leaf.
    """

    leaves: tuple[LeafReport, ...]

    @staticmethod
    def of_state(state: TrainState) -> Report:
        """Of the leaves that a state has, arrays or shapes."""
        leaves = ((n, path, x) for n in CLASSES for path, x in named_leaves(getattr(state, n)))
        return Report(tuple(_placed(name, path, leaf) for name, path, leaf in leaves))

    @staticmethod
    def of_plan(blue: Blueprint) -> Report:
        """Of the leaves that a plan will keep, whether or not there are such devices."""
        return Report(tuple(_planned(blue)))

    def by_device(self, tier: str) -> dict[int, Counter[str]]:
        """Bytes that each device has in a tier."""
        alike: dict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
        for leaf in self.leaves:
            if leaf.tier == tier:
                size = leaf.bytes_per_device
                alike[leaf.devices].update({leaf.state_class: size, "total": size})
        held: dict[int, Counter[str]] = defaultdict(Counter)
        for devices, sizes in alike.items():
            for device in devices:
                held[device].update(sizes)
        return held

    def fullest(self, tier: str, among: Collection[int] | None = None) -> dict[str, int]:
        """Bytes in a tier of the device that has the most of them, class by class.

        Args:
            tier: the tier.
            among: devices to look at; all by default.
        """
        held = [by for at, by in self.by_device(tier).items() if among is None or at in among]
        return {n: max((by[n] for by in held), default=0) for n in (*CLASSES, "total")}

    def in_all(self, tier: str) -> dict[str, int]:
        """Bytes in a tier, of all devices."""
        sizes: Counter[str] = Counter()
        for leaf in self.leaves:
            if leaf.tier == tier:
                sizes.update({leaf.state_class: leaf.bytes_in_all, "total": leaf.bytes_in_all})
        return {name: sizes[name] for name in (*CLASSES, "total")}


def planned_on(
    plan: Plan,
    model: Model,
    tx: optax.GradientTransformation | None,
    devices: Sequence[Any] | None,
    num_devices: int | None,
) -> Blueprint:
    """The layout of a model on some devices, or on as many that need not exist.

    By default there are as many as the plan names, or else as many as there are.
    """
    require_in_order(model, plan, "the plan, the model and its optimizer")
    if num_devices is None and devices is not None:
        num_devices = len(devices)
    if num_devices is None and plan.data:
        num_devices = math.prod((plan.pipe, plan.data, plan.replica, *plan.further.values()))
    return planned(model, tx, plan, plan.sizes(num_devices or len(jax.devices())))


def _row(
    name: str, path: str, leaf: Any, tier: str, devices: tuple[int, ...], **planned: Any
) -> LeafReport:
    """A leaf's row, read off its sharding."""
    stored = tuple(leaf.shape)
    shard = leaf.sharding.shard_shape(stored)
    size = leaf_bytes(leaf, shard)
    num_shards = math.prod(-(-n // max(own, 1)) for n, own in zip(stored, shard, strict=True))
    copies = num_shards if tier == DISK else len(devices)
    row: dict[str, Any] = {
        "shape": stored, "dtype": str(leaf.dtype), "spec": axes_in_words(leaf.sharding),
        "bytes_per_device": size, "bytes_in_all": size * copies,
    }  # fmt: skip
    return LeafReport(name, path, tier=tier, devices=devices, **row | planned)


def _placed(name: str, path: str, leaf: Any) -> LeafReport:
    devices = {device.id for device in on_device(leaf.sharding).device_set}
    return _row(name, path, leaf, tier_of(leaf), tuple(sorted(devices)))


def _planned(blue: Blueprint) -> Iterator[LeafReport]:
    """Every leaf of a state: how it is split and why, and of which shape in which sharding."""
    shapes, plan = blue.shapes(), blue.plan
    per_rank = blue.mesh.size // plan.pipe

    @functools.cache
    def devices_of(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank * per_rank + i for rank in ranks for i in range(per_rank))

    def row(
        name: str, path: str, to: Any, kept: Kept, home: Home | None, **more: Any
    ) -> LeafReport:
        parking = blue.buckets.parked.get((name, path))
        ranks = () if home is None else home.ranks
        more["why"] += _layers(home)
        return _row(
            name, path, to, DEVICE if parking is None else parking.tier,
            devices_of(ranks or range(plan.pipe)), shape=kept.logical, ranks=ranks, **more,
        )  # fmt: skip

    for name in ("params", "compute", *OWNED):
        if shapes[name] is None:
            continue
        sharded, each = plan.shards(name), map(jax.tree.leaves, (shapes[name], blue.kept(name)))
        for split, to, kept in zip(flat_splits(blue.splits(name)), *each, strict=True):
            more: dict[str, Any] = {"axes": split.axes, "why": split.reason}
            if sharded and split.dim is not None:
                more |= {"dim": split.dim, "pad_rows": split.pad}
                more |= {"over": split.over, "shards": split.shards}
            elif split.dim is not None:
                more["why"] = f"zero={plan.zero} keeps {name} whole"
            yield row(name, split.path, to, kept, split.home, **more)
    for (path, to), kept in zip(
        named_leaves(shapes["buffers"]), jax.tree.leaves(blue.kept("buffers")), strict=True
    ):
        home = blue.home_of(path.split("/")[0])
        yield row("buffers", path, to, kept, home, why="buffers stay whole")


def _layers(home: Home | None) -> str:
    """How many layers of a stack that is cut each rank has, in words."""
    if home is None or not home.rows:
        return ""
    count = np.sum(np.reshape(home.rows, (len(home.ranks), -1)) >= 0, axis=1).tolist()
    filled = f", filled up to {max(count)}" if len(set(count)) > 1 else ""
    return f"; layers per rank: {', '.join(map(str, count))}{filled}"


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
