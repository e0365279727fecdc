"""Plans drawn over all axes: the losses, updates and files of one device."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz


WORDS, WIDTH, HEADS, LENGTH, ROWS, EXPERTS = 16, 16, 4, 16, 8, 4
ATTENTION = {"qkv": (None, None, fz.Parts("tensor", HEADS)), "out": (fz.Parts("tensor", HEADS),)}
DENSE = {"up": (None, "tensor"), "down": ("tensor",)}
MIXED = {"up": ("expert",), "down": ("expert",)}


def block_init(num, rng):
    """A layer's weights; with `num` experts, each has its own."""
    keys = jax.random.split(rng, 5)
    own = (num,) if num else ()
    shapes = {"qkv": (WIDTH, 3, HEADS, 4), "out": (HEADS, 4, WIDTH), "up": (*own, WIDTH, 32),
              "down": (*own, 32, WIDTH), **({"router": (WIDTH, num)} if num else {})}  # fmt: skip
    pairs = zip(keys, shapes.items(), strict=False)
    return {name: 0.2 * jax.random.normal(key, shape) for key, (name, shape) in pairs}


def hidden(own, p, rows):
    return own.dot(jnp.tanh(own.dot(rows, p["up"])), p["down"])


def block(p, x, ctx):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", jnp.tanh(x), p["qkv"]), 2, 0)
    seen = fz.attention(q, k, v, causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", seen, p["out"])
    if "router" not in p:
        return x + jnp.tanh(x @ p["up"]) @ p["down"]
    gates, chosen = jax.lax.top_k(jax.nn.softmax(10 * (x @ p["router"])), 2)
    weights = {name: p[name] for name in ("up", "down")}
    return x + fz.experts(hidden, weights, x, chosen, gates)[0]


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


def one_device(plan):
    return fz.Plan(zero=0, data=1, clip_norm=plan.clip_norm), jax.devices()[:1]


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    """For so many experts, the file of an initial state on one device."""

    @functools.cache
    def saved(num):
        plan, devices = one_device(fz.Plan())
        folder = tmp_path_factory.mktemp("initial") / "state"
        fz.save(folder, fz.init(model(num), TX, plan, rng=0, devices=devices), plan)
        return folder

    return saved


def trained(made, plan, folder, devices):
    """The state after a step from a file's, or a new one, with loss and gradients' norm."""
    if folder is None:
        state = fz.init(made, TX, plan, rng=0, devices=devices)
    else:
        state = fz.restore(folder, made, TX, plan, devices=devices)
    state, metrics = fz.train_step(made, TX, plan, devices=devices)(state, batch())
    return state, (float(metrics["loss"]), float(metrics["grad_norm"]))


@functools.cache
def alone(clip_norm, num, folder):
    plan, devices = one_device(fz.Plan(clip_norm=clip_norm))
    state, numbers = trained(model(num), plan, folder, devices)
    return numbers, jax.device_get((state.params, state.opt_state))


def check(seed, initial, tmp_path=None):
    plan = draw(seed)
    num = EXPERTS if plan.expert > 1 else 0
    made, further = model(num), plan.tensor * plan.context * plan.expert
    devices = jax.devices()[: plan.pipe * plan.data * plan.replica * further]
    state, numbers = trained(made, plan, initial(num), devices)
    wanted, arrays = alone(plan.clip_norm, num, initial(num))
    # Sums over a divided dim, and softmaxes of parts, round in another order.
    np.testing.assert_allclose(numbers, wanted, rtol=1e-5, err_msg=str(plan))
    # What moves to one device, or is written and read there, is what there was, to the bit.
    whole = jax.device_get(fz.logical(made, state, plan))
    one, first = one_device(plan)
    if tmp_path is not None:
        fz.save(tmp_path / "state", state, plan)
        found = fz.restore(tmp_path / "state", made, TX, one, devices=first)
    else:
        found = fz.replan(state, made, TX, plan, one, devices=first)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.params), whole)
    # Adam's first step is as long as its rate, whatever the gradient: moments are compared, too.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=2e-6, err_msg=str(plan))
    jax.tree.map(close, jax.device_get((found.params, found.opt_state)), arrays)


# Of the three CPU seconds that a plan takes most is compilation: ten take 30; others, a night.
@pytest.mark.parametrize("seed", range(10))
def test_a_drawn_plan_trains_as_one_device(seed, initial):
    check(seed, initial)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10, 500))
def test_many_drawn_plans_train_as_one_device(seed, initial, tmp_path):
    check(seed, initial, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_drawn_plans_in_fp16_train_as_one_device_where_none_overflows(seed):
    """At 2^16 some plans skip their first steps, and others do not (tests/test_precision.py)."""
    scaling = fz.LossScaling(initial=2.0**8)
    plan = draw(seed).replace(precision="fp16", loss_scale=scaling)
    one = fz.Plan(data=1, clip_norm=plan.clip_norm, precision="fp16", loss_scale=scaling)
    made = model(EXPERTS if plan.expert > 1 else 0)
    further = plan.tensor * plan.context * plan.expert
    num = plan.pipe * plan.data * plan.replica * further
    (state, found), (alone, wanted) = (
        trained(made, p, None, jax.devices()[:n]) for p, n in ((plan, num), (one, 1))
    )
    assert float(state.loss_scale.skipped) == float(alone.loss_scale.skipped) == 0
    # A float16 has 11 bits, and sums of its products round in another order.
    np.testing.assert_allclose(found, wanted, rtol=2e-3, err_msg=str(plan))
