"""Any optax transformation, sharded over eight devices, equals the same one on whole arrays.

The reference is a loop written by hand in jax and optax: one device, the whole batch, no fzero.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz


# Given values: no initial random numbers to compile thirteen times.
MODEL = fz.Model(jax.device_get(tiny.regression().init(jax.random.key(0))), tiny.regression_loss)
NUM_STEPS = 5


def frozen_and_mixed():
    """A different optimizer for each leaf; the padded one is frozen."""
    kinds = {"w": "adam", "odd": "frozen", "gain": "sgd"}
    return optax.multi_transform(
        {"adam": optax.adam(1e-2), "frozen": optax.set_to_zero(), "sgd": optax.sgd(0.1)}, kinds
    )


def plateau():
    """Halves the rate when the loss, which the step must pass on, stops falling at once."""
    return optax.chain(
        optax.sgd(0.05), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.9)
    )


# Every leaf-wise kind, and the ones that a sharded update gets wrong when it sees only its shard:
# norms of all leaves (clip), of one leaf (lamb, adafactor), rows and columns (adafactor), whole
# matrices (muon).
OPTIMIZERS = {
    "clip-adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=0.1)
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, weight_decay_rate=1e-3),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "muon": lambda: optax.contrib.muon(1e-2),
    "multi-transform": frozen_and_mixed,
    "masked-decay": lambda: optax.adamw(
        1e-2, weight_decay=0.5, mask={"w": True, "odd": True, "gain": False}
    ),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 5)),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "multi-steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "bf16-moment": lambda: optax.adamw(1e-2, mu_dtype="bfloat16"),
    "plateau": plateau,
}
CASES = [(name, 3) for name in OPTIMIZERS] + [("lamb", 1), ("adafactor", 1)]


@cache
def by_hand(name):
    """Losses, parameters and optimizer state of the plain loop; what init gave first."""
    tx = optax.with_extra_args_support(OPTIMIZERS[name]())
    params = tiny.on_one_device(MODEL.init[0])
    first, opt_state = tiny.host(params), tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda p: tiny.whole_loss(MODEL, p, batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for seed in range(NUM_STEPS):
        params, opt_state, loss = step(params, opt_state, tiny.points(seed=seed))
        losses.append(float(loss))
    return losses, params, opt_state, first


def unpadded(tree, like):
    """Stored leaves cut to the shapes of `like`; the rest must be zeros."""

    def cut(leaf, want):
        inside = tuple(map(slice, want.shape))
        outside = np.array(leaf, np.float32)
        outside[inside] = 0
        assert not np.any(outside), "padding is not zero"
        return np.asarray(leaf)[inside]

    return jax.tree.map(cut, tree, like)


# Gradients are sums over 8 devices in another order than over one batch: some 1e-7 of each leaf's
# largest. Optimizers that divide by a gradient's own size (all but sgd) pass the relative error of
# its smallest elements on, times the rate of 1e-2, in each of five steps. Muon multiplies it by
# the slope of its five polynomials. bf16 moments round to 2^-8, and an ulp may tip a rounding.
LOOSE = {"muon": 2e-5, "bf16-moment": 2e-4}
TIGHT = 5e-6


@pytest.mark.parametrize(("name", "zero"), CASES, ids=lambda x: str(x))
def test_equals_the_unsharded_loop(name, zero):
    losses, params, opt_state, first = by_hand(name)
    tx, plan = OPTIMIZERS[name](), tiny.plan(zero=zero)
    state = fz.init(MODEL, tx, plan, rng=0)
    tiny.same_bits(fz.logical(MODEL, state), first)
    assert state.params["odd"].shape == ((13, 32) if zero == 3 else (13, 27))
    step = fz.train_step(MODEL, tx, plan)
    for seed, loss in enumerate(losses):
        state, metrics = step(state, tiny.points(seed=seed))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=2e-6)
    atol = LOOSE.get(name, TIGHT)
    ours = fz.logical(MODEL, state)
    tiny.close(ours, params, rtol=0, atol=atol)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)
    # Second moments are squares: twice the relative error.
    bf16 = 2**-8 if name == "bf16-moment" else 0
    tiny.close(unpadded(state.opt_state, opt_state), opt_state, rtol=bf16, atol=4 * atol)
    moved = {path: np.max(np.abs(value - first[path])) for path, value in tiny.host(ours).items()}
    frozen = name == "multi-transform"
    assert all((step > 1e-3) != (frozen and path == "odd") for path, step in moved.items()), moved


def test_moments_lie_like_their_parameters_and_factored_ones_by_their_own_shape():
    state = fz.init(MODEL, OPTIMIZERS["adafactor"](), tiny.plan(zero=3))
    factored = state.opt_state[0]
    assert factored.v_row["w"].sharding.shard_shape((16,)) == (2,)
    assert factored.v_col["w"].shape == (16,)  # 13 columns, padded on their own account
    moments = fz.init(MODEL, OPTIMIZERS["lamb"](), tiny.plan(zero=1)).opt_state[0]
    assert moments.mu["odd"].sharding.shard_shape((13, 32)) == (13, 4)


def test_frozen_leaves_have_no_state():
    state = fz.init(MODEL, frozen_and_mixed(), tiny.plan(zero=3))
    names = [path for path in tiny.host(state.opt_state) if path.endswith("odd")]
    assert names == []


def gives(update):
    """A transformation that has one number for its state, and this for its update."""
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()), lambda u, s, params=None: update(u, s)
    )


ODD = {
    "a number in its state": (
        optax.GradientTransformation(lambda p: {"rate": 0.1}, optax.sgd(0.1).update),
        "init: opt_state/rate is a float: expected",
    ),
    "text in its state": (
        optax.GradientTransformation(lambda p: {"name": "x"}, optax.sgd(0.1).update),
        "init: opt_state/name is a str: expected",
    ),
    "a parameter left out": (
        gives(lambda u, s: ({k: v for k, v in u.items() if k != "odd"}, s)),
        "gives nothing for odd: expected an update for each",
    ),
    "a list": (gives(lambda u, s: (list(u.values()), s)), "gives nothing for gain, odd, w"),
    "an update more": (gives(lambda u, s: ({**u, "k": u["w"]}, s)), "tree of another structure"),
    "a row of a matrix": (
        gives(lambda u, s: ({**u, "w": u["w"][:1]}, s)),
        r"gives \[1, 13\] for w, whose shape is \[16, 13\]",
    ),
    "a state of another shape": (
        gives(lambda u, s: (u, jnp.zeros(3))),
        r"opt_state is float32\[\] before and float32\[3\] after",
    ),
    "a state of another dtype": (
        gives(lambda u, s: (u, s.astype(jnp.int32))),
        r"opt_state is float32\[\] before and int32\[\] after",
    ),
    "a state with a name": (
        gives(lambda u, s: (u, {"a": s})), r"opt_state/a is not there before and float32\[\] after"
    ),
    "no state": (gives(lambda u, s: (u, None)), r"opt_state is float32\[\] before and not there"),
}  # fmt: skip


@pytest.mark.parametrize(("tx", "said"), ODD.values(), ids=ODD)
def test_what_is_no_optimizer_is_refused_before_a_step(tx, said):
    """Silently before: a row was added to all of a matrix, and a state changed its shape."""
    plan = tiny.plan(zero=1, data=2)
    with pytest.raises(fz.PlanError, match=said):
        fz.init(MODEL, tx, plan)


def test_an_update_may_give_a_number_for_its_state():
    plan = tiny.plan(zero=1, data=2)
    tx = gives(lambda u, s: (u, 1.0))
    state, _ = fz.train_step(MODEL, tx, plan)(fz.init(MODEL, tx, plan), tiny.points(4))
    assert (float(state.opt_state), state.opt_state.dtype) == (1.0, jnp.float32)
