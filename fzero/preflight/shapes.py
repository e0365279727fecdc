"""What a step holds and multiplies, from shapes: saved activations, gradients, model FLOPs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fzero.axes import DATA, TOKENS
from fzero.batch import Inputs, batch_sharding
from fzero.compat import abstract_mesh, is_traced_on_host
from fzero.model import Model
from fzero.pieces import whole_chain
from fzero.plan import Plan
from fzero.programs.flops import flops
from fzero.sharding.group import Group
from fzero.sharding.initial import initial_shapes
from fzero.sharding.split import split_params
from fzero.step.passes import OneProgram, kept_by
from fzero.tree import PyTree, leaf_bytes
from fzero.zero.chain import train_forward
from fzero.zero.grads import first_saved, keeping_rules
from fzero.zero.keeping import saved_bytes
from fzero.zero.layer import End
from fzero.zero.rules import Rules
from fzero.zero.weights import FetchedWeights


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
        times: how many equal parts of the batch see the model, one after the other or side by side.
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


@dataclass(frozen=True)
class SavedBytes:
    """What one device's forward pass of one microbatch leaves for its backward pass.

    Args:
        activations: of activations.
        secondary: of parts of weights (`Plan.secondary`).
        on_host: of the activations, those in host memory (`remat="offload"`).
    """

    activations: int
    secondary: int
    on_host: int


def saved_in_a_step(passes: OneProgram, fields: dict[str, Any], batch: PyTree) -> SavedBytes:
    """Bytes that one device's forward pass of one microbatch leaves for its backward pass.

    Args:
        passes: those of a step that is one program, without a pipeline.
        fields: shapes of the state's fields.
        batch: shapes of the global batch.
    """
    blue = passes.blueprint
    found: list[SavedBytes] = []

    def local(kept: PyTree, buffers: PyTree, batch: Inputs, key: jax.Array) -> tuple[()]:
        args = kept, buffers, batch, key
        rules = keeping_rules(blue.model, passes.rules(), *args)
        saved = first_saved(blue.model, rules, *args)
        further = blue.plan.further
        away = sum(leaf_bytes(x) for x in jax.tree.leaves(saved) if is_traced_on_host(x))
        divided = math.prod(further.get(axis, 1) for axis in TOKENS)
        found.append(SavedBytes(*saved_bytes(saved, further), away // divided))
        return ()

    run = passes.on_devices(local, ())
    jax.eval_shape(run, kept_by(blue, fields), fields["buffers"], Inputs.of(batch), fields["rng"])
    return found[-1]


def batch_bytes(batch: PyTree, mesh: Any) -> int:
    """Bytes of one device's rows, and of what is shared."""
    inputs = Inputs.of(batch)
    rows = sum(
        leaf_bytes(x, batch_sharding(mesh, x.shape).shard_shape(x.shape))
        for x in jax.tree.leaves(inputs.rows)
    )
    return rows + sum(leaf_bytes(x) for x in jax.tree.leaves(inputs.shared))
