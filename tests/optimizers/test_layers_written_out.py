"""A stack trains exactly as the same layers written out, for every optimizer, or is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_cases import (
    ALL,
    BY_ELEMENT,
    BY_LEAF,
    NUM,
    batch,
    by_hand,
    matrices,
    plan,
    stacked,
    trained,
)
from support import tiny
from support.sample import some

import fzero as fz


# What divides by gradients' sizes, or by their differences, passes on the relative error of the
# smallest: sums over eight devices are in another order.
LOOSE = {
    "muon": 2e-5, "galore": 2e-4, "rprop": 2e-5, "momo": 1e-5, "adabelief": 2e-5, "lbfgs": 5e-5,
    "adan": 1e-5, "yogi": 1e-5, "acprop": 1e-4, "prodigy": 2e-5, "dadapt": 2e-5, "cocob": 1e-5,
}  # fmt: skip
TIGHT = 5e-6
# Those of each kind that `make test` runs; the others run nightly.
USUAL = ("clip-adamw", "skipping", "muon", "lamb", "noisy-sgd", "masked-by-shape",
         "by-the-others", "from-the-next", "by-written-path")  # fmt: skip
CASES = [(name, 3) for name in ALL] + [(name, zero) for name in ALL for zero in (0, 1)]
KEPT = [(name, 3) for name in USUAL] + [("muon", 0), ("lamb", 1)]


def usable(name):
    tx = ALL[name]()
    return fz.per_layer(tx) if name in BY_LEAF else tx


@pytest.mark.parametrize(("name", "zero"), some(CASES, *(set(CASES) - set(KEPT))))
def test_trains_as_the_layers_written_out(name, zero):
    ours, _ = trained(usable(name), plan(zero=zero))
    tiny.close(ours, by_hand(name), rtol=0, atol=LOOSE.get(name, TIGHT))


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_what_is_right_is_not_refused(name):
    fz.train_step(stacked(), BY_ELEMENT[name](), plan(data=1))


@pytest.mark.parametrize("name", BY_LEAF)
def test_what_would_be_wrong_is_refused_with_what_to_say_instead(name):
    match = r"train_step: .*otherwise than the same layers written out: .*fz\.per_layer\(tx\)"
    with pytest.raises(fz.PlanError, match=match):
        fz.train_step(stacked(), BY_LEAF[name](), plan(data=1))
    fz.train_step(stacked(), fz.per_layer(BY_LEAF[name]()), plan(data=1))
    fz.train_step(stacked(), fz.as_stacked(BY_LEAF[name]()), plan(data=1))
    fz.accumulate_step(stacked(), BY_LEAF[name](), plan(data=1))  # updates nothing


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("muon", r"blocks/w is kept for the one, not for the other"),
        ("lamb", r"params/blocks/b: its update takes an operation \(\w+\) on several layers"),
        ("novograd", r"opt_state/0/nu/blocks/b has shape \[\], where 3 layers have \[\] each"),
        ("masked-by-shape", r"params/blocks/b: its update is computed otherwise"),
        ("summed-along", r"params/blocks/b: .*\(cumsum\)"),
        ("sorted", r"params/blocks/b: .*\(sort\)"),
    ],
)
def test_refusals_name_the_leaf_and_the_operation(name, match):
    with pytest.raises(fz.PlanError, match="init: .*" + match):
        fz.init(stacked(), BY_LEAF[name](), plan(data=1))


def test_an_optimizer_that_knows_of_stacked_leaves_is_told_how_to_say_so():
    def scaled(updates, params):
        blocks = updates["blocks"]
        return {**updates, "blocks": {**blocks, "w": blocks["w"] * jnp.abs(blocks["b"])[..., None]}}

    match = r"cannot be called with layers written out \(TypeError: (.|\n)*fz\.as_stacked\(tx\)"
    with pytest.raises(fz.PlanError, match=match):
        fz.train_step(stacked(), optax.stateless(scaled), plan(data=1))
    fz.train_step(stacked(), fz.as_stacked(optax.stateless(scaled)), plan(data=1))


def test_a_product_of_a_stack_with_its_transpose_is_no_sum_over_layers():
    """Three layers of three numbers: as a matrix, element (i, j) meets element (j, i)."""

    def by_trace(updates, params):
        leaves = jax.tree.leaves(updates)
        total = sum(jnp.einsum("ij,ji->", x, x) if x.ndim == 2 else jnp.vdot(x, x) for x in leaves)
        return jax.tree.map(lambda x: x * total, updates)

    block = fz.Stack("blocks", 3, lambda key: jnp.ones(3), lambda p, x, ctx: x * p)
    model = fz.Sequential([block], loss=lambda x, batch: jnp.mean(x))
    with pytest.raises(fz.PlanError, match="otherwise than the same layers written out"):
        fz.train_step(model, optax.stateless(by_trace), plan(data=1))


def test_what_is_refused_would_be_wrong():
    wrong, _ = trained(fz.as_stacked(BY_LEAF["lamb"]()), plan(zero=3))
    right = by_hand("lamb")
    assert np.abs(np.stack(wrong["blocks"]["w"]) - np.stack(right["blocks"]["w"])).max() > 1e-4


def test_a_part_of_a_chain_is_enough():
    """The norm is that of all leaves, and is not seen layer by layer."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), fz.per_layer(optax.lamb(1e-2)))
    whole = fz.per_layer(optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)))
    one, other = trained(tx, plan(zero=3))[0], trained(whole, plan(zero=3))[0]
    tiny.close(one, other, rtol=0, atol=TIGHT)


def test_the_state_is_stacked_and_split():
    _, state = trained(fz.per_layer(optax.contrib.muon(1e-2)), plan(zero=1, data=4), steps=1)
    moments = state.opt_state.inner_states["muon"].inner_state[0].mu
    assert moments["blocks"]["w"].sharding.shard_shape((NUM, 8, 8)) == (NUM, 2, 8)
    assert moments["blocks"]["b"] == optax.MaskedNode()


def test_layers_may_be_labelled_one_by_one():
    """The first layer is frozen: its number is that of the last step of its path."""

    def labels(params):
        def label(path, leaf):
            return "stay" if getattr(path[-1], "idx", None) == 0 else "move"

        return jax.tree_util.tree_map_with_path(label, params)

    kinds = {"stay": optax.set_to_zero(), "move": optax.adam(1e-2)}
    tx = fz.per_layer(optax.multi_transform(kinds, labels))
    start = jax.device_get(stacked().init[0])["blocks"]["w"]
    ours, _ = trained(tx, plan(zero=3), steps=1)
    moved = [np.abs(now - was).max() for now, was in zip(ours["blocks"]["w"], start, strict=True)]
    assert moved[0] == 0
    assert min(moved[1:]) > 1e-3


def test_layers_may_be_scaled_by_arrays_that_an_optimizer_holds():
    """Of two arrays of one shape each layer has its own, though all else is computed alike."""
    up, down = jnp.arange(1.0, 9), jnp.arange(9.0, 1, -1)

    def scaled(updates, params):
        def of(path, x):
            number = getattr(path[-1], "idx", None)
            return x if number is None else x * (up, down)[number % 2]

        return jax.tree_util.tree_map_with_path(of, updates)

    start = jax.device_get(stacked().init[0])["blocks"]
    plain, held = optax.sgd(0.1), fz.per_layer(optax.chain(optax.stateless(scaled), optax.sgd(0.1)))
    (by_one, _), (ours, _) = (trained(tx, plan(zero=3), steps=1) for tx in (plain, held))
    for name in ("w", "b"):
        for number in range(NUM):
            was, one = start[name][number], by_one["blocks"][name][number]
            want = was + (one - was) * np.asarray((up, down)[number % 2])
            # The difference of parameters of about 1 is rounded, and multiplied by up to 8.
            np.testing.assert_allclose(ours["blocks"][name][number], want, rtol=0, atol=TIGHT)


def test_each_layer_has_a_path_of_its_own():
    _, state = trained(usable("by-written-path"), plan(zero=1), steps=1)
    assert set(state.opt_state[0]) == {"['first']", "['last']"} | {
        f"['blocks']['{name}'][{number}]['{name}']" for name in "wb" for number in range(NUM)
    }


def test_outside_of_fzero_stacks_are_named():
    tx, params = optax.lamb(1e-2), stacked().init[0]
    with pytest.raises(fz.PlanError, match=r"per_layer\(tx, stacks=\[\.\.\.\]\)"):
        fz.per_layer(tx).init(params)
    inside = fz.per_layer(tx, stacks=["blocks"])
    state = jax.eval_shape(inside.init, params)
    updates, _ = jax.eval_shape(inside.update, params, state, params)
    assert updates["blocks"]["w"].shape == (NUM, 8, 8)


# Orthogonalised matrices, divided over devices


def cost(tx, zero, data):
    """Of a compiled step: FLOPs of a device, and collectives."""
    chain = fz.Sequential(
        [
            fz.Layer("in", None, lambda p, batch, ctx: batch["x"]),
            fz.Stack("blocks", 8, lambda key: {"w": jnp.zeros((64, 64))},
                     lambda p, x, ctx: x @ p["w"]),
        ],
        lambda x, batch: jnp.sum(x),
    )  # fmt: skip
    cut = plan(zero=zero, data=data)
    state = fz.abstract_state(chain, tx, cut)
    step = fz.train_step(chain, tx, cut)
    lowered = step.lower(state, {"x": jax.ShapeDtypeStruct((8, 64), jnp.float32)})
    compiled = lowered.compile()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    moves = re.findall(rf" ({kinds})(-start)?\(", compiled.as_text())
    return np.array([compiled.cost_analysis()["flops"], len(moves)])


@pytest.mark.parametrize("zero", some([0, 1, 3], 0, 3))
def test_each_device_orthogonalises_its_own_layers(zero):
    """Five iterations of three products of 64x64 matrices: 8 of them on one device, 1 on eight.

    Layers go to their devices and come back; nothing is sent within the iterations.
    """
    tx, one = fz.per_layer(optax.contrib.muon(1e-2)), 5 * 3 * 2 * 64**3
    per_device, moves = cost(tx, zero, 8) - cost(optax.sgd(1e-2), zero, 8)
    assert one <= per_device < 1.2 * one
    # There and back, and on CPUs the norms of the layers, whose update is compiled apart there
    # (fzero/optimizer/adds_up.py); stage 0 gathers the momentum, too.
    assert moves <= (4 if zero == 0 else 3)


def test_uneven_numbers_of_layers_are_divided_too():
    """Three layers over eight devices: five have nothing to do."""
    ours, _ = trained(fz.per_layer(optax.contrib.muon(1e-2)), plan(zero=1, data=8))
    tiny.close(ours, by_hand("muon"), rtol=0, atol=LOOSE["muon"])


def test_masks_see_the_layers_own_shapes():
    tx = optax.adamw(1e-2, weight_decay=0.5, mask=matrices)
    ours, _ = trained(fz.per_layer(tx), plan(zero=3))
    tiny.close(ours["blocks"]["b"], by_hand("masked-by-shape")["blocks"]["b"], 0, TIGHT)


LAST = {
    "key": lambda path: path[-1].key != "b",
    "str": lambda path: str(path[-1]) != "['b']",
    "keystr": lambda path: not jax.tree_util.keystr(path).endswith("['b']"),
}


@pytest.mark.parametrize("named", LAST)
@pytest.mark.parametrize("given", [lambda tx: tx, fz.per_layer], ids=["plain", "per-layer"])
def test_masks_may_read_the_last_name_of_a_path(given, named):
    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: LAST[named](path), params)

    tx = given(optax.adamw(1e-2, weight_decay=0.5, mask=mask))
    ours, _ = trained(tx, plan(zero=3))
    tiny.close(ours, by_hand("masked-by-shape"), rtol=0, atol=TIGHT)


@pytest.mark.parametrize(("leaves", "layers"), [(1, 3), (3, 5), (2, 3), (1, 2)])
def test_a_norm_of_all_is_the_same_however_many_leaves_and_layers_there_are(leaves, layers):
    def init(key):
        return {f"w{n}": jax.random.normal(key, (4, 4)) for n in range(leaves)}

    def apply(params, x, context):
        return x + jnp.tanh(x @ sum(params.values()))

    model = fz.Sequential([fz.Stack("blocks", layers, init, apply)], loss=lambda x, _: fz.Mean(x))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    fz.train_step(model, tx, fz.Plan(data=1), devices=jax.devices()[:1])


@pytest.mark.parametrize("name", ["clip-adamw", "dog", "adafactor", "lamb"])
def test_a_stack_of_one_layer_trains_as_that_layer(name):
    """Its layer is all there are: what looks at whole leaves, or at all of them, sees the same."""

    def apply(params, x, context=None):
        return x + jnp.tanh(x @ params["w"] + params["b"])

    def written(params, x):
        return jnp.mean(apply(params["blocks"], x * params["first"]) ** 2)

    x, tx = batch(0)["x"][:8, :4], ALL[name]()
    chain = [
        fz.Layer("first", lambda key: jnp.ones(4), lambda p, x, ctx: x * p),
        fz.Stack("blocks", 1, lambda key: {"w": jax.random.normal(key, (4, 4)),
                                           "b": jnp.ones(4)}, apply),
    ]  # fmt: skip
    two = plan(zero=3, data=2)
    model = fz.Sequential(chain, lambda x, _: fz.Mean(jnp.sum(x**2), jnp.float32(x.size)))
    state = fz.init(model, tx, two)
    first = jax.device_get(fz.logical(model, state, two))
    state, _ = fz.train_step(model, tx, two)(state, x)
    params = {**first, "blocks": jax.tree.map(lambda leaf: leaf[0], first["blocks"])}
    updates, _ = tx.update(jax.grad(written)(params, x), tx.init(params), params)
    after = jax.device_get(fz.logical(model, state, two))
    after["blocks"] = jax.tree.map(lambda leaf: leaf[0], after["blocks"])
    tiny.close(after, optax.apply_updates(params, updates), rtol=0, atol=TIGHT)
