"""Steps are pure functions: they can be part of users' own programs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


TX = optax.adam(1e-2)
MODEL = tiny.regression()


def made(plan, tx=TX, rng=0):
    """A state, a training step that keeps its input, an evaluation."""
    step = fz.train_step(MODEL, tx, plan, donate=False)
    return fz.init(MODEL, tx, plan, rng), step, fz.eval_step(MODEL, plan)


@pytest.mark.bits
@pytest.mark.parametrize(("zero", "precision"), [(0, "bf16"), (3, "fp32")])
def test_a_scan_of_steps_is_that_many_calls(zero, precision):
    plan = tiny.plan(zero=zero, data=2, precision=precision, clip_norm=1.0)
    state, step, evaluate = made(plan)
    batches = [tiny.points(4, seed) for seed in range(3)]
    # In a jit: what runs outside of one has the session's quick compiles.
    scan = jax.jit(functools.partial(jax.lax.scan, step))
    scanned, metrics = scan(state, jax.tree.map(lambda *x: np.stack(x), *batches))
    last = {}
    called = state
    for batch in batches:
        called, last = step(called, batch)
    tiny.same_bits(scanned, called)
    tiny.same_bits({name: found[-1] for name, found in metrics.items()}, last)
    traces = step.num_traces, evaluate.num_traces
    loss = evaluate(scanned, batches[0])["loss"]  # a state like any other
    assert float(jax.jit(evaluate)(scanned, batches[0])["loss"]) == float(loss)
    assert step.num_traces == traces[0]


def test_jit_with_donation_of_its_own():
    plan = tiny.plan(zero=1, data=2, precision="bf16")
    state, step, _ = made(plan)
    expected, _ = step(state, tiny.points(4))

    def twice(state, batch):
        state, _ = step.pure(state, batch)
        return step(state, batch)[0], state.params

    whole = jax.jit(twice, donate_argnums=(0,), compiler_options=step.compiler_options or None)
    new, params = whole(fz.init(MODEL, TX, plan), tiny.points(4))
    tiny.same_bits(params, expected.params)
    tiny.same_bits(new, step(expected, tiny.points(4))[0])


def test_shapes_without_running():
    plan = tiny.plan(zero=3, data=2)
    _, step, evaluate = made(plan)
    shapes = fz.abstract_state(MODEL, TX, plan)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.points(4))
    new, metrics = jax.eval_shape(step, shapes, batch)
    assert jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), new, shapes)
    assert metrics["loss"].shape == jax.eval_shape(evaluate, shapes, batch)["loss"].shape == ()


def test_seeds_side_by_side():
    plan = tiny.plan(zero=0, data=1)
    state, step, _ = made(plan)
    states = [state, made(plan, rng=1)[0]]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    both, metrics = jax.jit(jax.vmap(step, in_axes=(0, None)))(stacked, tiny.points(4))
    for i, one in enumerate(states):
        own, expected = step(one, tiny.points(4))
        np.testing.assert_allclose(metrics["loss"][i], expected["loss"], rtol=1e-5)
        tiny.close(jax.tree.map(lambda x, i=i: x[i], both).params, own.params, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("zero", "precision"), [(1, "bf16"), (3, "fp32"), (3, "bf16")])
def test_gradients_pass_through_evaluation(zero, precision):
    plan = tiny.plan(zero=zero, data=2, precision=precision)
    tx = optax.sgd(1.0)
    state, step, evaluate = made(plan, tx)
    batch = tiny.points(4)
    of = jax.grad(lambda p: evaluate(state.replace(params=p), batch)["loss"])
    found = jax.jit(of)(state.params)
    new, _ = step(state, batch)
    stepped = jax.tree.map(lambda a, b: a - b, state.params, new.params)
    tiny.close(found, stepped, rtol=0, atol=1e-5 if precision == "fp32" else 3e-2)


@pytest.mark.nightly  # outside of any program each operation is compiled
def test_gradients_pass_through_training():
    """A parameter after a step, by what those before it were scaled with; some are padded."""
    plan, tx = tiny.plan(zero=3, data=2), optax.sgd(0.1)
    state, step, _ = made(plan, tx)
    batch = tiny.points(4)

    def after(scale):
        new, _ = step(state.replace(params=jax.tree.map(lambda x: x * scale, state.params)), batch)
        return new.params["gain"]

    def alone(scale):
        params = jax.tree.map(lambda x: x * scale, start)
        grads = jax.grad(lambda p: tiny.whole_loss(MODEL, p, batch))(params)
        return params["gain"] - 0.1 * grads["gain"]

    start = tiny.on_one_device(fz.logical(MODEL, state))
    np.testing.assert_allclose(jax.grad(after)(1.0), jax.jit(jax.grad(alone))(1.0), rtol=1e-5)


@pytest.mark.parametrize(
    "numbers", [{"precision": "fp8", "float8": fz.Float8(keep=())}, {"gather_dtype": "int8"}]
)
def test_derivatives_through_training_are_refused_where_gradients_are_of_8_bits(numbers):
    """They would be zeros wherever a value was rounded; evaluation has all of them."""
    model, plan = tiny.chain(1), tiny.plan(zero=3, data=2, **numbers)
    state, step = fz.abstract_state(model, TX, plan), fz.train_step(model, TX, plan)

    def loss(params, state):
        return step(state.replace(params=params), tiny.tokens(4))[1]["loss"]

    with pytest.raises(fz.PlanError, match=r"8'.*through a training step.*plan\.replace\("):
        jax.eval_shape(jax.grad(loss), state.params, state)


@jax.custom_vjp
def turned(x):
    """The identity, whose gradient is turned round."""
    return x


turned.defvjp(lambda x: (x, None), lambda _, g: (-g,))


def turned_loss(p, buffers, batch, rng, train):
    out = jnp.tanh(fz.cast(batch["x"], like=p) @ p["w"]) @ p["odd"]
    error = (turned(out) * p["gain"] - batch["y"]).astype(jnp.float32)
    return fz.Mean(jnp.sum(jnp.square(error)), jnp.float32(error.size)), buffers, {}


TURNED = {
    "function": (fz.Model(MODEL.init, turned_loss), tiny.points(4)),
    "chain": (tiny.chain(2, lambda p, x, ctx: turned(tiny.block(p, x, ctx))), tiny.tokens(4)),
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    ("name", "numbers"),
    [("function", {}), ("chain", {}),
     ("chain", {"precision": "fp8", "float8": fz.Float8(keep=())})],
)  # fmt: skip
def test_derivatives_of_ones_own_pass_through_evaluation(name, zero, numbers):
    """And so do those of products in 8 bits, whatever is gathered."""
    model, batch = TURNED[name]

    def slopes(**options):
        plan = tiny.plan(**numbers, **options)
        state, evaluate = fz.init(model, TX, plan), fz.eval_step(model, plan)
        of = jax.grad(lambda p: evaluate(state.replace(params=p), batch)["loss"])
        return jax.jit(of)(state.params)

    one, several = slopes(zero=0, data=1), slopes(zero=zero, data=2)
    assert max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(one)) > 0.01
    several = jax.tree.map(lambda a, b: a[tuple(map(slice, b.shape))], several, one)  # no padding
    # Devices add up in another order. In 8 bits each scales what it has, and gradients have two
    # bits behind the first; one that was turned would be off by twice its size.
    tiny.close(several, one, rtol=0, atol=0.15 if numbers else 1e-5)


def test_accumulation_composes():
    plan = tiny.plan(zero=2, data=2, precision="bf16")
    state, step, _ = made(plan)
    add = fz.accumulate_step(MODEL, TX, plan, donate=False)

    @jax.jit
    def both(state, batch):
        state, _ = add(state, batch)
        return step(state, batch)[0]

    expected, _ = step(add(state, tiny.points(4))[0], tiny.points(4))
    tiny.same_bits(both(state, tiny.points(4)), expected)


REFUSED = {
    "pipeline": {"pipe": 2, "data": 1, "microbatches": 2},
    "tiers": {"data": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 1024},
    "host update": {"data": 2, "tiers": {"opt_state": "host"}, "update_on": "host"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_many_programs_is_refused_by_name(name):
    model = tiny.chain()
    plan = tiny.plan(**REFUSED[name])
    step = fz.train_step(model, TX, plan)
    shapes = fz.abstract_state(model, TX, plan)
    with pytest.raises(fz.PlanError, match=r"train_step\.pure: .* many programs"):
        jax.eval_shape(step, shapes, tiny.tokens(4))
    if name == "pipeline":
        with pytest.raises(fz.PlanError, match=r"eval_step\.pure: .* many programs"):
            jax.eval_shape(fz.eval_step(model, plan), shapes, tiny.tokens(4))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parked_leaves_are_refused_by_name_in_programs_of_ones_own(tier, tmp_path):
    state, step, evaluate = made(tiny.plan(zero=3, data=2))
    parked = fz.offload(state, "opt_state", to=tier, path=tmp_path if tier == "disk" else None)
    batches = jax.tree.map(lambda x: np.stack([x, x]), tiny.points(4))
    for run in (
        lambda: jax.jit(step)(parked, tiny.points(4)),
        lambda: jax.lax.scan(step, parked, batches),
        lambda: jax.vmap(step, (None, 0))(parked, batches),
    ):
        with pytest.raises(fz.PlacementError, match=r"opt_state/0/.*fz\.reload\(state"):
            run()
    # What a program does not read may be anywhere.
    loss = jax.grad(lambda p: evaluate(parked.replace(params=p), tiny.points(4))["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(loss(parked.params)))
    jax.jit(step)(fz.reload(parked), tiny.points(4))


def test_a_mesh_that_somebody_set_changes_nothing(tmp_path):
    plan = tiny.plan(zero=3, data=2)
    state, step, evaluate = made(plan)
    expected, _ = step(state, tiny.points(4))
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"))):
        state, step, evaluate = made(plan)
        tiny.same_bits(step(state, tiny.points(4))[0], expected)
        assert np.isfinite(evaluate(state, tiny.points(4))["loss"])
        fz.save(tmp_path, state, plan, asynchronous=False)
        tiny.same_bits(fz.restore(tmp_path, MODEL, TX, plan), state)
        with pytest.raises(fz.PlanError, match=r"train_step: jax\.set_mesh has set .*outside"):
            jax.jit(step)(state, tiny.points(4))
        assert dict(jax.sharding.get_abstract_mesh().shape) == {"data": 2, "tensor": 4}


def test_what_does_not_fit_is_refused_when_traced():
    plan = tiny.plan(zero=3, data=2)
    state, step, _ = made(plan)
    with pytest.raises(fz.BatchError, match="3 examples"):
        jax.jit(step)(state, tiny.points(3))
    other = fz.init(MODEL, optax.sgd(1.0), plan)
    with pytest.raises(fz.StateError, match="opt_state"):
        jax.jit(step)(other, tiny.points(4))
    with pytest.raises(fz.StateError, match=r"logical: the state is traced.* outside of it"):
        jax.jit(lambda state: fz.logical(MODEL, state))(state)


def test_init_is_compiled_once_and_the_users_init_traced_once():
    calls = []

    def init(key):
        calls.append(1)
        return MODEL.init(key)

    model = fz.Model(init, MODEL.loss)
    plan = tiny.plan(zero=1, data=2)
    first = fz.init(model, TX, plan)
    with tiny.counted_compiles() as compiles:
        second = fz.init(model, TX, plan)
    assert not compiles
    tiny.same_bits(first, second)
    fz.train_step(model, TX, plan)(first, tiny.points(4))
    fz.eval_step(model, plan)
    fz.abstract_state(model, TX, plan.replace(zero=3))
    assert len(calls) == 1
    other = model.with_init(lambda key: jax.tree.map(jnp.zeros_like, init(key)))
    assert float(jnp.abs(fz.init(other, TX, plan).params["w"]).sum()) == 0
