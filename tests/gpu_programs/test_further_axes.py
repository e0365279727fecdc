"""Layers and sequences divided over H200s: what is kept and sent, and whose kernels attend."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import fzero as fz
from fzero.compat import auto_mesh
from fzero.exchange import cudnn
from fzero.preflight.hlo.counts import Module
from fzero.preflight.kernels import Kernels
from fzero.preflight.network import Network, uses
from fzero.preflight.rates import default_rates
from fzero.preflight.topology import parse
from tests.gpu_programs.conftest import TX, case
from tests.support.large import LLAMA_8B, abstract_batch, llama, num_params
from tests.support.sample import some


LAYERS = 4
TENSOR = {
    "one host": case("llama", "h200:8", LAYERS, zero=3, data=4, tensor=2, remat="none"),
    "eight hosts": case("llama", "h200:8x8", LAYERS, zero=3, data=8, tensor=8, remat="none"),
}


@pytest.mark.parametrize("name", some(TENSOR, "eight hosts"))
def test_a_divided_layer_is_added_up_twice_a_pass_and_zero_sends_its_part(name, compiled):
    found, size = compiled(TENSOR[name]), TENSOR[name].size
    plan = found.plan
    elements = num_params(size)
    # Master and two moments; norms alone are whole.
    assert found.memory.state_total == pytest.approx(
        12 * elements / (plan.data * plan.tensor), rel=0.01
    )
    assert set(found.by_axes) == {"data", "tensor", "data+tensor"}
    whole = size.seq * size.d * 2
    sums = [c for c in found.collectives if c.axes == "tensor" and c.bytes > 2**20]
    assert {(c.kind, c.bytes) for c in sums} <= {("all-reduce", whole), ("all-gather", whole)}
    # Two for each layer and pass; the embedding's rows forward, and the head's input backward.
    assert sum(c.times for c in sums) == 4 * LAYERS + 2
    # What ZeRO sends is its own without the axis, divided: but for the table, as in stage 3.
    sent = found.by_axes["data"].communicated_bytes / 2 * plan.data / (plan.data - 1)
    assert sent == pytest.approx((3 * elements - size.vocab * size.d) / plan.tensor, rel=0.005)
    assert all(c.crosses_hosts == (name == "eight hosts") for c in found.collectives
               if c.axes == "data")  # fmt: skip
    assert not [c for c in sums if c.crosses_hosts]


def test_positions_shared_out_between_layers_leave_no_sum_over_tensor():
    """Gathers and reductions instead, each half of a sum's bytes; weights travel besides."""
    size, rows = dataclasses.replace(LLAMA_8B, layers=LAYERS), 8
    plan = fz.Plan(zero=3, data=1, tensor=8, precision="bf16", clip_norm=1.0, remat="none",
                   sequence_parallel=True)  # fmt: skip
    found = fz.preflight(llama(size), TX, plan, abstract_batch(size, rows), "h200:8")
    large = [c for c in found.collectives if c.bytes > 2**20]
    assert {c.axes for c in large} == {"tensor"}
    assert {c.kind for c in large} == {"all-gather", "reduce-scatter", "all-to-all"}
    # What a layer hands on is gathered where the next begins, and where both passes read it again.
    whole = rows * size.seq * size.d * 2
    handed = Counter(c.kind for c in large if c.bytes == whole and c.times == LAYERS)
    assert handed == {"all-gather": 3, "reduce-scatter": 2}
    # All that grows with tokens, beside the four sums of both passes: each is two such.
    turned = sum(c.bytes for c in large if c.kind == "all-to-all")
    assert whole * handed.total() + turned < 0.7 * (4 * 2 * whole)
    # What each device keeps for backward passes, beside a layer's weights gathered for them.
    assert sum(count for _, count in found.memory.parts()) <= found.memory.peak
    assert found.memory.saved_activations == 0  # (divided: among the temporaries)
    assert found.memory.temporaries < 8.5 * 2**30


LENGTH = 2**17


def ring(causal):
    """The compiled program of attention over 8 H200s and its gradients, how often a kernel in it is
    told of a causal mask, and what is sent."""
    where = parse("h200:8")
    mesh = auto_mesh(np.array(where.devices()), ("context",))
    q, k = (jax.ShapeDtypeStruct((1, LENGTH, n, 128), jnp.bfloat16) for n in (16, 8))

    def run(q, k, v):
        out = fz.attention(q, k, v, causal=causal, exchange="ring")
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        lies = jax.NamedSharding(mesh, PartitionSpec(None, "context"))
        program = jax.jit(jax.grad(run, (0, 1, 2)), in_shardings=lies, out_shardings=lies)
        lowered = program.lower(q, k, k)
    text, rates = lowered.compile().as_text(), default_rates(where)
    sent = uses(Kernels(Module(text), rates, "bf16"), {"context": 8}, Network(rates, (0,) * 8))
    return text, lowered.as_text().count("CAUSAL"), sent


@pytest.mark.parametrize(("causal", "blocks"), some([(True, 3 + 2 * 7), (False, 8)], (False, 8)))
def test_each_block_of_a_ring_is_one_kernel_of_cudnn_beside_which_the_next_keys_travel(
    causal, blocks
):
    text, masked, sent = ring(causal)
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == blocks
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == blocks
    assert masked == (2 * 2 if causal else 0)  # on the diagonal, forwards and back
    part = LENGTH // (16 if causal else 8)
    assert not re.search(rf"f\d+\[(\d+,){{2,}}{part},{part}\]", text), "scores"
    # Keys and values in 16 bits seven times each way, their gradients in float32 as often, and once
    # more in 16 bits where nothing is left to compute: home.
    keys, hidden = 2 * LENGTH // 8 * 8 * 128 * 2, [one for one in sent if one.num_matmuls]
    assert sum(one.bytes for one in hidden) >= 0.9 * (7 + 7 + 7 * 2 + 1) * keys
    assert not any(one.exposed_seconds for one in hidden)


def test_a_ring_in_a_whole_llama_hides_all_of_its_rounds():
    """All 32 layers. ZeRO's parts are over `context`: where XLA's scheduler has no memory left it
    hides less."""
    size = dataclasses.replace(LLAMA_8B, seq=LENGTH, exchange="ring")
    plan = fz.Plan(
        zero=3, context=8, precision="bf16", reduce_dtype="fp32", clip_norm=1.0, remat="layer"
    )
    found = fz.preflight(llama(size), TX, plan, abstract_batch(size, 1), "h200:8")
    sent = [c for c in found.collectives if c.kind == "collective-permute"]
    keys, queries = (2 * LENGTH // 8 * heads * 128 for heads in (2 * 8, 32))
    # Forward twice (`remat`), and back: keys; their gradients in float32, and home in 16 bits;
    # halves of queries, keys and results dealt out and collected.
    rounds, halves = 3 * 7 * keys + 7 * 2 * keys + keys, 3 * (2 * queries + keys)
    total = sum(c.total_bytes for c in sent)
    assert total == pytest.approx(size.layers * (rounds + halves), rel=1e-4)
    # Of all but 3 % of the rounds (the hop home), and of seven twelfths of the halves.
    exposed = [c for c in sent if c.exposed]
    assert sum(c.total_bytes for c in exposed) <= 0.13 * total
    # Of all that is sent, with gathers and sums of gradients.
    waits = sum(c.total_bytes for c in found.collectives if c.exposed)
    assert waits <= 0.1 * sum(c.total_bytes for c in found.collectives)
    # Gradients are added over `context` in the dtype of products, whatever `reduce_dtype` says.
    sums = [c for c in found.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    assert {c.dtype for c in sums if c.bytes > 2**20} == {"bf16"}
    assert found.memory.peak < 40 * 2**30
    assert not [c for c in exposed if c.bytes > keys], "rounds with gradients"


def test_documents_in_a_row_are_one_kernel_of_cudnn_and_no_scores():
    where = parse("h200:1")
    mesh = auto_mesh(np.array(where.devices()), ("data",))
    q, k = (jax.ShapeDtypeStruct((2, 1024, n, 64), jnp.bfloat16) for n in (8, 2))
    segments = jax.ShapeDtypeStruct((2, 1024), jnp.int32)

    def run(q, k, v, segments):
        out = fz.attention(q, k, v, causal=True, segments=segments)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        lies = jax.NamedSharding(mesh, PartitionSpec())
        program = jax.jit(jax.grad(run, (0, 1, 2)), in_shardings=lies, out_shardings=lies)
        compiled = program.lower(q, k, k, segments).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaScaleBiasSoftmaxBackward"') == 1
    assert not re.search(r"f32\[(\d+,)*1024,1024\]", text)
    # The mask and its unread gradient, in 16 bits; scores would be 64 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20


def configs(function, *shapes):
    """The kernels' settings in a program as it is handed to XLA, by the kernels' names."""
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(
        r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "((?:[^"\\]|\\.)*)"', text
    )
    return {name: json.loads(said.replace("\\22", '"')) for name, said in calls}


@pytest.mark.parametrize("causal", [False, True])
def test_a_blocks_kernels_are_those_that_jax_calls(causal):
    """All but what is at its default, which jax writes out."""
    q, k = (jax.ShapeDtypeStruct((2, 256, n, 64), jnp.bfloat16) for n in (8, 4))
    level = jax.ShapeDtypeStruct((2, 8, 256), jnp.float32)

    def jaxs(q, k, v):
        return jax.vjp(cudnn._kernel(causal, None, 0.5), q, k, v)[1](q)

    def own(q, k, v, level):
        out, _ = cudnn.block(q, k, v, causal=causal, scale=0.5)
        return out, cudnn.gradients(q, k, v, q, level, q, causal=causal, scale=0.5)

    wanted, found = configs(jaxs, q, k, k), configs(own, q, k, k, level)
    assert set(found) == set(wanted) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    for name, config in wanted.items():
        layout = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]
        layout.pop("tuple_shapes")
        layout["layout"] = {"minor_to_major": layout["layout"]["minor_to_major"]}
        assert found[name] == config
