"""jax's switches for debugging beside steps, and plans that give the same bits in every run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.zero.options import compiler_options
from tests.support import tiny


SGD = optax.sgd(0.1)
MODEL = tiny.regression()
POINTS = tiny.points()
SPOILT = {**POINTS, "x": np.where(POINTS["x"] > 1, np.nan, POINTS["x"])}


@pytest.mark.parametrize("data", [1, 4])
def test_debug_nans_raises_at_the_step_that_made_one(data):
    plan = tiny.plan(zero=3, data=data)
    state = fz.init(MODEL, SGD, plan)
    step, evaluate = fz.train_step(MODEL, SGD, plan), fz.eval_step(MODEL, plan)
    with jax.debug_nans(True):
        state, metrics = step(state, POINTS)
        assert np.isfinite(metrics["loss"])
        with pytest.raises(FloatingPointError, match=r"eval_step: loss became NaN"):
            evaluate(state, SPOILT)
        with pytest.raises(FloatingPointError, match=r"train_step: loss and grad_norm became NaN"):
            step(state, SPOILT)


def test_debug_nans_finds_the_operation_in_the_models_own_function():
    """What the message above advises."""
    params = fz.logical(MODEL, fz.init(MODEL, SGD, tiny.plan(data=1)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in"):
        jax.jit(MODEL.loss, static_argnums=4)(params, {}, SPOILT, jax.random.key(0), True)


def test_disable_jit_is_refused_by_name():
    plan = tiny.plan(data=2)
    state = fz.init(MODEL, SGD, plan)
    with jax.disable_jit():
        for step in (fz.train_step(MODEL, SGD, plan), fz.eval_step(MODEL, plan)):
            with pytest.raises(fz.StateError, match=r"disable_jit is on.*model\.loss"):
                step(state, POINTS)
        with pytest.raises(fz.StateError, match=r"init: jax\.disable_jit is on"):
            fz.init(MODEL, SGD, plan)
        mean, _, _ = MODEL.loss(fz.logical(MODEL, state), {}, POINTS, jax.random.key(0), True)
        assert jnp.isfinite(mean.total)
    fz.train_step(MODEL, SGD, plan)(state, POINTS)


def test_a_deterministic_plan_says_so_and_its_options_are_known_to_xla():
    plan = tiny.plan(zero=3, deterministic=True)
    assert fz.Plan.from_json(plan.to_json()) == plan
    layout = jax.tree.map(lambda _: None, {})
    options = compiler_options(plan, layout, 8, "cuda")
    alone = {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
    assert compiler_options(plan, layout, 1, "gpu") == alone
    assert options == alone | {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert compiler_options(plan, layout, 8, "cpu") == {}
    assert not alone.keys() & compiler_options(tiny.plan(zero=3), layout, 8, "gpu").keys()
    # The compiler refuses names that it does not know, on any platform.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2.0
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_deterministic_opts": True})(1.0)
    assert "deterministic" in str(fz.describe(plan, MODEL, num_devices=8)).splitlines()[-1]
