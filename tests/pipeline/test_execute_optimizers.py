"""Any optax transformation in a pipeline equals the same one without."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from execute_cases import given, tied, train
from support import tiny
from support.sample import some

import fzero as fz
from fzero.state.row_order import meant


MICROBATCHES = 2


def by_leaf():
    """Another optimizer for each link; the embedding is frozen."""

    def labels(params):
        return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in
                params.items()}  # fmt: skip

    kinds = {"embed": optax.set_to_zero(), "blocks": optax.adam(1e-2), "head": optax.sgd(0.1)}
    return optax.multi_transform(kinds, labels)


def plateau():
    """Halves the rate when the loss, which the step must pass on, stops falling at once."""
    return optax.chain(
        optax.sgd(0.05), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
    )


def decay_matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def per_layer(make):
    """What looks at more than single elements is told that leaves are layers."""
    return lambda: fz.per_layer(make())


def adafactor():
    return optax.adafactor(1e-2, min_dim_size_to_factor=8, weight_decay_rate=1e-3)


OPTIMIZERS = {
    "clip-adamw": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2)),
    "adafactor": per_layer(adafactor),
    "lamb": per_layer(lambda: optax.lamb(1e-2, weight_decay=0.1)),
    "muon": per_layer(lambda: optax.contrib.muon(1e-2)),
    "noisy": per_layer(lambda: optax.noisy_sgd(0.05, key=jax.random.key(0))),
    "multi-transform": by_leaf,
    "masked-decay": per_layer(lambda: optax.adamw(1e-2, weight_decay=0.5, mask=decay_matrices)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 5)),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "bf16-moment": lambda: optax.adamw(1e-2, mu_dtype="bfloat16"),
    "plateau": plateau,
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "agc": per_layer(lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))),
}
# As tests/test_optimizers.py: the gradients' last bits times each optimizer's sensitivity to them.
LOOSE = {"muon": 5e-5, "bf16-moment": 2e-4, "plateau": 1e-5, "multi-steps": 1e-5}
TIGHT = 5e-6


def plan(pipe, **options):
    return tiny.plan(**{"pipe": pipe, "data": 2, "microbatches": MICROBATCHES, **options})


@cache
def whole(name):
    return train(tied(), plan(1), 4, tx=OPTIMIZERS[name]())


# Where both ranks have two layers of the stack, in order and out of it.
# What treats all leaves alike is for `make nightly`.
NIGHTLY = [
    (name, "1f1b")
    for name in ("schedule", "plateau", "hyperparameters", "bf16-moment", "agc", "masked-decay")
]
CASES = [(name, "1f1b") for name in OPTIMIZERS] + [("muon", "interleaved")]


@pytest.mark.parametrize(("name", "schedule"), some(CASES, *NIGHTLY))
def test_equals_the_same_without_a_pipeline(name, schedule):
    tx, cut = OPTIMIZERS[name](), plan(2, schedule=schedule)
    run = train(tied(), cut, 4, tx=tx)
    atol = LOOSE.get(name, TIGHT)
    tiny.close(run.params, whole(name).params, rtol=0, atol=atol)
    for one, other in zip(run.trace, whole(name).trace, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    back = fz.replan(run.state, tied(), tx, cut, plan(1))
    bf16 = 2**-8 if name == "bf16-moment" else 0
    tiny.close(back.opt_state, whole(name).state.opt_state, rtol=bf16, atol=4 * atol)
    moved = {path: np.any(value != tied().init[0][path.split("/")[0]][path.split("/")[1]])
             for path, value in run.params.items()}  # fmt: skip
    frozen = name == "multi-transform"
    assert all(moved[path] != (frozen and path.startswith("embed")) for path in moved), moved


def pulled_back():
    """Its state begins as the parameters themselves, and is never written."""

    def update(grads, start, params):
        return jax.tree.map(lambda g, p, s: -0.1 * (g + p - s), grads, params, start), start

    return optax.GradientTransformation(lambda params: params, update)


def test_a_state_that_begins_as_the_parameters_lies_otherwise_than_they():
    """In stages 1 and 2: one value, wanted in parts and whole."""
    tx, cut = pulled_back(), plan(2, zero=1)
    run, alone = (train(tied(), p, 2, tx=tx) for p in (cut, plan(1, zero=1)))
    tiny.close(run.params, alone.params, rtol=0, atol=TIGHT)
    wanted = fz.abstract_state(tied(), tx, cut)
    lies = jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to.sharding, x.ndim),
                        (run.state.params, run.state.opt_state),
                        (wanted.params, wanted.opt_state))  # fmt: skip
    assert all(jax.tree.leaves(lies))


# Uneven stages: ranks that hold one, two and one layer


UNEVEN = {"pipe": 4, "partition": (2, 2, 1, 1)}


@pytest.mark.parametrize(
    "name",
    some(
        ["lamb", "clip-adamw", "masked-decay", "agc", "schedule-free", "muon", "adafactor"],
        "clip-adamw",
        "schedule-free",
        "masked-decay",
        "agc",
    ),
)
def test_filling_rows_are_no_layers(name):
    tx = OPTIMIZERS[name]()
    run = train(tied(), plan(**UNEVEN), 4, tx=tx)
    tiny.close(run.params, whole(name).params, rtol=0, atol=LOOSE.get(name, TIGHT))
    table = run.state.params["blocks"]["w"]
    filling = np.asarray(table)[[1, 5]]  # rank 0: layer 0 and filling; 1: 1, 2; 2: 3 and filling
    assert table.shape[0] == 6
    assert not filling.any()


def by_their_norm():
    """Updates as large as all parameters together."""

    def update(updates, params):
        norm = optax.tree.norm(params)
        return jax.tree.map(lambda leaf: -1e-3 * norm * leaf, updates)

    return optax.stateless(update)


def test_what_an_edit_adds_to_filling_rows_is_not_counted():
    """Noise on all parameters is on rows that are no layers, too."""
    tx, batch = by_their_norm(), tiny.tokens(8)

    def edited(cut):
        state = fz.init(tied(), tx, cut)
        state = state.replace(params=jax.tree.map(lambda leaf: leaf + 0.25, state.params))
        state, _ = fz.train_step(tied(), tx, cut)(state, batch)
        return state, fz.logical(tied(), state, cut)

    (state, ours), (_, theirs) = edited(plan(2, partition=(2, 4))), edited(plan(1))
    tiny.close(ours, theirs, rtol=0, atol=TIGHT)
    assert not np.asarray(state.params["blocks"]["w"])[1:3].any()  # rank 0 has one layer


def by_first_norm():
    """Updates as large as all parameters were together when it began."""

    def update(updates, norm, params=None):
        return jax.tree.map(lambda leaf: norm * leaf, updates), norm

    return optax.GradientTransformation(optax.tree.norm, update)


def unit(leaf):
    """Each layer's values by their norm: 0 / 0 where no layer is."""
    return leaf / jnp.sqrt(jnp.sum(leaf**2, range(1, leaf.ndim), keepdims=True))


@pytest.mark.parametrize(
    "field",
    ["params", "opt_state", "opt_state on the host", "params unseen", "opt_state unseen",
     "opt_state on the host unseen"],
)  # fmt: skip
def test_what_an_edit_writes_where_no_layer_is_goes_no_further(field):
    """Moments are added up by a clip behind them; a new optimizer starts from parameters."""
    batch, parked = tiny.tokens(8), {"tiers": {"opt_state": "host"}, "stream_bytes": 2**20}
    more = parked if "on the host" in field else {}
    tx = optax.chain(optax.trace(0.9), optax.clip_by_global_norm(0.3), optax.scale(-0.3))

    def edited(cut):
        state, _ = fz.train_step(tied(), tx, cut)(fz.init(tied(), tx, cut), batch)
        edit = partial(dataclasses.replace, state) if "unseen" in field else state.replace
        if "params" in field:
            then = optax.contrib.dowg(1.0)
            if "unseen" in field:
                then = optax.chain(by_first_norm(), optax.sgd(1e-2))
            moved = jax.tree.map(lambda leaf: leaf + 0.25, state.params)
            state = fz.with_optimizer(edit(params=moved), tied(), tx, then, cut)
        else:
            then, (momentum, *rest) = tx, state.opt_state
            trace = {**momentum.trace, "blocks": jax.tree.map(unit, momentum.trace["blocks"])}
            state = edit(opt_state=(momentum._replace(trace=trace), *rest))
        state, metrics = fz.train_step(tied(), then, cut)(state, batch)
        assert not metrics["nonfinite"]
        return fz.logical(tied(), state, cut)

    ours = edited(plan(2, partition=(2, 4), **more))
    tiny.close(ours, edited(plan(1)), rtol=0, atol=TIGHT)


def scaled(by):
    """Divides all gradients by a number that all of them say."""

    def update(updates, params):
        count = sum(map(by, jax.tree.leaves(updates)))
        return jax.tree.map(lambda leaf: -0.1 * leaf / count, updates)

    return optax.stateless(update)


# Right for a stack's layers, but not for rows that are none.
COUNTING = {
    "sizes": lambda: scaled(lambda leaf: leaf.size),
    "ones": lambda: scaled(lambda leaf: jnp.sum(jnp.cos(leaf))),
    "largest": lambda: scaled(lambda leaf: jnp.max(leaf)),
    "products": lambda: scaled(lambda leaf: jnp.vdot(jnp.cos(leaf), jnp.cos(leaf))),
}


@pytest.mark.parametrize("name", COUNTING)
def test_optimizers_that_would_count_them_are_refused(name):
    match = "train_step: .*the same layers written out.*per_layer"
    with pytest.raises(fz.PlanError, match=match):
        fz.train_step(tied(), COUNTING[name](), plan(**UNEVEN))
    fz.train_step(tied(), fz.per_layer(COUNTING[name]()), plan(**UNEVEN))
    fz.accumulate_step(tied(), COUNTING[name](), plan(**UNEVEN))  # updates nothing
    if name == "ones":
        fz.train_step(tied(), COUNTING[name](), plan(2))  # two layers on each rank


def test_what_is_refused_would_be_wrong():
    run = train(tied(), plan(**UNEVEN), 4, tx=fz.as_stacked(adafactor()))
    apart = run.params["blocks/w"] - whole("adafactor").params["blocks/w"]
    assert np.abs(apart).max() > 1e-3


def test_optimizers_that_join_leaves_of_two_stages_are_refused():
    """Small leaves may travel; what needs more than 4096 elements elsewhere does not."""

    def dense(name, n):
        return fz.Layer(name, lambda key: np.zeros((n, n), np.float32), lambda w, x, ctx: x @ w)

    first = fz.Layer("in", lambda key: np.zeros((4, 80), np.float32),
                     lambda w, batch, ctx: batch["x"] @ w)  # fmt: skip
    chain = [first, dense("mid", 80), dense("out", 80)]
    model = given(fz.Sequential(chain, lambda y, batch: fz.Mean(np.float32(1) * y.sum(), 4.0)))
    match = r"large arrays of several pipeline stages.*float32\[6400\].*pipe=1"
    with pytest.raises(fz.StateError, match="init: .*" + match):
        fz.init(model, optax.flatten(optax.adam(1e-2)), plan(2))

    def join(updates, params):
        flat = jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(updates)])
        return jax.tree.map(lambda leaf: leaf / jnp.max(flat), updates)

    several = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    wanted = r"operation cond .*float32\[80,80\].*accumulate_step.*pipe=1"
    for tx, said in ((optax.stateless(join), match), (several, wanted)):
        state, step = fz.init(model, tx, plan(2)), fz.train_step(model, tx, plan(2))
        before = tiny.host(state)
        with pytest.raises(fz.StateError, match="train_step: .*" + said):
            step(state, {"x": np.ones((4, 4), np.float32)})
        tiny.same_bits(state, before)


@pytest.mark.parametrize("tx", [optax.flatten(optax.adam(1e-2)), optax.scale_by_lbfgs()])
def test_states_that_could_not_be_taken_to_another_plan_are_refused(tx):
    tx = fz.as_stacked(tx)
    with pytest.raises(fz.PlanError, match=r"opt_state/.* holds the layers of a stack that is cut"):
        fz.init(tied(), tx, plan(2))
    fz.init(tied(), tx, plan(2, partition=(5, 1)))  # the stack is whole on rank 0


def test_factors_over_columns_are_no_rows():
    """A square leaf's two factors look alike; only one of them has a row for each layer."""

    def init(key):
        return {"w": np.zeros((4, 4), np.float32), "b": np.zeros(4, np.float32)}

    first = fz.Layer("in", lambda key: np.zeros((4, 4), np.float32),
                     lambda w, batch, ctx: batch["x"] @ w)  # fmt: skip
    stack = fz.Stack("s", 4, init, lambda p, x, ctx: x + jnp.tanh(x @ p["w"] + p["b"]))
    last = fz.Layer("out", lambda key: np.zeros((4, 4), np.float32), lambda w, x, ctx: x @ w)
    model = given(fz.Sequential([first, stack, last], lambda y, batch: fz.Mean((y**2).sum(), 4.0)))

    def batch(rows, seed):
        return {"x": np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)}

    tx = fz.as_stacked(optax.adafactor(1e-2, min_dim_size_to_factor=2, weight_decay_rate=1e-3))
    cut = plan(2, schedule="interleaved")  # ranks hold layers 0 and 3, and 1 and 2
    run = train(model, cut, 3, tx=tx, batch=batch)
    expected = train(model, plan(1), 3, tx=tx, batch=batch)
    back = fz.replan(run.state, model, tx, cut, plan(1))
    assert back.opt_state[0].v_row["s"]["b"].shape == back.opt_state[0].v_col["s"]["b"].shape
    tiny.close(back.opt_state, expected.state.opt_state, rtol=0, atol=2e-5)


def test_the_last_stacks_name_in_a_path_is_that_of_a_leaf():
    """Groups of an optimizer's may be called as a stack is."""
    rows = (("blocks", (0, -1, 1)), ("tail", (1, 0, -1)))
    tree = {"groups": {"blocks": {"tail": {"w": 0}, "blocks": {"w": 1}}, "rest": {"w": 2}}}
    found = dict(meant(jax.tree.structure(tree), rows))
    assert found == {
        "groups/blocks/tail/w": (1, 0, -1),
        "groups/blocks/blocks/w": (0, -1, 1),
        "groups/rest/w": (),
    }
