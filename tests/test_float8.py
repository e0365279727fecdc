"""`Plan(precision="fp8")`: products with parameters on 8-bit operands, all else as in bf16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.float8.products import in_float8
from fzero.links import apply_layer


ALL = fz.Float8(keep=())
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
LIMITS = {"e4m3": (448.0, ml_dtypes.float8_e4m3fn), "e5m2": (57344.0, ml_dtypes.float8_e5m2)}


def rounded(matrix, dim, kind="e4m3", rowwise=False):
    """A matrix as 8 bits hold it, by numpy."""
    most, dtype = LIMITS[kind]
    wide = np.asarray(matrix, np.float32)
    largest = np.abs(wide).max(axis=dim if rowwise else None, keepdims=True)
    scale = np.float32(most) / np.maximum(largest, np.float32(1e-12))
    if rowwise:
        scale = np.exp2(np.floor(np.log2(scale)))
    return (wide * scale).clip(-most, most).astype(dtype).astype(np.float32) / scale


def operands(rows=32, size=64, columns=48):
    rng = np.random.default_rng(0)
    x, w, g = rng.normal(size=(rows, size)), rng.normal(size=(size, columns)), None
    x[3] *= 50  # an outlier, which a scale for all rows has to hold
    g = rng.normal(size=(rows, columns)) * 1e-4
    return [jnp.asarray(one, jnp.bfloat16) for one in (x, w, g)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_product_and_its_gradients_are_those_of_operands_in_8_bits(recipe):
    (x, w, g), rowwise = operands(), recipe == "rowwise"
    run = in_float8(lambda p, x: x @ p["w"], "mlp", fz.Float8(recipe=recipe, keep=()))
    out, pull = jax.vjp(run, {"w": w}, x)
    dw, dx = pull(g)
    kind = "e4m3" if rowwise else "e5m2"
    expected = (
        rounded(x, 1, rowwise=rowwise) @ rounded(w, 0, rowwise=rowwise),
        rounded(g, 1, kind, rowwise) @ rounded(w, 1, rowwise=rowwise).T,
        rounded(x, 0, rowwise=rowwise).T @ rounded(g, 0, kind, rowwise),
    )
    for found, exact in zip((out, dx, dw["w"]), expected, strict=True):
        # Rounded to bf16 at the end, whose steps are 2^-8 of a value; and sums in another order.
        scale = np.abs(exact).max()
        np.testing.assert_allclose(np.float32(found) / scale, exact / scale, rtol=2**-8, atol=1e-6)
    exact = np.float32(x) @ np.float32(w)
    assert np.abs(np.float32(out) - exact).max() > 0.01 * np.abs(exact).max() / 4  # it does round


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_of_gradients_are_nearly_those_of_products_in_16_bits(recipe):
    """As in a penalty on slopes: rounding to 8 bits gives none, or those of numbers unscaled."""
    x, w, _ = operands(8, 16, 16)

    def plain(p, x):
        return x @ p["w"]

    def slopes(product):
        def slope(w, x):
            return 1e-4 * jnp.sum(jnp.sin(product({"w": w}, x).astype(jnp.float32)))

        def penalty(w, x):
            return jnp.sum(jax.grad(slope, 1)(w, x).astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(penalty, (0, 1)))(w * 0.1, x.at[3].set(1))

    run = in_float8(plain, "mlp", fz.Float8(recipe=recipe, keep=()))
    for found, exact in zip(slopes(run), slopes(plain), strict=True):
        off = jnp.linalg.norm((found - exact).astype(jnp.float32))
        assert 0 < off < 0.2 * jnp.linalg.norm(exact.astype(jnp.float32))


@pytest.mark.parametrize(
    ("function", "shape", "taken"),
    [
        (lambda p, x: x @ p["w"], (64, 48), True),
        (lambda p, x: x @ p["w"].T, (48, 64), True),
        (lambda p, x: jnp.einsum("bk,hkd->bhd", x, p["w"]), (2, 64, 16), True),
        (lambda p, x: p["w"] @ x.T, (48, 64), True),
        (lambda p, x: jax.jit(lambda v: x @ v)(p["w"]), (64, 48), True),
        (lambda p, x: jax.checkpoint(lambda v, x: x @ v)(p["w"], x), (64, 48), True),
        (lambda p, x: jax.lax.scan(lambda c, v: (c @ v, None), x, p["w"])[0], (3, 64, 64), True),
        (lambda p, x: x @ jnp.split(p["w"], 3, 1)[1], (64, 96), True),
        (lambda p, x: jnp.einsum("bk,ekd->bed", x, p["w"][None]), (64, 48), True),
        (lambda p, x: x @ jax.lax.with_sharding_constraint(p["w"], HERE), (64, 48), True),
        (lambda p, x: x @ jnp.broadcast_to(p["w"][:, None], (64, 48)), (64,), False),
        (lambda p, x: x @ x.T, (64, 48), False),  # scores are no product with a parameter
        (lambda p, x: x @ (p["w"] * 2), (64, 48), False),  # nor is what was computed from one
        (lambda p, x: x @ p["w"], (64, 40), False),  # no multiple of 16
        (lambda p, x: x @ jnp.concatenate([p["w"], x.T], 1), (64, 48), False),  # or both
        (lambda p, x: x.astype(jnp.float32) @ p["w"].astype(jnp.float32), (64, 48), False),
    ],
)
def test_products_with_parameters_are_found_wherever_they_stand(function, shape, taken):
    x = operands()[0].at[3].set(1)  # no outlier
    w = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.bfloat16)
    run = in_float8(function, "mlp", ALL)
    text = str(jax.make_jaxpr(run)({"w": w}, x))
    assert ("f8_e4m3fn" in text) is taken
    np.testing.assert_allclose(
        np.float32(run({"w": w}, x)), np.float32(function({"w": w}, x)), rtol=0,
        atol=0.1 * np.abs(np.float32(function({"w": w}, x))).max() if taken else 0,
    )  # fmt: skip


def test_paths_keep_products_in_16_bits():
    x, w, _ = operands()
    for path, taken in [("up", True), ("lm_head", False), ("router", False), ("outputs", True)]:
        run = in_float8(lambda p, x, path=path: x @ p[path], "mlp", fz.Float8())
        assert ("f8_e4m3fn" in str(jax.make_jaxpr(run)({path: w}, x))) is taken


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("blocks/mlp.gate_proj.weight", True), ("blocks/w_gate", True), ("blocks/gate", True),
        ("layers/attention.output.dense.weight", True), ("encoder/multi_head_attention/q", True),
        ("lm_head/weight", False), ("output/weight", False), ("shared/weight", False),
        ("cls.predictions.decoder.weight", False), ("embeddings.word_embeddings.weight", False),
        ("layers/block_sparse_moe.gate.weight", False), ("qa_head/kernel", False),
        (("logits_of/t", "wte/weight"), False),
    ],
)  # fmt: skip
def test_names_of_heads_tables_and_routers(path, taken):
    assert fz.Float8().takes(path, 64, 64) is taken


def test_tied_parameters_are_asked_about_under_both_names():
    layer = fz.Layer("up", None, lambda p, x, ctx: x @ p["w"].T, reads={"w": "tok/rows/w"})
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((48, 64), jnp.bfloat16)
    for keep, taken in [(("^tok/rows/w$",), False), (("^up/w$",), False), (("^down",), True)]:
        ctx = fz.Context(None, jax.random.key(0), True, products=fz.Float8(keep=keep))
        program = jax.make_jaxpr(lambda w, ctx=ctx: apply_layer(layer, {"w": w}, x, {}, ctx)[0])(w)
        assert ("f8_e4m3fn" in str(program)) is taken


@pytest.mark.parametrize("first", ["up", "router"])
def test_of_parameters_that_are_joined_one_keeps_all_in_16_bits(first):
    second = {"up": "router", "router": "up"}[first]

    def joined(p, x):
        return x @ jnp.concatenate([p[first], p[second]], 1)

    half = jnp.ones((32, 32), jnp.bfloat16)
    for kept, taken in ((fz.Float8(), False), (fz.Float8(keep=()), True)):
        run = in_float8(joined, "a", kept)
        program = jax.make_jaxpr(run)({"up": half, "router": half}, half)
        assert ("f8_e4m3fn" in str(program)) is taken


def test_a_product_that_asks_for_float32_is_not_rounded_before():
    x, w, _ = operands()
    run = in_float8(
        lambda p, x: jnp.einsum("bk,kd->bd", x, p["w"], preferred_element_type=jnp.float32),
        "mlp", ALL,
    )  # fmt: skip
    found = run({"w": w}, x)
    assert found.dtype == jnp.float32
    assert np.any(np.asarray(found) != np.float32(found.astype(jnp.bfloat16)))


def test_products_are_kept_where_the_plan_keeps_products():
    model, tx = tiny.chain(2), optax.sgd(1.0)
    count = {}
    for remat in ("layer", "dots"):
        plan = fz.Plan(data=1, precision="fp8", float8=ALL, remat=remat)
        state, step = fz.abstract_state(model, tx, plan), fz.train_step(model, tx, plan)
        text = step.lower(state, tiny.tokens(8)).as_text()
        count[remat] = sum("dot_general" in x and "f8E4M3FN" in x for x in text.splitlines())
    assert count["dots"] < count["layer"]


def test_values_that_are_not_finite_are_seen_and_zeros_stay_zeros():
    _, w, _ = operands()
    run = in_float8(lambda p, x: x @ p["w"], "mlp", ALL)
    assert not np.asarray(run({"w": w}, jnp.zeros((8, 64), jnp.bfloat16))).any()
    bad = jnp.ones((8, 64), jnp.bfloat16).at[2, 3].set(jnp.inf)
    assert not np.isfinite(np.float32(run({"w": w}, bad))).all()
    assert run({"w": w}, jnp.zeros((0, 64), jnp.bfloat16)).shape == (0, 48)


def losses(plan, steps=3, **options):
    model, tx = tiny.chain(2, **options), optax.adamw(1e-2)
    state, step, found = fz.init(model, tx, plan), fz.train_step(model, tx, plan), []
    for seed in range(steps):
        state, metrics = step(state, tiny.tokens(16, seed=seed))
        found.append(float(metrics["loss"]))
    return np.array(found, np.float32), state


def test_stages_and_pipelines_have_the_losses_of_one_another_and_nearly_bf16s():
    plans = {
        "zero 3": fz.Plan(zero=3, data=4, min_shard_bytes=0, precision="fp8"),
        "zero 1": fz.Plan(zero=1, data=4, min_shard_bytes=0, precision="fp8"),
    }
    ours = {name: losses(plan)[0] for name, plan in plans.items()}
    other, _ = losses(plans["zero 3"].replace(precision="bf16"))
    # The same rows on each device, and so the same scales.
    np.testing.assert_allclose(ours["zero 1"], ours["zero 3"], rtol=1e-5)
    assert np.abs(ours["zero 3"] - other).max() > 1e-6  # not the same program
    np.testing.assert_allclose(ours["zero 3"], other, rtol=0.02)  # 8 bits: 1/16 an operand


@pytest.mark.nightly  # many programs
def test_states_are_saved_parked_moved_and_piped_as_with_bf16(tmp_path):
    plan = fz.Plan(zero=3, data=2, min_shard_bytes=0, precision="fp8", float8=ALL, microbatches=2)
    model, tx = tiny.chain(2), optax.adamw(1e-2)
    whole, _ = losses(plan, 2)
    _, state = losses(plan, 1)
    fz.save(tmp_path, state, plan, asynchronous=False)

    def goes_on(state, plan):
        _, metrics = fz.train_step(model, tx, plan)(state, tiny.tokens(16, seed=1))
        return float(metrics["loss"])

    # The same program on the same values.
    tiny.same_bits(fz.restore(tmp_path, model, tx, plan), state)
    assert goes_on(fz.restore(tmp_path, model, tx, plan), plan) == whole[1]
    assert goes_on(fz.reload(fz.offload(state)), plan) == whole[1]
    others = {"zero": {"zero": 1}, "tiers": {"tiers": {"opt_state": "host"}}, "pipe": {"pipe": 2}}
    for name, changes in others.items():
        other = plan.replace(**changes)
        moved = fz.replan(fz.restore(tmp_path, model, tx, plan), model, tx, plan, other)
        # The same rows on each device, so the same scales; sums in another order.
        np.testing.assert_allclose(goes_on(moved, other), whole[1], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(losses(other, 2)[0], whole, rtol=1e-5, err_msg=name)


def two_layers(dim=16):
    """A layer, and a head that reads its parameters under names of its own."""

    def loss(x, batch):
        return fz.Mean(jnp.sum(x), jnp.float32(len(x)))

    up = fz.Layer("up", lambda key: {"w": jnp.ones((dim, dim))}, lambda p, b, ctx: b["x"] @ p["w"])
    head = fz.Layer("out", None, lambda p, x, ctx: x @ p["tied"].T, reads={"tied": "up/w"})
    return fz.Sequential([up, head], loss)


@pytest.mark.parametrize("keep", [("up/w$",), ("^out/tied$",), (*fz.Float8.keep, "up")])
def test_patterns_that_are_about_a_parameter_are_taken(keep, recwarn):
    fz.init(two_layers(), optax.sgd(1.0), tiny.plan(precision="fp8", float8=fz.Float8(keep=keep)))
    assert [str(one.message)[:30] for one in recwarn] == (
        ["plan: precision='fp8', but no "] if "out" not in keep[0] else [])  # fmt: skip


def test_patterns_that_are_about_none_are_refused():
    plan = tiny.plan(precision="fp8", float8=fz.Float8(keep=("up", "haed")))
    with pytest.raises(fz.PlanError, match=r"float8: keep: \['haed'\] are found in no.*up/w"):
        fz.init(two_layers(), optax.sgd(1.0), plan)


def test_a_plan_without_a_product_in_8_bits_is_named():
    tx, plan = optax.sgd(1.0), tiny.plan(precision="fp8")
    with pytest.warns(UserWarning, match="no parameter of the model is for a product in 8 bits"):
        fz.init(two_layers(24), tx, plan)  # no multiple of 16
    with pytest.warns(UserWarning, match="or under 32. Change float8"):
        fz.init(two_layers(), tx, plan.replace(float8=fz.Float8(min_dim=32)))


@pytest.mark.parametrize("casts", [True, False])
def test_a_step_without_a_product_in_8_bits_is_named(casts, recwarn):
    """Of inputs that stay float32, say, which products of any dims then are in, too."""

    def loss(p, buffers, batch, rng, train):
        x = fz.cast(batch["x"], like=p) if casts else batch["x"]
        return jnp.mean((x @ p["w"]).astype(jnp.float32)), buffers, {}

    model, tx = fz.Model(lambda key: ({"w": jnp.ones((16, 16))}, {}), loss), optax.sgd(1.0)
    plan = tiny.plan(precision="fp8", data=1)
    step = fz.train_step(model, tx, plan)
    step.lower(fz.abstract_state(model, tx, plan), {"x": np.ones((4, 16), np.float32)})
    said = [str(one.message) for one in recwarn]
    assert ("no product of this training step runs in 8 bits" in " ".join(said)) is not casts


def test_plans_say_which_products():
    plan = fz.Plan(precision="fp8", float8=fz.Float8(recipe="rowwise", keep=("mlp",)))
    assert fz.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(fz.PlanError, match=r"float8=\.\.\. with precision='bf16' would do nothing"):
        plan.replace(precision="bf16")
    with pytest.raises(fz.PlanError, match="recipe='blockwise': expected one of"):
        fz.Float8(recipe="blockwise")
    with pytest.raises(fz.PlanError, match=r"keep='\(': expected a regular expression"):
        fz.Float8(keep=("(",))
    with pytest.raises(fz.PlanError, match="unknown keys"):
        fz.Float8.from_json({"mindim": 16})


@pytest.mark.parametrize("zero", [1, 3])
def test_an_evaluation_may_be_differentiated(zero):
    """Weights that are gathered in 8 bits would have no derivative: zeros would be taken for it."""
    model, plan = tiny.chain(2), tiny.plan(zero=zero, data=2, precision="fp8", float8=ALL)
    state, evaluate = fz.init(model, None, plan), fz.eval_step(model, plan)
    batch = tiny.tokens(16)

    def loss(params):
        return evaluate(state.replace(params=params), batch)["loss"]

    grads = jax.jit(jax.grad(loss))(state.params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(grads))
