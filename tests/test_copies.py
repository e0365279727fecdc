"""Initial values that are read piece by piece: the same state, and no more is read than is kept."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.sharding.lazy_array import LazyArray, Stacked
from fzero.tree import named_leaves
from tests.support import tiny


class Recorded(LazyArray):
    """An array that remembers which pieces were asked for."""

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value, self.shape, self.dtype = value, value.shape, value.dtype
        self.pieces: list[tuple[int, ...]] = []

    def read(self, index: Any) -> np.ndarray[Any, Any]:
        assert all(isinstance(s.start, int) and s.start < s.stop for s in index)
        found = self.value[index]
        self.pieces.append(found.shape)
        return found


PLANS = {
    "zero0": tiny.plan(zero=0),
    "zero3": tiny.plan(zero=3),
    "pipe": tiny.plan(zero=3, pipe=2, data=4, microbatches=2),
    "three ranks": tiny.plan(zero=1, pipe=3, data=2, microbatches=3, schedule="1f1b"),
}


@pytest.mark.parametrize("name", PLANS)
def test_lazy_values_give_the_same_state(name: str) -> None:
    plan, tx = PLANS[name], optax.adam(1e-3)
    devices = jax.devices()[: plan.pipe * (plan.data or 8)]
    model = tiny.chain(num=4)
    params, buffers = jax.device_get(model.init(jax.random.key(0)))
    wanted = fz.init(model.with_init((params, buffers)), tx, plan, devices=devices)

    lazy = jax.tree.map(Recorded, params)
    rows = {
        key: Stacked([Recorded(value[0]), *value[1:]])  # arrays and lazy ones mixed
        for key, value in params["blocks"].items()
    }
    state = fz.init(model.with_init(({**lazy, "blocks": rows}, buffers)), tx, plan, devices=devices)
    tiny.same_bits(wanted, state)
    for (path, one), (_, two) in zip(named_leaves(wanted), named_leaves(state), strict=True):
        assert one.sharding == two.sharding, path
    if plan.zero == 3:
        # 27 rows, padded: no device reads more than its share.
        share = -(-tiny.VOCAB // (plan.data or 8))
        assert {shape[0] for shape in lazy["embed"]["table"].pieces} <= set(range(share + 1))


def test_the_whole_is_an_array() -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    stacked = Stacked([Recorded(row) for row in rows])
    np.testing.assert_array_equal(np.asarray(stacked), rows)
    np.testing.assert_array_equal(stacked.read((slice(1, 3), slice(0, 2))), rows[1:3, :2])
