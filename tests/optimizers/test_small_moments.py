"""Moments of 8 and 16 bits: the numbers, the bytes, and every layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support import tiny
from support.sample import some

import fzero as fz
import torch_bridge as tb


WIDTH, LAYERS = 64, 3
DTYPES = ["int8", "bf16"]


def chain():
    """Rows that are long enough, rows that are not, and a number for each layer."""

    def normal(*shape):
        return lambda key: {"w": jax.random.normal(key, shape) * 0.2}

    def block_init(key):
        return {**normal(WIDTH, WIDTH)(key), "b": jnp.zeros(WIDTH), "gain": jnp.ones(())}

    return fz.Sequential(
        [
            fz.Layer("up", normal(16, WIDTH), lambda p, batch, ctx: batch["x"] @ p["w"]),
            fz.Stack("blocks", LAYERS, block_init,
                     lambda p, x, ctx: x + jnp.tanh(x @ p["w"] + p["b"]) * p["gain"]),
            fz.Layer("down", normal(WIDTH, tiny.VOCAB), lambda p, x, ctx: x @ p["w"]),
        ],
        loss=lambda y, batch: fz.Mean(jnp.sum((y - batch["y"]) ** 2), jnp.float32(y.size)),
    )  # fmt: skip


MODEL, BATCHES = chain(), [tiny.points(16, seed) for seed in range(3)]


def trained(plan, tx, state=None, batches=BATCHES):
    state, step = state or fz.init(MODEL, tx, plan), fz.train_step(MODEL, tx, plan)
    for batch in batches:
        state, _ = step(state, batch)
    return state


def weights(state, plan):
    return tiny.host(fz.logical(MODEL, state, plan))


@pytest.mark.parametrize(("dtype", "zeros"), some(
    [("int8", (0, 3)), ("int8", (1, 2)), ("bf16", (0, 1, 2, 3))],
    ("int8", (1, 2)), ("bf16", (0, 1, 2, 3)),
))  # fmt: skip
@pytest.mark.bits
def test_every_stage_has_the_same_bits(dtype, zeros):
    tx = fz.small_moments(optax.adamw(1e-2), dtype)
    plans = [tiny.plan(zero=zero) for zero in zeros]
    first, *others = [weights(trained(plan, tx), plan) for plan in plans]
    for other in others:
        tiny.same_bits(first, other)


@pytest.mark.parametrize("options", some(
    [{"tiers": {"opt_state": "host"}, "stream_bytes": 3000}, {"pipe": 2, "microbatches": 2},
     {"data": 2, "replica": 4}],
    {"pipe": 2, "microbatches": 2}, {"data": 2, "replica": 4},
), ids=str)  # fmt: skip
def test_other_layouts_differ_by_roundings(options):
    tx = fz.small_moments(optax.adamw(1e-2))
    plans = [tiny.plan(zero=1, **more) for more in ({}, options)]
    first, other = (weights(trained(plan, tx), plan) for plan in plans)
    for path, value in first.items():  # a last bit may round one moment the other way
        np.testing.assert_allclose(other[path], value, rtol=0, atol=2e-3, err_msg=path)
        assert np.mean(np.abs(other[path] - value) > 1e-5) < 0.01, path


def test_bytes_are_counted_and_are_a_quarter():
    plan = tiny.plan(zero=1)
    sizes = {}
    for name, tx in {"int8": fz.small_moments(optax.adam(1e-2)), "fp32": optax.adam(1e-2),
                     "bf16": fz.small_moments(optax.adam(1e-2), "bf16")}.items():  # fmt: skip
        where = fz.placement(plan, MODEL, tx)
        assert where.bytes_per_device == fz.placement(fz.init(MODEL, tx, plan)).bytes_per_device
        own = [x for x in where.leaves if x.state_class == "opt_state" and "blocks/w" in x.path]
        sizes[name] = sum(leaf.bytes_per_device for leaf in own)
    assert sizes["bf16"] == sizes["fp32"] // 2
    # Two bytes for a row of 64.
    assert sizes["int8"] == sizes["fp32"] // 4 * (WIDTH + 2) // WIDTH


def test_checkpoints_and_other_plans_go_on_with_the_same_bits(tmp_path):
    tx = fz.small_moments(optax.adamw(1e-2))
    plan, other = tiny.plan(zero=3), tiny.plan(zero=0)
    state = trained(plan, tx, batches=BATCHES[:2])
    fz.save(tmp_path, state, plan)
    last = BATCHES[2:]
    restored = trained(other, tx, fz.restore(tmp_path, MODEL, tx, other), last)
    moved = trained(other, tx, fz.replan(state, MODEL, tx, plan, other), last)
    tiny.same_bits(restored.opt_state, moved.opt_state)
    tiny.same_bits(weights(restored, other), weights(trained(plan, tx), plan))


def kept_and_read(values, dtype, num):
    """What is read of a state that keeps its input, several times."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (state, updates),
    )
    tx, found = fz.small_moments(keep, dtype), []
    state, update = tx.init(values), jax.jit(tx.update)
    for _ in range(num):
        read, state = update(values, state)
        found.append(np.asarray(read))
    return np.stack(found[1:])


@pytest.mark.parametrize(("dtype", "step"), [("int8", 2**-3), ("bf16", 2**-7)])
def test_what_is_kept_is_near_and_right_on_average(dtype, step):
    rng = np.random.default_rng(0)
    values = rng.uniform(0.01, 1, (32, 256)) * rng.choice([-1, 1], (32, 256))
    for given in (values.astype(np.float32), np.abs(values).astype(np.float32)):
        read = kept_and_read(jnp.asarray(given), dtype, 301)
        errors = read / given - 1
        assert np.abs(errors).max() <= step
        # 300 choices between two values a step apart: half a step at most, each; 5 sigma.
        assert np.abs(errors.mean(0)).max() < 5 * step / 2 / np.sqrt(300)
        assert np.abs(errors.mean()) < step / 50


def test_what_is_below_the_least_is_right_on_average_too():
    """With signs: that, or 0, which a second moment is not."""
    given = np.full((1, 64), 2**-17, np.float32)
    given[0, :2] = 1, -1
    read = kept_and_read(jnp.asarray(given), "int8", 301)[:, 0, 2]
    assert len(set(read.tolist())) == 2
    assert abs(read.mean() / 2**-17 - 1) < 0.3  # 3 sigma


def test_what_is_below_the_least_is_never_0_in_a_row_without_signs():
    given = np.full((1, 64), 2**-35, np.float32)
    given[0, 0] = 1
    assert (kept_and_read(jnp.asarray(given), "int8", 21) > 0).all()


def test_elements_are_rounded_each_by_itself():
    """All of them up, or all of them down, would be a step in one direction."""
    rng, shape = np.random.default_rng(0), (64, 256)
    tx = fz.small_moments(optax.trace(1.0))
    update, state = jax.jit(tx.update), tx.init({"w": jnp.zeros(shape)})
    for number in range(5):
        draw = jnp.asarray(rng.normal(size=shape), jnp.float32)
        found, state = update({"w": draw}, state)
        kept, _ = update({"w": jnp.zeros(shape)}, state)
        large = np.abs(np.asarray(found["w"])) > 0.1
        error = np.mean(np.asarray(kept["w"] / found["w"])[large] - 1)
        assert number == 0 or abs(error) < 0.015  # at first nothing was kept that tells them apart


def test_nothing_is_lost_that_matters():
    row = np.linspace(1, 2, 64, dtype=np.float32)
    values = np.stack([row, row * 0, row, row])
    values[2, 5] = np.uint32(0x7FFFFFFF).view(np.float32)  # NaN as GPUs write it
    values[3, 7] = np.inf
    values[0, :3] = 2**-28, -0.0, 2**-33  # beside 2
    read = kept_and_read(jnp.asarray(values), "int8", 3)[-1]
    assert read[0, 0] == 2**-28
    assert read[0, 1] == 0
    assert 0 < read[0, 2] < 2**-29  # what is not zero never becomes it: it may be divided by
    assert not read[1].any()
    assert np.isnan(read[2]).all()
    assert np.isnan(read[3]).all()
    half = kept_and_read(jnp.asarray(values), "bf16", 3)[-1]
    assert np.isnan(half[2, 5])
    assert half[3, 7] == np.inf


@pytest.mark.nightly
def test_two_hundred_steps_beside_float32():
    """A teacher's outputs, new points in every step: losses of the last 50 steps."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"a": (16, 128), "b": (128, 128), "c": (128, 64)}

    def make(key):
        return {name: jax.random.normal(k, shape) / np.sqrt(shape[0]) for (name, shape), k in
                zip(shapes.items(), jax.random.split(key, 3), strict=True)}  # fmt: skip

    def model(p, x):
        return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]

    teacher, student = make(keys[0]), make(keys[1])

    def loss(p, key):
        x = jax.random.normal(key, (64, 16))
        return jnp.mean((model(p, x) - model(teacher, x)) ** 2)

    def run(tx):
        def step(carry, key):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, key)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        start = student, tx.init(student)
        losses = jax.jit(lambda: jax.lax.scan(step, start, jax.random.split(keys[2], 200))[1])()
        return float(losses[:5].mean()), float(losses[-50:].mean())

    first, wide = run(optax.adamw(3e-3))
    assert wide < first / 4
    for dtype, bound in (("bf16", 1.01), ("int8", 1.05)):
        assert run(fz.small_moments(optax.adamw(3e-3), dtype))[1] < wide * bound, dtype


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        fz.small_moments(optax.adam(0.1), "int4")
    converted = tb.convert(torch.nn.Linear(64, 64), torch.zeros(4, 64))
    model = converted.model(lambda forward, batch: jnp.mean(forward(batch["x"])))
    state = fz.init(model, fz.small_moments(optax.adam(0.1)), tiny.plan(zero=0))
    with pytest.raises(fz.CheckpointError, match="without"):
        tb.moments_of(converted, state.opt_state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_without_gradients_stays_where_it_is(dtype):
    # A dead unit among others: its first moment fades below what the row's scale holds.
    tx = fz.small_moments(optax.adam(1e-3, b2=0.95), dtype)
    noise = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 1, WIDTH)), jnp.float32)
    grads = noise.at[50:, 0, 0].set(0.0)

    def move(carry, grad):
        params, state = carry
        updates, state = tx.update(grad, state, params)
        return (params + updates, state), params[0, 0]

    params = jnp.zeros((1, WIDTH))
    _, path = jax.jit(lambda: jax.lax.scan(move, (params, tx.init(params)), grads))()
    assert abs(float(path[-1] - path[400])) < 1e-3  # was 0.6: a stuck moment over a faded second
