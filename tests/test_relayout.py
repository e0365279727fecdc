"""Leaves from one layout into another: by pieces on the host, and as a program of all processes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from fzero.sharding import relayout as module
from fzero.sharding.lazy_array import Stacked
from fzero.sharding.relayout import Kept, _program, relayout
from fzero.storage.scratch import aligned


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


def test_copies_of_a_leaf_share_no_memory(monkeypatch):
    """jax's CPU devices take aligned memory as it is (jax#37830), and steps write into theirs."""
    whole = module._shard

    def shard(*given):
        found = whole(*given)
        memory = aligned(4096)[: found.nbytes].view(found.dtype).reshape(found.shape)
        memory[...] = found
        return memory

    monkeypatch.setattr(module, "_shard", shard)
    mesh = jax.make_mesh((4,), ("data",))
    to = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    leaf = relayout(VALUE, WHOLE, WHOLE, jax.ShapeDtypeStruct((4, 3), np.float32, sharding=to))
    assert len({x.data.unsafe_buffer_pointer() for x in leaf.addressable_shards}) == 4
