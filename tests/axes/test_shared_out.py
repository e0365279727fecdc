"""ZeRO shares leaves out over further axes, too, whose devices would hold the same of them."""

import dataclasses
import functools
import itertools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import fzero as fz
from fzero import axes
from fzero.preflight import hlo
from tests.support import tiny


TX = optax.adam(1e-2)
# No dim of `odd` divides by 4 or 8, one does by 2; `gains` are small, and stay whole.
SHAPES = {"w": (16, 24), "odd": (13, 22), "own": (4, 16, 24), "gains": (24,)}


def loss(p, buffers, batch, rng, train):
    h = batch["x"] @ p["w"] * p["gains"]
    h = jnp.sin(h + jnp.einsum("btf,efg->btg", batch["x"], p["own"]))
    total = jnp.sum(h) + jnp.sum(jnp.sin(batch["x"][..., :13] @ p["odd"]))
    return fz.Mean(total, jnp.float32(h.size)), buffers, {}


def init(rng):
    keys = jax.random.split(rng, len(SHAPES))
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items(), strict=True)}, {}


MODEL = fz.Model(init, loss, shard={"own": ("expert",), "odd": (None, "tensor")})
BATCH = {"x": np.random.default_rng(0).standard_normal((8, 8, 16)).astype(np.float32)}
ONE = fz.Plan(zero=0, data=1)


def plan_of(zero=3, **sizes):
    return fz.Plan(zero=zero, min_shard_bytes=200, **sizes)


def devices_of(plan):
    return jax.devices()[: int(np.prod(list(plan.sizes(8).values())))]


def trained(plan, state=None):
    """Parameters after two steps, in logical shapes, and the norm."""
    devices = devices_of(plan)
    state = fz.init(MODEL, TX, plan, rng=0, devices=devices) if state is None else state
    step = fz.train_step(MODEL, TX, plan, devices=devices, donate=False)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    return jax.device_get(fz.logical(MODEL, state, plan)), float(metrics["grad_norm"])


@pytest.mark.parametrize(
    ("plan", "specs"),
    [
        (plan_of(data=2, context=4),
         {"w": P(("data", "context")), "odd": P(None, ("data", "context"))}),
        (plan_of(data=1, context=4), {"own": P(("data", "context"))}),
        (plan_of(data=2, expert=4), {"w": P(("data", "expert")), "own": P("expert", "data")}),
        (plan_of(data=1, expert=2, context=2, replica=2),
         {"w": P(("data", "expert", "context")), "own": P("expert", ("data", "context"))}),
        (plan_of(data=2, expert=2, tensor=2),
         {"w": P(("data", "expert")), "own": P("expert", ("data", "tensor"))}),
        (plan_of(zero=1, data=2, context=2), {name: P() for name in ("w", "odd", "own")}),
    ],
    ids=str,
)  # fmt: skip
def test_each_device_keeps_one_share_and_trains_as_one(plan, specs):
    layout = fz.layout(MODEL, TX, plan, devices=devices_of(plan)).state
    for name, spec in {**specs, "gains": P()}.items():
        assert layout.params[name].sharding.spec == spec, name
    # Whatever the stage keeps whole: moments are shared out from stage 1 on.
    moment = layout.opt_state[0].mu["w"]
    others = plan.context * plan.data * plan.expert
    assert np.prod(moment.sharding.shard_shape(moment.shape)) == 16 * 24 // others
    (params, norm), (wanted, whole) = trained(plan), trained(ONE)
    np.testing.assert_allclose(norm, whole, rtol=1e-5)  # sums of parts
    # Adam's first steps have the length of the rate: roundings of a gradient near zero show.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), params, wanted
    )


def test_reports_say_over_which_axes():
    plan = plan_of(data=2, context=4)
    told = {leaf.path: leaf for leaf in fz.describe(plan, MODEL).leaves}
    assert (told["w"].over, told["w"].shards) == (("data", "context"), 8)
    assert told["w"].bytes_per_device == 16 * 24 * 4 // 8
    assert "dim 0 / 8 (data, context)" in str(fz.describe(plan, MODEL))
    state = fz.init(MODEL, TX, plan, rng=0)
    layout = {f"{leaf.state_class}/{leaf.path}": leaf for leaf in fz.placement(state).leaves}
    expected = fz.placement(plan, MODEL, TX)
    for leaf in expected.leaves:
        live = layout[f"{leaf.state_class}/{leaf.path}"]
        assert (leaf.spec, leaf.bytes_in_all) == (live.spec, live.bytes_in_all), leaf.path
    assert layout["params/w"].spec == "data+context"


def test_whole_leaves_travel_once_a_pass_and_nothing_else_does():
    """Counted in the compiled step: gathers over both axes at once give whole leaves."""
    plan = plan_of(data=2, context=4)
    shapes = {"x": jax.ShapeDtypeStruct((8, 8, 16), jnp.float32)}
    step = fz.train_step(MODEL, TX, plan)
    compiled = step.lower(fz.abstract_state(MODEL, TX, plan), shapes).compile()
    sizes = {"replica": 1, "data": 2, "context": 4}
    gathers = [c for c in hlo.collectives(compiled.as_text(), mesh_axes=sizes)
               if c.kind == "all-gather"]  # fmt: skip
    assert {c.axes for c in gathers} == {("data", "context")}
    # `odd` has 24 columns, filled up; the experts' leaf is an ordinary one without their axis.
    assert {c.bytes for c in gathers} == {4 * n for n in (16 * 24, 13 * 24, 4 * 16 * 24)}


@pytest.mark.parametrize("written", [{"zero": {"data": 2}}, {"format": 1, "data": 2}], ids=str)
def test_files_of_states_shared_out_over_data_alone_go_on(tmp_path, written):
    """As they were; files said no more than how many devices there were along it."""
    old, new = plan_of(data=2, context=4), plan_of(data=4, context=2)
    with mock.patch.object(axes, "ZERO", ("data",)):
        state = fz.init(dataclasses.replace(MODEL), TX, old, rng=0)
        assert state.params["odd"].shape == (13, 22)
        fz.save(tmp_path, state, old)
        fz.wait(tmp_path)
    (file,) = tmp_path.glob("*/meta/metadata")
    meta = json.loads(file.read_text())
    del meta["sum"]
    assert meta.pop("zero") == {"data": 2}
    file.write_text(json.dumps(meta | written))
    for plan in (new, ONE):
        back = fz.restore(tmp_path, MODEL, TX, plan, devices=devices_of(plan))
        found = jax.device_get(fz.logical(MODEL, back, plan))
        jax.tree.map(np.testing.assert_array_equal, found, jax.device_get(state.params))


def test_files_say_over_which_axes_leaves_were_shared_out(tmp_path):
    """Rows that were filled up over several axes are read as they were written."""
    plans = plan_of(data=2, context=4), plan_of(data=2, expert=2, tensor=2), plan_of(data=3), ONE
    for number, (old, new) in enumerate(itertools.permutations(plans, 2)):
        state = fz.init(MODEL, TX, old, rng=0, devices=devices_of(old))
        fz.save(tmp_path / str(number), state, old)
        back = fz.restore(tmp_path / str(number), MODEL, TX, new, devices=devices_of(new))
        written, found = fz.logical(MODEL, state, old), fz.logical(MODEL, back, new)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(written))
        again = fz.replan(back, MODEL, TX, new, old, devices=devices_of(old))
        tiny.same_bits(again, state)


def slope(plan, jit):
    devices = devices_of(plan)
    state = fz.init(MODEL, TX, plan, rng=0, devices=devices)
    evaluate = fz.eval_step(MODEL, plan, devices=devices)
    grad = jax.grad(lambda p: evaluate(state.replace(params=p), BATCH)["loss"])
    found = state.replace(params=(jax.jit(grad) if jit else grad)(state.params))
    return jax.device_get(fz.logical(MODEL, found, plan))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(data=2, context=4),
        plan_of(data=2, expert=2, tensor=2),
        plan_of(2, data=1, context=4),
    ],
    ids=str,
)
def test_gradients_of_ones_own_pass_through_an_evaluation(plan):
    """Also outside of a `jit`, where JAX itself differentiates no `shard_map` over some axes."""

    wanted = slope(ONE, False)
    for jit in (False, True):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # sums of parts
        jax.tree.map(close, slope(plan, jit), wanted)


@pytest.mark.parametrize("options", [{}, {"zero": 1, "gather": "lazy"}], ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_where_rows_are_whole_a_gradient_of_ones_own_is_refused_by_name(options, jit):
    """XLA's partitioner ends where weights are gathered at use over further axes alone."""
    with pytest.raises(fz.PlanError, match=r"data=1, replica=1.*Take it with zero=2"):
        slope(plan_of(data=1, context=4, **options), jit)
