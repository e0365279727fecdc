"""Static offload: which leaves a plan parks, and in what buckets they visit the device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fzero.plan import Plan
from fzero.sharding.split import Split, flat_splits
from fzero.storage.tiers import DEVICE, cut_of, largest
from fzero.tree import PyTree, device_bytes, is_plain, named_leaves


# The fields of a state that only updates read, each leaf of which belongs to a parameter (or none).
OWNED = ("opt_state", "ema")
# The fields of a state that may be parked by a plan.
FIELDS = ("params", *OWNED)


@dataclass(frozen=True)
class Parking:
    """How one leaf is kept between steps.

    Args:
        tier: its tier.
        cut: the dim and the number of equal slabs, for a leaf that is larger than a bucket. (But
            parameters that a forward pass reads are whole, and visit an update whole.)
        name: the leaf's field and path, for messages.
    """

    tier: str
    cut: tuple[int, int] | None = None
    name: str = ""


@dataclass(frozen=True)
class Buckets:
    """What a plan parks.

    Args:
        parked: by field and path, how a leaf is kept; leaves on the device are not there.
        labels: for every parameter, the bucket that it is updated in; empty for those that nothing
            is parked of.
        cuts: for parameters updated slab by slab, how they are cut.
    """

    parked: Mapping[tuple[str, str], Parking]
    labels: Mapping[str, str]
    cuts: Mapping[str, tuple[int, int]]


def plan_buckets(
    plan: Plan, splits: PyTree, owned: Mapping[str, PyTree], shapes: Mapping[str, PyTree]
) -> Buckets:
    """Divides what a plan parks into buckets of at most `plan.stream_bytes` per device.

    Args:
        plan: the plan.
        splits: a `Split` for every parameter.
        owned: the same for each of `OWNED`.
        shapes: shapes and shardings of the state's fields, as if on the device.
    """
    params = dict(named_leaves(shapes["params"]))
    by_path = {split.path: split for split in flat_splits(splits)}
    owners = {
        (field, split.path): split.owner
        for field, leaves in owned.items() for split in flat_splits(leaves)
    }  # fmt: skip
    sizes = dict.fromkeys(by_path, 0)
    found: list[tuple[str, str, str, Any]] = []  # field, path, owner, leaf
    for field in FIELDS:
        tier, share = plan.tier(field)
        if tier == DEVICE:
            continue
        # Scalars, such as counters, are needed by every bucket.
        leaves = {p: x for p, x in named_leaves(shapes[field]) if is_plain(x) and x.ndim}
        if field == "params" and plan.keeps_compute_copy:  # only what has such a copy is a master
            leaves = {path: leaf for path, leaf in leaves.items() if not by_path[path].frozen}
        bytes_of = {path: device_bytes(leaf) for path, leaf in leaves.items()}
        for path in largest(bytes_of, share):
            owner = path if field == "params" else owners[field, path]
            if owner is not None:
                found.append((field, path, owner, leaves[path]))
                # No update sees what is frozen.
                sizes[owner] += 0 if by_path[owner].frozen else bytes_of[path]
    if plan.update_on == "host":  # nothing visits
        sizes = dict.fromkeys(sizes, 0)
    # No parameter is cut along a dim that it is divided along, or that something of its own is: a
    # number for each layer of a stack may be, where the stack's matrices are divided by columns.
    divided = {path: _split_dims(split) for path, split in by_path.items()}
    for field, leaves in owned.items():
        for split in flat_splits(leaves):
            owner = owners[field, split.path]
            if owner is not None and len(split.shape) == len(by_path[owner].shape):
                divided[owner] |= _split_dims(split)
    labels, cuts = _packed(plan.stream_bytes, sizes, by_path, divided)
    # Forward passes read parameters from the host as they are: as single arrays.
    whole = () if plan.keeps_compute_copy else ("params",)
    parked = {
        (field, path): Parking(
            plan.tier(field)[0],
            None
            if field in whole or owner not in cuts
            else same_cut(cuts[owner], params[owner], leaf),
            f"{field}/{path}",
        )
        for field, path, owner, leaf in found
    }
    return Buckets(parked, labels, cuts)


def _packed(
    limit: int,
    sizes: Mapping[str, int],
    splits: Mapping[str, Split],
    divided: Mapping[str, Collection[int]],
) -> tuple[dict[str, str], dict[str, tuple[int, int]]]:
    labels: dict[str, str] = {}
    cuts: dict[str, tuple[int, int]] = {}
    number, room = 0, 0
    for path, size in sizes.items():
        labels[path] = ""
        if not size:
            continue
        if size > room:
            number, room = number + 1, limit
        labels[path] = f"bucket {number}"
        room -= size
        if size > limit:
            cut = cut_of(splits[path].shape, -(-size // limit), divided[path])
            if cut is not None:
                cuts[path] = cut
    return labels, cuts


def _split_dims(split: Split) -> set[int]:
    dims = {dim for dim, axis in enumerate(split.axes) if axis is not None}
    dims |= set() if split.dim is None else {split.dim}
    return dims | ({0} if split.home is not None and split.home.rows else set())


def same_cut(cut: tuple[int, int], owner: Any, leaf: Any) -> tuple[int, int] | None:
    """The cut of a parameter, for a leaf that belongs to it, if it has as many rows.

    Args:
        cut: a dim, and the number of slabs.
        owner: the parameter's shape.
        leaf: the leaf's shape.
    """
    dim, _ = cut
    alike = leaf.ndim == len(owner.shape) and leaf.shape[dim] == owner.shape[dim]
    return cut if alike else None
