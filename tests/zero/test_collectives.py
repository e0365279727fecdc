"""What the compiled step communicates, read from the program: the ZeRO paper's volumes, no more.

Elements are counted, because the CPU backend reduces bfloat16 in float32.
"""

import jax.numpy as jnp
import optax
import pytest

import fzero as fz
from fzero.preflight import hlo
from tests.support.gpt import GPT2, Size, abstract_batch, gpt, num_params


N = 8


def compiled_text(plan, size, rows, tx=None):
    model, tx = gpt(size), tx or optax.adamw(1e-3)
    step = fz.train_step(model, tx, plan)
    lowered = step.lower(fz.abstract_state(model, tx, plan), abstract_batch(size, rows))
    return lowered.compile().as_text()


def by_kind(text):
    found = hlo.collectives(text)
    assert all(c.times is not None for c in found)
    kinds = {c.kind for c in found}
    return {kind: hlo.total(found, kind).wire_elements for kind in kinds}, found


# (zero, precision) -> volume in Ψ (N-1)/N: gathered + reduced (section 7 of the paper).
VOLUMES = {(0, "fp32"): (1, 1), (1, "bf16"): (1, 1), (2, "fp32"): (1, 1), (3, "bf16"): (2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "precision"), VOLUMES)
def test_gpt2_124m_communicates_what_the_paper_says(zero, precision):
    plan = fz.Plan(zero=zero, data=N, precision=precision, clip_norm=1.0)
    # 2 of the real 1024 positions' rows: activations do not change what is communicated.
    size = Size(GPT2.vocab, GPT2.d, GPT2.layers, GPT2.heads, seq=64)
    kinds, found = by_kind(compiled_text(plan, size, rows=8))
    unit = num_params(size) * (N - 1) / N
    gathered, reduced = VOLUMES[zero, precision]
    assert kinds["all-gather"] == pytest.approx(gathered * unit, rel=0.02)
    assert kinds["reduce-scatter"] == pytest.approx(reduced * unit, rel=0.02)
    assert set(kinds) <= {"all-gather", "reduce-scatter", "all-reduce"}
    # Whole leaves (biases, norms) are reduced together. Besides there are scalars, and for the norm
    # one number per split matrix (per layer, and two tables), in the order of the chain.
    assert kinds["all-reduce"] <= 0.01 * unit
    numbers = 4 * size.layers + 2
    large = [c for c in found if c.kind == "all-reduce" and c.elements > numbers]
    assert len(large) <= 1


def test_gathering_lazily_sends_the_parameters_once_a_step():
    """Stage 3 would gather twice for each microbatch; eager, the volume is the same."""
    size, microbatches = Size(), 2
    plan = fz.Plan(zero=2, data=N, gather="lazy", microbatches=microbatches, min_shard_bytes=0)
    kinds, _ = by_kind(compiled_text(plan, size, rows=8 * microbatches))
    unit = num_params(size) * (N - 1) / N
    # What no dim divides is padded (61 rows to 64).
    assert kinds["all-gather"] == pytest.approx(unit, rel=0.01)
    assert kinds["reduce-scatter"] == pytest.approx(microbatches * unit, rel=0.01)
    about = fz.describe(plan, gpt(size), num_devices=N)
    assert kinds["all-gather"] == pytest.approx(about.elements_gathered, rel=1e-6)
    assert kinds["reduce-scatter"] == pytest.approx(about.elements_reduced, rel=1e-3)


def test_bf16_gathers_move_two_bytes_an_element():
    plan = fz.Plan(zero=3, data=N, precision="bf16", min_shard_bytes=0)
    found = hlo.collectives(compiled_text(plan, Size(), rows=8))
    gathers = [c for c in found if c.kind == "all-gather"]
    assert gathers
    assert {c.bytes // c.elements for c in gathers} == {2}


def test_hybrid_sharding_sends_only_shards_between_groups():
    plan = fz.Plan(zero=3, data=4, replica=2, min_shard_bytes=128)
    text = compiled_text(plan, Size(), rows=8)
    found = hlo.collectives(text, mesh_axes={"replica": 2, "data": 4})
    across = [c for c in found if "replica" in (c.axes or ()) and "data" not in c.axes]
    sent = sum(c.elements * c.times for c in across)
    shards = num_params(Size()) / 4
    assert {c.kind for c in across} == {"all-reduce"}
    # Shards of all gradients once; whole leaves and metrics are a little on top.
    assert shards * 0.9 <= sent <= shards * 1.2


def chain_of_matmuls(num, d):
    """A model that is not a `Sequential`: `num` weights, one after the other."""

    def loss(params, buffers, batch, rng, train):
        x = batch["x"]
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return fz.Mean(jnp.sum(x), jnp.float32(x.size)), buffers, {}

    return fz.Model(lambda rng: ({f"w{i}": jnp.zeros((d, d)) for i in range(num)}, {}), loss)


def lowered_chain(num=8, d=256, **options):
    plan = fz.Plan(**{"zero": 3, "data": N, **options})
    model, tx = chain_of_matmuls(num, d), optax.sgd(0.1)
    step = fz.train_step(model, tx, plan)
    return step.lower(fz.abstract_state(model, tx, plan), {"x": jnp.zeros((8, d))})


def test_a_model_that_is_no_chain_gathers_each_leaf_once_each_way():
    kinds, _ = by_kind(lowered_chain().compile().as_text())
    unit = 8 * 256 * 256 * (N - 1) / N
    # The first layer's weights are not needed backward: no gradient flows into the batch.
    assert kinds["all-gather"] == pytest.approx((2 - 1 / 8) * unit, rel=0.001)
    assert kinds["reduce-scatter"] == pytest.approx(unit, rel=0.001)


def test_a_model_that_is_no_chain_gathers_at_use_one_ahead_and_reduces_one_behind():
    """Read from the program that XLA is given.

    Its GPU backend keeps to it: 16 weights of 2048 x 2048 on 8 H200 need temporary memory for 4
    (2 of them the gradients' shards), where gathering up front needs 16 (by its
    temporaries).
    """
    text, forward = events(lowered_chain()), "G" + "GM" * 7 + "M"
    assert text.startswith(forward)
    # Backward, layer by layer: the weight's gradient, its reduction, the input's gradient.
    assert text[len(forward) :] == "GMR" + "GMMR" * 6 + "MMR"


def test_a_model_that_is_no_chain_gathers_lazily_in_the_forward_pass_only():
    text = events(lowered_chain(zero=2, gather="lazy"))
    # Nothing is gathered after the update either.
    assert text == "G" + "GM" * 7 + "M" + "MR" + "MMR" * 7


def events(lowered):
    """Gathers, matmuls and reductions in program order, as letters."""
    found = []
    for line in lowered.as_text().splitlines():
        for name, letter in (("all_gather", "G"), ("dot_general", "M"), ("reduce_scatter", "R")):
            if f"stablehlo.{name}" in line:
                found.append(letter)
    return "".join(found)
