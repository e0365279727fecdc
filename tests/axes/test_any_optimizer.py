"""Optimizers and ways to call a step beside the further axes: the updates of one device."""

import jax
import numpy as np
import optax
import pytest

import fzero as fz
from tests.axes.test_any_plan import EXPERTS, LENGTH, ONE, ROWS, WORDS, devices_of, model


pytestmark = pytest.mark.nightly


def batches():
    ids = np.random.default_rng(0).integers(0, WORDS, (3, ROWS, LENGTH), dtype=np.int32)
    return {"ids": ids, "next": np.roll(ids, -1, -1)}


def each():
    return [jax.tree.map(lambda x, at=at: x[at], batches()) for at in range(3)]


def updates(made, tx, plan, how="calls"):
    """What three steps add to each parameter."""
    devices = devices_of(plan)
    state = fz.init(made, tx, plan, rng=0, devices=devices)
    before = jax.device_get(fz.logical(made, state, plan))
    step = fz.train_step(made, tx, plan, devices=devices, donate=how == "calls")
    if how == "scan":
        state, _ = jax.jit(lambda state, batch: jax.lax.scan(step, state, batch))(state, batches())
    else:
        step = jax.jit(step) if how == "jit" else step
        for batch in each():
            state, _ = step(state, batch)
    return jax.tree.map(np.subtract, jax.device_get(fz.logical(made, state, plan)), before)


def agree(found, wanted):
    """By norms: optimizers that divide by a gradient's size pass on the error of its smallest."""
    close = jax.tree.map(
        lambda a, b: np.linalg.norm(a - b) <= 5e-5 * np.linalg.norm(b), found, wanted
    )
    assert all(jax.tree.leaves(close)), close
    assert all(np.any(leaf) for leaf in jax.tree.leaves(wanted))


def per_layer(make):
    return lambda: fz.per_layer(make())


# What sees more than an element of a gradient, more than one gradient, or begins as parameters.
OPTIMIZERS = {
    "adafactor": per_layer(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "lamb": per_layer(lambda: optax.lamb(1e-2)),
    "lion": lambda: optax.lion(1e-3),
    "muon": per_layer(lambda: optax.contrib.muon(1e-2)),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    ),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "several-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "cocob": optax.contrib.cocob,
}
PLANS = [
    {"zero": 3, "data": 2, "tensor": 2, "context": 2},
    {"zero": 1, "data": 2, "tensor": 2, "expert": 2},
    {"zero": 2, "data": 2, "tensor": 2, "pipe": 2, "microbatches": 2},
]


@pytest.mark.parametrize("axes", PLANS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_updates_divided_layers_as_whole_ones(name, axes):
    tx, made = OPTIMIZERS[name](), model(EXPERTS if "expert" in axes else 0)
    plan = fz.Plan(min_shard_bytes=0, **axes)
    agree(updates(made, tx, plan), updates(made, tx, ONE))


@pytest.mark.parametrize("how", ["jit", "scan"])
@pytest.mark.parametrize("axes", PLANS[:2], ids=str)
def test_a_step_of_divided_layers_within_a_program_is_that_of_one_device(axes, how):
    tx, made = optax.sgd(0.1, momentum=0.9), model(EXPERTS if "expert" in axes else 0)
    plan = fz.Plan(min_shard_bytes=0, **axes)
    agree(updates(made, tx, plan, how), updates(made, tx, ONE))
