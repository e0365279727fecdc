"""What variables of nnx modules hold: as it is stored, in its own dtype, random keys too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fzero as fz


WIDTH = 4
ROWS = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


class Positive(nnx.Param):
    def get_value(self, **options):
        return jax.nn.softplus(super().get_value(**options))


class Halved(nnx.BatchStat):
    def get_value(self, **options):
        return super().get_value(**options) / 2


class Scaled(nnx.Module):
    """One product, by a variable and by its forward's own function of it."""

    def __init__(self, variable, read=lambda held: held[...]):
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.held, self.read = variable, read

    def __call__(self, x):
        return self.dense(x) * self.read(self.held)


def loss(forward, batch):
    return jnp.mean((forward(batch) - 1) ** 2)


def stepped(module, num_steps=2, num_devices=1, of=loss):
    """The state after some steps, and the loss of each."""
    model = fz.from_flax(module, of)
    plan, tx = fz.Plan(zero=3, data=num_devices, min_shard_bytes=0), optax.sgd(0.1)
    state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, ROWS)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_values_that_are_computed_when_they_are_read_are_held_as_stored():
    annotated = {"out_sharding": (None,), "eager_sharding": False}
    state, losses = stepped(Scaled(Positive(jnp.zeros(WIDTH), **annotated)), 1)
    kernel = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)).kernel[...]
    plain, grad = jax.value_and_grad(
        lambda held: jnp.mean((ROWS @ kernel * jax.nn.softplus(held) - 1) ** 2)
    )(jnp.zeros(WIDTH))
    np.testing.assert_allclose(losses[0], plain, 1e-6)
    np.testing.assert_allclose(state.params["held"], -0.1 * grad, 1e-5, 1e-6)

    def grown(held):
        held[...] = held[...] + 1
        return held[...]

    state, _ = stepped(Scaled(Halved(jnp.zeros(())), grown))
    module = Scaled(Halved(jnp.zeros(())), grown)
    _ = module(ROWS), module(ROWS)
    assert float(state.buffers["held"]) == float(module.held.get_raw_value()) == 1.5


def test_random_keys_that_a_module_holds_are_kept():
    """As they are, or as it writes them; those of streams are the step's."""

    def fixed(held):
        return jax.random.normal(held[...], (WIDTH,))

    def drawn(held):
        own, held[...] = jax.random.split(held[...])
        return jax.random.normal(own, (WIDTH,))

    for make in (nnx.Variable, lambda key: nnx.RngKey(key, tag="features")):
        for read in (fixed, drawn):
            module = Scaled(make(jax.random.key(3)), read)
            expected = [float(loss(module, ROWS)) for _ in range(2)]

            def still(forward, batch):
                return jax.lax.stop_gradient(loss(forward, batch))

            for num_devices in (1, 2):
                state, found = stepped(
                    Scaled(make(jax.random.key(3)), read), 2, num_devices, of=still
                )
                np.testing.assert_allclose(found, expected, 1e-5)
                bits = jax.random.key_data(module.held.get_raw_value())
                np.testing.assert_array_equal(state.buffers["held"], bits)


@pytest.mark.parametrize("what", ["key", "count"])
def test_what_a_stream_holds_is_not_for_the_forward(what):
    def read(stream):
        stream()
        return jax.random.normal(stream.key[...]) if what == "key" else stream.count[...] + 0.0

    with pytest.raises(
        fz.StateError, match=rf"read the nnx.Rng{what.title()} of a stream of random keys 'own'"
    ):
        stepped(Scaled(nnx.RngStream(0, tag="own"), read))
    stepped(Scaled(nnx.RngStream(0, tag="own"), lambda stream: stream.fork().normal()))


@pytest.mark.parametrize("value", [False, np.uint8(0)])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_buffers_of_another_dtype_are_refused(kind, value):
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            held = self.variable("own", "held", lambda: jnp.asarray(value))
            if not self.is_initializing():
                held.value += jnp.int32(100)
            return nn.Dense(WIDTH)(x)

    def counted(held):
        held.set_value(held.get_value() + jnp.int32(100))
        return 1

    if kind == "linen":
        model = fz.from_flax(Counts(), loss, ROWS)
    else:
        model = fz.from_flax(Scaled(nnx.Variable(jnp.asarray(value)), counted), loss)
    params, buffers = model.init(jax.random.key(0)) if kind == "linen" else model.init
    dtype = np.asarray(value).dtype.name
    with pytest.raises(fz.StateError, match=rf"held: {dtype}\[\] became int32\[\]\..*\.astype"):
        model.loss(params, buffers, ROWS, jax.random.key(0), True)


def test_variables_of_several_arrays_are_refused():
    held = {"u": jnp.ones(WIDTH), "v": jnp.zeros(WIDTH)}
    with pytest.raises(fz.StateError, match=r"held: this nnx.Param holds a dict.*nnx\.Dict\(a="):
        fz.from_flax(Scaled(nnx.Param(held)), loss)
    variables = nnx.Dict(u=nnx.Param(held["u"]), v=nnx.Param(held["v"]))
    _, losses = stepped(Scaled(variables, lambda held: held["u"][...] + held["v"][...]))
    assert losses[1] < losses[0]
