"""Optimizers that add elements up give the same bits in every stage: it does not matter who clips.

A sum over a whole leaf and one over its shards round otherwise, so stage 0 updates shards for such
an optimizer, as the other stages do, and gathers what it keeps. Compiled as users compile.
"""

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support import tiny
from tests.support.sample import some


STEPS = 20
# Norms of everything, under a condition, of each leaf, and of rows and columns.
OPTIMIZERS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)),
    "clip-every-second": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2)), 2
    ).gradient_transformation(),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
CASES = [(name, (0, 1, 3) if name == "clip" else (0, 3)) for name in OPTIMIZERS]
# A leaf that divides by eight devices, one that is padded, a scalar; given values.
MODEL = fz.Model(jax.device_get(tiny.regression().init(jax.random.key(0))), tiny.regression_loss)


def run(tx, **options):
    """Losses and norms of every step, and the last state laid out whole."""
    plan = tiny.plan(**{"data": 8, **options})
    state, step, trace = fz.init(MODEL, tx, plan), fz.train_step(MODEL, tx, plan), []
    for seed in range(STEPS):
        state, metrics = step(state, tiny.points(seed=seed))
        trace.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    whole = fz.replan(state, MODEL, tx, plan, plan.replace(zero=0))
    return trace, jax.device_get(whole.replace(rng=None))


# Stage 1 is that of stage 0 but for its gathers; one case shows it.
@pytest.mark.bits
@pytest.mark.parametrize(("name", "stages"), some(CASES, ("clip-every-second", (0, 3))))
def test_every_stage_has_the_same_bits(name, stages):
    tx = OPTIMIZERS[name]()
    runs = [run(tx, zero=zero) for zero in stages]
    assert runs[0][0][0] != runs[0][0][-1]
    for trace, state in runs[1:]:
        assert trace == runs[0][0]
        tiny.same_bits(state, runs[0][1])


@pytest.mark.nightly
@pytest.mark.bits
@pytest.mark.parametrize("name", ["clip", "lamb"])
def test_beside_replicas_too(name):
    runs = [run(OPTIMIZERS[name](), zero=zero, data=4, replica=2) for zero in (0, 3)]
    assert runs[0][0] == runs[1][0]
    tiny.same_bits(runs[0][1], runs[1][1])


@pytest.mark.bits
def test_in_16_bits_too():
    tx = OPTIMIZERS["clip"]()
    runs = [run(tx, zero=zero, precision="bf16") for zero in (0, 3)]
    assert runs[0][0] == runs[1][0]
    # Stage 0 keeps a copy in bf16, stage 3 gathers one.
    one, other = (state.replace(compute=None) for _, state in runs)
    tiny.same_bits(one, other)


def test_stage_0_keeps_everything_whole_and_says_what_it_sends():
    plan, counts = tiny.plan(zero=0, data=8), {}
    for name, tx in (("elements", optax.adamw(1e-2)), ("sums", OPTIMIZERS["clip"]())):
        described = fz.describe(plan, MODEL, tx)
        state = fz.init(MODEL, tx, plan)
        state, _ = fz.train_step(MODEL, tx, plan)(state, tiny.points())
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
        counts[name] = described.elements_gathered
    # Two moments of the two leaves that are split, (16, 13) and (13, 32) with padding.
    moments = 2 * np.array([16 * 13, 13 * 32]).sum() * 7 // 8
    assert counts["sums"] == counts["elements"] + moments
