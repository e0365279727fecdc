"""flax modules: the same numbers as plain flax, statistics, dropout, modes."""

import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import fzero as fz


KINDS = ("linen", "nnx")
NUM_ROWS, NUM_IN, NUM_HIDDEN, NUM_OUT = 32, 8, 16, 8


class LinenNet(nn.Module):
    rate: float = 0.0
    axis_name: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(NUM_HIDDEN)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(NUM_OUT)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0):
        self.first = nnx.Linear(NUM_IN, NUM_HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(NUM_HIDDEN, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(NUM_HIDDEN, NUM_OUT, rngs=rngs)])

    def __call__(self, x):
        return self.heads[0](self.dropout(nnx.relu(self.norm(self.first(x)))))


def square_error(out, batch):
    return jnp.sum((out - batch["y"]) ** 2), out.size


def loss(forward, batch):
    total, count = square_error(forward(batch["x"]), batch)
    return fz.Mean(total, jnp.float32(count)), {"rows": fz.Mean(jnp.float32(0), jnp.float32(1))}


def make(kind, rate=0.0):
    return remade(kind, loss, rate)


def remade(kind, loss, rate=0.0, **options):
    if kind == "linen":
        example = jax.ShapeDtypeStruct((2, NUM_IN), jnp.float32)
        return fz.from_flax(LinenNet(rate), loss, example, **options)
    return fz.from_flax(NnxNet(nnx.Rngs(0), rate), loss, **options)


@cache
def batch_at(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(NUM_ROWS, NUM_IN)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :NUM_OUT]) + 1}


def plain_apply(kind):
    """`apply(params, buffers, x, train) -> (output, buffers)` in flax's own terms."""

    def linen(params, buffers, x, train):
        variables = {"params": params, **buffers}
        return LinenNet().apply(variables, x, train, mutable=["batch_stats"])

    def nnx_(params, buffers, x, train):
        net = NnxNet(nnx.Rngs(1))
        net.set_attributes(deterministic=not train, use_running_average=not train)
        nnx.update(net, nnx.State(_int_keys(params)), nnx.State(buffers))
        out = net(x)
        return out, {"norm": {"mean": net.norm.mean[...], "var": net.norm.var[...]}}

    return {"linen": linen, "nnx": nnx_}[kind]


def _int_keys(params):
    return {**params, "heads": {0: params["heads"]["0"]}}


TX = optax.sgd(0.05, momentum=0.9)
NUM_STEPS = 3


@cache
def initial_values(kind):
    model = make(kind)
    if kind == "nnx":
        return model.init
    return host(jax.jit(model.init)(jax.random.key(0)))


@cache
def plain_steps(kind, num_parts):
    """Plain flax and optax; each part of the batch has its own batch statistics, as devices do."""
    apply = plain_apply(kind)

    def mean_loss(params, buffers, batch):
        def part(rows):
            out, new = apply(params, buffers, rows["x"], True)
            total, count = square_error(out, rows)
            return total / count, new

        rows = jax.tree.map(lambda x: x.reshape(num_parts, -1, x.shape[-1]), batch)
        losses, new = jax.vmap(part)(rows)
        return jnp.mean(losses), jax.tree.map(lambda x: jnp.mean(x, 0), new)

    @jax.jit
    def step(params, buffers, opt_state, batch):
        (value, buffers), grads = jax.value_and_grad(mean_loss, has_aux=True)(
            params, buffers, batch
        )
        updates, opt_state = TX.update(grads, opt_state, params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return optax.apply_updates(params, updates), buffers, opt_state, value, norm

    params, buffers = initial_values(kind)
    opt_state, losses, norms = TX.init(params), [], []
    for index in range(NUM_STEPS):
        params, buffers, opt_state, value, norm = step(params, buffers, opt_state, batch_at(index))
        losses.append(float(value))
        norms.append(float(norm))
    return params, buffers, losses, norms


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(got, expected, rtol):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol), got, expected)


@pytest.mark.parametrize(("num_devices", "zero"), [(1, 0), (8, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_plain_flax(kind, num_devices, zero):
    model, plan = make(kind), fz.Plan(zero=zero, data=num_devices, min_shard_bytes=0)
    state = fz.init(model, TX, plan, rng=0)
    start = host((state.params, state.buffers))
    jax.tree.map(np.testing.assert_array_equal, start, initial_values(kind))
    assert len(jax.tree.leaves(start)) == 6 + 2

    train_step, losses, norms = fz.train_step(model, TX, plan), [], []
    for index in range(NUM_STEPS):
        state, metrics = train_step(state, batch_at(index))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    expected = plain_steps(kind, num_devices)
    np.testing.assert_allclose(losses, expected[2], rtol=1e-5)
    np.testing.assert_allclose(norms, expected[3], rtol=1e-5)
    assert_close(host(state.params), expected[0], rtol=1e-5)
    assert_close(host(state.buffers), expected[1], rtol=1e-5)
    for leaf, first in zip(jax.tree.leaves(state.buffers), jax.tree.leaves(start[1]), strict=True):
        assert np.all(np.asarray(leaf) != first)

    before = host((state.params, state.buffers, state.opt_state))
    found = fz.eval_step(model, plan)(state, batch_at(9))
    after = host((state.params, state.buffers, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    out, _ = plain_apply(kind)(before[0], before[1], batch_at(9)["x"], False)
    total, count = square_error(out, batch_at(9))
    np.testing.assert_allclose(float(found["loss"]), float(total / count), rtol=1e-5)


def test_batch_norm_over_axes_sees_the_whole_batch():
    net = LinenNet(axis_name=("replica", "data"))
    model = fz.from_flax(net, loss, np.zeros((2, NUM_IN), np.float32))
    plan = fz.Plan(data=8, min_shard_bytes=0)
    state, step = fz.init(model, TX, plan, rng=0), fz.train_step(model, TX, plan)
    expected = plain_steps("linen", 1)
    for index in range(NUM_STEPS):
        state, metrics = step(state, batch_at(index))
    np.testing.assert_allclose(float(metrics["loss"]), expected[2][-1], rtol=1e-5)
    assert_close(host(state.params), expected[0], rtol=1e-5)
    assert_close(host(state.buffers), expected[1], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_differs_between_steps_and_is_absent_in_evaluation(kind):
    model, tx, plan = make(kind, rate=0.5), optax.sgd(0.0), fz.Plan(data=8)
    state = fz.init(model, tx, plan, rng=0)
    train_step = fz.train_step(model, tx, plan, donate=False)
    eval_step, batch = fz.eval_step(model, plan), batch_at(0)
    second, first_loss = train_step(state, batch)
    assert float(train_step(state, batch)[1]["loss"]) == float(first_loss["loss"])
    # A learning rate of 0 and statistics of the batch itself: only the masks differ.
    assert float(train_step(second, batch)[1]["loss"]) != float(first_loss["loss"])
    out, _ = plain_apply(kind)(*host((state.params, state.buffers)), batch["x"], False)
    total, count = square_error(out, batch)
    np.testing.assert_allclose(float(eval_step(state, batch)["loss"]), float(total / count), 1e-5)


class TwoDropouts(nnx.Module):
    def __init__(self, rngs):
        self.one, self.two = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.one(x), self.two(x)


class LinenTwoDropouts(nn.Module):
    @nn.compact
    def __call__(self, x, *, deterministic):
        return tuple(nn.Dropout(0.5, deterministic=deterministic)(x) for _ in range(2))


@pytest.mark.parametrize("net", [LinenTwoDropouts(), TwoDropouts(nnx.Rngs(0))], ids=KINDS)
def test_every_dropout_and_every_call_has_its_own_mask(net):
    masks = []

    def loss(forward, batch):
        masks.extend([*forward(batch), *forward(batch)])
        return jnp.float32(0)

    fz.from_flax(net, loss).loss({}, {}, jnp.ones(64), jax.random.key(0), True)
    fz.from_flax(net, loss).loss({}, {}, jnp.ones(64), jax.random.key(1), True)
    as_bytes = {np.asarray(mask).tobytes() for mask in masks}
    assert len(as_bytes) == len(masks) == 8
    for mask in masks:
        assert set(np.unique(mask)) == {0.0, 2.0}
        assert 16 < np.count_nonzero(mask) < 48


def flag_module(name, default):
    """A linen module and an nnx one whose `__call__` has a flag of that name and returns it."""
    made = {}
    source = f"def __call__(self, x, {name}={default}):\n    return {name}\n"
    exec(source, made)
    body = {"__call__": made["__call__"]}
    return type("Linen", (nn.Module,), dict(body))(), type("Nnx", (nnx.Module,), dict(body))()


@pytest.mark.parametrize("index", [0, 1], ids=KINDS)
@pytest.mark.parametrize(
    ("name", "in_training"),
    [("train", True), ("training", True), ("is_training", True), ("deterministic", False)],
)
def test_the_mode_reaches_the_argument(name, in_training, index):
    seen = []

    def loss(forward, batch):
        seen.extend([forward(batch), forward(batch, "mine"), forward(batch, **{name: "mine"})])
        return jnp.float32(0)

    model = fz.from_flax(flag_module(name, None)[index], loss)
    for train in (True, False):
        model.loss({}, {}, jnp.ones(2), jax.random.key(0), train)
    assert seen == [in_training, "mine", "mine", not in_training, "mine", "mine"]


def test_the_mode_reaches_a_linen_attribute():
    class Net(nn.Module):
        train: bool = False

        @nn.compact
        def __call__(self, x):
            return self.train

    seen = []
    model = fz.from_flax(Net(), lambda forward, batch: seen.append(forward(batch)) or 0.0)
    for train in (True, False):
        model.loss({}, {}, jnp.ones(2), jax.random.key(0), train)
    assert seen == [True, False]


def test_the_mode_reaches_one_of_attribute_and_argument():
    """`nn.merge_param` takes it from either, and refuses both."""

    class Net(nn.Module):
        train: bool | None = None

        @nn.compact
        def __call__(self, x, train=None):
            return nn.merge_param("train", self.train, train)

    seen = []
    model = fz.from_flax(Net(), lambda forward, batch: seen.append(forward(batch)) or 0.0)
    for train in (True, False):
        model.loss({}, {}, jnp.ones(2), jax.random.key(0), train)
    assert seen == [True, False]


def test_linen_values_are_those_of_its_own_init():
    expected = jax.jit(lambda key: LinenNet().init(key, jnp.zeros((2, NUM_IN)), False))
    plan = fz.Plan(zero=3, min_shard_bytes=0)
    state = fz.init(make("linen"), None, plan, rng=7)
    assert state.params["Dense_0"]["kernel"].sharding.shard_shape((NUM_IN, NUM_HIDDEN)) == (1, 16)
    own = expected(jax.random.key(7))
    jax.tree.map(np.testing.assert_array_equal, host(state.params), host(own["params"]))

    fixed = fz.from_flax(LinenNet(), loss, np.zeros((2, NUM_IN), np.float32), rng=3)
    state, own = fz.init(fixed, None, plan, rng=7), expected(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, host(state.params), host(own["params"]))


def test_nnx_values_are_copies_and_the_module_stays_as_it_was():
    net = NnxNet(nnx.Rngs(0), rate=0.5)
    graph, values = nnx.split(net)
    kept = host(nnx.to_pure_dict(nnx.state(net, nnx.filterlib.Any(nnx.Param, nnx.BatchStat))))
    model, plan, tx = fz.from_flax(net, loss), fz.Plan(data=1), optax.sgd(0.1)
    net.first.kernel[...] = jnp.zeros((NUM_IN, NUM_HIDDEN))
    state = fz.init(model, tx, plan)
    np.testing.assert_array_equal(state.params["first"]["kernel"], kept["first"]["kernel"])
    assert all(not leaf.flags.writeable for leaf in jax.tree.leaves(model.init))

    net.first.kernel[...] = jnp.asarray(kept["first"]["kernel"])
    fz.train_step(model, tx, plan)(state, batch_at(0))
    assert nnx.graphdef(net) == graph
    now = host(nnx.to_pure_dict(nnx.state(net, nnx.filterlib.Any(nnx.Param, nnx.BatchStat))))
    jax.tree.map(np.testing.assert_array_equal, kept, now)
    assert int(net.dropout.rngs.count[...]) == int(values["dropout"]["rngs"]["count"][...])


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_keep_their_dtypes_under_bf16(kind):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("seen", "last", jnp.zeros, (2,)).value = x
            return x

    class Nnx(nnx.Module):
        def __init__(self):
            self.last = nnx.Variable(jnp.zeros(2))

        def __call__(self, x):
            self.last[...] = x
            return x

    def loss(forward, batch):
        return jnp.sum(forward(batch))

    half = jnp.ones(2, jnp.bfloat16)
    model = fz.from_flax(Nnx(), loss)
    buffers = model.init[1] if kind == "nnx" else {"seen": {"last": jnp.zeros(2)}}
    if kind == "linen":
        model = fz.from_flax(Linen(), loss, half)
    value, new, _ = model.loss({}, buffers, half, jax.random.key(0), True)
    assert value.total.dtype == jnp.float32  # 16-bit totals are widened
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [jnp.float32]
    np.testing.assert_array_equal(jax.tree.leaves(new)[0], [1, 1])


def test_calls_hand_buffers_on_and_reach_other_methods():
    class Counter(nn.Module):
        def setup(self):
            self.count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.count.value += 1
            self.sow("intermediates", "seen", x)
            return x

        def peek(self):
            return self.count.value

    def loss(forward, batch):
        forward(batch)
        _, extra = forward(batch, mutable=["intermediates"])
        assert jax.tree.leaves(extra)[0] is batch
        return fz.Mean(forward(method="peek").astype(jnp.float32), jnp.float32(1))

    model = fz.from_flax(Counter(), loss, jnp.ones(2))
    params, buffers = model.init(jax.random.key(0))
    value, new, _ = model.loss(params, buffers, jnp.ones(2), jax.random.key(0), True)
    assert int(buffers["counts"]["calls"]) == 1  # linen's init runs the module once
    assert int(new["counts"]["calls"]) == int(value.total) == 3


def test_nnx_tied_annotated_and_plain_leaves():
    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(), ("data", None))
            self.embed = nnx.Embed(NUM_IN, 4, embedding_init=init, rngs=rngs)
            self.again = self.embed
            self.scale = nnx.data(jnp.float32(2))
            self.seen = nnx.Variable(0)
            self.sown = nnx.Intermediate(1.0)

        def __call__(self, ids):
            self.late = nnx.Intermediate(ids)
            self.seen[...] = self.seen[...] + 1
            return self.again(ids) * self.scale

        def double(self, ids):
            return 2 * self(ids)

    def loss(forward, batch):
        return jnp.mean((forward(batch["ids"], method="double") - 1) ** 2)

    plan, tx = fz.Plan(zero=3, data=8, min_shard_bytes=0), optax.sgd(0.1)
    with jax.set_mesh(plan.mesh()):  # flax places annotated variables at once
        model = fz.from_flax(Net(nnx.Rngs(0)), loss)
    state = fz.init(model, tx, plan)
    assert list(state.params) == ["again"]
    assert set(state.buffers) == {"scale", "seen"}
    table = np.asarray(state.params["again"]["embedding"])
    ids = np.arange(8, dtype=np.int32) % 4
    state, _ = fz.train_step(model, tx, plan)(state, {"ids": ids})
    grad = jax.grad(lambda t: jnp.mean((4 * t[ids] - 1) ** 2))(table)
    np.testing.assert_allclose(state.params["again"]["embedding"], table - 0.1 * grad, rtol=1e-6)
    assert int(state.buffers["seen"]) == 1
    assert float(state.buffers["scale"]) == 2


def annotated(kind, up, down):
    """Two layers whose kernels say how they lie."""
    if kind == "linen":

        def kernel(names):
            return nn.with_partitioning(nn.initializers.lecun_normal(), names)

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.relu(nn.Dense(NUM_HIDDEN, kernel_init=kernel(up), name="up")(x))
                return nn.Dense(NUM_OUT, kernel_init=kernel(down), name="down")(x)

        return Net(), (jax.ShapeDtypeStruct((2, NUM_IN), jnp.float32),)

    class Both(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            self.up = nnx.Linear(
                NUM_IN, NUM_HIDDEN, kernel_init=nnx.with_partitioning(init, up), rngs=rngs
            )
            self.down = nnx.Linear(
                NUM_HIDDEN, NUM_OUT, kernel_init=nnx.with_partitioning(init, down), rngs=rngs
            )

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    with nnx.use_eager_sharding(False):
        return Both(nnx.Rngs(0)), ()


@pytest.mark.parametrize("kind", KINDS)
def test_annotations_of_parameters_are_what_a_plan_divides(kind):
    def error(forward, batch):
        total, count = square_error(forward(batch["x"]), batch)
        return fz.Mean(total, jnp.float32(count))

    module, example = annotated(kind, (None, "tensor"), ("mlp", "data"))
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_IN)).astype(np.float32)
    batch = {"x": rows, "y": rows}
    model = fz.from_flax(module, error, *example, rng=0 if example else None,
                         axes={"mlp": "tensor"})  # fmt: skip
    found = []
    tx = optax.sgd(0.1)
    for plan in (fz.Plan(zero=3, data=4, tensor=2, min_shard_bytes=0), fz.Plan(zero=0, data=8)):
        state = fz.init(model, tx, plan)
        lies = {name: state.params[name]["kernel"].sharding.spec for name in ("up", "down")}
        if plan.tensor > 1:
            assert lies == {"up": PartitionSpec("data", "tensor"),
                            "down": PartitionSpec("tensor", "data")}  # fmt: skip
        state, metrics = fz.train_step(model, tx, plan)(state, batch)
        found.append((metrics["loss"], jax.device_get(fz.logical(model, state, plan))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *found)


@pytest.mark.parametrize("names", [(None, "mlp"), (None, ("tensor", "expert"))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_annotations_with_names_of_no_axis_are_refused(kind, names):
    module, example = annotated(kind, names, (None, None))
    with pytest.raises(fz.PlanError, match=r"up/kernel is annotated .* axes=\{'mlp': 'tensor'"):
        fz.from_flax(module, loss, *example)


def test_nnx_stacked_streams_get_stacked_keys():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0)
    def stacked(rngs):
        return nnx.Dropout(0.5, rngs=rngs)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = stacked(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    masks = []
    model = fz.from_flax(
        Net(nnx.Rngs(0)), lambda forward, batch: masks.extend(forward(batch)) or 0.0
    )
    model.loss({}, {}, jnp.ones(64), jax.random.key(0), True)
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 3


def test_what_is_refused():
    with pytest.raises(TypeError, match=r"expected an instance of flax\.linen\.Module"):
        fz.from_flax(LinenNet, loss)
    with pytest.raises(fz.StateError, match="brings its own initial values"):
        fz.from_flax(NnxNet(nnx.Rngs(0)), loss, np.zeros((2, NUM_IN)))

    class Sower(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("counts", "calls", jnp.zeros, ())
            self.sow("losses", "aux", x)
            return x

    model = fz.from_flax(Sower(), lambda forward, batch: forward(batch)[0], jnp.ones(2))
    params, buffers = model.init(jax.random.key(0))
    with pytest.raises(
        fz.StateError, match=r"by path\): losses/aux/1: none became float32\[2\]\..*intermediates"
    ):
        model.loss(params, buffers, jnp.ones(2), jax.random.key(0), True)


def test_scales_that_linen_takes_from_gradients_are_refused():
    module = nn.Dense(2, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)
    with pytest.raises(fz.StateError, match=r"'_overwrite_with_gradient'.*Plan\(precision='fp8'\)"):
        fz.from_flax(module, loss, np.zeros((2, NUM_IN), np.float32))
    bare = fz.from_flax(module, lambda forward, batch: jnp.mean(forward(batch)))
    params, buffers = module.init(jax.random.key(0), jnp.ones((2, NUM_IN))), {}
    buffers = {"_overwrite_with_gradient": params.pop("_overwrite_with_gradient")}
    with pytest.raises(fz.StateError, match="would stay as they began"):
        bare.loss(params["params"], buffers, jnp.ones((2, NUM_IN)), jax.random.key(0), True)


def test_a_loss_of_other_arguments_is_refused_when_the_model_is_made():
    example = np.zeros((2, NUM_IN), np.float32)
    with pytest.raises(fz.PlanError, match=r"from_flax: .* loss\(forward, batch\), got .*train"):
        fz.from_flax(LinenNet(), lambda forward, batch, train: 0.0, example)
    with pytest.raises(fz.PlanError, match=r"from_flax: .* predict\(forward, batch\), got"):
        fz.from_flax(LinenNet(), loss, example, predict=lambda batch: batch)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_what_a_module_does_not_take_is_refused_by_name(kind):
    given = make(kind)
    keys = {"dropout": jax.random.key(0)}
    model = remade(kind, lambda forward, batch: forward(batch["x"], rngs=keys).mean())
    params, buffers = given.init(jax.random.key(0)) if kind == "linen" else given.init
    with pytest.raises(fz.PlanError, match=r"'rngs'; expected .*__call__\(x.*step's key"):
        model.loss(params, buffers, batch_at(0), jax.random.key(0), True)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_predictions_are_those_of_the_module_in_evaluation(kind):
    """From the running statistics, without dropout."""
    model = remade(kind, loss, predict=lambda forward, batch: {"out": forward(batch["x"])})
    plan, tx = fz.Plan(zero=3, data=2, min_shard_bytes=0), optax.sgd(0.1)
    state, batch = fz.init(model, tx, plan), batch_at(0)
    found = fz.predict_step(model, plan)(state, batch)["out"]
    seen = []
    plain = remade(kind, lambda forward, batch: seen.append(forward(batch["x"])) or 0.0)
    plain.loss(host(state.params), host(state.buffers), batch, jax.random.key(0), False)
    np.testing.assert_allclose(found, seen[0], 1e-5, 1e-6)


def test_a_loss_may_ask_for_the_step():
    model = remade("linen", lambda forward, batch, step: forward(batch["x"]).mean() * 0 + step)
    plan, tx = fz.Plan(data=1), optax.sgd(0.1)
    state = fz.init(model, tx, plan).replace(step=3)
    assert float(fz.train_step(model, tx, plan)(state, batch_at(0))[1]["loss"]) == 3


def test_fzero_works_without_flax():
    script = (
        "import sys; sys.modules['flax'] = None\n"
        "import fzero as fz\n"
        "try:\n    fz.from_flax(object(), None)\n"
        "except ImportError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("from_flax: flax is not installed; pip install 'fzero[flax]'")
