"""Layers divided over a `tensor` axis beside ZeRO: the numbers of one device, and what is sent."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fzero as fz
from fzero.preflight import hlo
from tests.support.sample import some


D, F, LAYERS, WIDTH = 16, 32, 3, 8
SHARD = {"up": (None, "tensor"), "bias": ("tensor",), "down": ("tensor", None)}
# Sums over a dim that is divided add up in another order than on one device.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def block_init(rng):
    up, down = jax.random.split(rng)
    return {
        "scale": jnp.ones(D),
        "up": 0.3 * jax.random.normal(up, (D, F)),
        "bias": jnp.zeros(F),
        "down": 0.3 * jax.random.normal(down, (F, D)),
    }


def block(p, x, ctx):
    """A residual layer that says nothing of devices."""
    return x + jnp.tanh((x * p["scale"]) @ p["up"] + p["bias"]) @ p["down"]


def chain(shard=SHARD, frozen=frozenset(), rules=None):
    def dense(name, n, m, read):
        def apply(p, x, ctx):
            return read(x) @ p["w"]

        return fz.Layer(name, lambda rng: {"w": 0.3 * jax.random.normal(rng, (n, m))}, apply)

    return fz.Sequential(
        [
            dense("enter", WIDTH, D, lambda batch: batch["x"]),
            fz.Stack("blocks", LAYERS, block_init, block, shard=shard),
            dense("leave", D, WIDTH, lambda x: x),
        ],
        lambda y, batch: fz.Mean(jnp.sum((y - batch["y"]) ** 2), jnp.float32(y.size)),
        frozen=frozen,
        shard=rules,
    )


def rows(seed=0, num=16):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, num, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def trained(plan, model, steps=2, devices=None):
    """`(losses and norms, parameters, evaluation)` after some steps."""
    tx = optax.adamw(1e-2)
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    step = fz.train_step(model, tx, plan, devices=devices)
    numbers = []
    for seed in range(steps):
        state, metrics = step(state, rows(seed))
        numbers.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    found = fz.eval_step(model, plan, devices=devices)(state, rows())
    if plan.tiers:
        state = fz.reload(state)
    params = jax.tree.map(np.asarray, fz.logical(model, state, plan))
    return np.array(numbers), params, float(found["loss"])


def on_one_device(model, **options):
    return trained(fz.Plan(zero=0, data=1, **options), model, devices=jax.devices()[:1])


def agree(found, wanted, **tolerance):
    for a, b in zip(found, wanted, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.fixture(scope="module")
def alone():
    return on_one_device(chain(), clip_norm=1.0)


PLANS = [
    {"zero": 0},
    {"zero": 1, "reduce": "step", "microbatches": 2},
    {"zero": 2, "gather": "lazy", "microbatches": 2},
    {"zero": 2, "tiers": {"opt_state": "host"}, "stream_bytes": 4096},
    {"zero": 3, "tensor": 4, "data": 2},
    {"zero": 3, "data": 2, "pipe": 2, "microbatches": 2, "schedule": "zb_h1"},
    pytest.param({"zero": 2}, marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "prefetch": True, "remat": "none"}, marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "secondary": 2, "remat": "dots"}, marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "replica": 2, "data": 2}, marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "remat": "offload"}, marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "tiers": {"opt_state": "disk", "params": "host"}},
                 marks=pytest.mark.nightly),
    pytest.param({"zero": 2, "tiers": {"opt_state": "host"}, "update_on": "host"},
                 marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_a_layer_divided_over_devices_trains_as_on_one(options, alone):
    plan = fz.Plan(**{"data": 4, "tensor": 2, "min_shard_bytes": 0, "clip_norm": 1.0, **options})
    agree(trained(plan, chain()), alone, **CLOSE)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_sixteen_bits_round_the_sums_of_devices_once_more(precision):
    options = {"precision": precision, "loss_scale": fz.LossScaling(initial=16.0)}
    plan = fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0, **options)
    # Two partial sums are rounded to 8 bits of mantissa before they are added; Adam's first steps
    # are as long as the rate (0.01) in the direction of the sign, whatever the gradient.
    agree(trained(plan, chain()), on_one_device(chain(), **options), rtol=2e-2, atol=2.5e-2)


def compiled(plan, model=None):
    model, tx = model or chain(), optax.adamw(1e-2)
    step = fz.train_step(model, tx, plan)
    text = step.lower(fz.abstract_state(model, tx, plan), rows()).compile().as_text()
    return hlo.collectives(text, mesh_axes={"replica": 1, "data": 4, "tensor": 2})


def test_stage_3_gathers_and_reduces_parts_of_layers_and_adds_twice_a_layer():
    """Per layer: each divided leaf gathered twice and reduced once over `data`, half as large; and
    over `tensor` one sum forward (of `down`'s products), one backward (of the input's gradient)."""
    found = compiled(fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=256))
    matrix = D * F // 2
    sent = Counter()
    for c in found:
        if c.elements == matrix or "tensor" in c.axes:
            sent[c.kind, c.axes, c.elements] += c.times
    norm = [key for key in sent if key[0] == "all-reduce" and key[2] <= 3 * LAYERS]
    for key in norm:  # one number a layer and divided leaf, for the gradient's norm
        sent.pop(key)
    assert sent == {
        ("all-gather", ("data",), matrix): 2 * 2 * LAYERS,
        ("reduce-scatter", ("data",), matrix): 2 * LAYERS,
        ("all-reduce", ("tensor",), 16 // 4 * D): 2 * LAYERS,
    }


@pytest.mark.nightly
def test_a_stage_of_a_pipeline_gathers_parts_and_adds_twice_a_layer():
    """As without a pipeline, of the two layers of the fuller rank; of each microbatch two rows."""
    plan = fz.Plan(zero=3, pipe=2, data=2, tensor=2, microbatches=2, schedule="zb_h1",
                   min_shard_bytes=256)  # fmt: skip
    tx = optax.adamw(1e-2)
    found = fz.preflight(chain(), tx, plan, rows(num=8), "cpu:8")
    sent = Counter()
    for c in found.collectives:
        if c.axes in ("data", "tensor"):
            sent[c.kind, c.axes, int(c.bytes)] += c.times
    matrix = 4 * D * F // 2
    # Two leaves of two layers in two microbatches, gathered in both passes.
    assert sent["all-gather", "data", matrix] == 2 * 2 * 2 * 2
    assert sent["reduce-scatter", "data", matrix] == 2 * 2 * 2
    assert {key: times for key, times in sent.items() if key[1] == "tensor"} == {
        ("all-reduce", "tensor", 4 * 2 * D): 2 * 2 * 2
    }
    assert "tensor=2" in str(found)


def test_each_device_keeps_its_share_over_both_axes_and_reports_say_so():
    plan = fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0)
    model, tx = chain(), optax.adamw(1e-2)
    state = fz.init(model, tx, plan)
    up, bias, scale = (state.params["blocks"][name] for name in ("up", "bias", "scale"))
    assert up.sharding.shard_shape(up.shape) == (LAYERS, D // 4, F // 2)
    assert bias.sharding.spec == P(None, "tensor")
    assert scale.sharding.spec == P(None, "data")
    moment = state.opt_state[0].mu["blocks"]["down"]
    assert moment.sharding.spec == P(None, "tensor", "data")
    where = fz.placement(state)
    assert where.bytes_per_device == fz.placement(plan, model, tx).bytes_per_device
    assert where.bytes_per_device["params"] == 4 * sum(
        leaf.size // (2 if "bias" in str(path) else 8 if str(path[0]) == "['blocks']"
                      and "scale" not in str(path) else 4)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    )  # fmt: skip
    about = fz.describe(plan, model, tx, num_devices=8)
    assert about.bytes_per_device["total"] == fz.describe(plan, model, tx).bytes_per_device["total"]
    assert "replica=1 x data=4 x tensor=2" in str(about)
    assert "over tensor: what a layer's work asks for" in str(about)
    assert re.search(r"params/blocks/up .* dim 1 / 4, dim 2 / 2 \(tensor\)", str(about))
    layout = fz.layout(model, tx, plan)
    assert layout.mesh.shape == {"replica": 1, "data": 4, "tensor": 2}
    assert layout.state.params["blocks"]["down"].sharding.spec == P(None, "tensor", "data")
    assert layout.batch_multiple == 4


def test_what_is_communicated_for_zero_is_half_where_two_share_a_layer():
    model = chain()
    whole, half = (
        fz.describe(fz.Plan(data=4, tensor=n, min_shard_bytes=256), model, num_devices=8)
        for n in (1, 2)
    )
    undivided = 2 * WIDTH * D * 3 / 4
    matrices = 2 * LAYERS * D * F * 3 / 4
    assert whole.elements_gathered == 2 * (undivided + matrices)
    assert half.elements_gathered == 2 * (undivided + matrices / 2)


def test_states_go_between_axes_and_files_without_losing_a_bit(tmp_path):
    model, tx = chain(), optax.adamw(1e-2)
    plans = [
        fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0),
        fz.Plan(zero=1, data=1, tensor=8, min_shard_bytes=0),
        fz.Plan(zero=3, data=8, min_shard_bytes=0),
        fz.Plan(zero=0, data=2, tensor=4, precision="bf16"),
    ]
    state, _ = fz.train_step(model, tx, plans[0])(fz.init(model, tx, plans[0], rng=1), rows())
    wanted = jax.tree.map(np.asarray, fz.logical(model, state))
    moments = jax.tree.map(np.asarray, state.opt_state)
    for old, new in zip(plans, [*plans[1:], plans[0]], strict=True):
        fz.save(tmp_path / str(new), state, old)
        moved = fz.replan(state, model, tx, old, new)
        read = fz.restore(tmp_path / str(new), model, tx, new)
        for one in (moved, read):
            assert jax.tree.all(jax.tree.map(
                lambda a, b: np.array_equal(a, np.asarray(b)), wanted, fz.logical(model, one)
            ))  # fmt: skip
        assert read.params["blocks"]["up"].sharding == moved.params["blocks"]["up"].sharding
        state = moved
    back = jax.tree.map(np.asarray, state.opt_state)
    assert jax.tree.all(jax.tree.map(np.array_equal, moments, back))


def test_a_plain_model_is_divided_by_rules_on_names():
    def loss(p, buffers, batch, rng, train):
        hidden = jnp.tanh(batch["x"] @ p["mlp"]["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, P(None, "tensor"))
        error = hidden @ p["mlp"]["down"] - batch["y"]
        return fz.Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}

    def init(rng):
        up, down = jax.random.split(rng)
        return {"mlp": {"up": jax.random.normal(up, (WIDTH, F)),
                        "down": jax.random.normal(down, (F, WIDTH))}}, {}  # fmt: skip

    rules = {"mlp/up": (None, "tensor"), re.compile("down$"): ("tensor",)}
    divided, plain = fz.Model(init, loss, shard=rules), fz.Model(init, loss)
    plan = fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0)
    one = on_one_device(fz.Model(init, lambda p, b, batch, rng, train: loss_alone(p, b, batch)))
    agree(trained(plan, divided), one, **CLOSE)
    assert plain.shard == {}


def test_of_several_rules_for_one_parameter_the_first_counts():
    rules = {"w": (None, "tensor"), re.compile("w"): ("tensor", None)}
    model = fz.Model(lambda rng: ({"w": jnp.ones((4, 8))}, {}), loss_alone, shard=rules)
    found = fz.layout(model, None, fz.Plan(data=1, tensor=2), devices=jax.devices()[:2])
    assert found.state.params["w"].sharding.spec == P(None, "tensor")


def loss_alone(p, buffers, batch):
    error = jnp.tanh(batch["x"] @ p["mlp"]["up"]) @ p["mlp"]["down"] - batch["y"]
    return fz.Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}


def test_frozen_leaves_stay_divided_and_cost_no_gradient():
    frozen = re.compile("^blocks/(up|down)$")
    plan = fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0)
    numbers, params, loss = trained(plan, chain(frozen=frozen))
    agree((numbers, params, loss), on_one_device(chain(frozen=frozen)), **CLOSE)
    born = fz.logical(chain(), fz.init(chain(), None, plan, rng=0))
    np.testing.assert_array_equal(params["blocks"]["up"], born["blocks"]["up"])


@pytest.mark.parametrize(
    ("shard", "plan", "message"),
    [
        ({"upp": (None, "tensor")}, {}, r"layer 'blocks' is for 'upp', which is no .*'bias'"),
        ({"up": (None, "model")}, {}, r"blocks/up names the mesh axes \['model'\].*'tensor'\]"),
        ({"up": (None, None, "tensor")}, {}, r"blocks/up: expected at most one axis .* \[16, 32\]"),
        ({"up": ("tensor", "tensor")}, {}, r"none twice"),
        ({"up": "tensor"}, {}, r"blocks/up: expected .*\(None, 'tensor'\); got 'tensor'"),
        ({"up": ("tensor",)}, {"tensor": 5, "data": 1}, r"tensor=5 does not divide dim 0 \(16\)"),
        (SHARD, {"tensor": 0}, r"tensor=0: expected a whole number of at least 1"),
        (SHARD, {"tensor": 16, "data": 1}, r"data=1 x tensor=16 needs 16 devices, but there are 8"),
        (SHARD, {"tensor": 3, "data": None}, r"cannot be split into replica=1 x tensor=3 equal"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_to_do(shard, plan, message):
    with pytest.raises(fz.PlanError, match=message):
        fz.init(chain(shard), None, fz.Plan(**{"data": 4, "tensor": 2, **plan}))


def test_a_rule_by_name_goes_before_patterns():
    shard = {re.compile("u"): (), re.compile(""): ("tensor",), "up": (None, "tensor")}
    named = fz.layout(chain(shard), None, fz.Plan(data=4, tensor=2)).shardings.params["blocks"]
    plain = fz.layout(chain(SHARD), None, fz.Plan(data=4, tensor=2)).shardings.params["blocks"]
    assert named["up"].spec == plain["up"].spec


def test_an_axis_that_divides_nothing_is_named(recwarn):
    with pytest.warns(fz.UnusedDevicesWarning, match=r"tensor=2, but no parameter .*all do the"):
        fz.init(chain({}), None, fz.Plan(data=4, tensor=2))
    recwarn.clear()
    fz.init(chain(), None, fz.Plan(data=4, tensor=2))
    assert not [w for w in recwarn if w.category is fz.UnusedDevicesWarning]


def test_one_model_runs_under_plans_with_and_without_the_axis():
    plan = fz.Plan(zero=3, data=2, min_shard_bytes=0)
    state = fz.init(chain(), None, plan, devices=jax.devices()[:2])
    assert state.params["blocks"]["up"].sharding.spec == P(None, "data")


def test_a_whole_models_rules_yield_to_those_of_a_layer():
    plan = fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0)
    rules = {re.compile("blocks/(up|scale)"): ("tensor",), "enter/w": (None, "tensor")}
    params = fz.init(chain(rules=rules), None, plan).params
    assert params["blocks"]["up"].sharding.spec == P(None, "data", "tensor")
    assert params["blocks"]["scale"].sharding.spec == P(None, "tensor")
    assert params["enter"]["w"].sharding.spec == P("data", "tensor")


def test_plans_with_the_axis_come_back_from_json():
    plan = fz.Plan(zero=2, data=4, tensor=2)
    assert fz.Plan.from_json(plan.to_json()) == plan
    assert repr(plan) == "Plan(zero=2, data=4, tensor=2)"


@pytest.mark.parametrize(
    ("dtype", "last", "finite"),
    [(np.uint8, 255, True), (np.int32, 383, True), (np.int32, 384, False)],
)
def test_labels_of_a_divided_vocabulary_are_those_of_a_whole_one(dtype, last, finite):
    size = 384
    model = fz.Sequential(
        [
            fz.Layer("embed", lambda key: {"w": jax.random.normal(key, (16, 8))},
                     lambda p, batch, ctx: p["w"][batch["ids"]]),
            fz.Layer("head", lambda key: {"w": jax.random.normal(key, (8, size))},
                     lambda p, x, ctx: fz.cross_entropy(x @ p["w"], ctx.batch["labels"]),
                     shard={"w": (None, "tensor")}),
        ]
    )  # fmt: skip
    ids = np.arange(8, dtype=np.int32).reshape(2, 4)
    batch = {"ids": ids, "labels": np.full((2, 4), last, dtype)}
    losses = []
    for plan in (fz.Plan(data=1), fz.Plan(data=1, tensor=2)):
        state = fz.init(model, None, plan)
        losses.append(float(fz.eval_step(model, plan)(state, batch)["loss"]))
    assert np.isfinite(losses).tolist() == [finite, finite]
    np.testing.assert_allclose(*losses, rtol=1e-6)  # sums in another order; NaN equals NaN


VOCAB, CHUNK = 512, 8


def language(tied, terms):
    """A model whose head is divided by words; its loss reads no logits."""

    def init(key):
        table, head, bias = jax.random.split(key, 3)
        params = {"table": jax.random.normal(table, (VOCAB, D)),
                  "bias": jax.random.normal(bias, (VOCAB,))}  # fmt: skip
        return params if tied else params | {"head": jax.random.normal(head, (VOCAB, D))}, {}

    def loss(params, buffers, batch, rng, train):
        x = jnp.tanh(params["table"][batch["ids"]])
        head = params["table"] if tied else params["head"]
        args = x, head, jnp.roll(batch["ids"], -1, 1)
        mean = fz.linear_cross_entropy(*args, bias=params["bias"], terms=terms, chunk=CHUNK)
        return mean, buffers, {}

    return fz.Model(init, loss, shard={re.compile("table|head|bias"): ("tensor",)})


@pytest.mark.parametrize(
    ("tied", "terms"),
    [
        (True, fz.CrossEntropy(label_smoothing=0.2, z_loss=1e-2, soft_cap=3.0)),
        (False, fz.CrossEntropy()),
        pytest.param(True, fz.CrossEntropy(), marks=pytest.mark.nightly),
        pytest.param(False, fz.CrossEntropy(label_smoothing=0.2, z_loss=1e-2, soft_cap=3.0),
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_divided_head_has_the_loss_of_a_whole_one_and_no_logits(tied, terms):
    model, tx = language(tied, terms), optax.sgd(1.0)
    ids = np.random.default_rng(0).integers(0, VOCAB, (8, 64)).astype(np.int32)
    found = []
    for plan in (fz.Plan(zero=0, data=1), fz.Plan(zero=3, data=2, tensor=4, min_shard_bytes=0)):
        state, step = fz.init(model, tx, plan), fz.train_step(model, tx, plan)
        text = step.lower(state, {"ids": ids}).compile().as_text()
        state, metrics = step(state, {"ids": ids})
        found.append((float(metrics["loss"]), jax.tree.map(np.asarray, dict(state.params))))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    agree([found[1][1]], [found[0][1]], **CLOSE)
    # Of 256 tokens on a device, and a quarter of the words: eight tokens' logits at a time.
    assert max(int(n) for n in re.findall(rf"f32\[(\d+),{VOCAB // 4}\]", text)) == CHUNK
    assert not re.search(rf"f32\[[\d,]+,{VOCAB}\]", text)


AXES = [{"context": 4}, {"context": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", some(AXES, AXES[1]), ids=str)
def test_a_head_of_divided_sequences_has_chunks_of_each_devices_own(axes):
    """Not chunks of whole sequences, each of which one device has."""
    model, tx = language(True, fz.CrossEntropy()), optax.sgd(1.0)
    ids = np.random.default_rng(0).integers(0, VOCAB, (8, 64)).astype(np.int32)
    found = []
    for plan in (fz.Plan(zero=0, data=1), fz.Plan(zero=3, data=2, min_shard_bytes=0, **axes)):
        devices = jax.devices()[: plan.data * plan.tensor * plan.context]
        state = fz.init(model, tx, plan, devices=devices)
        step = fz.train_step(model, tx, plan, devices=devices)
        text = step.lower(state, {"ids": ids}).compile().as_text()
        state, metrics = step(state, {"ids": ids})
        found.append((float(metrics["loss"]), jax.tree.map(np.asarray, dict(state.params))))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    agree([found[1][1]], [found[0][1]], **CLOSE)
    # Three products of a device's own tokens and words, none of others' tokens.
    own = 8 * 64 // (2 * axes["context"]) * VOCAB // plan.tensor
    assert hlo.matmul_flops(text).flops == 3 * 2 * own * D


@pytest.mark.parametrize(
    ("kernel", "held", "right"),
    [("HIO", False, True), ("OIH", True, True), ("OIH", "before", False), ("OIH", False, False)],
)
def test_a_depthwise_convolution_is_right_or_refused(kernel, held, right):
    """XLA's gradient of a kernel with features first is all wrong where they are divided."""
    sizes = {"H": 3, "I": 1, "O": 16}

    def init(rng):
        keys = jax.random.split(rng, 3)
        shapes = {"up": (8, 16), "kernel": tuple(sizes[dim] for dim in kernel), "down": (16, 8)}
        pairs = zip(keys, shapes.items(), strict=True)
        return {name: jax.random.normal(key, shape) for key, (name, shape) in pairs}, {}

    def loss(p, buffers, batch, rng, train):
        x = jnp.tanh(batch["x"] @ p["up"])
        x = jax.lax.with_sharding_constraint(x, P()) if held else x
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), [(2, 0)], dimension_numbers=("NHC", kernel, "NHC"),
            feature_group_count=16,
        )  # fmt: skip
        x = jax.lax.with_sharding_constraint(x, P()) if held is True else x
        return jnp.mean((jnp.tanh(x) @ p["down"]) ** 2), buffers, {}

    made = fz.Model(init, loss, shard={"up": (None, "tensor"), "down": ("tensor",)})
    given = {"x": np.random.default_rng(0).normal(size=(4, 12, 8)).astype(np.float32)}

    def stepped(plan):
        devices, tx = jax.devices()[: plan.data * plan.tensor], optax.sgd(0.1)
        state = fz.init(made, tx, plan, rng=0, devices=devices)
        state, _ = fz.train_step(made, tx, plan, devices=devices)(state, given)
        return jax.device_get(fz.logical(made, state, plan))

    plan = fz.Plan(zero=1, data=2, tensor=4, min_shard_bytes=0)
    if not right:
        with pytest.raises(fz.PlanError, match=r"tensor=4: .*each feature .*by itself .*'HIO'"):
            stepped(plan)
        return
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
                 stepped(plan), stepped(fz.Plan(zero=0, data=1)))  # fmt: skip


@pytest.mark.parametrize("of", ["logits", "weights"])
def test_what_is_picked_for_each_row_may_be_divided_over_one_of_several_axes(of):
    """XLA's partitioner would end the process: a label's logit, of a vocabulary over `tensor`; a
    label's weight, of classes over `context`."""

    def loss(x, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(x, batch["labels"])
        weights = jnp.take_along_axis(batch["classes"], batch["labels"] % 4, 1)
        weights = weights if of == "weights" else jnp.ones_like(weights)
        return fz.Mean(jnp.sum(losses * weights), jnp.sum(weights))

    model = fz.Sequential(
        [
            fz.Layer("embed", lambda key: {"w": jax.random.normal(key, (16, 8))},
                     lambda p, batch, ctx: p["w"][batch["ids"]]),
            fz.Layer("head", lambda key: {"w": jax.random.normal(key, (8, 16))},
                     lambda p, x, ctx: x @ p["w"],
                     shard={"w": (None, "tensor")} if of == "logits" else {}),
        ],
        loss=loss,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 16, (4, 6), dtype=np.int32) for name in ("ids", "labels")}
    batch["classes"] = rng.random((4, 4), dtype=np.float32)
    found = []
    for plan in (fz.Plan(zero=0, data=1), fz.Plan(data=2, context=2, tensor=2, min_shard_bytes=0)):
        state = fz.init(model, optax.sgd(0.5), plan)
        before = fz.eval_step(model, plan)(state, batch)
        state, metrics = fz.train_step(model, optax.sgd(0.5), plan)(state, batch)
        found.append((fz.logical(model, state, plan), before["loss"], metrics["loss"]))
    agree(*found, **CLOSE)
