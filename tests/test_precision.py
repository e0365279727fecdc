"""Mixed precision: one fp32 master, casts of it, and fp16's dynamic loss scale."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny
from support.sample import some

import fzero as fz
from fzero import precision
from fzero.loss_scaling import LossScale, initial_loss_scale, next_loss_scale
from fzero.preflight import hlo


TX = optax.adam(1e-2)
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def mild_loss(p, buffers, batch, rng, train):
    """The regression's loss over 64: its gradients times 2^16 fit into fp16."""
    mean, buffers, metrics = tiny.regression_loss(p, buffers, batch, rng, train)
    return fz.Mean(mean.total / 64, mean.count), buffers, metrics


# Given values: no initial random numbers to compile for every plan.
MODEL = fz.Model(jax.device_get(tiny.regression().init(jax.random.key(0))), mild_loss)


@cache
def plan(kind, zero):
    """A plan that splits every leaf."""
    return tiny.plan(zero=zero, precision=kind)


@cache
def step(kind, zero):
    """A compiled step that keeps its input."""
    return fz.train_step(MODEL, TX, plan(kind, zero), donate=False)


@cache
def start(kind, zero):
    """A new state."""
    return fz.init(MODEL, TX, plan(kind, zero))


def rounded(value, kind):
    """numpy's own rounding to nearest even."""
    return np.asarray(value).astype(jnp.dtype(DTYPES[kind]))


# What a plan may keep beside a device's memory, or gather otherwise.
AROUND = {
    "lazy": {"gather": "lazy"},
    "parked": {"tiers": {"opt_state": "host", "ema": "host"}, "stream_bytes": 300},
    "on disk": {"tiers": {"opt_state": "disk", "master": "disk"}, "stream_bytes": 300},
}


def overflowing(rows=16):
    """Errors of 1e4, squared: beyond what fp16 holds once the gradient is scaled."""
    batch = tiny.points(rows)
    batch["y"][:] = 6e4
    return batch


class TestMaster:
    """The master is float32 and moves by less than the compute dtype could hold."""

    @pytest.mark.parametrize(
        ("kind", "zero"),
        [("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 1), ("fp16", 3)],
    )
    def test_the_compute_copy_is_the_masters_cast(self, kind, zero):
        state = start(kind, zero)
        for number in range(3):
            assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
            moments = jax.tree.leaves((state.opt_state[0].mu, state.opt_state[0].nu))
            assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}
            if zero == 3:
                assert state.compute is None
            else:
                master = fz.logical(MODEL, state)
                cast = {path: rounded(x, kind) for path, x in tiny.host(master).items()}
                tiny.same_bits(state.compute, cast)
            if number < 2:
                state, _ = step(kind, zero)(state, tiny.points(seed=number))

    def test_updates_below_the_compute_dtypes_ulp_are_not_lost(self):
        """A hundred steps of 1e-4 on 1.0: every single one vanishes in bf16 (ulp 2^-8)."""

        def loss(p, buffers, batch, rng, train):
            return jnp.sum(p["w"] * batch["x"].mean()).astype(jnp.float32), buffers, {}

        model = fz.Model(lambda key: ({"w": jnp.ones(8)}, {}), loss)
        tx, one = optax.sgd(1e-4), tiny.plan(zero=1, precision="bf16")
        state, go = fz.init(model, tx, one), fz.train_step(model, tx, one)
        for _ in range(100):
            state, metrics = go(state, {"x": np.ones(8, np.float32)})
            # Waits: a hundred programs of eight devices at once can starve each other of threads.
            metrics["loss"].block_until_ready()
        # A hundred fp32 subtractions, each off by up to half an ulp of 1 (3e-8).
        np.testing.assert_allclose(state.params["w"], 0.99, rtol=4e-6)
        np.testing.assert_array_equal(state.compute["w"], rounded(state.params["w"], "bf16"))

    @pytest.mark.parametrize("kind", DTYPES)
    def test_the_model_computes_in_the_compute_dtype(self, kind):
        seen = {}

        def loss(p, buffers, batch, rng, train):
            own = fz.cast(batch, like=p)
            seen.update(p=p["w"].dtype, batch=batch["x"].dtype, x=own["x"].dtype, i=own["i"].dtype)
            return jnp.sum(p["w"] * own["x"].mean()), buffers, {}

        model = fz.Model(lambda key: ({"w": jnp.ones(8)}, {}), loss)
        one = fz.Plan(zero=3, precision=kind)
        shapes = {
            "x": jax.ShapeDtypeStruct((8,), "float32"),
            "i": jax.ShapeDtypeStruct((8,), "int32"),
        }
        fz.train_step(model, TX, one).lower(fz.abstract_state(model, TX, one), shapes)
        assert seen == {"p": DTYPES[kind], "batch": "float32", "x": DTYPES[kind], "i": "int32"}

    def test_close_to_fp32(self):
        """bf16 gradients carry 8 bits; a missing cast back or a wrong scale is far outside."""
        norms = {
            kind: float(step(kind, 3)(start(kind, 3), tiny.points())[1]["grad_norm"])
            for kind in ("fp32", *DTYPES)
        }
        assert norms["bf16"] == pytest.approx(norms["fp32"], rel=2e-2)
        assert norms["fp16"] == pytest.approx(norms["fp32"], rel=3e-3)
        assert len(set(norms.values())) == 3


def test_collectives_move_the_compute_dtype():
    """Stage 3's gathers move two bytes an element in bf16 and four in fp32."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny.points())
    moved = {}
    for kind in ("fp32", "bf16"):
        shapes = fz.abstract_state(MODEL, TX, plan(kind, 3))
        text = step(kind, 3).lower(shapes, batch).compile().as_text()
        found = hlo.collectives(text)
        moved[kind] = hlo.total(found, "all-gather").wire_bytes
    assert moved["bf16"] * 2 == moved["fp32"] > 0


class TestLossScale:
    """fp16's dynamic scale: starts at 2^16, forgives once, halves, doubles after the window."""

    @pytest.mark.parametrize("zero", some([0, 1, 2, 3], 0, 2))
    def test_overflows_change_nothing_but_scale_and_counters(self, zero):
        go = step("fp16", zero)
        state, metrics = go(start("fp16", zero), tiny.points())
        assert float(metrics["loss_scale"]) == 2.0**16
        assert float(metrics["nonfinite"]) == 0
        before = tiny.host(state.replace(loss_scale=None))
        # (scale the step used, scale and patience it leaves): the first overflow is forgiven
        expected = [(16, 16, 1), (16, 15, 1), (15, 14, 1)]
        for number, (used, left, patience) in enumerate(expected, 1):
            state, metrics = go(state, overflowing())
            tiny.same_bits(state.replace(loss_scale=None), before)
            assert float(metrics["loss_scale"]) == 2.0**used
            assert float(state.loss_scale.scale) == 2.0**left
            assert int(state.loss_scale.hysteresis) == patience
            assert int(state.loss_scale.skipped) == float(metrics["skipped"]) == number
            assert int(state.loss_scale.good_steps) == 0
            assert float(metrics["nonfinite"]) == 1
        state, metrics = go(state, tiny.points())
        assert int(state.step) == 2
        assert float(metrics["skipped"]) == 3
        assert int(state.loss_scale.good_steps) == 1
        changed = tiny.host(state.params)
        assert not np.array_equal(changed["w"], before["params/w"])

    @pytest.mark.parametrize("options", some(AROUND, "parked", "on disk"))
    def test_averages_and_what_is_parked_stay_too(self, options, tmp_path):
        own = plan("fp16", 1).replace(ema=0.9, **AROUND[options])
        own = own.replace(disk_path=str(tmp_path)) if options == "on disk" else own
        go = fz.train_step(MODEL, TX, own)
        state, _ = go(fz.init(MODEL, TX, own), tiny.points())

        def kept(state):
            return tiny.host(fz.reload(state.replace(loss_scale=None), donate=False))

        before = kept(state)
        for number in (1, 2):  # the first overflow is forgiven, the second halves
            state, metrics = go(state, overflowing())
            assert float(metrics["skipped"]) == number
            assert float(state.loss_scale.scale) == 2.0 ** (17 - number)
            tiny.same_bits(kept(state), before)
        state, _ = go(state, tiny.points())
        changed = kept(state)
        for name in ("step", "params/w", "ema/w", "opt_state/0/mu/w"):
            assert not np.array_equal(changed[name], before[name]), name

    def test_a_scale_may_stay_where_it_is(self):
        how = fz.LossScaling(initial=2**6, growth_steps=10**9, hysteresis=1, minimum=2**6)
        own = plan("fp16", 1).replace(loss_scale=how)
        state, _ = fz.train_step(MODEL, TX, own)(fz.init(MODEL, TX, own), overflowing())
        assert float(state.loss_scale.scale) == 2**6
        with pytest.raises(fz.PlanError, match=r"minimum=128\.0 is above initial=64\.0"):
            fz.LossScaling(initial=2**6, minimum=2**7)

    def test_the_scale_moves_as_the_plan_says(self):
        how = fz.LossScaling(initial=2**10, growth_steps=2, hysteresis=1, minimum=2**9)
        own = plan("fp16", 1).replace(loss_scale=how)
        state, go = fz.init(MODEL, TX, own), fz.train_step(MODEL, TX, own)
        seen = [float(state.loss_scale.scale)]
        good = tiny.points()
        for batch in (good, good, good, overflowing(), overflowing(), overflowing(), good, good):
            state, metrics = go(state, batch)
            seen.append(float(state.loss_scale.scale))
        assert seen == [1024, 1024, 2048, 2048, 1024, 512, 512, 512, 1024]
        assert float(metrics["skipped"]) == 3

    def test_buffers_are_kept_too(self):
        def loss(p, buffers, batch, rng, train):
            total = jnp.sum(jnp.square(batch["x"] * p["w"])).astype(jnp.float32)
            return total, {"seen": buffers["seen"] + 1, "mean": batch["x"].mean()}, {}

        def init(key):
            return {"w": jnp.ones(())}, {"seen": jnp.int32(0), "mean": jnp.float16(0)}

        model, one = fz.Model(init, loss), fz.Plan(zero=0, precision="fp16")
        state, go = fz.init(model, TX, one), fz.train_step(model, TX, one)
        state, _ = go(state, {"x": np.full(8, 0.5, np.float32)})
        before = tiny.host(state.buffers)
        state, metrics = go(state, {"x": np.full(8, 1e4, np.float32)})
        assert float(metrics["nonfinite"]) == 1
        tiny.same_bits(state.buffers, before)
        assert int(state.buffers["seen"]) == 1

    def test_a_norm_that_overflows_skips_a_step_as_a_gradient_does(self):
        """Squares of 1e20 are beyond float32, those of 1e18 are not."""
        sums = lambda p, b, batch, rng, train: (jnp.mean(batch * p["w"]), b, {})  # noqa: E731
        model = fz.Model(lambda key: ({"w": jnp.zeros(2)}, {}), sums)
        one = fz.Plan(data=1, skip_nonfinite=True)
        for size, skipped in ((1e18, 0), (1e20, 1)):
            state, go = fz.init(model, TX, one), fz.train_step(model, TX, one)
            state, metrics = go(state, np.full((2, 2), size, np.float32))
            assert float(metrics["skipped"]) == skipped
            assert bool(np.any(state.params["w"])) is not bool(skipped)

    def test_growth_after_the_window(self):
        soon = plan("fp16", 3).replace(loss_scale=fz.LossScaling(growth_steps=3))
        go = fz.train_step(MODEL, TX, soon, donate=False)
        state = start("fp16", 3)
        place = lambda x: jax.device_put(x, state.step.sharding)  # noqa: E731
        scale = LossScale(
            place(np.float32(2.0**10)), place(np.int32(1)), place(np.int32(1)), place(np.int32(4))
        )
        state = state.replace(loss_scale=scale)
        seen = []
        for seed in range(4):
            state, _ = go(state, tiny.points(seed=seed))
            now = state.loss_scale
            seen.append((float(now.scale), int(now.good_steps), int(now.hysteresis)))
        assert seen == [(1024, 2, 1), (2048, 0, 2), (2048, 1, 2), (2048, 2, 2)]
        assert int(state.loss_scale.skipped) == 4

    @pytest.mark.parametrize("zero", [1, 3])
    def test_results_do_not_depend_on_the_scale(self, zero):
        """Scaling by a power of two is exact: 2^16 and 2^20 give the same bits."""
        go, first = step("fp16", zero), start("fp16", zero)
        outs = []
        for power in (16, 20):
            scale = jax.device_put(np.float32(2.0**power), first.step.sharding)
            state = first.replace(loss_scale=replaced(first.loss_scale, scale))
            new, metrics = go(state, tiny.points())
            assert float(metrics.pop("loss_scale")) == 2.0**power
            outs.append((new.replace(loss_scale=None), metrics))
        tiny.same_bits(outs[0], outs[1])
        assert float(outs[0][1]["nonfinite"]) == 0


class TestLossScaleInParts:
    """One scale for all microbatches and calls of a step; one overflow in any of them skips it."""

    @staticmethod
    @cache
    def divided(zero):
        """A compiled step over two microbatches, and a state that has taken one."""
        one = plan("fp16", zero).replace(microbatches=2)
        go = fz.train_step(MODEL, TX, one, donate=False)
        return go, go(start("fp16", zero), tiny.points())[0]

    @staticmethod
    @cache
    def accumulating(zero):
        """A compiled step that accumulates, and a state that has taken one step."""
        state, _ = step("fp16", zero)(start("fp16", zero), tiny.points())
        return fz.accumulate_step(MODEL, TX, plan("fp16", zero), donate=False), state

    @staticmethod
    def cycle(zero, state, batches):
        """All batches but the last accumulated, then a step."""
        accumulate, _ = TestLossScaleInParts.accumulating(zero)
        for batch in batches[:-1]:
            before = tiny.host(state.replace(grads=None))
            state, _ = accumulate(state, batch)
            # Scale and counters, too: only a step decides.
            tiny.same_bits(state.replace(grads=None), before)
        return step("fp16", zero)(state, batches[-1])

    def skipped(self, before, after, metrics, number):
        """Asserts that nothing changed but the scale and its counters."""
        tiny.same_bits(after.replace(loss_scale=None), before.replace(loss_scale=None))
        assert after.grads is None
        assert float(metrics["nonfinite"]) == 1
        assert int(after.loss_scale.skipped) == float(metrics["skipped"]) == number
        # The first overflow is forgiven, the second halves.
        assert float(metrics["loss_scale"]) == 2.0**16
        assert float(after.loss_scale.scale) == 2.0 ** (17 - number)
        assert int(after.loss_scale.good_steps) == 0

    @pytest.mark.parametrize("zero", [0, 3])
    def test_microbatches_are_scaled_and_unscaled_alike(self, zero):
        """Against fp32 and one batch, and at another scale to the bit."""
        go, _ = self.divided(zero)
        first = start("fp16", zero)
        new, metrics = go(first, tiny.points())
        _, plain = step("fp32", 3)(start("fp32", 3), tiny.points())
        assert float(metrics["grad_norm"]) == pytest.approx(float(plain["grad_norm"]), rel=3e-3)
        scale = jax.device_put(np.float32(2.0**20), first.step.sharding)
        again, other = go(
            first.replace(loss_scale=replaced(first.loss_scale, scale)), tiny.points()
        )
        assert (float(metrics.pop("loss_scale")), float(other.pop("loss_scale"))) == (2**16, 2**20)
        tiny.same_bits((new.replace(loss_scale=None), metrics),
                       (again.replace(loss_scale=None), other))  # fmt: skip

    @pytest.mark.parametrize("zero", [0, 3])
    @pytest.mark.parametrize("where", [0, 1])
    def test_an_overflow_in_one_microbatch_of_one_device_skips_the_step(self, zero, where):
        go, state = self.divided(zero)
        # 8 devices have two rows each, one for every microbatch.
        batch = tiny.points()
        batch["y"][2 * 5 + where] = 6e4
        before = state
        for number in (1, 2):
            state, metrics = go(state, batch)
            self.skipped(before, state, metrics, number)
        state, metrics = go(state, tiny.points(seed=1))
        assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 2)
        assert int(state.step) == 2
        assert int(state.loss_scale.good_steps) == 1

    @pytest.mark.parametrize("zero", [2, 3])
    @pytest.mark.parametrize("where", [0, 1, 2])
    def test_an_overflow_in_one_call_skips_the_step(self, zero, where):
        _, first = self.accumulating(zero)
        good = [tiny.points(seed=seed) for seed in (1, 2, 3)]
        bad = [overflowing() if k == where else batch for k, batch in enumerate(good)]
        state, metrics = self.cycle(zero, first, bad)
        self.skipped(first, state, metrics, 1)
        # What overflowed is gone: the next cycle steps as if it had never been.
        new, metrics = self.cycle(zero, state, good)
        assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 1)
        expected, _ = self.cycle(zero, first, good)
        tiny.same_bits(new.replace(loss_scale=None), expected.replace(loss_scale=None))
        assert int(new.step) == 2


def test_whether_a_step_overflows_depends_on_how_its_batch_is_divided():
    """A device adds the rows of a microbatch up in float16; `reduce_dtype` is that of the rest.

    A gradient of 1.5, each of its 16 rows at 2^12 of the scale: 98304 on one device, 24576 on four.
    """

    def loss(p, buffers, batch, rng, train):
        total = jnp.sum(1.5 * (batch["x"] @ p["w"]).astype(jnp.float32))
        return fz.Mean(total, jnp.float32(batch["x"].shape[0])), buffers, {}

    model = fz.Model(({"w": np.zeros((1, 1), np.float32)}, {}), loss)
    batch, found = {"x": np.ones((16, 1), np.float16)}, {}
    for data, power in [(1, 16), (4, 16), (1, 15), (4, 15)]:
        plan = fz.Plan(zero=0, data=data, precision="fp16", reduce_dtype="fp32",
                       loss_scale=fz.LossScaling(initial=2.0**power))  # fmt: skip
        state = fz.init(model, TX, plan)
        state, metrics = fz.train_step(model, TX, plan)(state, batch)
        found[data, power] = float(metrics["skipped"]), float(metrics["grad_norm"])
    assert found.pop((1, 16)) == (1, np.inf)
    assert set(found.values()) == {(0, 1.5)}


def replaced(old, scale):
    """A loss scale with another value."""
    return LossScale(scale, old.good_steps, old.hysteresis, old.skipped)


# (precision, skip_nonfinite) -> scale a new state starts with, or None
STARTS = [("fp16", False, 2.0**16), ("fp16", True, 2.0**16), ("bf16", True, 1.0),
          ("fp32", True, 1.0), ("bf16", False, None), ("fp32", False, None)]  # fmt: skip


@pytest.mark.parametrize(("kind", "skip", "scale"), STARTS)
def test_where_the_scale_starts(kind, skip, scale):
    made = initial_loss_scale(fz.Plan(precision=kind, skip_nonfinite=skip))
    assert (None if made is None else float(made.scale)) == scale
    if made is not None:
        assert (int(made.hysteresis), int(made.good_steps), int(made.skipped)) == (2, 0, 0)


class TestNextScale:
    """The rule by itself."""

    PLAN = fz.Plan(precision="fp16")

    def run(self, pattern, scale=2.0**16, good=0, patience=2):
        old = LossScale(jnp.float32(scale), jnp.int32(good), jnp.int32(patience), jnp.int32(0))
        for finite in pattern:
            old = next_loss_scale(self.PLAN, old, jnp.bool_(finite == "+"))
        return float(old.scale), int(old.good_steps), int(old.hysteresis), int(old.skipped)

    @pytest.mark.parametrize(
        ("pattern", "start", "expected"),
        [
            ("+", {}, (65536, 1, 2, 0)),
            ("-", {}, (65536, 0, 1, 1)),
            ("--", {}, (32768, 0, 1, 2)),
            ("-+-", {}, (32768, 0, 1, 2)),  # a clean step does not restore patience
            ("++-+", {}, (65536, 1, 1, 1)),
            ("+", {"good": 999, "patience": 1}, (131072, 0, 2, 0)),
            ("+", {"good": 998, "patience": 1}, (65536, 999, 1, 0)),
            ("--", {"scale": 1.0, "patience": 1}, (1, 0, 1, 2)),  # never below 1
        ],
    )
    def test_table(self, pattern, start, expected):
        assert self.run(pattern, **start) == expected

    def test_other_precisions_only_count(self):
        one = jnp.int32(1)
        new = next_loss_scale(
            fz.Plan(skip_nonfinite=True), LossScale(jnp.float32(1), one, one, one), jnp.bool_(False)
        )
        assert (float(new.scale), int(new.skipped)) == (1.0, 2)


@pytest.mark.parametrize("x", [2.0**-90, 3e-12, 0.5, 1.0, 1.5, 3.0, 4.0, 1e3, 2.0**20 + 1, 2.0**20])
def test_power_of_two_below(x):
    expected = 2.0 ** max(np.floor(np.log2(x)), -64)
    for value in (x, -x):
        assert float(precision.power_of_two_below(jnp.float32(value))) == expected
    for none in (0.0, np.nan):
        assert float(precision.power_of_two_below(jnp.float32(none))) == 1


@pytest.mark.parametrize("factor", [2.0**-40, -(2.0**12)])
def test_what_weights_of_rows_add_up_to_is_nothing_to_fp16(factor):
    """A mean by weights is that of these weights times a number, and so is its gradient."""

    def loss(p, buffers, batch, rng, train):
        out = (fz.cast(batch["x"], like=p) @ p["w"]).astype(jnp.float32)
        total = jnp.sum(batch["weights"] * jnp.mean((out - batch["y"]) ** 2, -1))
        return fz.Mean(total, jnp.sum(batch["weights"])), buffers, {}

    model, tx = fz.Model(({"w": np.full((4, 8), 0.1, np.float32)}, {}), loss), optax.sgd(0.1)
    rng, own, found = np.random.default_rng(0), plan("fp16", 1), []
    batch = {name: rng.normal(size=(16, n)).astype("f") for name, n in (("x", 4), ("y", 8))}
    weights = rng.uniform(0.5, 1, 16).astype("f")
    for times in (1, factor):
        given = {**batch, "weights": weights * np.float32(times)}
        state, _ = fz.train_step(model, tx, own)(fz.init(model, tx, own), given)
        found.append(np.asarray(state.params["w"]))
    np.testing.assert_array_equal(*found)
    assert not np.array_equal(found[0], np.full((4, 8), np.float32(0.1)))


@pytest.mark.parametrize("kind", DTYPES)
def test_rounding_is_to_nearest_even(kind):
    """As numpy rounds, and also where jit could widen the result again at once."""
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:3] = [0.0, -0.0, 1 + 2.0**-9]
    run = jax.jit(lambda x: precision.round_to(x, DTYPES[kind]).astype(jnp.float32) * 1)
    np.testing.assert_array_equal(run(values), rounded(values, kind).astype(np.float32))


def test_float16_keeps_what_is_below_its_normal_numbers():
    half = np.arange(2**16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half)]
    powers = 2.0 ** np.random.default_rng(0).uniform(-27, 16, 10_000)
    values = np.float32([*half, *powers, *-powers, 6.1035153e-5, 6.1005e-5, np.inf, -0.0])
    found = jax.jit(lambda x: precision.round_to(x, jnp.float16))(values)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint16), want.view(np.uint16))

    def rounded(x):
        return jnp.sum(precision.round_to(x, jnp.float16).astype(jnp.float32))

    assert jax.grad(rounded)(jnp.float32([0, 1e-5, 6.1e-5, 1])).tolist() == [1] * 4


@pytest.mark.parametrize("zero", [1, 3])
def test_small_parameters_are_no_zeros_in_fp16(zero):
    def loss(p, buffers, batch, rng, train):
        return jnp.sum(p["w"].astype(jnp.float32)), buffers, {}

    model = fz.Model(({"w": np.full((8,), 1e-5, np.float32)}, {}), loss)
    own = plan("fp16", zero).replace(data=2)
    metrics = fz.eval_step(model, own)(fz.init(model, TX, own), {"x": np.ones((2, 1), np.float32)})
    assert float(metrics["loss"]) == 8 * float(np.float16(1e-5))


@pytest.mark.parametrize("kind", DTYPES)
def test_nothing_relies_on_implicit_promotion(kind):
    """A step under jax's strict promotion is the one without it; optax.adam itself is not."""

    def loss(p, buffers, batch, rng, train):
        error = (fz.cast(batch["x"], like=p) @ p["w"]).astype(jnp.float32)
        return fz.Mean(jnp.sum(error**2), jnp.float32(len(error))), buffers, {}

    weights = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    model, tx = fz.Model(({"w": weights}, {}), loss), optax.sgd(0.1, momentum=0.9)
    batch, found = {"x": np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)}, []
    for promotion in ("standard", "strict"):
        with jax.numpy_dtype_promotion(promotion):
            state, metrics = fz.train_step(model, tx, plan(kind, 3))(
                fz.init(model, tx, plan(kind, 3)), batch
            )
            found.append((state.params["w"], metrics["loss"]))
    for standard, strict in zip(*found, strict=True):
        np.testing.assert_array_equal(standard, strict)
    assert not np.array_equal(found[0][0], weights)


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_targets_keep_their_values(kind):
    """16 bits hold no 70001: bf16 makes 70144 of it, fp16 infinity."""

    def loss(out, batch):
        return jnp.mean(jnp.abs(batch["target"] - 70000.0) + 0 * out.astype(jnp.float32)[:, 0])

    first = fz.Layer(
        "first", lambda key: {"w": jnp.ones((3, 2))}, lambda p, b, ctx: b["x"] @ p["w"]
    )
    whole = fz.Sequential([first], loss)
    rows = {"x": np.ones((8, 3), np.float32), "target": np.full(8, 70001, np.float32)}
    for plan in (tiny.plan(zero=1, precision=kind), tiny.plan(zero=3, precision=kind)):
        state = fz.init(whole, optax.sgd(0.1), plan)
        assert fz.eval_step(whole, plan)(state, rows)["loss"] == 1
        assert fz.train_step(whole, optax.sgd(0.1), plan)(state, rows)[1]["loss"] == 1
