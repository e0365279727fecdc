"""Mixtures of experts: tokens travel to their experts; the numbers are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fzero as fz
from fzero.exchange.expert_products import grouped_dot


WIDTH, HIDDEN, NUM, K, LENGTH, ROWS, LAYERS = 8, 12, 8, 2, 6, 16, 2


def gated(own, p, rows):
    hidden = jax.nn.silu(own.dot(rows, p["gate"])) * own.dot(rows, p["up"])
    return own.dot(hidden, p["down"]) + own.each(p["bias"])


def looped(p, x, chosen, gates):
    """Every expert of every token, by itself."""
    every = jnp.einsum("td,edf->etf", x, p["gate"]), jnp.einsum("td,edf->etf", x, p["up"])
    hidden = jax.nn.silu(every[0]) * every[1]
    out = jnp.einsum("etf,efd->etd", hidden, p["down"]) + p["bias"][:, None]
    mine = jnp.sum(jax.nn.one_hot(chosen, len(out)) * gates[..., None], axis=1)
    return jnp.einsum("te,etd->td", mine, out)


def expert_init(rng):
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    keys = jax.random.split(rng, len(shapes) + 1)
    made = {name: 0.3 * jax.random.normal(key, (NUM, *shape))
            for key, (name, shape) in zip(keys, shapes.items(), strict=False)}  # fmt: skip
    return {**made, "bias": 0.3 * jax.random.normal(keys[-1], (NUM, WIDTH))}


@pytest.mark.parametrize(("chosen", "devices"), [("spread", 1), ("one", 1), ("spread", 4)], ids=str)
def test_a_mixture_gives_what_a_loop_over_experts_gives(chosen, devices):
    """Ten tokens on four devices: not equally many on each."""
    keys = jax.random.split(jax.random.key(0), 4)
    p, x = expert_init(keys[0]), jax.random.normal(keys[1], (10, WIDTH))
    gates = jax.random.uniform(keys[2], (10, K))
    picks = jnp.full((10, K), 3)
    if chosen == "spread":
        picks = jax.random.randint(keys[3], (10, K), 0, NUM)

    def of(function):
        def run(p, x, gates):
            out, back = jax.vjp(lambda *given: function(*given[:2], picks, given[2]), p, x, gates)
            return out, back(x)

        return jax.device_get(jax.jit(run)(p, x, gates))

    wanted = of(looped)
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        found = of(lambda *given: fz.experts(gated, *given)[0])
    # Sums in another order.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_expert_takes_the_first_of_its_tokens_up_to_its_capacity(devices):
    """An even share of 8 tokens is one of each of 8 experts, the capacity three: all choose one."""
    p, x = expert_init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (8, WIDTH))
    chosen, gates = jnp.zeros((8, 1), int), jnp.ones((8, 1))
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        found, dropped = jax.jit(functools.partial(fz.experts, gated, capacity=3.0))(
            p, x, chosen, gates
        )
    wanted = jnp.where(jnp.arange(8)[:, None] < 3, looped(p, x, chosen, gates), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)  # sums in another order
    _, none = fz.experts(gated, p, x, chosen, gates, capacity=float("inf"))
    assert (float(dropped), float(none)) == (5, 0)


def test_a_capacity_of_a_part_of_a_token_is_a_token():
    """A share of six choices is 3/4 of one: no expert is left without any."""
    p, x = {"none": jnp.zeros((NUM, 1))}, jnp.ones((6, WIDTH))
    chosen, gates = jnp.array([[0], [0], [0], [1], [1], [2]]), jnp.ones((6, 1))

    @jax.jit
    def dropped():
        given = lambda own, p, rows: rows, p, x, chosen, gates
        return [fz.experts(*given, capacity=capacity)[1] for capacity in (1.0, 1.5, 3.0)]

    assert list(map(float, dropped())) == [3, 1, 0]


@pytest.mark.parametrize("devices", [1, 2])
def test_numbers_that_no_expert_has_are_no_choice_and_frozen_leaves_have_no_gradient(devices):
    keys = jax.random.split(jax.random.key(0), 2)
    p, x = expert_init(keys[0]), jax.random.normal(keys[1], (6, WIDTH))
    chosen, gates = jnp.array([[3, 1]] * 6), jnp.ones((6, K)) / 2
    frozen = {"step": jnp.arange(NUM, dtype=jnp.uint8)}

    def total(p, chosen):
        def apply(own, p, rows):
            return gated(own, p, rows) * (1 + own.each(p["step"])[:, :1].astype(jnp.float32))

        return jnp.sum(fz.experts(apply, {**p, **frozen_rows}, x, chosen, gates)[0] ** 2)

    frozen_rows = {"step": jnp.broadcast_to(frozen["step"][:, None], (NUM, WIDTH))}
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(total))
        found = [run(p, chosen.at[2:, 1].set(other)) for other in (-1, NUM)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(found))
    wanted = jax.device_get(jax.jit(jax.value_and_grad(total))(p, chosen.at[2:, 1].set(NUM)))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.device_get(found[0]), wanted)


def block_init(rng):
    dense, router, experts = jax.random.split(rng, 3)
    return {
        "dense": 0.3 * jax.random.normal(dense, (WIDTH, WIDTH)),
        "router": jax.random.normal(router, (WIDTH, NUM)),
        "experts": expert_init(experts),
    }


def block(capacity, p, carry, ctx):
    x, balance, dropped = carry
    x = x + jnp.tanh(x @ p["dense"])
    logits = x @ p["router"]
    gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), K)
    y, lost = fz.experts(gated, p["experts"], x, chosen, gates, capacity=capacity)
    return x + y, balance + fz.balance_loss(logits, K), dropped + lost


SHARD = {f"experts/{name}": ("expert",) for name in ("gate", "up", "down", "bias")}


@functools.cache
def chain(capacity=None):
    def enter(p, batch, ctx):
        return jnp.tanh(batch["x"] @ p["w"]), jnp.float32(0), jnp.float32(0)

    def loss(out, batch):
        x, balance, dropped = out
        count = jnp.float32(x[..., 0].size)
        total = jnp.sum((x - batch["y"]) ** 2) + 0.1 * balance * count
        return fz.Mean(total, count), {"dropped": fz.Mean(dropped, count * K * LAYERS)}

    return fz.Sequential(
        [
            fz.Layer("enter", lambda rng: {"w": jax.random.normal(rng, (WIDTH, WIDTH))}, enter),
            fz.Stack("blocks", LAYERS, block_init, functools.partial(block, capacity), shard=SHARD),
        ],
        loss,
    )


def batch(skewed=False):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, ROWS, LENGTH, WIDTH)).astype(np.float32)
    return {"x": np.ones_like(x) if skewed else x, "y": y}


def trained(plan, capacity=None, skewed=False):
    """Loss, norm and dropped share of a step, and the optimizer's first moments."""
    model, tx = chain(capacity), optax.adam(1e-2)
    count = plan.data * plan.replica * plan.expert * plan.context * plan.tensor
    devices = jax.devices()[:count]
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    state, metrics = fz.train_step(model, tx, plan, devices=devices)(state, batch(skewed))
    moments = state.opt_state[0].mu
    numbers = [float(metrics[name]) for name in ("loss", "grad_norm", "dropped")]
    return np.array(numbers), jax.device_get(moments)


@functools.cache
def alone(clip_norm=None, **how):
    return trained(fz.Plan(zero=0, data=1, clip_norm=clip_norm), **how)


def agree(found, wanted):
    # Sums in another order.
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(
        a[tuple(map(slice, b.shape))], b, rtol=1e-4, atol=1e-6), found[1], wanted[1])  # fmt: skip


def test_tokens_travel_to_the_devices_of_their_experts():
    """All tokens are alike and choose the same two experts: as many rounds as that needs."""
    plan = fz.Plan(zero=3, data=2, expert=4, clip_norm=0.5, min_shard_bytes=0)
    agree(trained(plan, skewed=True), alone(clip_norm=0.5, skewed=True))


@pytest.mark.nightly
def test_a_capacity_drops_what_one_device_drops_and_says_how_many():
    found = trained(fz.Plan(zero=3, data=2, expert=2, min_shard_bytes=0), capacity=0.5)
    agree(found, alone(capacity=0.5))
    assert 0.3 < found[0][2] < 0.8


PLANS = [
    {"zero": 3, "data": 2, "expert": 4},
    {"zero": 1, "data": 1, "expert": 2, "context": 2, "tensor": 2},
    {"zero": 2, "data": 2, "replica": 2, "expert": 2, "microbatches": 1, "gather": "lazy"},
    {"zero": 0, "data": 1, "expert": 8},
]


@pytest.mark.nightly
@pytest.mark.parametrize("axes", PLANS, ids=str)
def test_a_mixture_on_many_devices_trains_as_on_one(axes):
    agree(trained(fz.Plan(min_shard_bytes=0, **axes)), alone())


@pytest.mark.nightly
def test_the_stages_of_a_pipeline_have_experts_too():
    """Two microbatches, whose balance is taken one by one: the same rows as without stages."""
    model, tx, found = chain(), optax.adam(1e-2), []
    plan = fz.Plan(zero=3, data=2, expert=2, microbatches=2, min_shard_bytes=0)
    for one in (plan, plan.replace(pipe=2, schedule="zb_h1")):
        devices = jax.devices()[: 4 * one.pipe]
        state = fz.init(model, tx, one, rng=0, devices=devices)
        state, metrics = fz.train_step(model, tx, one, devices=devices)(state, batch())
        found.append((metrics["loss"], jax.device_get(fz.logical(model, state, one))))
    agree(found[1], found[0])


def test_experts_are_kept_by_their_owners_and_go_between_plans_without_losing_a_bit(tmp_path):
    plan, other = (fz.Plan(zero=3, min_shard_bytes=0, **axes)
                   for axes in ({"data": 2, "expert": 4}, {"data": 8}))  # fmt: skip
    model = chain()
    state = fz.init(model, None, plan, rng=0)
    up = state.params["blocks"]["experts"]["up"]
    assert up.sharding.spec == P(None, "expert", "data")
    assert up.sharding.shard_shape(up.shape) == (LAYERS, NUM // 4, WIDTH // 2, HIDDEN)
    assert "dim 1 / 4 (expert)" in str(fz.describe(plan, model, num_devices=8))
    moved = fz.replan(state, model, None, plan, other)
    fz.save(tmp_path / "state", moved, other)
    back = fz.restore(tmp_path / "state", model, None, plan)
    assert back.params["blocks"]["experts"]["up"].sharding == up.sharding
    jax.tree.map(np.testing.assert_array_equal, back.params, state.params)


def refused(**given):
    tokens = {
        "x": jnp.ones((4, WIDTH)),
        "chosen": jnp.zeros((4, K), int),
        "gates": jnp.ones((4, K)),
    }
    values = {**tokens, "weights": expert_init(jax.random.key(0)), **given}
    return fz.experts(gated, values.pop("weights"), **values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gates": jnp.ones((4, 1))}, r"expected tokens .* chosen and gates .*\(4, 1\)"),
        (
            {"x": jnp.ones(WIDTH), "chosen": jnp.zeros(K, int), "gates": jnp.ones(K)},
            r"expected tokens \(\.\.\., features\), .* got \(\d+,\), \(2,\), \(2,\)",
        ),
        ({"weights": {"a": jnp.ones(3), "b": jnp.ones(4)}}, r"weights of \[\(3,\), \(4,\)\]"),
        ({"chosen": jnp.zeros((4, K))}, r"chosen has dtype float32: expected integers"),
        ({"capacity": 0.0}, r"capacity=0.0: expected a number above 0"),
        ({"capacity": "a"}, r"capacity='a': expected a number above 0"),
        (
            {
                "x": jnp.ones((0, WIDTH)),
                "chosen": jnp.zeros((0, K), int),
                "gates": jnp.ones((0, K)),
            },
            r"expected at least one token and choice, got \(0, 2\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected(given, message):
    with pytest.raises(fz.PlanError, match=message):
        refused(**given)


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    with pytest.raises(fz.PlanError, match=r"expert=3 does not divide dim 0 \(8\) of blocks/exp"):
        fz.init(chain(), None, fz.Plan(data=1, expert=3), devices=jax.devices()[:3])


def test_weights_on_the_host_and_outside_of_jit():
    given = expert_init(jax.random.key(0)), jnp.ones((3, WIDTH)), jnp.zeros((3, 1), int)
    wanted, found = (
        fz.experts(gated, *one, jnp.ones((3, 1)))[0] for one in (given, jax.device_get(given))
    )
    np.testing.assert_array_equal(found, wanted)


def test_a_balanced_router_loses_one_for_each_choice():
    logits = 1e-6 * jnp.tile(jnp.eye(4), (3, 1))
    np.testing.assert_allclose(fz.balance_loss([logits, logits], 1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(fz.balance_loss(logits * 1e8, 1, jnp.arange(12) % 4 == 0), 4.0)
    # Tokens that do not count are as if they were not there, wherever they would have gone.
    drawn = jax.random.normal(jax.random.key(1), (12, 4))
    counted = np.arange(12) % 3 > 0
    found = fz.balance_loss(drawn, 2, jnp.asarray(counted))
    np.testing.assert_allclose(found, fz.balance_loss(drawn[counted], 2), rtol=1e-6)
    with pytest.raises(fz.PlanError, match=r"k of at most as many; .* k=5"):
        fz.balance_loss(logits, 5)


def test_balance_is_that_of_all_devices_tokens():
    """Each of two devices sends its tokens to one expert; together they use both."""

    def loss(p, buffers, batch, rng, train):
        return fz.balance_loss(batch["x"] * p["w"], 1), buffers, {}

    model = fz.Model(lambda rng: ({"w": jnp.ones(2)}, {}), loss)
    plan, two = fz.Plan(data=2), jax.devices()[:2]
    state = fz.init(model, None, plan, devices=two)
    found = fz.eval_step(model, plan, devices=two)(state, {"x": 10 * np.eye(2, dtype=np.float32)})
    np.testing.assert_allclose(found["loss"], 1.0, rtol=1e-6)


def test_an_axis_that_no_parameter_lies_along_is_refused():
    plain = fz.Model(lambda rng: ({"w": jnp.ones(4)}, {}), lambda *_: None)
    with pytest.raises(fz.PlanError, match=r"expert=2, but no parameter .* give its devices to d"):
        fz.init(plain, None, fz.Plan(data=1, expert=2), devices=jax.devices()[:2])


@pytest.mark.parametrize("axis", ["expert", "context"])
def test_a_function_that_closes_over_a_traced_value_is_refused_where_tokens_are_spread(axis):
    x, chosen, gates = jnp.ones((4, WIDTH)), jnp.zeros((4, K), int), jnp.ones((4, K))

    def total(p, scale):
        def apply(own, p, rows):
            return gated(own, p, rows) * scale

        return jnp.sum(fz.experts(apply, p, x, chosen, gates)[0])

    p = expert_init(jax.random.key(0))
    mesh = jax.make_mesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(fz.PlanError, match=r"shapes \[\(\)\] .*read its row 0"):
        jax.eval_shape(jax.grad(total, argnums=1), p, jnp.float32(2))


def test_gradients_of_an_expert_are_added_up_in_float32():
    """In 16 bits blocks of 16 ones end at 4096."""
    rows = jnp.ones((2**14, 2), jnp.bfloat16)
    sizes = jnp.zeros(256, jnp.int32).at[3].set(2**14)
    weight = jnp.ones((256, 2, 2), jnp.bfloat16)
    found = jax.grad(lambda w: jnp.sum(grouped_dot(rows, w, sizes).astype(jnp.float32)))(weight)
    assert found[3].tolist() == [[2**14, 2**14]] * 2
    assert not found[:3].any()


def test_rows_behind_those_of_all_groups_give_0_whatever_the_weights_are():
    sizes, weight = jnp.array([1, 2]), jnp.array([[[1.0]], [[jnp.inf]]])
    found = grouped_dot(jnp.ones((5, 1)), weight, sizes)
    assert found.ravel().tolist() == [1.0, np.inf, np.inf, 0.0, 0.0]
