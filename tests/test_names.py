"""Names of scopes and modules reach the compiled program, for profiles and error messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import fzero as fz
from tests.support import tiny


WIDTH = 8
BATCH = {"x": np.ones((8, WIDTH), np.float32)}
SGD = optax.sgd(0.1)


def attention(w, x):
    with jax.named_scope("my_attention"):
        # A function that is compiled by itself, as most of jax.numpy's: it is inlined.
        return jnp.tanh(jnp.einsum("bi,ij->bj", x, w))


class Inner(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.Dense(WIDTH)(x))


class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(Inner(name="my_attention")(x))


def plain_model():
    def loss(params, buffers, batch, rng, train):
        return jnp.mean(attention(params["w"], batch["x"]) ** 2), buffers, {}

    return fz.Model(lambda key: ({"w": jnp.eye(WIDTH)}, {}), loss)


def chain():
    first = fz.Layer("in", lambda key: jnp.eye(WIDTH), lambda w, batch, ctx: batch["x"] @ w)
    blocks = fz.Stack("blocks", 4, lambda key: jnp.eye(WIDTH), lambda w, x, ctx: attention(w, x))
    return fz.Sequential([first, blocks], loss=lambda x, batch: jnp.mean(x**2))


def flax_model():
    return fz.from_flax(Net(), lambda run, batch: jnp.mean(run(batch["x"])), BATCH["x"][:1])


CASES = {
    "model": (plain_model, {"data": 4}),
    "model-bf16": (plain_model, {"data": 1, "precision": "bf16"}),
    "flax": (flax_model, {"data": 4, "precision": "bf16"}),
    "flax-stage-1": (flax_model, {"zero": 1, "data": 2}),
    "stack": (chain, {"data": 4, "prefetch": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_names_are_in_the_compiled_program(case):
    make, options = CASES[case]
    model, plan = make(), tiny.plan(**{"zero": 3, **options})
    state = fz.abstract_state(model, SGD, plan)
    text = fz.train_step(model, SGD, plan).lower(state, BATCH).compile().as_text()
    named = [line for line in text.splitlines() if "my_attention" in line]
    # The product of the forward pass and those of the backward pass.
    assert sum("dot_general" in line for line in named) >= 2
    assert any("transpose(jvp" in line for line in named)
