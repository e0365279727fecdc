"""Leaves from one layout into another: by pieces on the host, and as a program of all processes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from fzero.sharding.lazy import Stacked
from fzero.sharding.relayout import Kept, _program, relayout


VALUE = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
WHOLE = Kept.whole((4, 3))
WIDER = Kept((4, 3), (4, 5))
DEALT = Kept((6, 3), (6, 3), (2, -1, 0, 3, 1, -1))
OTHER = Kept((4, 3), (4, 4), (3, 1, 0, 2))


def kept(how: Kept) -> np.ndarray:
    """`VALUE`, laid out by hand."""
    found = np.zeros(how.stored, np.float32)
    for row, layer in enumerate(how.rows or range(4)):
        found[row, :3] = VALUE[layer] if layer >= 0 else 0
    return found


@pytest.mark.parametrize("old", [WHOLE, WIDER, DEALT, OTHER])
@pytest.mark.parametrize("new", [WHOLE, WIDER, DEALT, OTHER])
def test_rows_and_padding_go_where_they_belong(old, new):
    here = SingleDeviceSharding(jax.devices()[0])
    to = jax.ShapeDtypeStruct(new.stored, np.float32, sharding=here)
    np.testing.assert_array_equal(relayout(kept(old), old, new, to), kept(new))
    np.testing.assert_array_equal(_program(old, new, here)(kept(old)), kept(new))


def test_of_stacked_layers_those_are_read_that_are_asked_for():
    stacked = Stacked(list(VALUE))
    np.testing.assert_array_equal(stacked.read((slice(1, 3), slice(0, 2))), VALUE[1:3, :2])
