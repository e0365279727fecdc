"""Plans drawn over all axes: the losses, updates and files of one device."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support.sample import some


WORDS, WIDTH, HEADS, LENGTH, ROWS = 16, 16, 4, 16, 8
SHARD = {"qkv": (None, None, fz.Parts("tensor", HEADS)), "out": (fz.Parts("tensor", HEADS),),
         "up": (None, "tensor"), "down": ("tensor",)}  # fmt: skip


def block_init(rng):
    keys = jax.random.split(rng, 4)
    shapes = ((WIDTH, 3, HEADS, 4), (HEADS, 4, WIDTH), (WIDTH, 32), (32, WIDTH))
    names = ("qkv", "out", "up", "down")
    return {n: 0.2 * jax.random.normal(k, s) for n, k, s in zip(names, keys, shapes, strict=True)}


def block(p, x, ctx):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", jnp.tanh(x), p["qkv"]), 2, 0)
    seen = fz.attention(q, k, v, causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", seen, p["out"])
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


MODEL = fz.Sequential(
    [
        fz.Layer("embed", lambda rng: {"words": jax.random.normal(rng, (WORDS, WIDTH))},
                 lambda p, batch, ctx: p["words"][batch["ids"]], shard={"words": ("tensor",)}),
        fz.Stack("blocks", 2, block_init, block,
                 shard={**SHARD, "qkv": (None, None, fz.Parts("tensor", HEADS))}),
        fz.Layer("head", None, lambda p, x, ctx: fz.linear_cross_entropy(
            x, p["words"], ctx.batch["next"]), reads={"words": "embed/words"}),
    ]
)  # fmt: skip
TX = optax.adam(1e-3)


def batch():
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH), dtype=np.int32)
    return {"ids": ids, "next": np.roll(ids, -1, 1)}


def draw(seed):
    """A plan for at most 8 devices, with at least one further axis."""
    of = random.Random(seed)
    tensor, context = of.choice([(2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2)])
    left = 8 // (tensor * context)
    pipe = of.choice([1, 2]) if left >= 2 else 1
    left //= pipe
    replica = of.choice([1, 2]) if left >= 2 else 1
    zero = of.choice([0, 1, 2, 3])
    options = {
        "zero": zero, "data": left // replica, "replica": replica, "tensor": tensor, "pipe": pipe,
        "context": context, "microbatches": of.choice([1, 2]) if ROWS // left >= 2 else 1,
        "remat": of.choice(["none", "layer", "dots"]), "min_shard_bytes": of.choice([0, 512]),
        "clip_norm": of.choice([None, 0.5]),
    }  # fmt: skip
    if pipe > 1:
        schedules = ["1f1b", "zb_h1", "interleaved", "zb_v"]
        options |= {"schedule": of.choice(schedules), "microbatches": 2}
        return fz.Plan(**options)
    if zero in (1, 2):
        options["gather"] = of.choice(["eager", "lazy"])
    if zero < 2:
        options["reduce"] = of.choice(["step", "microbatch"])
    return fz.Plan(**options)


def trained(plan, devices):
    state = fz.init(MODEL, TX, plan, rng=0, devices=devices)
    state, metrics = fz.train_step(MODEL, TX, plan, devices=devices)(state, batch())
    return state, (float(metrics["loss"]), float(metrics["grad_norm"]))


@functools.cache
def alone(clip_norm):
    plan = fz.Plan(zero=0, data=1, clip_norm=clip_norm)
    state, numbers = trained(plan, jax.devices()[:1])
    return numbers, jax.device_get((state.params, state.opt_state))


def check(seed, tmp_path):
    plan = draw(seed)
    devices = jax.devices()[: plan.pipe * plan.data * plan.replica * plan.tensor * plan.context]
    state, numbers = trained(plan, devices)
    wanted, arrays = alone(plan.clip_norm)
    # Sums over a divided dim, and softmaxes of parts, round in another order.
    np.testing.assert_allclose(numbers, wanted, rtol=1e-5, err_msg=str(plan))
    # What is written is what is read on one device, to the bit.
    fz.save(tmp_path / "state", state, plan)
    one = fz.Plan(zero=0, data=1, clip_norm=plan.clip_norm)
    read = fz.restore(tmp_path / "state", MODEL, TX, one, devices=jax.devices()[:1])
    whole = jax.device_get(fz.logical(MODEL, state, plan))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read.params), whole)
    # Adam's first step is as long as its rate, whatever the gradient: moments are compared, too.
    found = jax.device_get((read.params, read.opt_state))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6, err_msg=str(plan))
    jax.tree.map(close, found, arrays)


@pytest.mark.parametrize("seed", some(range(10), *(set(range(10)) - {3, 5})))
def test_a_drawn_plan_trains_as_one_device(seed, tmp_path):
    check(seed, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 500))
def test_many_drawn_plans_train_as_one_device(seed, tmp_path):
    check(seed, tmp_path)
