"""What one device sends and receives in a step, by the plan: elements of weights and gradients."""

from __future__ import annotations

import dataclasses

from fzero.axes import DATA, REPLICA
from fzero.pieces import Piece
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.homes import stage_tree
from fzero.sharding.split import Split, flat_splits, trained
from fzero.tree import PyTree


def secondary_bytes(blue: Blueprint, secondary: int) -> int:
    """Bytes of weights that a device keeps for a backward pass; of the stage with the most.

    Args:
        blue: the layout.
        secondary: devices of a secondary group; 0 where there is none.
    """
    if not secondary:
        return 0
    stages = [flat_splits(blue.params)] if blue.stages is None else [
        [split for own in _by_owner(pieces, blue.params).values() for split in own]
        for pieces in blue.stages.pieces
    ]  # fmt: skip
    return max(
        sum(s.num_bytes(s.compute) // secondary for s in splits if s.dim is not None)
        for splits in stages
    )


def communication(blue: Blueprint, secondary: int) -> tuple[int, int]:
    """Elements that one device (receives, sends reduced) per step, with ring collectives.

    Args:
        blue: the layout.
        secondary: devices of a secondary group; 0 where there is none.
    """
    plan, splits, stages = blue.plan, blue.params, blue.stages
    if stages is None:
        gathered, reduced = _elements(blue, flat_splits(splits), secondary, 2)
        return gathered + _gathered_state(blue), reduced
    # A backward pass in halves gathers for both, where weight gradients read weights at all.
    halves = any(action.kind == "W" for action in stages.schedule.actions)
    ranks = [[0, 0] for _ in range(plan.pipe)]
    for stage, pieces in enumerate(stages.pieces):
        leaves, passes = _by_owner(pieces, splits), 3 if halves else 2
        own, tied = (_elements(blue, leaves[own], secondary, passes) for own in (True, False))
        rank = ranks[stages.rank_of(stage)]
        # Tied weights are gathered with their own link, or where they are read.
        rank[0] += own[0] + (tied[0] if plan.zero == 3 else 0)
        rank[1] += own[1] + tied[1]
    gathered, reduced = max(ranks, key=sum)
    return gathered + _gathered_state(blue), reduced


def _by_owner(pieces: tuple[Piece, ...], splits: PyTree) -> dict[bool, list[Split]]:
    """A stage's leaves: of its own links (`True`), or tied to those of others."""
    num_layers = {piece.layer.name: piece.num_layers for piece in pieces}
    leaves: dict[bool, list[Split]] = {True: [], False: []}
    for split in flat_splits(stage_tree(pieces, splits)):
        name = split.path.split("/")[0]
        if split.stacked and name in num_layers:
            shape = (num_layers[name], *split.shape[1:])
            split = dataclasses.replace(split, shape=shape)
        leaves[name in num_layers].append(split)
    return leaves


def _gathered_state(blue: Blueprint) -> int:
    """Elements that one device receives where stage 0 updates shards of what it keeps whole."""
    if not blue.updates_shards or blue.plan.shards("opt_state"):
        return 0
    # Of a master beside a compute copy, both are gathered.
    master = trained(blue.params) if blue.plan.mixed else None
    splits = [*flat_splits(blue.opt_state), *flat_splits(blue.ema), *flat_splits(master)]

    def of(rank: int) -> float:
        own = [s for s in splits if s.dim is not None and (not s.home or rank in s.home.ranks)]
        return sum(s.elements() // s.ranks_sharing * (s.shards - 1) / s.shards for s in own)

    return round(max(of(rank) for rank in range(blue.plan.pipe)))


def _elements(blue: Blueprint, splits: list[Split], secondary: int, passes: int) -> tuple[int, int]:
    plan, sizes = blue.plan, dict(blue.mesh.shape)
    data, replica = sizes[DATA], sizes[REPLICA]
    # Stages 0 to 2 gather once a step, lazily or not; stage 3 for every pass of every microbatch,
    # and after the forward pass from the secondary group if there is one.
    gathered = 0.0
    for s in (s for s in splits if s.dim is not None):
        size, again = s.elements(), secondary or s.shards
        gathered += size * (s.shards - 1) / s.shards
        if plan.zero == 3:
            gathered += (passes - 1) * size * (again - 1) / again
    gathered *= plan.microbatches if plan.zero == 3 else 1
    # A reduce-scatter within a group, then only the shard crosses groups. Leaves kept whole are
    # all-reduced: a reduce-scatter and an all-gather.
    learnt = [s for s in splits if not s.frozen]
    # (Over further axes XLA adds up: what is left there is a part of each leaf.)
    split = sum(s.elements() // (s.shards // data) for s in learnt if s.dim is not None)
    whole = sum(s.elements() for s in learnt if s.dim is None)
    scattered = split * (data - 1) / data + 2 * (split / data) * (replica - 1) / replica
    everywhere = 2 * whole * ((data - 1) / data + (replica - 1) / replica)
    reductions = plan.microbatches if plan.reduce == "microbatch" else 1
    return round(gathered), round(reductions * (scattered + everywhere))
