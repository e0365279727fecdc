"""Weights of products in 8 bits, gathered in 8 bits by stage 3: half the bytes, the same bits."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.programs.jaxprs import Program
from fzero.zero.float8_weights import narrow_inputs
from tests.support import tiny


ALL = fz.Float8(keep=())
TX = optax.adamw(1e-2)


def plan(**options):
    options = {"zero": 3, "data": 8, "float8": ALL, "min_shard_bytes": 0} | options
    return fz.Plan(precision="fp8", **options)


def mlp_init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (32, 48)) * 0.3,
            "down": {"w": jax.random.normal(down, (32, 48)) * 0.1}}, {}  # fmt: skip


def mlp_loss(p, buffers, batch, rng, train):
    """Two products, one of them with a transposed weight."""
    x = fz.cast(batch["x"], like=p)
    hidden = jax.checkpoint(lambda up, x: jnp.tanh(x @ up))(p["up"], x)
    error = (hidden @ p["down"]["w"].T - x).astype(jnp.float32)
    return fz.Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}


MLP = fz.Model(mlp_init, mlp_loss)
CHAIN = tiny.chain(3)


def checkpointed(p, x, ctx):
    return jax.checkpoint(lambda p, x: tiny.block(p, x, ctx))(p, x)


# What a checkpoint computes again waits at a barrier, as do the weights that it reads.
AGAIN = tiny.chain(3, checkpointed)


def rows(seed, model):
    if model in (CHAIN, AGAIN):
        return tiny.tokens(16, seed=seed)
    return {"x": np.random.default_rng(seed).normal(size=(16, 32)).astype(np.float32)}


def gathers(model, made, batch):
    """How many gathers of a step's program send 8 bits, and how many do not."""
    text = fz.train_step(model, TX, made).lower(fz.abstract_state(model, TX, made), batch).as_text()
    found = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    narrow = sum("xui8>" in line.rpartition("->")[2] for line in found)
    return narrow, len(found) - narrow


def trained(model, made, steps=3):
    state, step, found = fz.init(model, TX, made), fz.train_step(model, TX, made), []
    for seed in range(steps):
        state, metrics = step(state, rows(seed, model))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    found.append(float(fz.eval_step(model, made)(state, rows(9, model))["loss"]))
    whole = fz.replan(state, model, TX, made, made.replace(zero=0, secondary=None))
    return found, jax.device_get(whole.params)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("model", "options", "narrow"),
    [
        (CHAIN, {}, 2), (MLP, {}, 4),
        *(pytest.param(*more, marks=pytest.mark.nightly) for more in [
            (CHAIN, {"remat": "dots"}, 2), (CHAIN, {"remat": "none"}, 2),
            (CHAIN, {"prefetch": True}, 5), (MLP, {"microbatches": 2}, 4), (AGAIN, {}, 2)]),
    ],
)  # fmt: skip
def test_what_travels_in_8_bits_is_what_scaling_whole_weights_gives(model, options, narrow):
    if options.get("microbatches") and "SSE4_2" in os.environ.get("XLA_FLAGS", ""):
        pytest.skip("XLA compiles no float16 for SSE4.2")  # by which it goes to 8 bits
    made = plan(**options)
    assert gathers(model, made, rows(0, model))[0] == narrow
    ours, params = trained(model, made)
    theirs, other = trained(model, made.replace(zero=0))
    assert ours == theirs
    tiny.same_bits(params, other)


def test_a_gather_of_a_backward_pass_is_another_than_that_of_the_forward_pass():
    """Or XLA could take one for both, and keep what is whole in between."""
    made, batch = plan(), rows(0, CHAIN)
    state = fz.abstract_state(CHAIN, TX, made)
    text = fz.train_step(CHAIN, TX, made).lower(state, batch).as_text()
    found = [
        line.rpartition("->")[2] for line in text.splitlines() if "stablehlo.all_gather" in line
    ]
    narrow = [one for one in found if "xui8>" in one]
    assert len(narrow) == len(set(narrow)) == 2


@pytest.mark.parametrize(
    "options",
    [{"float8": fz.Float8("rowwise", keep=())}, {"float8": fz.Float8(keep=("blocks",))},
     {"secondary": 2}, {"zero": 2, "gather": "lazy"}],
)  # fmt: skip
def test_other_recipes_and_weights_that_are_kept_travel_in_16_bits(options):
    narrow, others = gathers(CHAIN, plan(**options), rows(0, CHAIN))
    assert (narrow, others > 0) == (0, True)


def test_a_weight_that_a_checkpoint_reads_again_travels_in_8_bits():
    assert gathers(AGAIN, plan(), rows(0, AGAIN))[0] == 2


def test_a_weight_that_something_else_reads_travels_in_16_bits():
    def loss(p, buffers, batch, rng, train):
        out, *rest = mlp_loss(p, buffers, batch, rng, train)
        return fz.Mean(out.total + jnp.sum(jnp.abs(p["up"].astype(jnp.float32))), out.count), *rest

    assert gathers(MLP, plan(), rows(0, MLP))[0] == 4
    # Of four: not in the forward pass, whose sum reads it.
    assert gathers(fz.Model(mlp_init, loss), plan(), rows(0, MLP))[0] == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_seen_on_every_device(bad):
    def init(key):
        params, buffers = mlp_init(key)
        return {**params, "up": params["up"].at[5, 3].set(bad)}, buffers

    model, made = fz.Model(init, mlp_loss), plan(skip_nonfinite=True)
    _, metrics = fz.train_step(model, TX, made)(fz.init(model, TX, made), rows(0, MLP))
    assert metrics["nonfinite"] == 1


def test_a_layer_over_further_devices_has_the_scale_of_all_of_it():
    size = {"data": 2, "tensor": 2}
    layer = fz.Layer(
        "up", lambda key: {"w": jax.random.normal(key, (32, 64)).at[1, 60].set(50)},
        lambda p, batch, ctx: fz.cast(batch["x"], like=p) @ p["w"], shard={"w": (None, "tensor")},
    )  # fmt: skip
    model = fz.Sequential(
        [layer], loss=lambda y, batch: jnp.mean(jnp.square(y.astype(jnp.float32)))
    )
    losses = {}
    for zero in (0, 3):
        made = plan(zero=zero, **size)
        _, metrics = fz.train_step(model, TX, made)(fz.init(model, TX, made), rows(0, MLP))
        losses[zero] = float(metrics["loss"])
    assert losses[3] == pytest.approx(losses[0], rel=1e-6)  # XLA divides the sums its own way


@pytest.mark.parametrize(
    ("function", "narrow"),
    [(lambda w, x: x @ w, True), (lambda w, x: x @ w.T.reshape(48, 64).T, True),
     (lambda w, x: (x @ w, w), False), (lambda w, x: x @ w + jnp.sum(w), False),
     (lambda w, x: x[:, :32] @ w[:32], False), (lambda w, x: x, False)],
)  # fmt: skip
def test_which_inputs_are_read_in_8_bits_only(function, narrow):
    from fzero.float8.products import in_float8

    w, x = jnp.ones((64, 48), jnp.bfloat16), jnp.ones((16, 64), jnp.bfloat16)
    run = in_float8(lambda p, x: function(p["w"], x), "mlp", ALL)
    closed = jax.make_jaxpr(lambda w: run({"w": w}, x))(w)
    program = Program(closed.jaxpr, closed.consts)
    assert (narrow_inputs(program, program.inputs) == set(program.inputs)) is narrow
