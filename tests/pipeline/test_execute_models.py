"""Chains of every kind as pipelines: what passes between stages, buffers, ties, odd leaves."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from execute_cases import given, gradients, tied, train, untied
from support import tiny
from support.sample import some

import fzero as fz
from fzero.state.row_order import _ROWS


ROWS = 8


def dense(name, n, m, apply=None, **options):
    """A layer with one matrix."""
    apply = apply or (lambda p, x, ctx: jnp.tanh(x @ p["w"]))
    return fz.Layer(name, lambda key: {"w": jnp.zeros((n, m))}, apply, **options)


def points(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    batch = {"x": rng.standard_normal((rows, 6)), "y": rng.standard_normal((rows, 3))}
    floats = {key: value.astype(np.float32) for key, value in batch.items()}
    return {**floats, "kind": rng.integers(0, 5, rows, dtype=np.int32)}


def squares(y, batch):
    error = (y - batch["y"]).astype(jnp.float32)
    return fz.Mean(jnp.sum(jnp.square(error)), jnp.float32(error.size)), {
        "largest": jnp.max(jnp.abs(error))
    }


# What passes between stages


@cache
def mixed():
    """Dicts with integers and booleans, a stack with shared inputs, tuples, other shapes."""

    def start(p, batch, ctx):
        return {
            "h": batch["x"] @ p["w"],
            "kind": batch["kind"],
            "mask": batch["x"][:, 0] > 0,
            "at": jnp.sin(batch["x"] @ p["w"]),
        }

    def block(p, x, ctx):
        new = jnp.tanh(x["h"] @ p["w"]) + p["t"][x["kind"]] * x["at"]
        return {**x, "h": x["h"] + jnp.where(x["mask"][:, None], new, 0)}

    def apart(p, x, ctx):
        cube = (x["h"] @ p["w"]).reshape(-1, 2, 4)
        return cube, x["kind"].astype(jnp.int8), jnp.mean(x["at"], axis=1)

    def join(p, x, ctx):
        cube, kind, mean = x
        return jnp.sum(cube, axis=1) @ p["w"] + kind[:, None] * mean[:, None]

    def init(key):
        return {"w": jnp.zeros((8, 8)), "t": jnp.zeros((5, 8))}

    return given(
        fz.Sequential(
            [
                dense("in", 6, 8, start),
                fz.Stack("blocks", 3, init, block, shared=("kind", "mask", "at")),
                dense("apart", 8, 8, apart),
                dense("join", 4, 5, join),
                dense("out", 5, 3),
            ],
            squares,
        )
    )


@cache
def whole(model, plan):
    """Gradients of `points` without a pipeline, of plans that differ by theirs only."""
    return gradients(model, plan, points())


def compare(model, plan, atol=2e-6):
    """The gradients of a pipeline, checked against those without one."""
    found = gradients(model, plan, points())
    alone = plan.replace(pipe=1, schedule=None, partition="uniform")
    tiny.close(found, whole(model, alone), rtol=0, atol=atol)
    return found


OTHER_SHAPES = [
    (2, {"partition": (2, 5), "schedule": "zb_h1"}),
    (7, {"schedule": "1f1b"}),
    (2, {"schedule": "interleaved", "data": 2, "zero": 1}),
    (3, {"schedule": "zb_v", "remat": "none", "microbatches": 1}),
    (2, {"partition": (5, 2), "remat": "dots", "schedule": "zb_h2", "data": 2}),
]


@pytest.mark.parametrize(
    ("pipe", "options"),
    some(OTHER_SHAPES, OTHER_SHAPES[0], OTHER_SHAPES[1]),
    ids=str,
)
def test_dicts_tuples_integers_and_other_shapes(pipe, options):
    plan = tiny.plan(**{"data": 1, "microbatches": 2, **options, "pipe": pipe})
    compare(mixed(), plan)


def test_metrics_of_the_model():
    plan = tiny.plan(pipe=2, data=2, microbatches=2)
    runs = [train(mixed(), plan.replace(pipe=pipe), 2, batch=points) for pipe in (1, 2)]
    for one, other in zip(runs[0].trace, runs[1].trace, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
        assert set(one) == {"loss", "count", "grad_norm", "nonfinite", "largest"}


def test_reserved_metrics_are_refused():
    chain = [dense("in", 6, 4, lambda p, b, ctx: b["x"] @ p["w"]), dense("out", 4, 3)]
    model = given(fz.Sequential(chain, lambda y, b: (jnp.sum(y), {"loss": jnp.sum(y)})))
    plan, tx = tiny.plan(pipe=2, data=1), optax.sgd(0.1)
    state = fz.init(model, tx, plan)
    with pytest.raises(fz.StateError, match=r"metrics \['loss'\]"):
        fz.train_step(model, tx, plan)(state, points())
    assert int(state.step) == 0
    tiny.host(state)  # still there


def test_a_chain_without_a_loss_function_and_with_a_scalar_loss():
    def last(p, x, ctx):
        return jnp.mean(jnp.square(x @ p["w"] - ctx.batch["y"]))

    chain = [
        dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
        dense("mid", 4, 4),
        dense("end", 4, 3, last),
    ]
    compare(given(fz.Sequential(chain)), tiny.plan(pipe=3, data=2, microbatches=2))


def test_layers_without_parameters_and_stages_without_any():
    chain = [
        dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
        fz.Layer("act", None, lambda _, x, ctx: jnp.tanh(x)),
        fz.Layer("flip", None, lambda _, x, ctx: x[:, ::-1]),
        dense("out", 4, 3),
    ]
    model = given(fz.Sequential(chain, squares))
    for schedule in ("1f1b", "zb_h1"):
        compare(model, tiny.plan(pipe=4, data=2, microbatches=2, schedule=schedule))


def test_gradients_stop_at_integers():
    """A stage whose input has no floating-point leaf gets no cotangent to pass on."""
    chain = [
        fz.Layer("count", None, lambda _, batch, ctx: {"kind": batch["kind"] % 3}),
        dense("table", 5, 4, lambda p, x, ctx: p["w"][x["kind"]]),
        dense("out", 4, 3),
    ]
    model = given(fz.Sequential(chain, squares))
    for schedule in ("1f1b", "zb_h1"):
        compare(model, tiny.plan(pipe=3, data=1, microbatches=2, schedule=schedule))


# Buffers


def norm_init(size):
    def init(key):
        return {"g": jnp.ones(size)}, {"mean": jnp.zeros(size), "seen": jnp.zeros((), jnp.int32)}

    return init


def norm(p, x, ctx):
    mean = jnp.mean(x, 0) if ctx.train else ctx.buffers["mean"]
    y = x + jnp.tanh((x - mean) * p["g"])
    if not ctx.train:
        return y, ctx.buffers
    new = 0.75 * ctx.buffers["mean"] + 0.25 * jax.lax.stop_gradient(mean)
    return y, {"mean": new, "seen": ctx.buffers["seen"] + 1}


@cache
def stateful():
    """Running means in single layers and in every layer of a stack."""
    return given(
        fz.Sequential(
            [
                dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
                fz.Layer("norm", norm_init(4), norm, stateful=True),
                fz.Stack("norms", 3, norm_init(4), norm, stateful=True),
                dense("out", 4, 3),
            ],
            squares,
        )
    )


def in_order(model, run, plan):
    """Buffers with the layers of cut stacks in order."""
    whole = fz.replan(run.state, model, optax.sgd(0.1), plan, plan.replace(pipe=1, schedule=None))
    return tiny.host(whole.buffers)


@pytest.mark.parametrize("name", some(["1f1b", "zb_v", "interleaved"], "1f1b", "zb_v"))
def test_buffers_are_those_without_a_pipeline(name):
    plan = tiny.plan(pipe=3, data=2, microbatches=4, schedule=name)
    options = {"tx": optax.sgd(0.1), "batch": points, "rows": 16}
    cut, whole = (train(stateful(), p, 3, **options) for p in (plan, plan.replace(pipe=1)))
    buffers = in_order(stateful(), cut, plan)
    tiny.close(buffers, whole.state.buffers, rtol=0, atol=1e-6)
    assert (buffers["norms/seen"] == 12).all()  # 3 steps of 4 microbatches
    assert buffers["norms/seen"].shape == (3,)
    assert np.abs(buffers["norms/mean"]).max() > 0.01
    losses = [
        float(fz.eval_step(stateful(), p)(run.state, points(16, 9))["loss"])
        for run, p in ((cut, plan), (whole, plan.replace(pipe=1)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_buffers_are_handed_on_in_the_order_of_microbatches():
    """Silently: other running statistics than without a pipeline."""
    rows = [[f"{stage}F1", f"{stage}F0", f"{stage}B0", f"{stage}B1"] for stage in range(2)]
    actions = [[fz.pipeline.Action.parse(word) for word in row] for row in rows]
    plan = tiny.plan(pipe=2, data=1, microbatches=2, schedule=fz.pipeline.Schedule(actions))
    fz.abstract_state(tied(), None, plan)
    with pytest.raises(fz.PlanError, match=r"0F1 runs before 0F0: .* 'norms' reads the"):
        fz.abstract_state(stateful(), None, plan)


@pytest.mark.nightly
def test_buffers_agree_between_schedules():
    plans = [
        tiny.plan(pipe=pipe, data=1, microbatches=3, schedule=name)
        for name, pipe in [("gpipe", 6), ("zb_h2", 6), ("dualpipe_v", 3)]
    ]
    options = {"tx": optax.sgd(0.1), "batch": points, "rows": 6}
    runs = [in_order(stateful(), train(stateful(), p, 2, **options), p) for p in plans]
    for run in runs[1:]:
        tiny.same_bits(run, runs[0])


# Ties


@cache
def often_tied():
    """A matrix that four layers read, one of them before its owner, and a scalar that two do."""

    def two(p, x, ctx):
        return jnp.tanh(x @ p["m"] * p["gain"])

    def owner(p, x, ctx):
        return jnp.tanh(x @ p["deep"]["m"] + x * p["gain"])

    read = {"m": "owner/deep/m", "gain": "owner/gain"}
    return given(
        fz.Sequential(
            [
                dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
                dense("early", 4, 4, lambda p, x, ctx: jnp.tanh(x @ p["w"] @ p["m"]),
                      reads={"m": "owner/deep/m"}),
                fz.Layer("owner", lambda key: {"deep": {"m": jnp.zeros((4, 4))},
                                               "gain": jnp.zeros(())}, owner),
                fz.Layer("again", None, two, reads=read),
                fz.Layer("more", None, lambda p, x, ctx: x @ p["part"]["m"],
                         reads={"part": "owner/deep"}),
                dense("out", 4, 3),
            ],
            squares,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pipe", "schedule", "partition"),
    some(
        [
            (6, "1f1b", "uniform"),
            (3, "zb_v", "uniform"),
            (2, "zb_h1", (3, 3)),
            (2, "gpipe", (5, 1)),
        ],
        (3, "zb_v", "uniform"),
        (2, "gpipe", (5, 1)),
    ),
)
def test_one_leaf_gets_the_sum_of_its_readers_gradients(pipe, schedule, partition):
    plan = tiny.plan(pipe=pipe, data=1, microbatches=2, schedule=schedule, partition=partition)
    model = often_tied()
    found = compare(model, plan)
    _, grads = tiny.reference(model, model.init[0], points())
    count = points()["y"].size
    tiny.close({k: v / count for k, v in found.items() if k != "loss"}, grads, rtol=0, atol=2e-6)
    state = fz.init(model, None, plan)
    assert jax.tree.structure(state.params) == jax.tree.structure(model.init[0])
    held = [x.sharding.num_devices for x in jax.tree.leaves(state.params)]
    assert set(held) == {1}  # each leaf once, where its owner is


def test_a_cut_stacks_weights_cannot_be_read():
    chain = [
        dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
        fz.Stack("s", 2, lambda key: {"w": jnp.zeros((4, 4))}, lambda p, x, ctx: x @ p["w"]),
        dense("out", 4, 3, lambda p, x, ctx: x @ p["other"][0] @ p["w"], reads={"other": "s/w"}),
    ]
    model, tx = given(fz.Sequential(chain, squares)), optax.sgd(0.1)
    plan = tiny.plan(pipe=2, data=1, microbatches=2)
    for make in (lambda: fz.train_step(model, tx, plan), lambda: fz.eval_step(model, plan)):
        with pytest.raises(fz.PlanError, match=r"'out' on stage 1 reads s/w.*ranks?\W.*within"):
            make()
    with pytest.raises(fz.PlanError, match=r"'out' on stage 1 reads s/w"):
        fz.train_step(model, tx, plan.replace(partition=(3, 1)))
    # Whole and on the reader's stage it can be.
    compare(model, plan.replace(partition=(1, 3)))


# Odd leaves


def test_scalars_empty_leaves_and_frozen_ones():
    def odd(p, x, ctx):
        return jnp.tanh(x * p["gain"]) + jnp.sum(p["none"]) + p["fixed"]

    def init(key):
        return {"gain": jnp.zeros(()), "none": jnp.zeros((0, 3)), "fixed": jnp.zeros(4)}

    chain = [
        dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
        fz.Layer("odd", init, odd),
        fz.Stack("odds", 3, init, odd),
        dense("out", 4, 3),
    ]
    frozen = frozenset({"odds/fixed", "in/w"})
    model = given(fz.Sequential(chain, squares), frozen=frozen)
    plan = tiny.plan(pipe=3, data=2, microbatches=2)
    compare(model, plan)
    tx = optax.adamw(1e-2, weight_decay=0.5)
    run = train(model, plan, 2, batch=points, tx=tx)
    start = tiny.host(model.init[0])
    still = {path for path, value in run.params.items() if (value == start[path]).all()}
    assert still == frozen | {"odd/none", "odds/none"}
    assert run.params["odds/none"].shape == (3, 0, 3)


def test_a_leaf_that_no_layer_reads_gets_no_gradient():
    model = tied()
    params, buffers = model.init
    more = {**params, "head": {**params["head"], "spare": np.ones(3, np.float32)}}
    extra = fz.Sequential(model.layers[:-1], model.layers[-1].apply and tiny.token_loss,
                          init=(more, buffers))  # fmt: skip
    run = train(extra, tiny.plan(pipe=2, data=1, microbatches=2), 2)
    assert (run.params["head/spare"] == 1).all()


# States


def test_a_state_goes_from_plan_to_plan():
    model, tx = stateful(), optax.adam(1e-2)
    first = tiny.plan(pipe=3, data=2, microbatches=2)
    run = train(model, first, 2, batch=points, tx=tx, rows=16)
    plans = [
        first,
        tiny.plan(pipe=2, data=2, microbatches=4, zero=0, schedule="interleaved"),
        tiny.plan(pipe=4, data=2, microbatches=1, zero=1, partition=(1, 1, 3, 1)),
        tiny.plan(pipe=1, data=8),
        first,
    ]
    states = [run.state]
    for old, new in itertools.pairwise(plans):
        states.append(fz.replan(states[-1], model, tx, old, new))
    tiny.same_bits(states[-1], run.state)
    for plan, state in zip(plans, states, strict=True):
        tiny.same_bits(fz.logical(model, state, plan), run.params)
        fresh = fz.abstract_state(model, tx, plan)
        assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, fresh)
        assert jax.tree.structure(state) == jax.tree.structure(fresh)


def test_layers_in_the_order_of_another_schedule_are_refused(tmp_path):
    """Shapes and shardings are alike: only the state knows which layer lies where."""
    model, tx = untied(), optax.sgd(0.1)
    names = "gpipe", "interleaved"
    plans = [tiny.plan(pipe=2, data=2, microbatches=2, schedule=name) for name in names]
    one = tiny.plan(data=4)
    states = [fz.init(model, tx, plan) for plan in plans]
    assert [dict(state.rows) for state in states] == [{}, {"blocks": (0, 3, 1, 2)}]
    assert len({str(jax.tree.map(lambda x: x.sharding, state.params)) for state in states}) == 1
    for plan, state, own in zip(plans, states[::-1], plans[::-1], strict=True):
        calls = [
            lambda plan=plan, state=state: fz.train_step(model, tx, plan)(state, tiny.tokens(16)),
            lambda plan=plan, state=state: fz.eval_step(model, plan)(state, tiny.tokens(16)),
            lambda plan=plan, state=state: fz.replan(state, model, tx, plan, one),
            lambda plan=plan, state=state: fz.logical(model, state, plan),
        ]
        for call in calls:
            with pytest.raises(fz.StateError, match=r"blocks: expected its layers .*another sched"):
                call()
        fz.save(tmp_path, state, plan)  # which is not its own: what is written says so
        got = fz.restore(tmp_path, model, tx, one)
        tiny.same_bits(fz.logical(model, got), fz.logical(model, state, own))
    with pytest.raises(fz.CheckpointError, match="a pipeline's, the plan has none"):
        fz.save(tmp_path, states[1], one)


@pytest.mark.parametrize("to", ["device", "host"])
def test_arrays_of_a_state_of_another_order_are_refused(to):
    """In either direction, any field, parked or not; edits of a state's own arrays are taken."""
    model, tx = untied(), optax.adam(0.1)
    names = "gpipe", "interleaved"
    plans = [tiny.plan(pipe=2, data=2, microbatches=2, schedule=name) for name in names]
    own, other = (fz.init(model, tx, plan) for plan in plans)
    if to == "host":
        own, other = (fz.offload(state, to=to) for state in (own, other))
    for one, two in ((own, other), (other, own)):
        for name in ("params", "opt_state"):
            with pytest.raises(fz.StateError, match=r"blocks/w: expected layers in .*fz\.replan"):
                one.replace(**{name: getattr(two, name)})
        with pytest.raises(fz.StateError, match="blocks/b: expected layers"):
            dataclasses.replace(one, rows=two.rows)
        halves = {name: value for name, value in two.params.items() if name != "blocks"}
        taken = one.replace(params={**one.params, **halves})
        assert taken.params["blocks"] is one.params["blocks"]
        again = jax.tree.map(lambda x: x, taken)
        assert again.rows == one.rows


def test_what_is_known_of_arrays_goes_with_them():
    model, tx = untied(), optax.sgd(0.1)
    plan = tiny.plan(pipe=2, data=2, microbatches=2, schedule="interleaved")
    state = fz.init(model, tx, plan)
    known = [id(leaf) for leaf in state.params["blocks"].values()]
    assert all(key in _ROWS.known for key in known)
    del state
    assert not any(key in _ROWS.known for key in known)


def test_trees_are_those_without_a_pipeline():
    model, tx = stateful(), optax.adam(1e-2)
    cut = fz.abstract_state(model, tx, tiny.plan(pipe=3, data=2, microbatches=2))
    whole = fz.abstract_state(model, tx, tiny.plan(data=8))
    assert cut.rows  # which no leaf says
    assert jax.tree.structure(cut.replace(rows=())) == jax.tree.structure(whole)


def test_some_devices_in_any_order():
    plan = tiny.plan(pipe=2, data=2, microbatches=2, schedule="zb_v")
    model, tx = mixed(), optax.adam(1e-2)
    found = []
    for devices in (jax.devices()[:4], jax.devices()[:2:-1]):
        state = fz.init(model, tx, plan, devices=devices)
        step = fz.train_step(model, tx, plan, devices=devices)
        for seed in range(2):
            state, _ = step(state, jax.tree.map(jnp.asarray, points(seed=seed)))
        found.append(tiny.host(state))
        used = {device for leaf in jax.tree.leaves(state) for device in leaf.sharding.device_set}
        assert used == set(devices[:4])
    tiny.same_bits(*found)


def test_a_last_layer_with_buffers_that_gives_the_loss():
    def last(p, x, ctx):
        error = jnp.square(x @ p["w"] - ctx.batch["y"])
        loss = fz.Mean(jnp.sum(error), jnp.float32(error.size))
        return (loss, {"worst": jnp.max(error)}), {"seen": ctx.buffers["seen"] + len(x)}

    chain = [
        dense("in", 6, 4, lambda p, batch, ctx: batch["x"] @ p["w"]),
        fz.Layer("last", lambda key: ({"w": jnp.zeros((4, 3))}, {"seen": jnp.zeros((), jnp.int32)}),
                 last, stateful=True, buffer_reduce={"seen": "sum"}),
    ]  # fmt: skip
    plan = tiny.plan(pipe=2, data=2, microbatches=2)
    model = given(fz.Sequential(chain))
    compare(model, plan)
    run = train(model, plan, 2, batch=points)
    assert int(run.state.buffers["last"]["seen"]) == 2 * 2 * 2 * 2  # rows of both devices
    assert run.trace[0]["worst"] > 0


def test_initial_values_by_a_function_are_those_without_a_pipeline():
    model = tiny.chain(3)
    plan = tiny.plan(pipe=2, data=2, microbatches=2)  # ranks hold two layers of the stack, and one
    cut = fz.init(model, None, plan, rng=3)
    whole = fz.init(model, None, plan.replace(pipe=1), rng=3)
    tiny.close(fz.logical(model, cut, plan), fz.logical(model, whole), rtol=1e-6, atol=1e-6)
    assert jax.random.key_data(cut.rng).tolist() == jax.random.key_data(whole.rng).tolist()


def test_a_layer_may_read_several_leaves_of_one_nested_layer():
    def head(p, x, ctx):
        return jnp.mean((x * p["gain"] + p["shift"] - ctx.batch["x"]) ** 2)

    def init(key):
        return {
            "out": {"gain": jnp.full(tiny.D, 2.0), "shift": jnp.ones(tiny.D)},
            "w": jnp.eye(tiny.D),
        }

    model = fz.Sequential(
        [
            fz.Layer("in", init, lambda p, batch, ctx: batch["x"] @ p["w"]),
            fz.Stack("blocks", 2, tiny.block_init, tiny.block),
            fz.Layer("head", None, head, reads={"gain": "in/out/gain", "shift": "in/out/shift"}),
        ]
    )
    found = []
    for plan in (fz.Plan(zero=0, data=1), tiny.plan(pipe=2, data=1, microbatches=2)):
        devices = jax.devices()[: plan.pipe]
        state = fz.init(model, optax.adam(1e-2), plan, devices=devices)
        state, metrics = fz.train_step(model, optax.adam(1e-2), plan, devices=devices)(
            state, tiny.points()
        )
        found.append((metrics["loss"], fz.logical(model, state, plan)))
    tiny.close(*found, rtol=1e-5, atol=1e-6)  # microbatches are another order of sums
