"""Bytes kept between steps, per device, against the ZeRO paper's formulas (section 3.1, 5)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.tree import device_bytes
from tests.support import tiny
from tests.support.gpt import GPT2, Size, gpt, num_params


N = 8
# Bytes per parameter on one device, AdamW. Mixed precision keeps one fp32 master.
FORMULAS = {
    ("fp32", 0): 12,
    ("fp32", 1): 4 + 8 / N,
    ("fp32", 2): 4 + 8 / N,
    ("fp32", 3): 12 / N,
    ("bf16", 0): 14,
    ("bf16", 1): 2 + 12 / N,
    ("bf16", 2): 2 + 12 / N,
    ("bf16", 3): 12 / N,
}


def kept_bytes(state):
    return sum(device_bytes(leaf) for leaf in jax.tree.leaves(state.replace(rng=None)))


@pytest.mark.parametrize(("precision", "zero"), FORMULAS)
def test_gpt2_124m_keeps_what_the_paper_says(precision, zero):
    plan = fz.Plan(zero=zero, data=N, precision=precision)
    state = fz.abstract_state(gpt(GPT2), optax.adamw(1e-3), plan)
    psi = num_params(GPT2)
    assert psi == 124_439_808
    expected = FORMULAS[precision, zero] * psi
    # 1 %: biases and norms below min_shard_bytes stay whole, 0.1 % of the parameters.
    assert kept_bytes(state) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_arrays_really_have_the_predicted_bytes(zero):
    size = Size()
    model, tx = gpt(size), optax.adamw(1e-3)
    plan = fz.Plan(zero=zero, data=N, precision="bf16", min_shard_bytes=0)
    real = fz.init(model, tx, plan)
    step = fz.train_step(model, tx, plan)
    real, _ = step(real, {"ids": np.zeros((8, size.seq + 1), np.int32)})
    abstract = fz.abstract_state(model, tx, plan)
    for leaf, shape in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
        shards = [shard.data for shard in leaf.addressable_shards]
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        assert {shard.nbytes for shard in shards} == {device_bytes(shape)}


def test_a_leaf_that_no_dim_divides_still_costs_one_part():
    """GPT-2's 50257 rows on 8 devices, with a width that does not divide either."""
    model = fz.Model(
        lambda rng: ({"table": jax.numpy.zeros((50257, 25))}, {}),
        lambda p, b, batch, rng, train: (p["table"][batch["ids"]].mean(), b, {}),
    )
    state = fz.abstract_state(model, optax.adamw(1e-3), fz.Plan(zero=3, data=N))
    whole = 50257 * 25 * 12
    assert kept_bytes(state) == pytest.approx(whole / N, rel=0.001)
    text = str(fz.describe(fz.Plan(zero=3, data=N), model))
    assert "padded by 7 to 50264" in text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_taken_keeps_shards_before_they_are_gathered(precision):
    """Of whole leaves the old ones would stay beside the new ones: a copy of all parameters."""
    model, tx = tiny.regression(), optax.adam(1e-2)
    plan = tiny.plan(zero=1, data=8, precision=precision)
    step = fz.train_step(model, tx, plan).lower(fz.abstract_state(model, tx, plan), tiny.points())
    chosen = set(re.findall(r"(\[[\d,]+\])\S* select\(", step.compile().as_text()))
    assert "[2,13]" in chosen
    assert "[16,13]" not in chosen


# Two weights of 1 MiB on two devices: 3.5, 3.0 and 2.5 MiB beside state and batch; 5.0, 4.0 and 3.5
# where moments are chosen after updates were made of them.
@pytest.mark.parametrize(("zero", "most"), [(0, 4.2), (1, 3.5), (3, 3.0)])
def test_a_new_moment_is_not_there_beside_the_one_that_is_kept(zero, most):
    model = fz.Model(
        lambda rng: ({name: jax.numpy.ones((512, 512)) for name in "vw"}, {}),
        lambda p, b, batch, rng, train: (((batch["x"] @ p["v"] @ p["w"]) ** 2).mean(), b, {}),
    )
    plan, tx = tiny.plan(zero=zero, data=2), optax.adam(1e-3)
    state = fz.abstract_state(model, tx, plan)
    batch = {"x": np.ones((8, 512), np.float32)}
    step = fz.train_step(model, tx, plan).lower(state, batch).compile()
    assert step.memory_analysis().temp_size_in_bytes < most * 2**20


def test_a_dim_of_as_many_rows_as_devices_is_cut():
    leaf = fz.describe(tiny.plan(zero=3, data=N), rows_of(N), num_devices=N).leaves[0]
    assert (leaf.dim, leaf.shards) == (0, N)


def rows_of(rows):
    """A model of one matrix with so many rows, of 3 elements."""
    return fz.Model(
        lambda key: ({"w": jnp.ones((rows, 3))}, {}),
        lambda p, buffers, batch, rng, train: (jnp.mean(p["w"]), buffers, {}),
    )
