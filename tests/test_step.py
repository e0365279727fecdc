"""Steps: exact means however a batch is divided, one compilation, named randomness, metrics."""

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


# A step of `sgd(1)` moves every parameter by exactly its gradient.
STILL = optax.sgd(0.0)
SGD = optax.sgd(1.0)
CHAIN = tiny.chain()
ROWS = tiny.tokens(16)


@cache
def start():
    """Initial parameters on one device, never consumed."""
    return fz.init(CHAIN, SGD, tiny.plan(zero=0, data=1))


def start_under(plan):
    """The same state under another plan (no compilation)."""
    state = fz.replan(start(), CHAIN, SGD, tiny.plan(zero=0, data=1), plan)
    # A copy: leaves that did not move are shared with `start()`.
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def loss_and_gradient(model, plan, state, batch):
    """What one fzero step computes: loss, metrics and gradient (as the parameters' difference)."""
    before = tiny.host(fz.logical(model, state))
    state, metrics = fz.train_step(model, SGD, plan)(state, batch)
    after = tiny.host(fz.logical(model, state))
    return {path: before[path] - after[path] for path in before}, jax.device_get(metrics)


@cache
def one_big_batch():
    """Loss and gradient of all 16 rows at once by `jax.grad`, on one device."""
    params = fz.logical(CHAIN, start())
    loss, grads = tiny.reference(CHAIN, params, ROWS)
    return loss, tiny.host(grads)


@cache
def chain_run(data, microbatches, zero, remat="layer"):
    """`loss_and_gradient` of the chain under one division."""
    plan = tiny.plan(zero=zero, data=data, microbatches=microbatches, remat=remat)
    return loss_and_gradient(CHAIN, plan, start_under(plan), ROWS)


# A parameter of size 0.5 is rounded to 3e-8 when its gradient of about 0.05 is taken off: 6e-7 of
# the gradient. Sums of 50 tokens in another order add about as much.
GRADIENT = {"rtol": 0, "atol": 4e-6}

# (devices, microbatches, stage): every number of each, together and alone
DIVISIONS = [(1, 1, 0), (1, 8, 0), (1, 2, 3), (2, 4, 3), (4, 1, 1), (8, 2, 3)]


@pytest.mark.parametrize(("data", "microbatches", "zero"), DIVISIONS)
def test_any_division_of_a_batch_is_one_big_batch(data, microbatches, zero):
    """Rows hold 1 to 5 tokens, so that a mean of means would be wrong by far."""
    assert len({int(row.sum()) for row in ROWS["mask"]}) == 5
    gradient, metrics = chain_run(data, microbatches, zero)
    loss, expected = one_big_batch()
    # One fp32 sum of 50 losses in another order.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-7)
    assert metrics["count"] == ROWS["mask"].sum()
    tiny.close(gradient, expected, **GRADIENT)
    norm = np.sqrt(sum(np.sum(np.square(grad)) for grad in expected.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=2e-6)


def test_a_mean_of_means_would_have_been_seen():
    """The tolerances above are far below what a forgotten count costs."""
    model, params = CHAIN, fz.logical(CHAIN, start())
    halves = [{k: v[part] for k, v in ROWS.items()} for part in (slice(0, 8), slice(8, 16))]
    naive = np.mean([tiny.reference(model, params, half)[0] for half in halves])
    assert abs(naive - one_big_batch()[0]) > 1e-4


def test_scalar_losses_count_once_per_device_and_microbatch():
    def loss(p, buffers, batch, rng, train):
        return jnp.mean(batch["x"]) * p["w"], buffers, {"m": jnp.max(batch["x"])}

    model = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss)
    plan = fz.Plan(data=4, microbatches=2)
    batch = {"x": np.arange(16, dtype=np.float32)}
    gradient, metrics = loss_and_gradient(model, plan, fz.init(model, SGD, plan), batch)
    # Sums of small whole numbers: exact.
    assert metrics["count"] == 8
    assert metrics["loss"] == 7.5
    assert gradient["w"] == 7.5
    assert metrics["m"] == np.mean([1, 3, 5, 7, 9, 11, 13, 15])


class TestShapesOfModels:
    """Chains of every form against `jax.grad` of their own loss function."""

    def check(self, model, batch, plans):
        state = fz.init(model, SGD, plans[0])
        whole = fz.logical(model, state)
        loss, grads = tiny.reference(model, whole, batch, tiny.on_one_device(state.buffers))
        for plan in plans:
            here = jax.tree.map(
                lambda leaf: leaf.copy(), fz.replan(state, model, SGD, plans[0], plan)
            )
            gradient, metrics = loss_and_gradient(model, plan, here, batch)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-7)
            tiny.close(gradient, tiny.host(grads), **GRADIENT)

    @pytest.mark.parametrize("num", [1, 2])
    def test_short_stacks(self, num):
        """The loops' first and last layers stand outside them: one and two layers are all edge."""
        plans = [tiny.plan(zero=3, remat="none" if num == 1 else "dots")]
        self.check(tiny.chain(num), ROWS, plans)

    def test_a_stack_with_shared_inputs_buffers_and_a_reader_from_outside(self):
        def embed(p, batch, ctx):
            x = tiny.embed(p, batch, ctx)
            return {"h": x, "shift": p["up"][:1] * 0.1, "ids": batch["ids"]}

        def layer(p, x, ctx):
            h = tiny.block(p, x["h"] + x["shift"], ctx)
            return {**x, "h": h}, {"seen": ctx.buffers["seen"] + 1}

        def out(p, x, ctx):
            # Reads the whole stacked leaf: its gradient meets that of the loop.
            return tiny.head(p, x["h"] @ p["all"].sum(0) * 0.1, ctx)

        model = fz.Sequential(
            [
                fz.Layer("embed", tiny.embed_init, embed),
                fz.Stack("blocks", 3, lambda key: (tiny.block_init(key), {"seen": jnp.int32(0)}),
                         layer, shared=("shift", "ids"), stateful=True),
                fz.Layer("head", tiny.head_init, out,
                         reads={"table": "embed/table", "all": "blocks/w"}),
            ],
            loss=tiny.token_loss,
        )  # fmt: skip
        self.check(model, ROWS, [tiny.plan(zero=3, microbatches=2)])

    def test_parameters_may_be_any_tree(self):
        def loss(p, buffers, batch, rng, train):
            w, (b,) = p
            error = batch["x"] @ w + b
            return fz.Mean(jnp.sum(error**2), jnp.float32(error.size)), buffers, {}

        def init(key):
            return (jax.random.normal(key, (16, 9)), [jnp.ones(9)]), {}

        batch = {"x": tiny.points()["x"]}
        self.check(fz.Model(init, loss), batch, [tiny.plan(zero=3)])

    def test_a_plain_model_is_the_same_as_its_chain(self):
        """A `Sequential`'s own init and loss as a plain `Model`, gathered leaf by leaf."""
        model, plan = fz.Model(CHAIN.init, CHAIN.loss), tiny.plan(zero=3)
        gradient, metrics = loss_and_gradient(model, plan, start_under(plan), ROWS)
        loss, expected = one_big_batch()
        np.testing.assert_allclose(metrics["loss"], loss, rtol=5e-7)
        tiny.close(gradient, expected, **GRADIENT)
        # Counts of right tokens over counts of tokens: exact.
        assert metrics["accuracy"] == chain_run(1, 1, 0)[1]["accuracy"] > 0


def test_remat_changes_memory_not_numbers():
    """What is kept and what is computed again is the same arithmetic."""
    kept = {remat: chain_run(8, 1, 3, remat) for remat in ("layer", "dots", "none")}
    tiny.close(kept["layer"][0], one_big_batch()[1], **GRADIENT)
    for remat in ("dots", "none"):
        assert kept[remat][1]["loss"] == kept["layer"][1]["loss"]
        # Kept and recomputed values enter differently fused loops: the last bits may differ.
        tiny.close(kept[remat][0], kept["layer"][0], **GRADIENT)


# Plans whose programs are others than those of ZeRO-3 in float32.
OTHERS = {
    "zero 0": {"zero": 0},
    "lazy, bf16": {"zero": 1, "gather": "lazy", "precision": "bf16", "microbatches": 2},
    "fp16, averages": {"zero": 2, "precision": "fp16", "ema": 0.9, "clip_norm": 1.0},
    "parked": {"zero": 3, "tiers": {"opt_state": "host", "params": "host"}, "stream_bytes": 300},
}


class TestCompilation:
    """One trace and one program for all batches of one shape."""

    @pytest.fixture(scope="class")
    @staticmethod
    def step():
        return fz.train_step(CHAIN, SGD, tiny.plan(zero=3))

    @pytest.fixture(scope="class")
    @staticmethod
    def evaluate():
        return fz.eval_step(CHAIN, tiny.plan(zero=3))

    def test_lower_needs_shapes_only_and_is_the_program_that_runs(self, step):
        plan = tiny.plan(zero=3)
        shapes = fz.abstract_state(CHAIN, SGD, plan)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ROWS)
        compiled = step.lower(shapes, batch).compile()
        text = compiled.as_text()
        assert "all-gather" in text
        assert "reduce-scatter" in text
        assert compiled.memory_analysis().argument_size_in_bytes > 0
        real = step.lower(start_under(plan), ROWS)
        assert real.as_text() == step.lower(shapes, batch).as_text()
        assert step.num_traces == 1

    def test_same_shapes_never_compile_twice(self, step, evaluate):
        state = start_under(tiny.plan(zero=3))
        state, _ = step(state, tiny.tokens(seed=1))
        evaluate(state, ROWS)
        traces = step.num_traces, evaluate.num_traces
        with tiny.counted_compiles() as compiles:
            for seed in range(3):
                state, _ = step(state, tiny.tokens(seed=seed))
                evaluate(state, tiny.tokens(seed=seed))
        assert (step.num_traces, evaluate.num_traces) == traces == (1, 1)
        assert not compiles

    @pytest.mark.parametrize("options", some(OTHERS, "lazy, bf16", "parked", "fp16, averages"))
    def test_nor_does_any_other_plan_and_it_names_what_consumed_a_state(self, options):
        """Steps, evaluations and accumulations in turn; pipelines: test_execute_evaluation.py."""
        model, tx, plan = tiny.regression(), optax.adam(1e-2), tiny.plan(**OTHERS[options])
        build = (fz.accumulate_step, fz.train_step)
        add, step = (make(model, tx, plan) for make in build)
        evaluate, state = fz.eval_step(model, plan), fz.init(model, tx, plan)

        def cycle(state, seed):
            state, _ = step(state, tiny.points(seed=seed))
            evaluate(state, tiny.points(seed=seed))
            for _ in range(2):
                state, _ = add(state, tiny.points(seed=seed))
            return step(state, tiny.points(seed=seed))[0]

        spent, state = state, cycle(state, 0)
        for call in (step, evaluate, add):
            with pytest.raises(fz.StateConsumedError, match=rf"{call.name}: .* by step 1 "):
                call(spent, tiny.points())
        traces = [one.num_traces for one in (step, evaluate, add)]
        with tiny.counted_compiles() as compiles:
            for seed in (1, 2):
                state = cycle(state, seed)
        assert [one.num_traces for one in (step, evaluate, add)] == traces
        assert not compiles

    @pytest.mark.parametrize("options", [{}, {"tiers": {"opt_state": "host"}}], ids=str)
    def test_what_an_optimizer_holds_of_a_consumed_state_is_named(self, options):
        """The first trace reads it before it is consumed; the next one, of other rows, after."""
        model, plan = tiny.regression(), tiny.plan(zero=1, **options)
        state = fz.init(model, SGD, plan)
        begun = state.params
        decay = optax.stateless(
            lambda g, p: jax.tree.map(lambda g, p, b: g + 0.1 * (p - b), g, p, begun)
        )
        step = fz.train_step(model, optax.chain(decay, SGD), plan)
        state = fz.init(model, optax.chain(decay, SGD), plan).replace(params=begun)
        state, _ = step(state, tiny.points(16))
        with pytest.raises(fz.StateConsumedError, match=r"a closure over state\.params"):
            step(state, tiny.points(32))

    def test_another_number_of_rows_compiles_once_more(self):
        model, plan = tiny.regression(), tiny.plan(zero=1)
        state, step = fz.init(model, SGD, plan), fz.train_step(model, SGD, plan)
        for rows, traces in ((16, 1), (8, 2), (16, 2), (8, 2)):
            state, _ = step(state, tiny.points(rows))
            assert step.num_traces == traces

    def test_counting_sees_a_compilation(self):
        with tiny.counted_compiles() as compiles:
            jax.jit(lambda x: x * 3 + 5)(np.float32(1))
        assert compiles

    def test_eval_is_the_loss_of_the_whole_batch(self, evaluate):
        state = start_under(tiny.plan(zero=3))
        metrics = evaluate(state, ROWS)
        np.testing.assert_allclose(metrics["loss"], one_big_batch()[0], rtol=5e-7)
        assert float(metrics["count"]) == ROWS["mask"].sum()

    def test_eval_lowers_too(self, evaluate):
        shapes = fz.abstract_state(CHAIN, SGD, tiny.plan(zero=3))
        assert "all-gather" in evaluate.lower(shapes, ROWS).compile().as_text()


class TestMetrics:
    """Names, dtypes and what models may add."""

    def test_all_are_float32_scalars(self):
        def loss(p, buffers, batch, rng, train):
            mine = {"seven": fz.Mean(jnp.int32(14), jnp.int32(2)), "half": jnp.bfloat16(0.5)}
            return jnp.sum(p["w"] * batch["x"]), buffers, mine

        model = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss)
        plan = fz.Plan(zero=1, skip_nonfinite=True)
        _, metrics = fz.train_step(model, SGD, plan)(
            fz.init(model, SGD, plan), {"x": np.ones(8, np.float32)}
        )
        names = {"loss", "count", "grad_norm", "nonfinite", "skipped", "loss_scale"}
        assert set(metrics) == {*names, "seven", "half"}
        assert {(v.dtype, v.shape) for v in metrics.values()} == {(jnp.dtype("float32"), ())}
        assert (float(metrics["seven"]), float(metrics["half"])) == (7.0, 0.5)

    def test_those_of_an_evaluation_have_counts_of_their_own(self):
        def loss(p, buffers, batch, rng, train):
            x = batch["x"] * p["w"]
            big = fz.Mean(jnp.sum(jnp.where(x > 3, x, 0)), jnp.sum(x > 3))
            return fz.Mean(jnp.sum(x), jnp.float32(x.size)), buffers, {"big": big}

        model, plan = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss), tiny.plan(data=2)
        metrics = fz.eval_step(model, plan)(
            fz.init(model, SGD, plan), {"x": np.arange(8, dtype=np.float32)}
        )
        assert (float(metrics["loss"]), float(metrics["big"])) == (3.5, 5.5)

    @pytest.mark.parametrize("name", ["loss", "count", "grad_norm", "nonfinite", "skipped"])
    @pytest.mark.parametrize("build", ["train", "eval"])
    def test_names_of_the_steps_own_metrics_are_refused(self, name, build):
        def loss(p, buffers, batch, rng, train):
            return jnp.sum(p["w"] * batch["x"]), buffers, {name: jnp.float32(1)}

        model = fz.Model(lambda key: ({"w": jnp.ones(())}, {}), loss)
        plan = fz.Plan(data=1)
        state = fz.init(model, SGD, plan)
        step = fz.train_step(model, SGD, plan) if build == "train" else fz.eval_step(model, plan)
        with pytest.raises(fz.StateError, match=rf"\['{name}'\].*rename"):
            step(state, {"x": np.ones(2, np.float32)})


class TestRandomness:
    """Keys are named by step, block of rows and layer, not drawn in sequence."""

    MODEL = tiny.chain(2, apply=tiny.dropped_block)
    PLANS = (
        tiny.plan(zero=3, data=8),
        tiny.plan(zero=0, data=4, microbatches=2),
        tiny.plan(zero=2, data=1, microbatches=8),
    )
    TX = optax.sgd(0.1)

    @pytest.fixture(scope="class")
    @staticmethod
    def start():
        return fz.init(TestRandomness.MODEL, TestRandomness.TX, TestRandomness.PLANS[0])

    @pytest.fixture(scope="class")
    @staticmethod
    def traces(start):
        """Three losses of every plan, from one start."""
        model, tx, plans = TestRandomness.MODEL, TestRandomness.TX, TestRandomness.PLANS
        traces = []
        for plan in plans:
            state = fz.replan(start, model, tx, plans[0], plan)
            step, losses = fz.train_step(model, tx, plan, donate=False), []
            for _ in range(3):
                state, metrics = step(state, ROWS)
                losses.append(float(metrics["loss"]))
            traces.append(losses)
        return np.array(traces)

    def test_dropout_does_not_depend_on_how_a_batch_is_divided(self, traces):
        """Blocks of rows keep their keys whichever device and microbatch they are."""
        for trace in traces[1:]:
            # Sums in another order, over three steps; another mask changes the loss by 1e-2.
            np.testing.assert_allclose(trace, traces[0], rtol=2e-6)

    def test_keys_are_folded_from_step_block_and_layer(self, start, traces):
        """The first loss by hand: eight blocks of two rows, each through the model's own loss."""
        params = tiny.on_one_device(fz.logical(self.MODEL, start))
        # Training, the first step, the first call: the same in every version from 0.2 on.
        key = jax.random.key(0)
        for number in (0x665A_0001, 0, 0):
            key = jax.random.fold_in(key, number)

        def block_loss(p, rows, block):
            mean, _, _ = self.MODEL.loss(p, {}, rows, jax.random.fold_in(key, block), True)
            return mean.total, mean.count

        blocks = {name: leaf.reshape(8, 2, -1) for name, leaf in ROWS.items()}
        run = jax.jit(lambda p: jax.lax.map(lambda x: block_loss(p, *x), (blocks, jnp.arange(8))))
        total, count = run(params)
        np.testing.assert_allclose(traces[0][0], total.sum() / count.sum(), rtol=1e-6)

    def test_masks_differ_between_steps_seeds_and_from_evaluation(self, start):
        plan, tx = self.PLANS[0], self.TX
        step = fz.train_step(self.MODEL, tx, plan, donate=False)
        zero, one = (jax.device_put(np.int32(k), start.step.sharding) for k in (0, 1))
        key = jax.device_put(jax.random.key(5), start.rng.sharding)
        states = [start.replace(step=zero), start.replace(step=one), start.replace(rng=key)]
        losses = [float(step(state, ROWS)[1]["loss"]) for state in states]
        losses.append(float(fz.eval_step(self.MODEL, plan)(start, ROWS)["loss"]))
        gaps = np.abs(np.subtract.outer(losses, losses)) + np.eye(4)
        assert gaps.min() > 1e-3


def test_every_layer_of_a_chain_draws_numbers_of_its_own():
    places = jnp.eye(4)

    def draw(p, x, ctx):
        return x + p["place"] * jax.random.uniform(ctx.rng)

    def loss(x, batch):
        return jnp.mean(x), {f"drawn {n}": x[0, n] for n in range(4)}

    links = [
        fz.Layer("a", lambda key: {}, draw),
        fz.Layer("b", lambda key: {}, draw),
        fz.Stack("c", 2, lambda key: {}, draw),
    ]
    params = {"a": {"place": places[0]}, "b": {"place": places[1]}, "c": {"place": places[2:]}}
    model, plan = fz.Sequential(links, loss=loss, init=(params, {})), tiny.plan(zero=0, data=1)
    state = fz.init(model, STILL, plan)
    _, metrics = fz.train_step(model, STILL, plan)(state, np.zeros((1, 4), np.float32))
    assert len({float(metrics[f"drawn {n}"]) for n in range(4)}) == 4


class TestBuffers:
    """Running statistics become those of the whole batch; counters stay counters."""

    def model(self):
        def loss(p, buffers, batch, rng, train):
            x = batch["x"]
            new = {"mean": 0.5 * buffers["mean"] + 0.5 * x.mean(0), "n": buffers["n"] + 1}
            return fz.Mean(jnp.sum(x * p["w"]), jnp.float32(x.size)), new, {}

        def init(key):
            return {"w": jnp.ones(16)}, {"mean": jnp.ones(16), "n": jnp.zeros((), jnp.int32)}

        return fz.Model(init, loss)

    @pytest.mark.parametrize(("data", "replica", "microbatches"), [(8, 1, 1), (4, 2, 1), (4, 1, 2)])
    def test_averaged_over_devices_in_order_of_microbatches(self, data, replica, microbatches):
        model, x = self.model(), tiny.points()["x"]
        plan = fz.Plan(data=data, replica=replica, microbatches=microbatches)
        state, _ = fz.train_step(model, SGD, plan)(fz.init(model, SGD, plan), {"x": x})
        # By hand: every device runs its own rows, microbatch after microbatch.
        rows = x.reshape(data * replica, microbatches, -1, 16)
        mean = np.ones((data * replica, 16))
        for k in range(microbatches):
            mean = 0.5 * mean + 0.5 * rows[:, k].mean(1)
        # fp32 means of 2 rows and of 8 devices.
        np.testing.assert_allclose(state.buffers["mean"], mean.mean(0), rtol=1e-6, atol=1e-7)
        assert int(state.buffers["n"]) == microbatches
        held = [np.asarray(piece.data) for piece in state.buffers["mean"].addressable_shards]
        assert all(one.tobytes() == held[0].tobytes() for one in held)

    @pytest.mark.parametrize(("zero", "replica"), [(0, 1), (3, 1), (1, 2)])
    def test_those_of_layers_and_of_a_stack_are_written_back(self, zero, replica):
        def init(key):
            return {"w": jnp.ones(4)}, {"calls": jnp.zeros(()), "sum": jnp.zeros(4)}

        def apply(p, x, ctx):
            new = {"calls": ctx.buffers["calls"] + 1, "sum": ctx.buffers["sum"] + jnp.mean(x, 0)}
            return x * p["w"] + 1, new if ctx.train else ctx.buffers

        first = fz.Layer("in", init, lambda p, b, ctx: apply(p, b["x"], ctx), stateful=True)
        chain = [first, fz.Stack("more", 4, init, apply, stateful=True)]
        model = fz.Sequential(chain, lambda x, b: fz.Mean(jnp.sum(x), jnp.float32(x.size)))
        plan = tiny.plan(zero=zero, data=2, replica=replica, microbatches=2)
        state, step = fz.init(model, STILL, plan), fz.train_step(model, STILL, plan)
        for _ in range(2):  # two microbatches each
            state, _ = step(state, {"x": np.ones((8, 4), np.float32)})
        found = tiny.host(state.buffers)
        assert {path: value.tolist() for path, value in found.items()} == {
            "in/calls": 4, "in/sum": [4.0] * 4, "more/calls": [4.0] * 4,
            "more/sum": [[4.0 * n] * 4 for n in (2, 3, 4, 5)],
        }  # fmt: skip

    def test_evaluation_leaves_them(self):
        model, plan = self.model(), fz.Plan()
        state = fz.init(model, SGD, plan)
        before = tiny.host(state)
        fz.eval_step(model, plan)(state, {"x": tiny.points()["x"]})
        tiny.same_bits(state, before)


class TestNonFinite:
    """Reported always; skipped when the plan says so."""

    MODEL = tiny.regression()
    TX = optax.adam(1e-2)

    @staticmethod
    def bad(value):
        batch = tiny.points()
        batch["x"][3, 2] = value
        return batch

    def test_reported_without_skipping(self):
        plan = tiny.plan(zero=3)
        step = fz.train_step(self.MODEL, self.TX, plan)
        state, metrics = step(fz.init(self.MODEL, self.TX, plan), tiny.points())
        assert float(metrics["nonfinite"]) == 0
        state, metrics = step(state, self.bad(np.nan))
        assert float(metrics["nonfinite"]) == 1
        assert int(state.step) == 2
        assert not np.all(np.isfinite(state.params["w"]))
        assert "skipped" not in metrics

    @pytest.mark.parametrize("zero", [0, 3])
    def test_skipped_by_plan(self, zero):
        plan = tiny.plan(zero=zero, skip_nonfinite=True)
        step = fz.train_step(self.MODEL, self.TX, plan)
        state, _ = step(fz.init(self.MODEL, self.TX, plan), tiny.points())
        for number in (1, 2):
            before = tiny.host(state.replace(loss_scale=None))
            state, metrics = step(state, self.bad(np.nan))
            tiny.same_bits(state.replace(loss_scale=None), before)
            assert float(metrics["nonfinite"]) == 1
            assert float(metrics["skipped"]) == number == int(state.loss_scale.skipped)
            assert float(metrics["loss_scale"]) == 1
        state, metrics = step(state, tiny.points(seed=1))
        assert int(state.step) == 2
        assert (float(metrics["nonfinite"]), float(metrics["skipped"])) == (0, 2)
        assert np.all(np.isfinite(state.params["w"]))


class TestClipping:
    """`Plan.clip_norm` is `optax.clip_by_global_norm`, computed from shards."""

    MODEL = tiny.regression()

    @staticmethod
    @cache
    def stepped(plan, tx):
        model = TestClipping.MODEL
        state, metrics = fz.train_step(model, tx, plan)(fz.init(model, tx, plan), tiny.points())
        return fz.logical(model, state), float(metrics["grad_norm"])

    @pytest.mark.parametrize(("zero", "clip"), [(3, 0.3), (0, 100.0)])
    def test_equals_optax(self, zero, clip):
        plain = tiny.plan(zero=zero)
        ours, norm = self.stepped(plain.replace(clip_norm=clip), SGD)
        theirs, same = self.stepped(plain, optax.chain(optax.clip_by_global_norm(clip), SGD))
        without, _ = self.stepped(plain, SGD)
        assert norm == pytest.approx(same, rel=2e-7)
        assert 0.3 < norm < 100
        # g * (c / n) against (g / n) * c, with n a sum in another order: three roundings of the
        # gradient, and one more when it is taken off a parameter of size 1.
        tiny.close(ours, theirs, rtol=2e-7, atol=1.2e-7)
        far = max(np.max(np.abs(a - b)) for a, b in zip(
            tiny.host(ours).values(), tiny.host(without).values(), strict=True))  # fmt: skip
        assert (far > 1e-2) == (clip == 0.3)
