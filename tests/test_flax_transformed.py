"""A loss that calls a flax module's forward within a function that JAX transforms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fzero as fz
from tests.support.one_call import called_once


WIDTH = 4
ROWS = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)


class Block(nnx.Module):
    def __init__(self, *, normed=False, dropped=False):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if normed else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if dropped else None

    def __call__(self, x):
        x = self.dense(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.drop is None else self.drop(x)


class LinenBlock(nn.Module):
    normed: bool = False
    dropped: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(WIDTH)(x)
        x = nn.BatchNorm(use_running_average=not train)(x) if self.normed else x
        return nn.Dropout(0.5, deterministic=not train)(x) if self.dropped else x


def square(x):
    return jnp.mean(x**2)


def called(module, loss, train=True):
    examples = (ROWS,) if isinstance(module, nn.Module) else ()
    return called_once(fz.from_flax(module, loss, *examples), ROWS, train)


def alone(forward, batch):
    return square(forward(batch))


SEVERAL_TIMES = {
    "vmap": lambda forward, rows: square(jax.vmap(forward)(rows)),
    "vmap of another": lambda forward, rows: square(
        jax.vmap(lambda i: i * forward(rows))(jnp.ones(2))
    ),
    "scan": lambda forward, rows: square(
        jax.lax.scan(lambda carry, x: (carry, forward(x[None])), 0, rows)[1]
    ),
    "checkpoint": lambda forward, rows: square(jax.checkpoint(lambda x: forward(x))(rows)),
    "gradients by row": lambda forward, rows: square(
        jax.vmap(jax.grad(lambda x: jnp.sum(forward(x[None]) ** 3)))(rows)
    ),
    "checkpoint of a gradient": lambda forward, rows: square(
        jax.checkpoint(jax.grad(lambda x: jnp.sum(forward(x) ** 3)))(rows)
    ),
}


@pytest.mark.parametrize("how", SEVERAL_TIMES)
def test_what_would_be_lost_or_repeated_is_refused(how):
    loss = SEVERAL_TIMES[how]
    for make in (Block, LinenBlock):
        with pytest.raises(fz.StateError, match="draws random numbers, which each row"):
            called(make(dropped=True), loss)
        with pytest.raises(fz.StateError, match=r"forward writes .*/mean, .*/var, which"):
            called(make(normed=True), loss)
        # In evaluation neither is, and a module that has neither is called as it is.
        for module, train in ((make(normed=True, dropped=True), False), (make(), True)):
            jax.eval_shape(partial(called, module, loss, train))


DERIVATIVES = {
    "gradient": lambda forward, rows: jax.grad(lambda x: jnp.sum(forward(x) ** 3))(rows),
    "gradient of no argument": lambda forward, rows: jax.grad(
        lambda y: jnp.sum(forward(rows) ** 3) * y
    )(2.0),
    "tangent": lambda forward, rows: jax.jvp(forward, (rows,), (rows**2,))[1],
    "second gradient": lambda forward, rows: jax.grad(
        lambda y: square(jax.grad(lambda x: jnp.sum(forward(x) ** 3))(y))
    )(rows),
}
BY_NIGHT = {"gradient", "tangent"}


@pytest.mark.parametrize(
    "how",
    [pytest.param(x, marks=[pytest.mark.nightly] * (x in BY_NIGHT)) for x in DERIVATIVES],
)
def test_derivatives_keep_what_is_written(how):
    def loss(forward, batch):
        return square(DERIVATIVES[how](forward, batch)) + square(forward(batch))

    def twice(forward, batch):
        return square(forward(batch)) + square(forward(batch))

    for make in (Block, LinenBlock):
        module = make(normed=True, dropped=True)
        found, expected = called(module, loss)[2], called(module, twice)[2]
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_a_function_that_jax_keeps_would_not_learn_of_later_buffers(transform):
    module = LinenBlock(normed=True)

    def evaluated(forward):
        return transform(lambda x: forward(x, train=False))

    def writes_between(forward, rows):
        kept = evaluated(forward)
        before = kept(rows)
        forward(rows)
        return square(kept(rows) - before)

    def writes_before(forward, rows):
        forward(rows)
        kept = evaluated(forward)
        return square(kept(rows)) + square(kept(rows))

    with pytest.raises(fz.StateError, match=r"var afterwards, of which .*that write come first"):
        called(module, writes_between)
    assert np.isfinite(called(module, writes_before)[0])


def test_a_key_that_a_module_holds_stays_what_it_is():
    class Draws(Block):
        def __init__(self):
            super().__init__(normed=True)
            self.key = nnx.Variable(jax.random.key(0))

        def __call__(self, x):
            return self.dense(x) + jax.random.normal(self.key[...], x.shape)

    found, expected = called(Draws(), SEVERAL_TIMES["checkpoint"]), called(Draws(), alone)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
