"""What a step holds and multiplies, from shapes: saved activations, gradients, model FLOPs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fzero.axes import AXES, CONTEXT, DATA, EXPERT, manual_axes
from fzero.batch import Inputs, batch_sharding
from fzero.compat import abstract_mesh
from fzero.model import Model
from fzero.pieces import whole_chain
from fzero.plan import Plan
from fzero.programs.flops import flops
from fzero.sharding.blueprint import Blueprint
from fzero.sharding.group import Group
from fzero.sharding.initial import initial_shapes
from fzero.sharding.split import flat_splits, split_params, trained
from fzero.step.passes import OneProgram, kept_by
from fzero.tree import PyTree, leaf_bytes
from fzero.zero.chain import secondary_shards, train_forward, without_inputs
from fzero.zero.fetched import FetchedWeights
from fzero.zero.layer import End
from fzero.zero.rules import Rules


# Further axes that share out tokens; along others what is saved lies as XLA decides.
TOKENS = (CONTEXT, EXPERT)
# A backward pass multiplies twice for each product of the forward pass: once for the gradient of
# either factor.
PASSES = 3


def model_flops(model: Model, plan: Plan, batch: PyTree, times: int) -> int:
    """FLOPs of the matmuls of one step of a model, whatever runs it: nothing is computed twice.

    Its forward pass is traced as a step runs it, in the plan's compute dtype: there are kernels
    that take no other.

    Args:
        model: the model.
        plan: the plan.
        batch: shapes of the global batch.
        times: how many equal parts of the batch see the model, one after the other or apart.
    """
    params, buffers = initial_shapes(model)
    alone = plan.replace(pipe=1, schedule=None, partition="uniform")
    rules = Rules(alone, split_params(model, params, alone, {DATA: 1}), Group(1, 1), False, False)
    inputs = Inputs.of(batch).map_rows(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // times, *x.shape[1:]), x.dtype)
    )
    one = inputs.at(jax.ShapeDtypeStruct((), np.int32))

    def forward(params: PyTree, buffers: PyTree, batch: PyTree, key: jax.Array) -> Any:
        pieces = whole_chain(model.layers)
        end, _, _ = train_forward(pieces, FetchedWeights(rules, params), batch, buffers, batch, key)
        assert isinstance(end, End)
        return end.mean

    key = jax.eval_shape(lambda: jax.random.key(0))
    # Constraints of the model's own name the plan's axes; nothing is divided here.
    mesh = abstract_mesh(dict.fromkeys(plan.further, 1))
    with jax.sharding.use_abstract_mesh(mesh) if plan.further else nullcontext():
        traced = jax.make_jaxpr(forward)(params, buffers, one, key)
    return PASSES * times * flops(traced)


def saved_bytes(passes: OneProgram, fields: dict[str, Any], batch: PyTree) -> tuple[int, int]:
    """Bytes that one device's forward pass of one microbatch leaves for its backward pass.

    Along `context` and `expert` activations count as divided, along `tensor` as whole: there it is
    XLA that decides.

    Returns:
        Of activations, and of parts of weights (`Plan.secondary`).

    Args:
        passes: those of a step that is one program, without a pipeline.
        fields: shapes of the state's fields.
        batch: shapes of the global batch.
    """
    blue, plan = passes.blueprint, passes.plan
    found: list[tuple[int, int]] = []

    def local(kept: PyTree, buffers: PyTree, batch: Inputs, key: jax.Array) -> tuple[()]:
        rows = batch.map_rows(lambda x: x[: x.shape[0] // plan.microbatches])
        pieces = whole_chain(blue.model.layers)
        fetched = FetchedWeights(passes.rules(), kept)
        _, saved, _ = train_forward(pieces, fetched, rows, buffers, rows, key)
        held = {id(leaf): leaf for leaf in jax.tree.leaves(without_inputs(saved))}
        secondary = sum(map(leaf_bytes, secondary_shards(saved)))
        found.append((sum(map(leaf_bytes, held.values())) - secondary, secondary))
        return ()

    whole = PartitionSpec()
    run = jax.shard_map(
        local,
        mesh=blue.mesh,
        in_specs=(passes.kept_specs(), whole, Inputs.specs(PartitionSpec(AXES), whole), whole),
        out_specs=(),
        axis_names=manual_axes(blue.mesh),
        check_vma=False,
    )
    jax.eval_shape(run, kept_by(blue, fields), fields["buffers"], Inputs.of(batch), fields["rng"])
    activations, secondary = found[-1]
    ways = math.prod(plan.further.get(axis, 1) for axis in TOKENS)
    return activations // ways, secondary


def gradient_bytes(blue: Blueprint, plan: Plan) -> int:
    """Bytes of one device's summed gradients during a step: shards, wherever leaves are split."""
    sums = 0
    wide = plan.microbatches > 1 or plan.reduce_dtype == "fp32"
    for split in flat_splits(trained(blue.params)):
        dtype = np.dtype(np.float32) if wide else split.compute
        sharded = plan.reduce == "microbatch"
        sums += split.num_bytes(dtype, padded=sharded) // (split.shards if sharded else 1)
    return sums


def held_bytes(blue: Blueprint, plan: Plan) -> int:
    """Bytes of the parameters that a step gathers once and holds, in the compute dtype."""
    return sum(
        split.num_bytes(split.compute, padded=False)
        for split in flat_splits(blue.params)
        if split.dim is not None
    )


def batch_bytes(batch: PyTree, mesh: Any) -> int:
    """Bytes of one device's rows, and of what is shared."""
    inputs = Inputs.of(batch)
    rows = sum(
        leaf_bytes(x, batch_sharding(mesh, x.shape).shard_shape(x.shape))
        for x in jax.tree.leaves(inputs.rows)
    )
    return rows + sum(leaf_bytes(x) for x in jax.tree.leaves(inputs.shared))
