"""The state: born sharded, never aliased, moved between plans bit for bit, consumed visibly."""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import tiny
from support.init import lower_init

import fzero as fz


TX = optax.adam(1e-2)
# jax 0.11 refuses leaves without elements on several CPU devices.
EMPTY = {"none": (0, 8)} if jax.__version_info__ < (0, 11) else {}


def small_init(key):
    """Divisible, padded, 1-d, scalar and empty leaves; a float and an int buffer."""
    odd = jax.random.normal(key, (13, 27))
    params = {
        "w": jnp.sin(jnp.arange(208.0)).reshape(16, 13) * odd[0, 0],
        "odd": odd,
        "bias": jnp.cos(jnp.arange(24.0)),
        "gain": jnp.ones(()),
        **{name: jnp.zeros(shape) for name, shape in EMPTY.items()},
    }
    return params, {"mean": jnp.full(13, 0.5), "seen": jnp.zeros((), jnp.int32)}


def small_loss(p, buffers, batch, rng, train):
    """Reads every leaf."""
    h = jnp.tanh(batch["x"] @ p["w"])
    out = h @ p["odd"] * p["gain"] + jnp.sum(p["bias"]) + sum(jnp.sum(p[name]) for name in EMPTY)
    new = {"mean": 0.9 * buffers["mean"] + 0.1 * h.mean(0), "seen": buffers["seen"] + 1}
    return fz.Mean(jnp.sum(jnp.square(out - batch["y"])), jnp.float32(out.size)), new, {}


MODEL = fz.Model(small_init, small_loss)


def plan_of(name):
    """`z3`, `z1-bf16`, `z3-d4` (four devices), `z2-r2` (two replica groups)."""
    options = {"zero": int(name[1])}
    for word in name.split("-")[1:]:
        if word[0] in "dr" and word[1:].isdigit():
            options["data" if word[0] == "d" else "replica"] = int(word[1:])
        else:
            options["precision"] = word
    return tiny.plan(**options)


@cache
def made(name):
    """A state of `MODEL` under a plan; shared, so no test may consume it."""
    return fz.init(MODEL, TX, plan_of(name), rng=7)


# path -> (logical shape, shape one of eight devices holds when the leaf is kept split)
SHARDS = {
    "w": ((16, 13), (2, 13)),
    "odd": ((13, 27), (13, 4)),  # 27 columns padded to 32: a smaller share than 13 rows to 16
    "bias": ((24,), (3,)),
    "gain": ((), ()),
    **{name: (shape, shape) for name, shape in EMPTY.items()},
}
STAGES = ["z0", "z1", "z2", "z3"]
MIXED = ["z0-bf16", "z1-bf16", "z2-fp16", "z3-bf16"]


@pytest.mark.parametrize("name", STAGES + MIXED)
def test_every_leaf_is_born_in_its_sharding(name):
    plan, state = plan_of(name), made(name)
    classes = {
        "params": (state.params, plan.shards("params"), "float32"),
        "mu": (state.opt_state[0].mu, plan.shards("opt_state"), "float32"),
        "nu": (state.opt_state[0].nu, plan.shards("opt_state"), "float32"),
    }
    if plan.keeps_compute_copy:
        dtype = "float16" if plan.precision == "fp16" else "bfloat16"
        classes["compute"] = (state.compute, False, dtype)
    else:
        assert state.compute is None
    for tree, split, dtype in classes.values():
        for path, (shape, shard) in SHARDS.items():
            leaf = tree[path]
            assert leaf.dtype == dtype
            held = {piece.data.shape for piece in leaf.addressable_shards}
            assert held == {shard if split else shape}, (name, path)
            assert len(leaf.addressable_shards) == 8
    for leaf in jax.tree.leaves((state.step, state.buffers, state.rng, state.opt_state[0].count)):
        assert leaf.sharding.spec == P()


def test_an_abstract_state_has_on_the_host_what_its_plan_has_there():
    plan = tiny.plan(zero=1, precision="bf16", tiers={"opt_state": "host", "master": "disk"})
    shapes = fz.abstract_state(MODEL, TX, plan)
    host = fz.placement(shapes).host_bytes
    assert 0 < host["total"] == host["opt_state"]
    assert host == fz.placement(plan, MODEL, TX).host_bytes
    assert fz.placement(shapes).disk_bytes["total"] == 0


@pytest.mark.parametrize("name", [*STAGES, *MIXED, "z3-d4", "z3-r2", "z1-d1"])
def test_abstract_state_is_the_real_one_without_arrays(name):
    shapes, state = fz.abstract_state(MODEL, TX, plan_of(name)), made(name)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for want, have in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert isinstance(want, jax.ShapeDtypeStruct)
        assert (want.shape, want.dtype, want.sharding) == (have.shape, have.dtype, have.sharding)


def test_a_model_larger_than_one_device_initialises():
    """Neither temporaries nor results of the compiled init hold the whole model on a device."""
    whole = 1024 * 1024 * 4

    def init(key):
        return {"w": jax.random.normal(key, (1024, 1024))}, {}

    model = fz.Model(init, lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
    compiled = lower_init(model, TX, fz.Plan(zero=3)).compile()
    memory = compiled.memory_analysis()
    # Three classes of 1/8 each come out: parameters and Adam's two moments.
    assert memory.output_size_in_bytes < 1.01 * 3 / 8 * whole
    # Random bits and their transform take a few buffers of a shard's size, never of the whole.
    assert memory.temp_size_in_bytes < whole / 2


def test_values_do_not_depend_on_the_plan_or_the_number_of_devices():
    whole = fz.logical(MODEL, made("z0"))
    for name in [*STAGES[1:], *MIXED, "z3-d4", "z3-r2", "z1-d1"]:
        tiny.same_bits(fz.logical(MODEL, made(name)), whole)


@pytest.mark.parametrize("chain", [False, True], ids=["a model", "a chain"])
def test_a_number_may_be_what_a_parameter_begins_as(chain):
    def init(key):
        return {"w": jnp.ones((8, 4)), "scale": jnp.asarray(2.5), "flag": jnp.array(1.0)}

    def loss(p, batch):
        return jnp.mean((batch["x"] @ p["w"] * p["scale"] + p["flag"]) ** 2)

    if chain:
        layer = fz.Layer("one", init, lambda p, batch, ctx: loss(p, batch))
        model = fz.Sequential([layer])
    else:
        model = fz.Model(lambda key: (init(key), {}), lambda p, b, x, rng, t: (loss(p, x), b, {}))
    for plan in (tiny.plan(zero=3, data=2), tiny.plan(zero=1, data=2, precision="bf16", ema=0.5)):
        state = fz.init(model, TX, plan)
        own = fz.logical(model, state)
        own = own["one"] if chain else own
        assert (float(own["scale"]), float(own["flag"])) == (2.5, 1.0)
        assert own["scale"].dtype == "float32"


def test_values_are_those_of_the_models_own_init():
    params, buffers = jax.jit(small_init)(jax.random.key(7))
    tiny.same_bits(fz.logical(MODEL, made("z3")), params)
    tiny.same_bits(made("z3").buffers, buffers)


def test_a_seed_is_the_key_made_from_it():
    state = fz.init(MODEL, TX, plan_of("z3"), rng=jax.random.key(7))
    tiny.same_bits(state, made("z3"))
    tiny.same_bits(state, fz.init(MODEL, TX, plan_of("z3"), rng=np.int64(7)))
    other = fz.init(MODEL, TX, plan_of("z3"), rng=8)
    assert not np.array_equal(other.params["w"], state.params["w"])


@pytest.mark.parametrize(
    ("num", "shape", "message"),
    [
        (2, (13, 27), r"blocks/w: expected \[2, 4\].* got \[3, 4\]"),
        (4, (13, 27), r"blocks/w: expected \[4, 4\].* got \[3, 4\]"),
        (3, (27, 13), r"odd: expected \[27, 13\].* got \[13, 27\]"),
        (3, None, r"expected parameters \[\], got \['odd'\]"),
    ],
)
def test_logical_refuses_a_state_of_another_model(num, shape, message):
    """Fewer layers, say, which are no others' padding."""

    def model(num, shape):
        odd = {} if shape is None else {"odd": jnp.ones(shape)}
        return fz.Model(({"blocks": {"w": jnp.ones((num, 4))}, **odd}, {}), lambda *_: None)

    plan = fz.Plan(zero=3, min_shard_bytes=100)
    state = fz.init(model(3, (13, 27)), None, plan)
    with pytest.raises(fz.StateError, match=message):
        fz.logical(model(num, shape), state, plan)


def test_padding_is_zeros_at_the_end_and_logical_takes_it_off():
    state = made("z3")
    assert state.params["odd"].shape == (13, 32)
    assert not np.any(np.asarray(state.params["odd"])[:, 27:])
    whole = fz.logical(MODEL, state)
    assert whole["odd"].shape == (13, 27)
    assert whole["w"] is state.params["w"]
    for put in (np.array, lambda x: jax.device_put(x, jax.devices()[0])):
        params = {**state.params, "odd": put(state.params["odd"])}
        with pytest.raises(fz.StateError, match=r"logical: odd: expected \[13, 27\].*old.sharding"):
            fz.logical(MODEL, state.replace(params=params))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([2**40 + 5]), "has 1099511627781, which int32 does not hold"),
        (np.full(3, 1e300), r"has 1e\+300, which float32 does not hold"),
        (np.ma.array(np.ones(2, np.float32), mask=[True, False]), "is a masked array"),
        (np.ones(2, ">f4"), "has dtype >f4: expected numbers in the machine's order"),
        (np.array(["a"], object), "has dtype object: expected numbers"),
    ],
    ids=["int64", "float64", "masked", "order of bytes", "objects"],
)
@pytest.mark.parametrize("where", ["params", "buffers"])
@pytest.mark.parametrize("drawn", [False, True], ids=["given", "made"])
def test_initial_values_that_jax_would_cut_are_refused(value, said, where, drawn):
    params, buffers = {"w": np.ones(3, np.float32)}, {}
    (params if where == "params" else buffers)["own"] = value
    init = (lambda key: (params, buffers)) if drawn else (params, buffers)
    loss = lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {})  # noqa: E731
    with pytest.raises(fz.StateError, match=f"init: {where}/own {said}"):
        fz.init(fz.Model(init, loss, frozen=["own"]), TX, fz.Plan(data=1))


def test_a_state_without_optimizer():
    state = fz.init(MODEL, None, plan_of("z3"), rng=7)
    assert state.opt_state == ()
    tiny.same_bits(state.params, made("z3").params)


class TestRefusals:
    """What cannot become a state, named by path."""

    LOSS = staticmethod(lambda p, b, batch, rng, train: (0.0, b, {}))

    def test_tied_leaves_of_an_init_function(self):
        def init(key):
            w = jnp.ones((8, 2))
            return {"embed": {"w": w}, "head": {"w": w}}, {}

        with pytest.raises(fz.StateError, match="params/embed/w = params/head/w") as caught:
            fz.init(fz.Model(init, self.LOSS), TX, fz.Plan())
        assert "reads=" in str(caught.value)

    @pytest.mark.parametrize("array", [np.ones(8, np.float32), jnp.ones(8)], ids=["numpy", "jax"])
    def test_tied_concrete_leaves_across_params_and_buffers(self, array):
        model = fz.Model(({"a": array}, {"copy": array}), self.LOSS)
        with pytest.raises(fz.StateError, match="buffers/copy = params/a"):
            fz.init(model, TX, fz.Plan())

    @pytest.mark.parametrize("dtype", ["int32", "bool"])
    def test_parameters_without_gradients(self, dtype):
        model = fz.Model(lambda key: ({"ids": jnp.zeros(8, dtype)}, {}), self.LOSS)
        with pytest.raises(fz.StateError, match=f"params/ids has dtype {dtype}.*into buffers"):
            fz.init(model, TX, fz.Plan())

    @pytest.mark.parametrize("rng", [np.ones(2, np.int32), jax.random.split(jax.random.key(3), 2)])
    def test_what_is_no_seed_and_no_key(self, rng):
        with pytest.raises(
            fz.StateError, match=r"rng: expected a seed or one key .*, got \S+\[2\]"
        ):
            fz.init(MODEL, TX, plan_of("z3"), rng=rng)

    def test_a_seed_is_a_whole_number(self):
        with pytest.raises(fz.StateError, match=r"expected a seed or one key .*, got 1\.5"):
            fz.init(MODEL, TX, plan_of("z3"), rng=1.5)

    def test_too_few_devices(self):
        with pytest.raises(fz.PlanError, match="needs 16 devices"):
            fz.init(MODEL, TX, fz.Plan(data=16))


def shadow():
    """An optimizer whose state is the parameters themselves (as an EMA starts)."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    return optax.GradientTransformation(lambda params: {"slow": params}, update)


BATCH = {"x": tiny.points()["x"], "y": tiny.points()["y"]}


@pytest.mark.parametrize("given", ["function", "arrays"])
def test_an_optimizer_state_equal_to_the_parameters_gets_memory_of_its_own(given):
    model = MODEL
    if given == "arrays":
        model = fz.Model(tiny.on_one_device(small_init(jax.random.key(7))), small_loss)
    plan, tx = plan_of("z0"), shadow()
    state = fz.init(model, tx, plan)
    before = tiny.host(state.params)
    new, _ = fz.train_step(model, tx, plan)(state, BATCH)
    tiny.same_bits(new.opt_state["slow"], before)
    assert not np.array_equal(new.params["w"], before["w"])


class TestGivenValues:
    """Concrete initial values are copied: nobody else's memory is read later or given away."""

    @pytest.fixture(scope="class")
    @staticmethod
    def step():
        return fz.train_step(MODEL, TX, plan_of("z3"))

    def test_numpy_arrays_changed_later_change_nothing(self, step):
        given = jax.tree.map(np.array, jax.device_get(small_init(jax.random.key(7))))
        # Page-aligned memory is what the CPU backend would adopt without a copy.
        room = np.empty(16 * 13 * 4 + 4096, np.uint8)
        start = -room.ctypes.data % 4096
        given[0]["w"] = room[start : start + 832].view(np.float32).reshape(16, 13)
        given[0]["w"][...] = 0.25
        for name in ("z0", "z3"):
            state = fz.init(fz.Model(given, small_loss), TX, plan_of(name))
            want = jax.tree.map(np.array, given[0])
            jax.tree.map(lambda leaf: leaf.fill(9), given)
            tiny.same_bits(fz.logical(MODEL, state), want)
            jax.tree.map(lambda leaf, old: leaf.__setitem__(..., old), given[0], want)

    def test_the_users_arrays_survive_the_donation(self, step):
        given = tiny.on_one_device(small_init(jax.random.key(7)))
        before = tiny.host(given)
        state = fz.init(fz.Model(given, small_loss), TX, plan_of("z3"), rng=7)
        tiny.same_bits(state.params, made("z3").params)
        new, _ = step(state, BATCH)
        jax.block_until_ready(new)
        tiny.same_bits(given, before)

    def test_wide_values_arrive_in_the_dtype_of_jax(self):
        model = fz.Model(({"w": np.ones((8, 2), np.float64)}, {"n": np.int64(3)}), small_loss)
        state = fz.init(model, TX, fz.Plan())
        assert state.params["w"].dtype == jnp.float32
        assert state.buffers["n"].dtype == jnp.int32


TOUCHES = {
    "train_step": lambda step, state: step(state, BATCH),
    "eval_step": lambda step, state: fz.eval_step(MODEL, plan_of("z3"))(state, BATCH),
    "replan": lambda step, state: fz.replan(state, MODEL, TX, plan_of("z3"), plan_of("z0")),
    "logical": lambda step, state: fz.logical(MODEL, state),
    "placement": lambda step, state: fz.placement(state),
}


class TestConsumed:
    """A state that was given to a step names that step; so do all operations that touch it."""

    @pytest.fixture(scope="class")
    @staticmethod
    def spent():
        """(first state, second state), both consumed."""
        plan = plan_of("z3")
        step = fz.train_step(MODEL, TX, plan)
        first = fz.init(MODEL, TX, plan)
        second, _ = step(first, BATCH)
        step(second, BATCH)
        return step, first, second

    @pytest.mark.parametrize("touch", TOUCHES)
    @pytest.mark.parametrize("number", [1, 2])
    def test_touching_it_names_the_step(self, spent, touch, number):
        with pytest.raises(fz.StateConsumedError) as caught:
            TOUCHES[touch](spent[0], spent[number])
        said = str(caught.value)
        assert said.startswith(f"{touch}: ")
        assert f"step {number}" in said
        assert f"step {3 - number}" not in said
        assert "donate=False" in said

    def test_donate_false_keeps_it(self):
        plan, state = plan_of("z3"), made("z3")
        before = tiny.host(state)
        step = fz.train_step(MODEL, TX, plan, donate=False)
        one, _ = step(state, BATCH)
        two, _ = step(state, BATCH)
        tiny.same_bits(state, before)
        tiny.same_bits(one, two)
        assert int(one.step) == 1


MOVES = [(a, b) for a in STAGES for b in STAGES] + [
    ("z3", "z3-d4"), ("z3-d4", "z1-d1"), ("z1-d1", "z3"), ("z3", "z3-r2"), ("z3-r2", "z0"),
    ("z3-d4", "z2-r2"), ("z3", "z3-bf16"), ("z3", "z1-bf16"), ("z1-bf16", "z0"),
    ("z0-bf16", "z3-bf16"), ("z3-bf16", "z0-bf16"), ("z1-bf16", "z2-fp16"), ("z2-fp16", "z1-bf16"),
    ("z2-fp16", "z3"),
]  # fmt: skip


class TestReplan:
    """The same values under another plan; nothing is copied that lies right already."""

    @pytest.mark.parametrize(("old", "new"), MOVES, ids=lambda name: name)
    def test_gives_exactly_what_init_would_have_given(self, old, new):
        """Same leaves, bits and shardings as a state born under the new plan; and both ways."""
        moved = fz.replan(made(old), MODEL, TX, plan_of(old), plan_of(new))
        born = made(new)
        tiny.same_bits(moved, born)
        for have, want in zip(jax.tree.leaves(moved), jax.tree.leaves(born), strict=True):
            assert have.sharding == want.sharding
        back = fz.replan(moved, MODEL, TX, plan_of(new), plan_of(old))
        tiny.same_bits(back, made(old))

    @pytest.mark.parametrize("name", ["z0", "z3", "z1-bf16", "z2-fp16", "z3-d4", "z3-r2"])
    def test_is_free_when_nothing_moves(self, name):
        state = made(name)
        again = fz.replan(state, MODEL, TX, plan_of(name), plan_of(name))
        for have, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            assert have is want

    def test_stepping_one_of_two_that_share_arrays_says_so_of_the_other(self):
        plan = plan_of("z0-d1")
        state = fz.init(MODEL, TX, plan)
        again = fz.replan(state, MODEL, TX, plan, plan)
        fz.train_step(MODEL, TX, plan)(state, BATCH)
        with pytest.raises(fz.StateConsumedError, match=r"a state that shares its arrays .*replan"):
            fz.logical(MODEL, again)

    @pytest.mark.parametrize("tiers", [{"opt_state": "host"}, {"params": "host"}], ids=str)
    def test_parking_leaves_the_state_that_was_given(self, tiers):
        """What is parked is given away: a copy, not the old state's own."""
        state = made("z3")
        before = tiny.host(state)
        new = plan_of("z3").replace(tiers=tiers, stream_bytes=300)
        fz.replan(state, MODEL, TX, plan_of("z3"), new)
        after = tiny.host(state)
        assert all(before[path].tobytes() == after[path].tobytes() for path in before)

    def test_skipped_steps_are_counted_on_in_another_precision(self):
        old, new = plan_of("z1-fp16"), plan_of("z1-bf16").replace(skip_nonfinite=True)
        state = fz.init(MODEL, TX, old)
        scale = dataclasses.replace(state.loss_scale, skipped=state.loss_scale.skipped + 3)
        after = fz.replan(state.replace(loss_scale=scale), MODEL, TX, old, new)
        assert (int(after.loss_scale.skipped), float(after.loss_scale.scale)) == (3, 1.0)

    def test_padded_leaves_move_shard_by_shard(self, monkeypatch):
        """No device, and no copy on the host, is given more of a leaf than it shall keep."""
        put, real = [], jax.device_put

        def device_put(value, *args, **more):
            put.append(np.shape(value))
            return real(value, *args, **more)

        state = made("z3")
        monkeypatch.setattr(jax, "device_put", device_put)
        moved = fz.replan(state, MODEL, TX, plan_of("z3"), plan_of("z3-d4"))
        odd = [shape for shape in put if len(shape) == 2 and shape[0] == 13]
        assert odd
        assert max(columns for _, columns in odd) == moved.params["odd"].shape[1] // 4 == 7

    def test_twice_is_once(self):
        once = fz.replan(made("z3"), MODEL, TX, plan_of("z3"), plan_of("z0"))
        twice = fz.replan(once, MODEL, TX, plan_of("z0"), plan_of("z0"))
        assert jax.tree.structure(once) == jax.tree.structure(twice)
        for have, want in zip(jax.tree.leaves(twice), jax.tree.leaves(once), strict=True):
            assert have is want

    def test_what_a_step_returned_lies_where_init_puts_it(self):
        """Stages hand states on without a copy after training as well, and keep their values."""
        plan = plan_of("z3")
        state, _ = fz.train_step(MODEL, TX, plan, donate=False)(made("z3"), BATCH)
        again = fz.replan(state, MODEL, TX, plan, plan)
        for have, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            assert have is want
        whole = fz.replan(state, MODEL, TX, plan, plan_of("z0"))
        tiny.same_bits(whole.params, fz.logical(MODEL, state))
        back = fz.replan(whole, MODEL, TX, plan_of("z0"), plan)
        tiny.same_bits(back, state)
        assert int(back.step) == 1

    @pytest.mark.parametrize(
        ("state", "old", "said"),
        [
            ("z0", "z3", "params/bias: expected"),
            ("z3", "z0", r"params/odd: expected float32\[13, 27\], got float32\[13, 32\]"),
            ("z3-bf16", "z0-bf16", "compute/bias: expected, but missing"),
            ("z0-bf16", "z0", "compute/bias: not expected"),
            ("z0", "z0-fp16", "loss_scale/scale: expected, but missing"),
        ],
    )
    def test_refuses_a_wrong_old_plan(self, state, old, said):
        with pytest.raises(fz.StateError, match=said) as caught:
            fz.replan(made(state), MODEL, TX, plan_of(old), plan_of("z0"))
        assert str(caught.value).startswith("replan: ")

    def test_refuses_another_optimizer(self):
        with pytest.raises(fz.StateError, match="opt_state/0/mu/bias: not expected"):
            fz.replan(made("z0"), MODEL, optax.sgd(0.1), plan_of("z0"), plan_of("z3"))

    def test_refuses_too_many_devices(self):
        with pytest.raises(fz.PlanError, match="needs 16"):
            fz.replan(made("z0"), MODEL, TX, plan_of("z0"), fz.Plan(data=16))


def test_a_step_refuses_a_state_of_another_plan_and_leaves_it():
    state = made("z0")
    with pytest.raises(fz.StateError, match=r"(?s)params/odd: expected .*fz.replan"):
        fz.train_step(MODEL, TX, plan_of("z3"))(state, BATCH)
    assert not state.params["w"].is_deleted()


def test_a_step_refuses_aliased_leaves_by_both_paths_unless_it_keeps_its_input():
    plan, state = plan_of("z0"), made("z0")
    mu = state.opt_state[0]._replace(nu={**state.opt_state[0].nu, "w": state.params["w"]})
    twisted = state.replace(opt_state=(mu, *state.opt_state[1:]))
    with pytest.raises(fz.StateError, match="params/w = opt_state/0/nu/w"):
        fz.train_step(MODEL, TX, plan)(twisted, BATCH)
    fz.train_step(MODEL, TX, plan, donate=False)(twisted, BATCH)


def test_a_step_refuses_aliased_leaves_of_a_shape_it_knows():
    """In the second call as in the first: one buffer given away twice ends the process."""
    plan = plan_of("z0-d1")
    step = fz.train_step(MODEL, TX, plan)
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    moments = state.opt_state[0]
    twisted = moments._replace(nu={**moments.nu, "w": state.params["w"]})
    with pytest.raises(fz.StateError, match="params/w = opt_state/0/nu/w"):
        step(state.replace(opt_state=(twisted, *state.opt_state[1:])), BATCH)


def test_a_step_refuses_other_arrays_of_the_same_memory():
    """Two objects, one buffer, as `jax.device_put` to an equal sharding may give them."""
    plan = plan_of("z0-d1")
    step = fz.train_step(MODEL, TX, plan)
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    moments, w = state.opt_state[0], state.params["w"]
    shards = [shard.data for shard in w.addressable_shards]
    twin = jax.make_array_from_single_device_arrays(w.shape, w.sharding, shards)
    mu = {**moments.mu, "w": twin}
    twisted = state.replace(opt_state=(moments._replace(mu=mu), *state.opt_state[1:]))
    with pytest.raises(fz.StateError, match="params/w = opt_state/0/mu/w"):
        step(twisted, BATCH)
    assert int(step(state, BATCH)[0].step) == 2


@pytest.mark.parametrize("options", [{"precision": "fp16"}, {"skip_nonfinite": True}])
def test_counters_that_begin_with_a_plan_are_given_away_one_by_one(options):
    """What `replan` makes anew shares no memory, whether a step knows its shapes or not."""
    old = plan_of("z0-d1")
    new = old.replace(**options)
    step = fz.train_step(MODEL, TX, new)
    for _ in range(2):
        state = fz.replan(fz.init(MODEL, TX, old), MODEL, TX, old, new)
        assert np.isfinite(float(step(state, BATCH)[1]["loss"]))


def test_the_state_is_immutable():
    with pytest.raises(AttributeError):
        made("z0").step = 1


def test_init_again_traces_and_compiles_nothing():
    """Another seed is another input of the same program."""
    traced = []

    def init(key):
        traced.append(key)
        return {"w": jax.random.normal(key, (4, 2))}, {}

    model, plan = fz.Model(init, small_loss), fz.Plan(data=1)
    first = fz.init(model, TX, plan, rng=0)
    assert len(traced) == 1
    second = fz.init(model, TX, plan, rng=1)
    assert len(traced) == 1
    assert not np.array_equal(first.params["w"], second.params["w"])


@pytest.mark.parametrize(
    ("where", "path"), [("params", "params/none"), ("buffers", "buffers/none")]
)
def test_arrays_without_elements_are_refused_where_jaxlib_would_end(monkeypatch, where, path):
    """Under jax 0.11, on several CPU devices; on one, and under 0.10, they train."""

    def init(key):
        trees = {"params": {"w": jnp.ones(3)}, "buffers": {"n": jnp.zeros(())}}
        trees[where]["none"] = jnp.zeros((0, 8))
        return trees["params"], trees["buffers"]

    model = fz.Model(init, lambda p, b, batch, rng, train: (jnp.sum(p["w"]), b, {}))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with pytest.raises(
        fz.StateError, match=rf"{path} has shape \(0, 8\).*segmentation.*jaxlib 0.10"
    ):
        fz.init(model, TX, fz.Plan(data=8))
    fz.init(model, TX, fz.Plan(data=1))
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    fz.init(model, TX, fz.Plan(data=8))
