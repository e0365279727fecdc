"""What a model's functions return, other than what they should, is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from support import tiny

import fzero as fz


TX = optax.sgd(0.1)


def init(key):
    return {"w": jnp.ones((3, 2))}, {"seen": jnp.zeros((), jnp.int32), "mean": jnp.zeros(2)}


def traced(returns, training=True):
    """Traces a step of a model whose loss returns `returns(loss, buffers)`; nothing is compiled."""

    def loss(p, buffers, batch, rng, train):
        return returns(batch["x"] @ p["w"], buffers)

    model, plan = fz.Model(init, loss), tiny.plan(zero=1, data=2)
    step = fz.train_step(model, TX, plan) if training else fz.eval_step(model, plan)
    tx = TX if training else None
    return step.lower(fz.abstract_state(model, tx, plan), {"x": jnp.ones((4, 3))})


LOSSES = {
    "each example's": (lambda y, b: (y.sum(1), b, {}), r"got float32\[2\].*jnp\.sum\(losses\)"),
    "of one element": (lambda y, b: (y.sum(keepdims=True), b, {}), r"got float32\[1, 1\]"),
    "a mean of vectors": (lambda y, b: (fz.Mean(y.sum(0), 2.0), b, {}), r"got float32\[2\]"),
    "complex": (lambda y, b: (y.sum() * 1j, b, {}), r"got complex64\[\]"),
    "a dict": (lambda y, b: ({"loss": y.sum()}, b, {}), "got dict"),
    "alone": (lambda y, b: y.sum(), r"\(loss, buffers, metrics\).*got float32\[\]"),
    "without metrics": (
        lambda y, b: (y.sum(), b),
        r"\(loss, buffers, metrics\).*float32\[\], dict",
    ),
    "a mean alone": (lambda y, b: fz.Mean(y.sum(), 2.0), "metrics.*got Mean"),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("returns", "said"), LOSSES.values(), ids=LOSSES)
def test_losses(returns, said, training):
    with pytest.raises(fz.StateError, match=rf"loss: expected .*{said}"):
        traced(returns, training)


def test_whole_numbers_are_evaluated_and_not_trained_with():
    def count(y, b):
        return fz.Mean(jnp.sum(y > 0), jnp.float32(y.size)), b, {}

    traced(count, training=False)
    with pytest.raises(fz.StateError, match="floating-point loss to train with, got int32"):
        traced(count)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("count", [8, 8.0], ids=["int", "float"])
def test_a_count_may_be_a_number_of_python(count, data):
    def loss(p, buffers, batch, rng, train):
        return fz.Mean(jnp.sum(batch["x"] @ p["w"]), count), buffers, {}

    model, plan = fz.Model(init, loss), tiny.plan(zero=1, data=data)
    state, batch = fz.init(model, TX, plan), {"x": jnp.ones((4, 3))}
    _, metrics = fz.train_step(model, TX, plan)(state, batch)
    assert float(metrics["loss"]) == 24 / 8 / data  # each device counts eight
    assert float(metrics["count"]) == 8 * data


def test_sums_of_16_bits_go_on_in_32():
    """So does a loss scale with them, which float16 may not hold."""
    mean = fz.Mean.of(fz.Mean(jnp.float16(1), jnp.bfloat16(3)))
    assert mean.total.dtype == mean.count.dtype == jnp.float32


METRICS = {
    "complex": ({"a": 1j * jnp.ones(())}, r"metric 'a' is complex64\[\]"),
    "a word": ({"a": "x"}, "metric 'a' is str"),
    "nested": ({"a": {"b": jnp.ones(())}}, "metric 'a' is dict"),
    "a number's": ({1: jnp.ones(())}, "metric 1 is .*expected a name"),
    "a list": ([1.0], r"expected a loss, or \(loss, metrics\), got float32\[\], list"),
}


@pytest.mark.parametrize(("metrics", "said"), METRICS.values(), ids=METRICS)
def test_metrics(metrics, said):
    """Of a complex one the real part was reported."""
    with pytest.raises(fz.StateError, match=f"loss: {said}"):
        traced(lambda y, b: (y.sum(), b, metrics))


def test_what_is_no_array():
    x, said = jnp.ones((4, 3)), "is str: expected arrays"
    model = fz.Model(
        init, lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {"a": "x"}),
        predict=lambda p, buffers, batch, rng: {"y": "x"},
    )  # fmt: skip
    layers = [fz.Layer("first", None, lambda p, batch, ctx: {"y": "x", "x": batch["x"]})]
    chain = fz.Sequential(layers, loss=lambda y, batch: jnp.sum(y["x"]))
    for plan in (tiny.plan(zero=0, data=2), tiny.plan(zero=3, data=2)):
        with pytest.raises(fz.StateError, match="loss: metric 'a' is str"):
            fz.eval_step(model, plan)(fz.init(model, None, plan), {"x": x})
        with pytest.raises(fz.StateError, match=f"the model: y {said}"):
            fz.predict_step(model, plan)(fz.init(model, None, plan), {"x": x})
        with pytest.raises(fz.StateError, match=f"layer 'first': y {said}"):
            fz.eval_step(chain, plan)(fz.init(chain, None, plan), {"x": x})


def test_a_mean_over_nothing_is_0_in_a_metric_too():
    def loss(p, buffers, batch, rng, train):
        none = fz.Mean(jnp.sum(p["w"]) * 0, jnp.float32(0))
        return none, buffers, {"own": none}

    model, plan = fz.Model(init, loss), tiny.plan(zero=1, data=2)
    state, batch = fz.init(model, TX, plan), {"x": jnp.ones((4, 3))}
    for metrics in (fz.eval_step(model, plan)(state, batch),
                    fz.train_step(model, TX, plan)(state, batch)[1]):  # fmt: skip
        assert float(metrics["loss"]) == float(metrics["own"]) == float(metrics["count"]) == 0


INITS = {
    "parameters alone": (lambda key: {"w": jnp.ones(3)}, r"return \(params, buffers\), got a dict"),
    "a number": (
        lambda key: ({"w": jnp.ones(3), "k": 1.0}, {}),
        "params/k is a float: expected",
    ),
    "a buffer": (lambda key: ({"w": jnp.ones(3)}, {"k": 1}), "buffers/k is a int: expected an"),
    "a key": (lambda key: ({"w": jnp.ones(3), "k": key}, {}), "params/k is a random .*key_data"),
    "a tensor": (
        ({"w": np.ones(3), "k": torch.ones(3)}, {}),
        "params/k is a torch.Tensor: expected an array of numpy or jax",
    ),
}


@pytest.mark.parametrize(("init", "said"), INITS.values(), ids=INITS)
@pytest.mark.parametrize("frozen", [(), ("k",)], ids=["trained", "frozen"])
def test_inits(init, said, frozen):
    with pytest.raises(fz.StateError, match=f"init: .*{said}"):
        fz.init(fz.Model(init, lambda *_: None, frozen=frozen), TX, tiny.plan(data=1))


def test_arguments_in_another_order():
    model, plan = fz.Model(init, lambda *_: None), tiny.plan(data=1)
    for arguments in ((TX, model, plan), (model, TX, {"zero": 3})):
        with pytest.raises(fz.PlanError, match=r"expected an fz\..*in this order"):
            fz.init(*arguments)


BUFFERS = {
    "one left out": (lambda b: {"seen": b["seen"]}, "mean: expected, but missing"),
    "one more": (lambda b: {**b, "other": b["mean"]}, "other: not expected"),
    "another shape": (lambda b: {**b, "mean": b["mean"][:1]}, r"float32\[2\], got float32\[1\]"),
    "a float": (lambda b: {**b, "seen": b["seen"] * 1.5}, r"seen: .*int32\[\], got float32\[\]"),
    "a smaller int": (lambda b: {**b, "seen": b["seen"].astype(jnp.int8)}, r"got int8\[\]"),
}


@pytest.mark.parametrize(("change", "said"), BUFFERS.values(), ids=BUFFERS)
def test_buffers(change, said):
    """Silently: a count of 1.5 became 1, and a smaller integer a state that no step takes."""
    with pytest.raises(fz.StateError, match=rf"loss: the buffers that it returns .*{said}"):
        traced(lambda y, b: (y.sum(), change(b), {}))


def test_buffers_of_a_stack():
    def apply(p, x, ctx):
        return x @ p["w"], {"seen": ctx.buffers["seen"] + 0.5}

    def made(key):
        return {"w": jnp.eye(3)}, {"seen": jnp.zeros((), jnp.int32)}

    first = fz.Layer("first", None, lambda p, batch, ctx: batch["x"])
    stack = fz.Stack("blocks", 2, made, apply, stateful=True)
    model = fz.Sequential([first, stack], lambda y, batch: jnp.mean(y))
    plan = tiny.plan(zero=3, data=2)
    with pytest.raises(fz.StateError, match=r"layer 'blocks': the buffers .*seen: expected int32"):
        fz.train_step(model, TX, plan).lower(
            fz.abstract_state(model, TX, plan), {"x": jnp.ones((4, 3))}
        )


def test_floats_of_another_precision_are_kept_in_the_buffers_own():
    def half(y, b):
        return y.sum(), {**b, "mean": (b["mean"] + 1).astype(jnp.bfloat16)}, {}

    lowered = traced(half)
    state, _ = jax.tree.unflatten(lowered.out_tree, jax.tree.leaves(lowered.out_info))
    assert state["buffers"]["mean"].dtype == jnp.float32


def test_a_count_that_depends_on_parameters_is_a_constant_to_a_step_alone():
    def gated(p, rows):
        gate = jax.nn.sigmoid(rows @ p["w"])
        return jnp.sum(gate * rows.mean(1, keepdims=True)), jnp.sum(gate)

    def loss(p, buffers, batch, rng, train):
        return fz.Mean(*gated(p, batch["x"])), buffers, {}

    rows = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    params, plan, tx = {"w": jnp.ones((2, 1))}, fz.Plan(data=2), optax.sgd(1.0)
    model = fz.Model((params, {}), loss)
    state = fz.init(model, tx, plan)
    evaluate = fz.eval_step(model, plan)
    found = jax.grad(lambda p: evaluate(state.replace(params=p), {"x": rows})["loss"])(state.params)
    count = gated(params, rows)[1]
    quotient = jax.grad(lambda p: jnp.divide(*gated(p, rows)))(params)
    constant = jax.grad(lambda p: gated(p, rows)[0] / count)(params)
    np.testing.assert_allclose(found["w"], quotient["w"], 1e-5)
    stepped, _ = fz.train_step(model, tx, plan)(state, {"x": rows})
    np.testing.assert_allclose(stepped.params["w"], params["w"] - constant["w"], 1e-5)
    assert abs(constant["w"] - quotient["w"]).max() > 0.01
