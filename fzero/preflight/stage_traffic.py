"""What a pipeline sends outside of its stages' programs, by the plan's arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from fzero.axes import shared_over
from fzero.preflight.network import CollectiveUse, Network
from fzero.preflight.program import Target
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.split import flat_splits


Groups = Sequence[tuple[int, ...]]


def handed(
    target: Target, here: Mesh, there: Mesh, size: int, *, where: str, hidden: float = math.inf
) -> CollectiveUse:
    """What each device of a rank sends to its counterpart on another rank, once.

    Args:
        target: what is compiled for.
        here: the sender's devices.
        there: the receiver's.
        size: bytes per device.
        where: what it is, for tables.
        hidden: seconds that nobody waits for it; the default where a timeline has its costs.
    """
    pairs = [(i, here.size + i) for i in range(here.size)]
    links = target.network(here, there)
    made = _outside(links, "collective-permute", pairs, size, size, hidden)
    return dataclasses.replace(made, kind="send", where=where, axes="pipe")


def update_gathers(target: Target, blue: Blueprint, rank: int) -> list[CollectiveUse]:
    """What a pipeline's update gathers on a rank: whole parameters from updated shards."""
    plan, mesh = blue.plan, blue.rank_mesh(rank)
    if plan.zero == 3 or blue.group.shards == 1:
        return []
    sizes: Counter[tuple[str, ...]] = Counter()
    for split in flat_splits(blue.params):
        if split.dim is not None and split.home is not None and rank in split.home.ranks:
            dtype = split.compute if plan.keeps_compute_copy else split.dtype
            sizes[split.over] += split.num_bytes(dtype) // split.ranks_sharing
    found = []
    for over, size in sizes.items():
        groups = _along(mesh, over)
        sent = size * (1 - 1 / len(groups[0]))
        made = _outside(target.network(mesh), "all-gather", groups, size, sent, hidden=0.0)
        axes = [name for name, n in shared_over(blue.zero_sizes).items() if n > 1 and name in over]
        found.append(dataclasses.replace(made, where="update", axes="+".join(axes)))
    return found


def _along(mesh: Mesh, axes: Sequence[str]) -> list[tuple[int, ...]]:
    """The groups of a mesh's devices, by number, that lie along some of its axes."""
    at = [mesh.axis_names.index(name) for name in axes]
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    last = np.moveaxis(numbers, at, range(-len(at), 0))
    size = math.prod(mesh.shape[name] for name in axes)
    return [tuple(group) for group in last.reshape(-1, size).tolist()]


def _outside(
    links: Network, kind: str, groups: Groups, size: int, sent: float, hidden: float
) -> CollectiveUse:
    crosses, carried, seconds = links.of(kind, groups, sent)
    return CollectiveUse(
        kind=kind, where="", dtype="", axes="", bytes=size, sent_bytes=sent, times=1,
        in_loop=False, crosses_hosts=crosses, network_bytes=carried, num_matmuls=0, num_kernels=0,
        seconds=seconds, exposed_best_seconds=max(0.0, seconds - hidden),
        exposed_seconds=max(0.0, seconds / links.rates.link_share - hidden), estimated=True,
    )  # fmt: skip
