"""`fz.check_same` sees that devices hold other values, whatever the difference is."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fzero as fz
from tests.support import tiny


PLAN = tiny.plan(zero=0, data=2)


def held(first: np.ndarray, second: np.ndarray) -> fz.TrainState:
    """A state whose parameter is one thing on the first device and another on the second."""
    model = fz.Model(lambda rng: ({"w": np.zeros_like(first)}, {}), lambda *_: None, frozen={"w"})
    state = fz.init(model, None, PLAN)
    w = state.params["w"]
    each = [
        jax.device_put(x, d) for x, d in zip((first, second), PLAN.mesh().devices.flat, strict=True)
    ]
    return state.replace(
        params={"w": jax.make_array_from_single_device_arrays(w.shape, w.sharding, each)}
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_values_in_another_order_are_others(dtype):
    values = np.arange(1, 7).astype(dtype).reshape(2, 3)
    fz.check_same(held(values, values))
    with pytest.raises(fz.DivergenceError, match=r"check_same: params/w .* is not the same on"):
        fz.check_same(held(values, values[:, ::-1]))


@pytest.mark.parametrize("turned", [slice(0, 1), slice(0, 2), slice(None)])
def test_signs_are_seen_however_many_are_turned(turned):
    values, other = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32)
    other[turned] *= -1
    with pytest.raises(fz.DivergenceError, match="params/w"):
        fz.check_same(held(values, other))


def test_leaves_without_elements_are_the_same_everywhere():
    model = fz.Model(lambda rng: ({"e": np.zeros((0, 3)), "w": np.ones(2)}, {}), lambda *_: None)
    fz.check_same(fz.init(model, None, PLAN))
