"""`gather="lazy"`: stages 1 and 2 whose parameters rest as stage 3's do.

That it has the bits of the other stages is tested in test_stages_agree.py, what it sends in
test_collectives.py.
"""

import jax
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


MODEL, TX, BATCH = tiny.chain(3), optax.adamw(1e-2), tiny.tokens(16)


def plan_of(zero=2, **options):
    return tiny.plan(**{"zero": zero, "data": 4, "gather": "lazy", **options})


def laid_out(plan):
    """Shapes, dtypes and shardings of a state."""
    return jax.tree.leaves(fz.abstract_state(MODEL, TX, plan))


def trained(plan, steps=2):
    state, step = fz.init(MODEL, TX, plan, rng=0), fz.train_step(MODEL, TX, plan)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("replica", [1, 2])
def test_the_state_is_laid_out_as_stage_3s(precision, replica):
    lazy = plan_of(precision=precision, replica=replica)
    other = lazy.replace(zero=3, gather="eager")
    assert laid_out(lazy) == laid_out(other)
    found, expected = (fz.placement(plan, MODEL, TX, num_devices=8) for plan in (lazy, other))
    assert found.bytes_per_device == expected.bytes_per_device
    assert found.leaves == expected.leaves


def test_a_trained_state_is_evaluated_replanned_saved_and_parked(tmp_path):
    lazy = plan_of(precision="bf16", microbatches=2)
    eager, whole = lazy.replace(gather="eager"), lazy.replace(zero=0, gather="eager")
    state, losses = trained(lazy)
    assert losses[1] < losses[0]
    fz.save(tmp_path / "ckpt", state, lazy)
    restored = fz.restore(tmp_path / "ckpt", MODEL, TX, whole)
    back = fz.restore(tmp_path / "ckpt", MODEL, TX, lazy)
    tiny.same_bits(back.params, state.params)
    moved = fz.replan(state, MODEL, TX, lazy, eager)
    tiny.same_bits(restored.params, fz.replan(moved, MODEL, TX, eager, whole).params)

    expected = fz.eval_step(MODEL, eager)(moved, BATCH)
    evaluate = fz.eval_step(MODEL, lazy)
    parked = fz.offload(state, ("params", "opt_state"), donate=False)
    with pytest.raises(fz.PlacementError, match="params/"):
        evaluate(parked, BATCH)
    for one in (fz.reload(parked), fz.replan(moved, MODEL, TX, eager, lazy), back):
        assert evaluate(one, BATCH) == expected


TIERS = {
    "all on the host": {"tiers": {"params": "host", "opt_state": "host"}, "stream_bytes": 300},
    "updated there": {"tiers": {"opt_state": "host"}, "update_on": "host"},
}


@pytest.mark.parametrize("tiers", TIERS)
def test_the_numbers_of_a_plan_without_tiers(tiers):
    plan = plan_of(zero=1)
    expected, losses = trained(plan)
    tiered = plan.replace(**TIERS[tiers])
    state, found = trained(tiered)
    fz.placement(state).require(opt_state="host")
    # Updates are other machine code there: a product and a sum round once or twice.
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    back = fz.replan(state, MODEL, TX, tiered, plan)
    tiny.close(back.params, expected.params, rtol=0, atol=1e-6)
