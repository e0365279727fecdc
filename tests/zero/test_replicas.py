"""Hybrid sharding: groups of replicas are one large batch on one device."""

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support import tiny
from tests.support.sample import some


SGD = optax.sgd(1.0)


def stepped(plan: fz.Plan, clip: float | None) -> tuple[dict[str, np.ndarray], float]:
    """Parameters after a step, and the norm of its gradient."""
    model, plan = tiny.chain(), plan.replace(clip_norm=clip)
    state, metrics = fz.train_step(model, SGD, plan)(
        fz.init(model, SGD, plan, rng=0), tiny.tokens(16)
    )
    return tiny.host(fz.logical(model, state, plan)), float(jax.device_get(metrics["grad_norm"]))


@pytest.mark.parametrize("clip", some([None, 0.05], None))
@pytest.mark.parametrize(("zero", "data", "replica"), [(0, 2, 2), (1, 4, 2), (2, 2, 4), (3, 2, 2)])
def test_groups_of_replicas_are_one_large_batch(zero, data, replica, clip):
    """Sums, norms and clipping; within float32's rounding, as sums are added in another order."""
    expected, norm = stepped(tiny.plan(zero=0, data=1), clip)
    found, other = stepped(tiny.plan(zero=zero, data=data, replica=replica), clip)
    assert clip is None or norm > 2 * clip, "clipping had nothing to do"
    np.testing.assert_allclose(other, norm, rtol=2e-6)
    tiny.close(found, expected, rtol=0, atol=4e-6)
