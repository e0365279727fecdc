"""A frozen leaf costs its own bytes and its gathers, nothing else, under every plan."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fzero as fz
from fzero.preflight.hlo import collectives
from fzero.tree import map_named, named_leaves
from tests.support import tiny


WIDTH, LAYERS, RANK = 16, 4, 2
BATCH = {"x": np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)}
ADAPTERS = re.compile(r"/(base|table)$")  # all but the adapters


def block(p, x, ctx):
    return x + jnp.tanh(x @ p["base"] + (x @ p["down"]) @ p["up"])


def block_init(key):
    return {
        "base": jax.random.normal(key, (WIDTH, WIDTH)) * 0.3,
        "down": jax.random.normal(jax.random.fold_in(key, 1), (WIDTH, RANK)) * 0.3,
        "up": jnp.zeros((RANK, WIDTH)) + 0.1,
    }


def chain(frozen=ADAPTERS):
    """Adapters in a stack between a frozen layer and a head; the bottom needs no backward pass."""
    return fz.Sequential(
        [
            fz.Layer("embed", lambda key: {"table": jnp.eye(WIDTH) * 0.5 + 0.1},
                     lambda p, batch, ctx: batch["x"] @ p["table"]),
            fz.Stack("blocks", LAYERS, block_init, block),
            fz.Layer("head", lambda key: jnp.ones((WIDTH, 1)) * 0.2, lambda w, x, ctx: x @ w),
        ],
        loss=lambda y, batch: fz.Mean(jnp.sum((y - 1) ** 2), jnp.float32(y.size)),
        frozen=frozen,
    )  # fmt: skip


def flat(frozen=ADAPTERS):
    """The same as a plain model."""
    whole = chain(frozen)
    return fz.Model(whole.init, whole.loss, frozen=frozen)


def tx():
    """Decay moves what has no gradient."""
    return optax.adamw(1e-2, weight_decay=0.1)


@cache
def by_hand(num_steps=2):
    """Adapters trained by plain jax: the base is no argument of the gradient."""
    model = chain()
    params = fz.logical(model, fz.init(model, None, tiny.plan(zero=0, data=1)))
    held = lambda path: ADAPTERS.search("/".join(str(k.key) for k in path))  # noqa: E731
    base = jax.tree_util.tree_map_with_path(lambda p, x: x if held(p) else None, params)
    own = jax.tree_util.tree_map_with_path(lambda p, x: None if held(p) else x, params)

    def joined(own):
        return jax.tree.map(lambda a, b: b if a is None else a, own, base,
                            is_leaf=lambda x: x is None)  # fmt: skip

    def loss(own):
        mean, _, _ = model.loss(joined(own), {}, BATCH, jax.random.key(0), True)
        return mean.total / mean.count

    optimizer = tx()
    opt_state, norms = optimizer.init(own), []
    for _ in range(num_steps):
        grads = jax.grad(loss)(own)
        norms.append(float(optax.tree.norm(grads)))
        grads = optax.tree.scale(0.5 / max(norms[-1], 0.5), grads)
        updates, opt_state = optimizer.update(grads, opt_state, own)
        own = optax.apply_updates(own, updates)
    return tiny.host(joined(own)), norms


PLANS = {
    "stage-0": {"zero": 0, "data": 8},
    "stage-1": {"zero": 1, "data": 8},
    "stage-1-step": {"zero": 1, "data": 4, "microbatches": 2, "reduce": "step"},
    "stage-2-lazy": {"zero": 2, "data": 4, "gather": "lazy", "microbatches": 2},
    "stage-3": {"zero": 3, "data": 8},
    "stage-3-ahead": {"zero": 3, "data": 4, "prefetch": True, "microbatches": 2},
    "stage-3-kept": {"zero": 3, "data": 4, "remat": "none", "secondary": 2},
    "replicas": {"zero": 3, "data": 2, "replica": 2},
    "pipeline": {"zero": 3, "data": 2, "pipe": 2, "microbatches": 2},
    "pipeline-halves": {"zero": 1, "data": 2, "pipe": 2, "microbatches": 2, "schedule": "zb_h1"},
    "parked": {"zero": 1, "data": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 2048},
    "parked-params": {"zero": 3, "data": 2, "tiers": {"opt_state": "host", "params": "host"}},
    "on-the-host": {"zero": 1, "data": 2, "tiers": {"opt_state": "host"}, "update_on": "host"},
}


def trained(model, plan, num_steps=2):
    """States before and after some steps, and the last metrics."""
    optimizer = tx()
    state = fz.init(model, optimizer, plan)
    before = tiny.host(fz.logical(model, fz.reload(state, donate=False), plan))
    step = fz.train_step(model, optimizer, plan)
    metrics = {}
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    return before, state, jax.device_get(metrics)


@pytest.mark.parametrize(
    ("make", "name"), [(chain, n) for n in PLANS] + [(flat, n) for n in ("stage-1", "stage-3")]
)
def test_adapters_train_as_by_hand_and_the_base_stays(make, name):
    plan = tiny.plan(**{"clip_norm": 0.5, **PLANS[name]})
    model = make()
    before, state, metrics = trained(model, plan)
    after = tiny.host(fz.logical(model, fz.reload(state, donate=False), plan))
    want, norms = by_hand()
    tiny.close(after, want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(metrics["grad_norm"], norms[-1], rtol=1e-5)
    for path in before:
        assert np.array_equal(before[path], after[path]) == bool(ADAPTERS.search("/" + path)), path


def test_gradients_go_through_a_frozen_middle():
    model, plan, sgd = chain(re.compile("blocks/")), tiny.plan(zero=3, data=2), optax.sgd(0.1)
    state = fz.init(model, sgd, plan)
    params = jax.device_get(fz.logical(model, state))
    state, _ = fz.train_step(model, sgd, plan)(state, BATCH)

    def loss(params):
        mean, _, _ = model.loss(params, {}, BATCH, jax.random.key(0), True)
        return mean.total / mean.count

    grads = jax.grad(loss)(params)
    still = jax.tree.map(np.zeros_like, params["blocks"])
    want = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads | {"blocks": still})
    tiny.close(tiny.host(fz.logical(model, state)), tiny.host(want), rtol=1e-5, atol=1e-6)


def leaves_with(state, name):
    """Names of a state class's leaves that belong to frozen parameters."""
    found = [path for path, _ in named_leaves(getattr(state, name))]
    return [path for path in found if ADAPTERS.search("/" + path)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_moments_no_second_copy_and_the_dtype_given(zero, precision):
    plan = tiny.plan(zero=zero, data=2, precision=precision)
    halves = cast_base(chain(), jnp.bfloat16)
    state = fz.init(halves, tx(), plan)
    assert leaves_with(state, "opt_state") == []
    assert state.compute is None or leaves_with(state, "compute") == []
    bases = [leaf for path, leaf in named_leaves(state.params) if ADAPTERS.search("/" + path)]
    assert {str(leaf.dtype) for leaf in bases} == {"bfloat16"}
    # Sharded between steps in stage 3 alone; otherwise every pass reads it whole.
    assert {leaf.sharding.is_fully_replicated for leaf in bases} == {zero != 3}
    where = fz.placement(plan, halves, tx(), num_devices=2)
    assert where.bytes_per_device == fz.placement(state).bytes_per_device
    about = fz.describe(plan, halves, tx(), num_devices=2)
    rows = [leaf for leaf in about.leaves if ADAPTERS.search("/" + leaf.path)]
    assert {leaf.state_class for leaf in rows} == {"params"}
    assert all("frozen" in leaf.why for leaf in rows)
    _, after, metrics = trained(halves, plan)
    assert np.isfinite(metrics["loss"])
    assert jax.tree.structure(after) == jax.tree.structure(state)


def cast_base(model, dtype):
    """The model with frozen leaves that are kept in another dtype."""

    def init(key):
        params, buffers = model.init(key)
        cast = lambda n, x: x.astype(dtype) if ADAPTERS.search("/" + n) else x  # noqa: E731
        return map_named(cast, params), buffers

    return model.with_init(init)


def test_only_adapters_are_reduced():
    """Rank-8 adapters on a frozen base of six layers of 256 x 256, on eight devices."""
    width, rank, layers = 256, 8, 6

    def init(key):
        return {
            "base": jnp.zeros((width, width)),
            "down": jnp.zeros((width, rank)),
            "up": jnp.zeros((rank, width)),
        }

    first = fz.Layer("in", lambda key: {"base": jnp.zeros((width, width))},
                     lambda p, batch, ctx: batch["x"] @ p["base"])  # fmt: skip
    model = fz.Sequential(
        [first, fz.Stack("blocks", layers, init, block)],
        loss=lambda x, batch: jnp.mean(x**2), frozen=re.compile("base"),
    )  # fmt: skip
    plan, adam = tiny.plan(zero=3, data=8), optax.adam(1e-3)
    batch = {"x": jax.ShapeDtypeStruct((16, width), jnp.float32)}
    state = fz.abstract_state(model, adam, plan)
    text = fz.train_step(model, adam, plan).lower(state, batch).compile().as_text()
    reduced = sum(
        use.bytes * use.times
        for use in collectives(text)
        if use.kind in ("reduce-scatter", "all-reduce")
    )
    adapters = layers * 2 * width * rank * 4
    assert adapters <= reduced <= 1.02 * adapters
    about = fz.describe(plan, model, adam, num_devices=8)
    assert about.elements_reduced == round(adapters / 4 * 7 / 8)


def test_a_bad_gradient_of_a_frozen_leaf_is_no_news():
    """It is never computed: neither clipped by, nor a reason to skip."""

    def loss(p, buffers, batch, rng, train):
        return jnp.mean(batch["x"] @ p["w"]) + jnp.sum(jnp.sqrt(p["base"])), buffers, {}

    def init(key):
        return {"w": jnp.ones((WIDTH, 1)), "base": jnp.zeros(3)}, {}

    plan = tiny.plan(zero=1, data=2, skip_nonfinite=True, clip_norm=1.0)
    moved = {}
    for frozen in (frozenset(), frozenset({"base"})):
        model = fz.Model(init, loss, frozen=frozen)
        state = fz.init(model, optax.sgd(0.1), plan)
        state, metrics = fz.train_step(model, optax.sgd(0.1), plan)(state, BATCH)
        moved[bool(frozen)] = float(metrics["skipped"]), float(metrics["grad_norm"])
    assert moved[False][0] == 1
    assert moved[True][0] == 0
    np.testing.assert_allclose(moved[True][1], np.linalg.norm(BATCH["x"].mean(0)), rtol=1e-5)


class TestNames:
    """Names, patterns and functions say what is frozen."""

    @pytest.mark.parametrize(
        "frozen",
        [
            frozenset({"embed/table", "blocks/base"}),
            ["embed/table", re.compile("base$")],
            re.compile(r"table|base"),
            lambda name: name.split("/")[-1] in ("table", "base"),
        ],
    )
    def test_all_say_the_same(self, frozen):
        about = fz.describe(tiny.plan(zero=3), chain(frozen), None, num_devices=8)
        named = {leaf.path for leaf in about.leaves if "frozen" in leaf.why}
        assert named == {"embed/table", "blocks/base"}
        assert "frozen" in repr(chain(frozen))

    @pytest.mark.parametrize("frozen", [frozenset({"blocks/bias"}), [re.compile("^lora")], "base"])
    def test_what_does_not_exist_is_refused(self, frozen):
        with pytest.raises(fz.StateError, match=r"frozen names .* there are \['blocks/base'"):
            fz.init(chain(frozen), tx(), tiny.plan(data=1))

    @pytest.mark.parametrize("frozen", [{"blocks/base": False}, None, [3], [re.compile(b"a")]])
    def test_what_is_no_name_is_refused(self, frozen):
        with pytest.raises(fz.StateError, match=r"frozen=.*: expected paths, regular expressions"):
            fz.init(chain(frozen), tx(), tiny.plan(data=1))

    def test_nothing_left_to_train_is_refused(self):
        model = chain(re.compile(""))
        assert fz.init(model, None, tiny.plan(data=1)).opt_state == ()
        with pytest.raises(fz.StateError, match="every parameter is frozen"):
            fz.train_step(model, tx(), tiny.plan(data=1))


@pytest.mark.parametrize("zero", [0, 3])
def test_edited_adapters_and_bases_reach_the_next_step(zero):
    """Also in 16 bits, where adapters have a second copy and the base has none."""
    model, plan = chain(), tiny.plan(zero=zero, data=2, precision="bf16")
    state = fz.init(model, tx(), plan)
    evaluate = fz.eval_step(model, plan)
    before = float(evaluate(state, BATCH)["loss"])
    for name in ("blocks/base", "blocks/down"):
        edit = lambda n, x, name=name: x * 3 if n == name else x  # noqa: E731
        edited = state.replace(params=map_named(edit, state.params))
        assert abs(float(evaluate(edited, BATCH)["loss"]) - before) > 1e-2
        _, metrics = fz.train_step(model, tx(), plan, donate=False)(edited, BATCH)
        np.testing.assert_allclose(metrics["loss"], evaluate(edited, BATCH)["loss"], rtol=1e-6)
    scanned, _ = jax.lax.scan(
        fz.train_step(model, tx(), plan), state, jax.tree.map(lambda x: x[None], BATCH)
    )
    assert jax.tree.structure(scanned) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["stage-1", "pipeline"])
def test_accumulation_checkpoints_and_other_plans(name, tmp_path):
    """Sums, files and `replan` have no leaves for what is frozen, and nothing is lost."""
    model, optimizer = chain(), tx()
    plan = tiny.plan(**PLANS[name], precision="bf16")
    state = fz.init(model, optimizer, plan)
    state, _ = fz.accumulate_step(model, optimizer, plan)(state, BATCH)
    assert not [p for p, _ in named_leaves(state.grads.sums) if ADAPTERS.search("/" + p)]
    fz.save(tmp_path, state, plan)
    state, _ = fz.train_step(model, optimizer, plan)(state, BATCH)
    other = fz.restore(tmp_path, model, optimizer, plan)
    other, _ = fz.train_step(model, optimizer, plan)(other, BATCH)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    third = tiny.plan(zero=3, data=4)
    moved = fz.replan(state, model, optimizer, plan, third)
    assert leaves_with(moved, "opt_state") == []
    tiny.close(fz.logical(model, moved, third), tiny.host(fz.logical(model, state, plan)), rtol=0)
    fz.train_step(model, optimizer, third)(moved, BATCH)


def test_a_run_goes_on_with_its_base_frozen(tmp_path):
    """Moments of what is frozen now stay in the file; those of the others are taken over."""
    plan, optimizer = tiny.plan(zero=1, data=2), tx()
    _, state, _ = trained(chain(frozenset()), plan)
    fz.save(tmp_path, state, plan)
    model = chain()
    other = fz.restore(tmp_path, model, optimizer, plan)
    assert leaves_with(other, "opt_state") == []
    was = dict(named_leaves(state.opt_state))
    for path, leaf in named_leaves(other.opt_state):
        np.testing.assert_array_equal(leaf, was[path])
    fz.train_step(model, optimizer, plan)(other, BATCH)


def test_optimizers_with_labels_see_what_is_trained():
    """Labels and masks of the whole tree fit, and functions that make them."""
    model, plan = chain(), tiny.plan(zero=1, data=2)
    labels = jax.tree.map(lambda _: "adam", fz.abstract_state(model, None, plan).params)
    labels["head"] = "sgd"
    kinds = {"adam": optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
             "sgd": optax.sgd(0.1)}  # fmt: skip
    for given in (labels, lambda params: jax.tree.map(lambda _: "adam", params)):
        optimizer = optax.chain(optax.multi_transform(kinds, given), optax.ema(0.9))
        state = fz.init(model, optimizer, plan)
        step = fz.train_step(model, optimizer, plan)
        for _ in range(2):
            state, metrics = step(state, BATCH)
        assert np.isfinite(metrics["loss"])
        assert leaves_with(state, "opt_state") == []


def test_a_model_without_parameters_has_none_to_train():
    model = fz.Model(lambda rng: ({}, {}), lambda p, b, batch, rng, train: (batch["x"][0], b, {}))
    with pytest.raises(fz.StateError, match="expected parameters to train: the model has none"):
        fz.train_step(model, optax.sgd(0.1), fz.Plan(data=1))


@pytest.mark.parametrize(
    ("precision", "kept"), [("fp32", ()), ("bf16", ()), ("bf16", ("base", "up"))]
)
def test_a_frozen_base_may_have_floats_of_8_bits_and_a_trained_leaf_none(precision, kept):
    def init(key):
        base = jax.random.normal(key, (WIDTH, WIDTH)).astype(jnp.float8_e4m3fn)
        return {"base": base, "up": jnp.eye(WIDTH)}, {}

    def loss(p, buffers, batch, rng, train):
        base = p["base"].astype(p["up"].dtype)
        return jnp.mean((batch["x"].astype(base.dtype) @ base @ p["up"]) ** 2), buffers, {}

    plan = tiny.plan(zero=3, data=2, precision=precision, keep_fp32=kept)
    model, tx = fz.Model(init, loss, frozen=("base",)), optax.sgd(0.1)
    state = fz.init(model, tx, plan)
    first = jax.tree.map(np.asarray, fz.logical(model, state))
    gradient = jax.grad(lambda up: loss({**first, "up": up}, {}, BATCH, None, True)[0])(first["up"])
    state, _ = fz.train_step(model, tx, plan)(state, BATCH)
    found = fz.logical(model, state)
    assert found["base"].dtype == jnp.float8_e4m3fn
    assert np.asarray(found["base"]).tobytes() == first["base"].tobytes()
    rtol = 1e-5 if precision == "fp32" or kept else 2e-2
    scale = rtol * float(jnp.abs(gradient).max())
    np.testing.assert_allclose(found["up"], first["up"] - 0.1 * gradient, atol=scale)
    with pytest.raises(fz.StateError, match=r"params/base has dtype float8_e4m3fn, .* freeze it"):
        fz.init(fz.Model(init, loss), tx, plan)


def test_what_comes_before_all_that_learns_needs_no_derivative():
    """A loop of unknown length has none: it may be in the first layer, and wherever all is frozen
    before."""

    def halved(p, batch, ctx):
        x = jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, batch["x"])
        return x @ p["w"]

    model = fz.Sequential(
        [fz.Layer("first", lambda key: {"w": jnp.ones((WIDTH, 1))}, halved)],
        loss=lambda y, batch: jnp.mean(y**2),
    )
    plan = tiny.plan(zero=1, data=2)
    _, metrics = fz.train_step(model, tx(), plan)(fz.init(model, tx(), plan), BATCH)
    assert np.isfinite(metrics["loss"])
