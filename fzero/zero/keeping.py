"""What forward passes keep for backward passes where the plan leaves that open (`remat=None`).

The most that memory has room for, by shapes: everything; the results of products; each layer's
input. What is kept is not computed again. Where nobody says how much memory there is, as on CPUs,
it is each layer's input, which is as fast there (`benchmarks/cpu.py`) and takes the least.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fzero.axes import TOKENS
from fzero.policies import policy_name
from fzero.schedule.liveness import slots
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.split import flat_splits, stored_shapes, trained
from fzero.tree import device_bytes, leaf_bytes
from fzero.zero.chain import Saved, secondary_shards, without_inputs
from fzero.zero.options import largest_layer_bytes
from fzero.zero.rules import Rules


# From the fastest to the smallest; of layers outside of stacks `dots` keeps less than `layer`.
CHOICES = ("none", "dots", "layer")
# Of the memory: what kernels take besides is not known from shapes. (Of a Llama 8B on H100s, by
# preflight, 0.3 to 2.8 GiB more than is counted here.)
SHARE = 0.9
# Layers that are gathered at once, with one whole gradient.
GATHERED = 3


def saved_bytes(saved: Saved, further: dict[str, int]) -> tuple[int, int]:
    """Bytes that one device's forward pass of one microbatch leaves for its backward pass.

    Along `context` and `expert` activations count as divided, along `tensor` as whole: there it is
    XLA that decides.

    Args:
        saved: what a traced forward pass leaves.
        further: sizes of the further axes.

    Returns:
        Of activations, and of parts of weights (`Plan.secondary`).
    """
    held = {id(leaf): leaf for leaf in jax.tree.leaves(without_inputs(saved))}
    secondary = sum(map(leaf_bytes, secondary_shards(saved)))
    activations = sum(map(leaf_bytes, held.values())) - secondary
    return activations // math.prod(further.get(axis, 1) for axis in TOKENS), secondary


def with_remat(rules: Rules, forward: Callable[[Rules], Saved]) -> Rules:
    """Rules whose plan says what is kept.

    Args:
        rules: of the pass; `rules.room` says how many bytes that may take.
        forward: what a forward pass under some rules leaves. It is traced for each choice that is
            looked at.
    """
    if rules.plan.remat is not None or rules.room is None:
        return rules
    sizes: list[tuple[int, Rules]] = []
    for remat in CHOICES:
        tried = dataclasses.replace(rules, plan=rules.plan.replace(remat=remat))

        def leave(tried: Rules = tried) -> tuple[()]:
            sizes.append((sum(saved_bytes(forward(tried), dict(tried.group.further))), tried))
            return ()

        jax.eval_shape(leave)
        if sizes[-1][0] <= rules.room:
            return tried
    return min(sizes, key=lambda one: one[0])[1]


def keeps(rules: Rules) -> str:
    """What forward passes under some rules keep, in the plan's words."""
    remat = rules.plan.remat
    return policy_name(remat) if callable(remat) else remat or CHOICES[-1]


def room_for(blue: Blueprint, rank: int | None = None) -> int | None:
    """Bytes that what one microbatch's forward pass leaves may take of a device.

    That is a share of its memory, less what is kept between steps, gradients, what a lazy gather
    holds and what is gathered at once; in a pipeline, for each of a rank's slots.

    Args:
        blue: the blueprint.
        rank: of a pipeline.
    """
    if blue.plan.remat is not None or blue.memory is None:
        return None
    plan, mesh = blue.plan, blue.mesh if rank is None else blue.rank_mesh(rank)
    here = set(mesh.devices.flat)
    state = [x for name, x in blue.shapes().items() if not blue.parks(name)]
    kept = [x for x in jax.tree.leaves(state) if not here.isdisjoint(x.sharding.device_set)]
    spoken_for = sum(map(device_bytes, kept)) + gradient_bytes(blue, here)
    spoken_for += GATHERED * largest_layer_bytes(blue.params)
    spoken_for += held_bytes(blue) if plan.gather == "lazy" else 0
    room = max(0, int(SHARE * blue.memory) - spoken_for)
    if blue.stages is None:
        return room
    each = slots(blue.stages.schedule).per_stage
    own = [n for stage, n in enumerate(each) if blue.stages.rank_of(stage) == rank]
    return room // max(1, sum(own))


def gradient_bytes(blue: Blueprint, here: set[Any] | None = None) -> int:
    """Bytes of one device's summed gradients during a step: shards, or with `reduce="step"` all.

    Args:
        blue: the blueprint.
        here: devices of one rank of a pipeline; all by default.
    """
    plan = blue.plan
    wide = plan.microbatches > 1 or plan.reduce_dtype == "fp32"
    sums = stored_shapes(
        trained(blue.params), blue.sharding, plan.reduce == "microbatch",
        lambda split: np.dtype(np.float32) if wide else split.compute,
    )  # fmt: skip
    leaves = jax.tree.leaves(sums)
    if here is not None:
        leaves = [x for x in leaves if not here.isdisjoint(x.sharding.device_set)]
    return sum(map(device_bytes, leaves))


def held_bytes(blue: Blueprint) -> int:
    """Bytes of the parameters that a step gathers once and holds, in the compute dtype."""
    return sum(
        split.num_bytes(split.compute, padded=False)
        for split in flat_splits(blue.params)
        if split.dim is not None
    )
