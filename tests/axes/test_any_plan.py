"""Plans drawn over all axes: the losses, updates and files of one device."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from tests.support.sample import some


WORDS, WIDTH, HEADS, LENGTH, ROWS, EXPERTS = 16, 16, 4, 16, 8, 4
ATTENTION = {"qkv": (None, None, fz.Parts("tensor", HEADS)), "out": (fz.Parts("tensor", HEADS),)}
DENSE = {"up": (None, "tensor"), "down": ("tensor",)}
MIXED = {"own": ("expert",)}


def block_init(num, rng):
    """A layer's weights; with `num` experts, each has its own."""
    keys = jax.random.split(rng, 4)
    dense = {"up": (WIDTH, 32), "down": (32, WIDTH)}
    mixed = {"own": (num, WIDTH, WIDTH), "router": (WIDTH, num)}
    shapes = {"qkv": (WIDTH, 3, HEADS, 4), "out": (HEADS, 4, WIDTH), **(mixed if num else dense)}
    pairs = zip(keys, shapes.items(), strict=False)
    return {name: 0.2 * jax.random.normal(key, shape) for key, (name, shape) in pairs}


def hidden(own, p, rows):
    return jnp.tanh(own.dot(rows, p["own"]))


def block(p, x, ctx):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", jnp.tanh(x), p["qkv"]), 2, 0)
    seen = fz.attention(q, k, v, causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", seen, p["out"])
    if "router" not in p:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]
    gates, chosen = jax.lax.top_k(jax.nn.softmax(10 * (x @ p["router"])), 2)
    return x + fz.experts(hidden, {"own": p["own"]}, x, chosen, gates)[0]


@functools.cache
def model(num):
    """Two layers with attention and products, or so many experts."""
    shard = {**ATTENTION, **(MIXED if num else DENSE)}
    return fz.Sequential([
        fz.Layer("embed", lambda rng: {"words": jax.random.normal(rng, (WORDS, WIDTH))},
                 lambda p, batch, ctx: p["words"][batch["ids"]], shard={"words": ("tensor",)}),
        fz.Stack("blocks", 2, functools.partial(block_init, num), block, shard=shard),
        fz.Layer("head", None, lambda p, x, ctx: fz.linear_cross_entropy(
            x, p["words"], ctx.batch["next"]), reads={"words": "embed/words"}),
    ])  # fmt: skip


# Its momentum after a step is the gradient, as the plan clips it.
RATE = 0.1
TX = optax.sgd(RATE, momentum=0.9)


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
    instead = random.Random(-1 - seed).choice(["", "", "tensor", "context"])
    if options.get(instead, 1) > 1:  # its devices share out experts
        options |= {"expert": options[instead], instead: 1}
    if options["tensor"] > 1:
        options["sequence_parallel"] = random.Random(1000 + seed).choice([None, True, False])
    if pipe > 1:
        schedules = ["1f1b", "zb_h1", "interleaved", "zb_v"]
        options |= {"schedule": of.choice(schedules), "microbatches": 2}
        return fz.Plan(**options)
    if zero in (1, 2):
        options["gather"] = of.choice(["eager", "lazy"])
    if zero < 2:
        options["reduce"] = of.choice(["step", "microbatch"])
    return fz.Plan(**options)


ONE = fz.Plan(zero=0, data=1)


@functools.cache
def begun(num):
    """A new state on one device."""
    return fz.init(model(num), TX, ONE, rng=0, devices=jax.devices()[:1])


def trained(made, plan, state, devices):
    """The state after a step, with loss and gradients' norm."""
    step = fz.train_step(made, TX, plan, devices=devices, donate=False)
    state, metrics = step(state, batch())
    return state, (float(metrics["loss"]), float(metrics["grad_norm"]))


@functools.cache
def alone(num):
    """Loss and norm on one device, parameters after a step, and gradients."""
    state, numbers = trained(model(num), ONE, begun(num), jax.devices()[:1])
    return numbers, *jax.device_get((state.params, state.opt_state[0].trace))


def devices_of(plan):
    further = plan.tensor * plan.context * plan.expert
    return jax.devices()[: plan.pipe * plan.data * plan.replica * further]


def moved(state, made, old, new, folder):
    """The state under another plan, through a file if there is a folder."""
    if folder is None:
        return fz.replan(state, made, TX, old, new, devices=devices_of(new))
    fz.save(folder, state, old)
    return fz.restore(folder, made, TX, new, devices=devices_of(new))


def check(plan, folder=None):
    num = EXPERTS if plan.expert > 1 else 0
    made, old, new = model(num), folder and folder / "old", folder and folder / "new"
    state = moved(begun(num), made, ONE, plan, old)
    state, numbers = trained(made, plan, state, devices_of(plan))
    wanted, params, grads = alone(num)
    # Sums over a divided dim, and softmaxes of parts, round in another order.
    np.testing.assert_allclose(numbers, wanted, rtol=1e-5, err_msg=str(plan))
    # What moves to one device, or is written and read there, is what there was, to the bit.
    found = moved(state, made, plan, ONE, new)
    whole = jax.device_get(fz.logical(made, state, plan))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.params), whole)
    clipped = min(1.0, (plan.clip_norm or np.inf) / wanted[1])
    params = jax.tree.map(lambda x, grad: x + RATE * (1 - clipped) * grad, params, grads)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6, err_msg=str(plan))
    jax.tree.map(close, jax.device_get(found.params), params)
    scaled = jax.tree.map(lambda grad: clipped * grad, grads)
    jax.tree.map(close, jax.device_get(found.opt_state[0].trace), scaled)


# Thirty whose compilation is cheap (one CPU second each) and that have what the test below counts.
DRAWN = (
    1, 3, 7, 10, 18, 26, 28, 32, 46, 55, 120, 126, 137, 143, 146, 164, 180, 185, 190, 199, 203, 224,
    246, 267, 308, 319, 379, 413, 440, 494,
)  # fmt: skip


def pairs(plan):
    """Which two of its axes and its stage come together."""
    names = ("replica", "data", "pipe", "tensor", "context", "expert")
    axes = [name for name in names if getattr(plan, name) > 1]
    return set(itertools.combinations([*axes, f"zero={plan.zero}"], 2))


def test_thirty_drawn_plans_have_all_pairs_of_axes_and_stages():
    first, all_ = (set().union(*(pairs(draw(seed)) for seed in seeds))
                   for seeds in (DRAWN, range(500)))  # fmt: skip
    assert len(set(DRAWN)) == 30
    # Of six axes, and each with four stages.
    assert first == all_
    assert len(all_) == 15 + 6 * 4


@pytest.mark.parametrize("seed", DRAWN)
def test_a_drawn_plan_trains_as_one_device(seed):
    check(draw(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted(set(range(500)) - set(DRAWN)))
def test_many_drawn_plans_train_as_one_device(seed, tmp_path):
    check(draw(seed), tmp_path)


PARKED = [
    {"zero": 1, "tensor": 2, "tiers": {"opt_state": "host"}},
    {"zero": 3, "tensor": 2, "tiers": {"opt_state": "disk"}, "schedule": "zb_h1"},
    {"zero": 2, "context": 2, "tiers": {"opt_state": "host"}},
    {"zero": 3, "context": 2, "tiers": {"opt_state": ("host", 0.5)}},
    {"zero": 2, "expert": 2, "tiers": {"opt_state": "host"}, "schedule": "zb_h1"},
    {"zero": 3, "expert": 2, "tiers": {"opt_state": "disk"}},
]


@pytest.mark.parametrize("options", some(PARKED, *PARKED[1:]), ids=str)
def test_a_pipeline_with_an_axis_parks_its_state(options, tmp_path):
    check(fz.Plan(pipe=2, data=2, microbatches=2, min_shard_bytes=0, **options), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_drawn_plans_in_fp16_train_as_one_device_where_none_overflows(seed):
    """At 2^16 some plans skip their first steps, and others do not (tests/test_precision.py)."""
    scaling = fz.LossScaling(initial=2.0**8)
    plan = draw(seed).replace(precision="fp16", loss_scale=scaling)
    one = fz.Plan(data=1, clip_norm=plan.clip_norm, precision="fp16", loss_scale=scaling)
    made = model(EXPERTS if plan.expert > 1 else 0)
    (state, found), (alone, wanted) = (
        trained(made, p, fz.init(made, TX, p, rng=0, devices=devices_of(p)), devices_of(p))
        for p in (plan, one)
    )
    assert float(state.loss_scale.skipped) == float(alone.loss_scale.skipped) == 0
    # A float16 has 11 bits, and sums of its products round in another order.
    np.testing.assert_allclose(found, wanted, rtol=2e-3, err_msg=str(plan))


@functools.cache
def exact(num):
    return np.concatenate([x.ravel() for x in jax.tree.leaves(alone(num)[2])])


def error(plan, num):
    """How far gradients are from those of one device in float32, of their size."""
    made, devices = model(num), devices_of(plan)
    state = fz.init(made, TX, plan, rng=0, devices=devices)
    state, _ = trained(made, plan, state, devices)
    grads = fz.replan(state, made, TX, plan, ONE, devices=jax.devices()[:1]).opt_state[0].trace
    found = np.concatenate([x.ravel() for x in jax.tree.leaves(jax.device_get(grads))])
    return np.linalg.norm(found - exact(num)) / np.linalg.norm(exact(num))


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("axes", [{"context": 8}, {"tensor": 4}, {"expert": 4}], ids=str)
def test_sums_over_an_axis_in_few_bits_are_no_farther_from_float32_than_one_device(axes, precision):
    """XLA adds terms of a product in its dtype, whatever `reduce_dtype` says of ZeRO's sums. In 8
    bits, operands are scaled by the largest value of all devices'."""
    num = EXPERTS if "expert" in axes else 0
    plan = fz.Plan(data=1, precision=precision, reduce_dtype="fp32", **axes)
    one = error(plan.replace(context=1, tensor=1, expert=1), num)
    assert one > 0.001
    assert error(plan, num) < 1.2 * one
