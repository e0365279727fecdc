"""Chains of layers: names, tied reads, stacks, buffers; and means kept as their two sums."""

from __future__ import annotations

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.tree import named_leaves


def link(name, **options):
    """A layer that adds its weight."""
    return fz.Layer(name, lambda key: {"w": jnp.ones(2)}, lambda p, x, ctx: x + p["w"], **options)


def stack(name, num=2, **options):
    """A stack of such layers."""
    apply = lambda p, x, ctx: x + p["w"]  # noqa: E731
    return fz.Stack(name, num, lambda key: {"w": jnp.ones(2)}, apply, **options)


NAMES = [
    ([link("")], ["''", "non-empty"]),
    ([link("a/b")], ["'a/b'", "without '/'", "rename"]),
    ([link("loss")], ["'loss'", "reserved"]),
    ([link("a"), stack("a")], ["two layers are named 'a'", "reads="]),
    ([stack("s", 0)], ["Stack 's'", "num=0", "1 or more"]),
    ([stack("s", 2.0)], ["Stack 's'", "num=2.0", "whole number"]),
    ([stack("s", True)], ["Stack 's'", "num=True"]),
    ([stack("s", shared="mask")], ["Stack 's'", "shared='mask'", "('mask',)"]),
    ([link("a"), link(3)], ["layer name 3: expected a non-empty name"]),
    ([link("a"), link("b", reads={"t": 3})], ["'b' has reads={'t': 3}", "embed/table"]),
    ([link("a"), link("b", reads=["a/w"])], ["'b' has reads=['a/w']: expected names for paths"]),
    ([link("a"), link("b", reads={"t": "none/w"})], ["'b' reads 't'", "'none'", "['a', 'b']"]),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "said"), NAMES, ids=[s[0] for _, s in NAMES])
def test_refuses_bad_chains(layers, said):
    with pytest.raises(fz.PlanError) as caught:
        fz.Sequential(layers)
    for words in said:
        assert words in str(caught.value)


def init(rng):
    """Initial values of a model that is never trained."""
    return {"w": jnp.ones(2)}, {}


def loss(params, buffers, batch, rng, train):
    """What a model's loss takes."""
    return jnp.sum(params["w"]), buffers, {}


def chain(*links, **options):
    """A chain whose loss is the sum of what it gives."""
    return fz.Sequential(links, **{"loss": lambda x, batch: jnp.sum(x), **options})


CALLS = {
    "init": (fz.Model(lambda: None, loss), r"init\(rng\), got init\(\): too many"),
    "loss": (
        fz.Model(init, lambda p, b, x: None),
        r"expected a function loss\(params, buffers, batch, rng, train\), got loss\(p, b, x\)",
    ),
    "no loss": (fz.Model(init, None), "loss is of type NoneType: expected a function"),
    "predict": (
        fz.Model(init, loss, predict=lambda p, x: None),
        r"predict\(params, buffers, batch, rng\), got predict\(p, x\)",
    ),
    "a layer's init": (
        chain(fz.Layer("a", lambda: None, lambda p, x, ctx: None)), r"Layer 'a': .*init\(rng\)"
    ),
    "a layer's apply": (
        chain(fz.Layer("a", None, lambda p, x: x), link("b")),
        r"Layer 'a': expected a function apply\(params, x, ctx\), got apply\(p, x\)",
    ),
    "a stack's apply": (
        chain(fz.Stack("s", 2, lambda rng: {"w": jnp.ones(2)}, lambda p, x, ctx, more: x)),
        "Stack 's'.*'more'",
    ),
    "a chain's loss": (
        chain(link("a"), loss=lambda y: None), r"loss\(x, batch\), got loss\(y\)"
    ),
    "a chain's predict": (
        chain(link("a"), predict=lambda y: None),
        r"predict\(params, buffers, batch, rng\), got predict\(y\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("model", "said"), CALLS.values(), ids=CALLS)
def test_functions_of_other_arguments_are_refused_by_name(model, said, zero):
    plan, tx, batch = tiny.plan(data=2, zero=zero), optax.sgd(0.1), np.ones((2, 2), np.float32)

    def use():
        step = fz.predict_step(model, plan) if "predict" in said else fz.train_step(model, tx, plan)
        step(fz.init(model, tx, plan), batch)

    with pytest.raises(fz.PlanError, match=said):
        use()


def pair(rng):
    """Parameters and buffers of a layer."""
    return {"w": jnp.ones(2)}, {"n": jnp.zeros(())}


STATEFUL = {
    "init": (link("a", stateful=True), r"Layer 'a': init gives dict: expected \(params, buffers\)"),
    "a stack's": (stack("a", stateful=True), "Stack 'a': init gives dict: expected"),
    "apply": (
        fz.Layer("a", pair, lambda p, batch, ctx: batch["x"], stateful=True),
        r"Layer 'a': apply gives float32\[2, 2\]: expected \(x, buffers\), as the layer is",
    ),
    "no buffers": (
        fz.Layer("a", lambda rng: ({"w": jnp.ones(2)}, {}), lambda p, x, ctx: (x["x"], None),
                 stateful=True),
        "layer 'a': the buffers that it returns .*expected a tree like .*, got",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "said"), STATEFUL.values(), ids=STATEFUL)
def test_stateful_layers_give_buffers(layer, said):
    model, plan, tx = chain(layer), tiny.plan(data=1), optax.sgd(0.1)

    def lowered():
        state = fz.abstract_state(model, tx, plan)
        return fz.train_step(model, tx, plan).lower(state, {"x": jnp.ones((2, 2))})

    with pytest.raises((fz.PlanError, fz.StateError), match=said):
        lowered()


def test_a_chain_with_other_frozen_parameters_and_not_by_its_fields():
    model = chain(link("a"), link("b"))
    held = model.with_frozen(["a/w"])
    state = fz.init(held, optax.adam(0.1), tiny.plan(data=1))
    assert [path for path, _ in named_leaves(state.opt_state[0].mu)] == ["b/w"]
    assert not model.frozen
    with pytest.raises(fz.PlanError, match=r"dataclasses\.replace makes no .*with_frozen"):
        dataclasses.replace(model, frozen=["a/w"])
    assert copy.copy(model).layers is model.layers


def test_functions_that_may_be_called_so_are_taken():
    """A step that is asked for by name, defaults, `*args`, what `jit` and `Partial` give."""

    def stepped(params, buffers, batch, rng, train, step):
        return jnp.sum(params["w"]) + step, buffers, {}

    plan, tx, batch = tiny.plan(data=2), optax.sgd(0.1), np.ones((2, 2), np.float32)
    for model in (
        fz.Model(init, stepped),
        fz.Model(lambda *args: init(*args), lambda *args, **named: loss(*args)),
        fz.Model(jax.jit(init), jax.tree_util.Partial(loss)),
        chain(fz.Layer("a", lambda rng, more=0: {}, lambda p, x, ctx=None: x), link("b")),
    ):
        fz.train_step(model, tx, plan)(fz.init(model, tx, plan), batch)


def test_a_read_of_a_missing_parameter_says_which_exist():
    model = fz.Sequential(
        [link("a"), link("b", reads={"t": "a/missing"})], loss=lambda x, b: jnp.sum(x)
    )
    params, buffers = model.init(jax.random.key(0))
    with pytest.raises(fz.PlanError, match=r"'a/missing': 'missing' is not among \['w'\]"):
        model.loss(params, buffers, jnp.zeros(2), jax.random.key(0), True)


def test_params_are_keyed_by_layer_and_stacked_on_the_leading_dim():
    params, buffers = tiny.chain(num=4).init(jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in tiny.host(params).items()}
    assert shapes == {
        "embed/table": (27, 13), "embed/up": (13, 16), "blocks/w": (4, 16, 16),
        "blocks/b": (4, 16), "head/down": (16, 13), "head/gain": (),
    }  # fmt: skip
    assert buffers == {}
    # Every layer of a stack starts from its own key.
    assert not np.array_equal(params["blocks"]["w"][0], params["blocks"]["w"][1])


def unrolled(model, params, batch, rng, train=True):
    """The chain of `tiny.chain`, layer after layer in Python."""
    ctx = fz.Context(batch, rng, train)
    embed, stack, head = model.layers[:3]
    x = embed.apply(params["embed"], batch, ctx.at(0))
    for k in range(stack.num):
        x = stack.apply(jax.tree.map(lambda leaf: leaf[k], params["blocks"]), x, ctx.at(1 + k))  # noqa: B023
    weights = {**params["head"], "table": params["embed"]["table"]}
    return tiny.token_loss(head.apply(weights, x, ctx.at(1 + stack.num)), batch)


@pytest.mark.parametrize("apply", [tiny.block, tiny.dropped_block], ids=["plain", "dropout"])
def test_a_stack_equals_its_layers_unrolled(apply):
    """Values and gradients, the tied table's included. Keys are counted over the whole chain."""
    model, batch, rng = tiny.chain(apply=apply), tiny.tokens(4), jax.random.key(3)
    params, _ = model.init(jax.random.key(0))

    def by_model(p):
        mean, _, metrics = model.loss(p, {}, batch, rng, True)
        return mean.total, metrics["accuracy"].total

    def by_hand(p):
        mean, metrics = unrolled(model, p, batch, rng)
        return mean.total, metrics["accuracy"].total

    one = jax.jit(jax.value_and_grad(by_model, has_aux=True))(params)
    two = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(params)
    # A loop and its unrolled form are fused differently: some ulps of fp32 per matmul of 16 terms.
    tiny.close(one, two, rtol=2e-6, atol=2e-6)


def test_a_tied_leaf_is_one_leaf_with_both_gradients():
    """Cutting either reader off changes the gradient; the two parts add up to the whole."""
    model, batch = tiny.chain(), tiny.tokens(4)
    params, _ = model.init(jax.random.key(0))

    def loss(first, second):
        embed = {**params["embed"], "table": first}
        ctx = fz.Context(batch, jax.random.key(0), True)
        x = tiny.embed(embed, batch, ctx)
        for k in range(3):
            x = tiny.block(jax.tree.map(lambda leaf: leaf[k], params["blocks"]), x, ctx)  # noqa: B023
        logits = tiny.head({**params["head"], "table": second}, x, ctx)
        return tiny.token_loss(logits, batch)[0].total

    table = params["embed"]["table"]
    parts = jax.jit(jax.grad(loss, (0, 1)))(table, table)

    def tied(p):
        return model.loss(p, {}, batch, jax.random.key(0), True)[0].total

    whole = jax.jit(jax.grad(tied))(params)["embed"]["table"]
    assert all(float(jnp.max(jnp.abs(part))) > 0.1 for part in parts)
    # Sum of two fp32 scatters in another order.
    tiny.close(whole, parts[0] + parts[1], rtol=2e-6, atol=2e-6)


def test_shared_inputs_reach_every_layer_and_come_out_unchanged():
    def add(p, x, ctx):
        return {"h": x["h"] + p["w"] * x["by"]}  # (a layer may leave a shared key out)

    model = fz.Sequential(
        [
            fz.Layer("in", None, lambda p, batch, ctx: {"h": batch["h"], "by": batch["by"]}),
            fz.Stack("s", 3, lambda key: {"w": jnp.ones(())}, add, shared=("by",)),
        ],
        loss=lambda x, batch: jnp.sum(x["h"]) + 1000 * jnp.sum(x["by"]),
    )
    params, buffers = model.init(jax.random.key(0))
    batch = {"h": jnp.zeros(1), "by": jnp.full(1, 2.0)}
    mean, _, _ = model.loss(params, buffers, batch, jax.random.key(0), True)
    assert float(mean.total) == 3 * 2.0 + 1000 * 2.0


def through_a_checkpoint(p, x):
    return jax.checkpoint(lambda p, x: {**x, "h": x["h"] + p["w"] * x["m"]})(p, x)


SHARED = {
    "changed": (lambda p, x: {"h": x["h"], "m": x["m"] * 2}, ("m",), "a layer changes 'm', which"),
    "another tree": (lambda p, x: {**x, "m": [x["m"]]}, ("m",), "a layer changes 'm', which"),
    "missing": (lambda p, x: x, ("m", "n"), r"names \['n'\]: .* got the keys \['h', 'm'\]"),
    "no dict": (lambda p, x: x["h"], ("m",), "expected a dict, .* got float32"),
    "as it came": (lambda p, x: {**x, "h": x["h"] + p["w"] * x["m"]}, ("m",), None),
    "left out": (lambda p, x: {"h": x["h"] + p["w"] * x["m"]}, ("m",), None),
    "through a call": (through_a_checkpoint, ("m",), None),
}


@pytest.mark.parametrize(("apply", "shared", "said"), SHARED.values(), ids=SHARED)
def test_what_layers_share_none_of_them_changes(apply, shared, said):
    """Silently: its change was left out."""
    model = chain(
        fz.Layer("first", None, lambda p, batch, ctx: {"h": batch["x"], "m": jnp.abs(batch["x"])}),
        fz.Stack("s", 2, lambda rng: {"w": jnp.ones(2)}, lambda p, x, ctx: apply(p, x), shared),
        fz.Layer("last", lambda rng: {"w": jnp.ones(2)}, lambda p, x, ctx: x["h"] * p["w"]),
    )
    plan, tx = tiny.plan(data=1), optax.sgd(0.1)
    step, state = fz.train_step(model, tx, plan), fz.abstract_state(model, tx, plan)
    batch = {"x": jnp.ones((4, 2))}
    if said is None:
        step.lower(state, batch)
        return
    with pytest.raises(fz.PlanError, match=f"Stack 's': .*{said}"):
        step.lower(state, batch)


def test_stateful_layers_and_stacks_return_new_buffers():
    def init(key):
        return {"w": jnp.ones(2)}, {"seen": jnp.zeros((), jnp.int32), "sum": jnp.zeros(2)}

    def apply(p, x, ctx):
        seen = ctx.buffers["seen"] + ctx.train
        return x + p["w"], {"seen": seen, "sum": ctx.buffers["sum"] + x}

    model = fz.Sequential(
        [
            fz.Layer("one", init, apply, stateful=True),
            link("plain"),
            fz.Stack("many", 3, init, apply, stateful=True),
        ],
        loss=lambda x, batch: jnp.sum(x),
    )
    params, buffers = model.init(jax.random.key(0))
    assert set(buffers) == {"one", "many"}
    assert buffers["many"]["sum"].shape == (3, 2)
    _, new, _ = model.loss(params, buffers, jnp.zeros(2), jax.random.key(0), True)
    assert new["one"]["seen"] == 1
    np.testing.assert_array_equal(new["many"]["seen"], [1, 1, 1])
    # Layer k of the stack sees what the layers before it added.
    np.testing.assert_array_equal(new["many"]["sum"][:, 0], [2, 3, 4])


def test_a_layer_without_parameters_gets_an_empty_dict():
    seen = []
    layer = fz.Layer("relu", None, lambda p, x, ctx: seen.append(p) or jax.nn.relu(x))
    model = fz.Sequential([link("a"), layer], loss=lambda x, b: jnp.sum(x))
    params, buffers = model.init(jax.random.key(0))
    assert set(params) == {"a"}
    model.loss(params, buffers, jnp.zeros(2), jax.random.key(0), True)
    assert seen == [{}]


def test_a_chain_may_end_with_the_loss_itself():
    last = fz.Layer("out", None, lambda p, x, ctx: (fz.Mean(jnp.sum(x), 4.0), {"m": jnp.max(x)}))
    model = fz.Sequential([link("a"), last])
    params, buffers = model.init(jax.random.key(0))
    mean, _, metrics = model.loss(params, buffers, jnp.ones(2), jax.random.key(0), True)
    assert (float(mean.total), float(mean.count), float(metrics["m"])) == (4.0, 4.0, 2.0)


def test_given_initial_values_replace_those_of_the_layers():
    def mine(key):
        return {"a": {"w": jnp.full(2, 7.0)}}, {}

    model = fz.Sequential([link("a")], loss=lambda x, b: jnp.sum(x), init=mine)
    assert model.init is mine


ONE, TWO = {"w": np.ones(2, np.float32)}, {"w": np.ones((2, 2), np.float32)}
# Of `link("a"), stack("s"), counting`: parameters, buffers, and what is said of them.
VALUES = {
    "more layers": ({"a": ONE, "s": {"w": np.ones((3, 2))}}, {}, [r"/s/w .* \[3, 2\]", "num=2"]),
    "one layer": ({"a": ONE, "s": {"w": np.ones((1, 2))}}, {}, [r"/s/w .* \[1, 2\]", "num=2"]),
    "no rows": ({"a": ONE, "s": np.ones(())}, {}, [r"params/s has shape \[\]", "of 2"]),
    "rows of buffers": ({"a": ONE, "s": TWO}, {"s": np.ones(3)}, [r"buffers/s has shape \[3\]"]),
    "another's": ({"a": ONE, "s": TWO, "old": ONE}, {}, ["params/old: no layer is named 'old'"]),
    "another's buffers": ({"a": ONE, "s": TWO}, {"old": ONE}, ["buffers/old: no layer"]),
    "none of a stack": ({"a": ONE}, {}, ["params/s: Stack 's' has none"]),
    "none of a layer": ({"s": TWO}, {"c": {}}, ["params/a: Layer 'a' has none"]),
    "no buffers": ({"a": ONE, "s": TWO}, {}, ["buffers/c: Layer 'c' has none"]),
    "hidden": ({"a": ONE, "s": TWO, "c": ONE}, {}, ["params/c/w: Layer 'c' reads 'a/w' as 'w'"]),
    "a leaf": ({"a": ONE, "s": TWO, "c": np.ones(2)}, {}, ["params/c are a .*expected a dict"]),
    "no dict": ([ONE, TWO], {}, [r"params are a list: .*\['a', 's', 'c', 'loss'\]"]),
}  # fmt: skip


@pytest.mark.parametrize(("params", "buffers", "said"), VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("pipe", [1, 2])
@pytest.mark.parametrize("drawn", [False, True], ids=["values", "function"])
def test_values_of_other_layers_are_refused(params, buffers, said, pipe, drawn):
    """Silently: a stack of 3 ran the one layer that it was given three times, in training too."""
    counting = link("c", reads={"w": "a/w"}, stateful=True)
    values = jax.tree.map(lambda x: np.array(x, np.float32), (params, buffers))
    model = chain(link("a"), stack("s"), counting)
    model = model.with_init((lambda rng: jax.tree.map(jnp.asarray, values)) if drawn else values)
    with pytest.raises(fz.StateError) as caught:
        fz.init(model, optax.sgd(0.1), tiny.plan(data=1, pipe=pipe, microbatches=pipe))
    for words in said:
        assert re.search(words, str(caught.value)), caught.value


def test_shapes_without_values_are_refused_where_values_are_wanted():
    values = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, {}
    model = fz.Model(values, lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
    assert fz.layout(model, optax.sgd(0.1), tiny.plan(data=1)).state.params["w"].shape == (2,)
    with pytest.raises(fz.StateError, match=r"params/w is a shape without values \(float32\[2\]\)"):
        fz.init(model, optax.sgd(0.1), tiny.plan(data=1))


def test_keys_differ_between_layers_and_do_not_depend_on_the_rest_of_the_chain():
    ctx = fz.Context(None, jax.random.key(0), True)
    keys = {jax.random.key_data(ctx.at(k).rng).tobytes() for k in range(5)}
    assert len(keys) == 5
    assert ctx.at(3).rng == jax.random.fold_in(jax.random.key(0), 3)


class TestMean:
    """Totals and counts, divided once."""

    def test_a_scalar_counts_once(self):
        mean = fz.Mean.of(3.0)
        assert (float(mean.total), float(mean.count)) == (3.0, 1.0)

    def test_a_mean_stays(self):
        mean = fz.Mean.of(fz.Mean(6.0, 3))
        assert (float(mean.total), int(mean.count)) == (6.0, 3)

    def test_is_a_pytree_of_two_scalars_and_frozen(self):
        mean = fz.Mean(jnp.float32(6), jnp.float32(3))
        assert jax.tree.leaves(jax.tree.map(lambda x: x + 1, mean)) == [7, 4]
        with pytest.raises(AttributeError):
            mean.total = 1  # type: ignore[misc]
