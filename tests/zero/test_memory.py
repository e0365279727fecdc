"""Stage 3 holds a constant number of gathered layers, however deep the stack."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from support import tiny

import fzero as fz
from fzero.batch import Inputs
from fzero.pieces import whole_chain
from fzero.step.passes import OneProgram
from fzero.zero.chain import input_backward, train_forward
from fzero.zero.grads import loss_seed
from fzero.zero.replay import gather_at_use
from fzero.zero.weights import FetchedWeights
from tests.support.gpt import Size, abstract_batch, gpt
from tests.support.init import lower_init


pytestmark = pytest.mark.as_users


def temporaries(layers, zero=3):
    # Weights dominate: a layer is 12 d² = 192 Ki parameters, its input 8 x 128.
    size = Size(vocab=32, d=128, layers=layers, heads=2, seq=8)
    model, tx = gpt(size), optax.sgd(0.1)
    plan = fz.Plan(zero=zero, data=8, min_shard_bytes=1024)
    step = fz.train_step(model, tx, plan)
    shapes = fz.abstract_state(model, tx, plan)
    compiled = step.lower(shapes, abstract_batch(size, 8)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_temporaries_grow_by_saved_activations_and_shards_never_by_gathered_layers():
    layer = 12 * 128 * 128 * 4
    saved = 1 * 8 * 128 * 4  # one row per device: a layer's input
    shard = layer / 8  # the layer's reduced gradient, which the step must hold
    temp = {depth: temporaries(depth) for depth in (4, 16, 64)}
    for shallow, deep in ((4, 16), (16, 64)):
        per_layer = (temp[deep] - temp[shallow]) / (deep - shallow)
        # The gradient's shard, the saved input and whole leaves' gradients; once the stack is so
        # deep that the optimizer's half needs more than the layers do, the update's shard too.
        # A gathered layer more would be eight shards.
        assert per_layer <= 2 * shard + saved + 13 * 128 * 4 * 3
    # Three gathered layers, gradients in flight included, and the gradient shards.
    assert temp[16] - 16 * (shard + saved) <= 5 * layer


def test_initialising_never_holds_a_whole_large_leaf():
    model = fz.Model(
        lambda rng: ({"w": jax.random.normal(rng, (4096, 1024))}, {}),
        lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}),
    )
    plan = fz.Plan(zero=3, data=8)
    lowered = lower_init(model, optax.adamw(1e-3), plan)
    memory = lowered.compile().memory_analysis()
    whole = 4096 * 1024 * 4
    assert memory.output_size_in_bytes < 3 * whole / 8 * 1.01 + 64
    # Random bits, their floats and one more copy of a device's part: three eighths.
    assert memory.temp_size_in_bytes < whole / 2


def test_a_reduction_waits_for_the_one_before():
    """Otherwise the compiler may reduce all at the end, with every whole gradient alive."""

    def loss(weights):
        x = jnp.ones(3)
        for weight in weights:
            x = jnp.tanh(weight * x)
        return x.sum()

    def backward(shards):
        shapes = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 4
        return gather_at_use(
            lambda weights: (jax.grad(loss)(weights),), shapes, shards, lambda i, shard: shard,
            [True] * 4, lambda i, grad: jax.lax.erf(grad), lambda i, shard: None, False,
        )  # fmt: skip

    behind, waits = {}, []  # for each value and each reduction: those that it needs
    for equation in jax.make_jaxpr(backward)([jnp.ones(3)] * 4).jaxpr.eqns:
        found = set().union(*(behind.get(x, set()) for x in map(id, equation.invars)))
        if equation.primitive.name == "erf":
            waits.append(found)
            found = found | {len(waits)}
        behind.update((id(x), found) for x in equation.outvars)
    # Behind the last gradient nothing is computed that could wait.
    assert waits[:-1] == [set(), {1}, {1, 2}]


def test_the_first_half_of_a_backward_pass_gathers_one_layer_ahead():
    """Before the loop and in it, for each leaf of a layer; otherwise in it alone."""
    model, batch = tiny.chain(), Inputs.of(tiny.tokens(4))

    def gathers(prefetch):
        plan = tiny.plan(zero=3, data=2, prefetch=prefetch)
        passes = OneProgram(fz.train_step(model, optax.sgd(0.1), plan).blueprint)

        def local(kept, buffers, batch, key):
            rules, pieces = passes.rules(), whole_chain(model.layers)
            rows, weights = batch, FetchedWeights(rules, kept)
            end, saved, _ = train_forward(pieces, weights, rows, buffers, rows, key)
            seed, _ = loss_seed(rules, end.mean, None)
            _, given = input_backward(saved, rules, kept, seed, key)
            return given

        state = fz.abstract_state(model, optax.sgd(0.1), plan)
        run = passes.on_devices(local, PartitionSpec())
        traced = jax.make_jaxpr(run)(state.params, state.buffers, batch, state.rng)
        return str(traced).count("all_gather[")

    both = 2 * 2  # the weights and biases of a layer, in both passes
    assert gathers(True) == gathers(False) + both
