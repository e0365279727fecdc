"""Warnings point to the line of the user that they are about."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx

import fzero as fz
import torch_bridge as tb
from tests.support import tiny


class Counting(torch.nn.Module):
    """A forward that counts its calls, in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(2, 2), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        return self.linear(x)


def convert() -> Any:
    return tb.convert(Counting(), torch.ones(2, 2))


def init() -> Any:
    return fz.init(tiny.chain(), optax.sgd(0.1), tiny.plan(data=1, tensor=2), rng=0)


def halves() -> Any:
    model = tiny.chain()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(jax.random.key(0)))
    return fz.init(model.with_init(rounded), optax.sgd(0.1), tiny.plan(data=1, precision="bf16"))


def constants() -> Any:
    """A step of a loss that calls the module itself, not the forward that it is given."""
    module, plan, tx = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tiny.plan(data=1), optax.sgd(0.1)
    model = fz.from_flax(module, lambda forward, batch: jnp.sum(module(batch)))
    state = fz.init(model, tx, plan)
    return fz.train_step(model, tx, plan)(state, jnp.ones((4, 2)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fz.Plan(data=2).mesh(), "of 8 devices; the others are not used"),
        (init, "no parameter of the model lies along it"),
        (halves, "have no float32 master"),
        (convert, "counts in values of Python"),
        (constants, "the loss follows from no parameter"),
    ],
    ids=["a plan", "a state", "16 bits", "a conversion", "constants"],
)
@pytest.mark.filterwarnings("default")
def test_a_warning_points_to_the_users_line(call: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=said) as seen:
        call()
    assert {one.filename for one in seen if said in str(one.message)} == {__file__}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("which", ["fp32 plan", "frozen", "no optimizer"])
def test_parameters_of_16_bits_need_no_master_there(which: str) -> None:
    model, tx = tiny.chain(), optax.sgd(0.1)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(jax.random.key(0)))
    model = model.with_init(rounded)
    if which == "frozen":
        model = fz.Model(rounded, model.loss, frozen=[re.compile("")])
    plan = tiny.plan(data=1, precision="fp32" if which == "fp32 plan" else "bf16")
    state = fz.init(model, None if which == "no optimizer" else tx, plan)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}


@pytest.mark.parametrize("given", ["a function", "values"])
def test_moments_of_16_bits_parameters_have_32(given: str) -> None:
    rounded = {"w": jnp.ones((8, 2), jnp.bfloat16)}
    init = (lambda rng: (rounded, {})) if given == "a function" else (rounded, {})
    model, tx = fz.Model(init, lambda *_: None), optax.adam(0.1)
    state = fz.init(model, tx, tiny.plan(data=2))
    moments = state.opt_state[0].mu["w"], state.opt_state[0].nu["w"]
    assert [leaf.dtype.name for leaf in moments] == ["float32"] * 2
