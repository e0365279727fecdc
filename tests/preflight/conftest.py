"""Shared by the tests of preflight: predictions for 8 CPU devices, compiled once."""

from __future__ import annotations

import jax
import optax
import pytest

import fzero as fz
from tests.support.gpt import Size, abstract_batch, gpt


# Starts jax with the session's devices: no command in this process can ask for others afterwards.
jax.devices()

SIZE = Size(vocab=128, d=64, layers=4, heads=2, seq=16)
TX = optax.adamw(1e-3)
ROWS = 16
PLANS = {
    "zero1_bf16": fz.Plan(zero=1, data=8, precision="bf16", min_shard_bytes=256, clip_norm=1.0),
    "zero3": fz.Plan(zero=3, replica=2, data=4, min_shard_bytes=256, microbatches=2),
    "pipeline": fz.Plan(
        zero=2, pipe=2, data=4, microbatches=4, schedule="zb_h1", min_shard_bytes=256
    ),
}


@pytest.fixture(scope="session")
def model():
    return gpt(SIZE)


@pytest.fixture(scope="session")
def batch():
    return abstract_batch(SIZE, ROWS)


@pytest.fixture(scope="session")
def predicted(model, batch):
    """A prediction by the name of its plan."""
    known: dict[str, fz.Preflight] = {}

    def get(name: str) -> fz.Preflight:
        if name not in known:
            known[name] = fz.preflight(model, TX, PLANS[name], batch, "cpu:8")
        return known[name]

    return get


@pytest.fixture(scope="session")
def held():
    """Bytes of arrays on one device, by device number."""

    def count(tree) -> dict[int, int]:
        found: dict[int, int] = {}
        for leaf in jax.tree.leaves(tree):
            for shard in leaf.addressable_shards:
                found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
        return found

    return count
