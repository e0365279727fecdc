"""Leaves that a user put into a state by hand: what does not fit is refused by name."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fzero as fz
from tests.support import tiny


MODEL, TX, PLAN = tiny.regression(), optax.adam(1e-2), tiny.plan(zero=3, data=2)
DEVICES = jax.devices()[:2]
EDITS = {
    "numpy parameters": (
        lambda state: {"params": jax.device_get(state.params)},
        r"params/w: expected a jax.Array float32\[16, 13\], got numpy.ndarray(.|\n)*device_put",
    ),
    "parameters of another dtype": (
        lambda state: {"params": jax.tree.map(lambda x: x.astype("float16"), state.params)},
        r"params/w: expected float32\[16, 13\], got float16\[16, 13\]",
    ),
    "numpy moments": (
        lambda state: {"opt_state": jax.device_get(state.opt_state)},
        r"opt_state/0/mu/w: expected a jax.Array float32\[16, 13\], got numpy.ndarray",
    ),
    "gradients": (
        lambda state: {"grads": state.params},
        r"grads: expected None or what accumulate_step left there, got dict",
    ),
    "numbers beside sums": (
        lambda state: {"grads": fz.Pending(state.params, 0.0, np.float32(0), jnp.int32(0))},
        r"grads/count: expected a jax.Array as accumulate_step leaves it, got numpy.float32(.|\n)*"
        r"grads/total: expected a jax.Array as accumulate_step leaves it, got builtins.float",
    ),
    "neither sums nor calls": (
        lambda state: {"grads": fz.Pending(None, *[jnp.float32(0)] * 2, None)},
        r"grads/sums/gain: expected, but missing(.|\n)*grads/calls: expected, but missing",
    ),
}


@pytest.fixture(scope="module")
def given():
    state = fz.init(MODEL, TX, PLAN, devices=DEVICES)
    return state, fz.train_step(MODEL, TX, PLAN, devices=DEVICES, donate=False)


@pytest.mark.parametrize("name", EDITS)
def test_what_is_no_array_of_the_plan_is_refused_by_name(name, given):
    state, step = given
    edit, message = EDITS[name]
    edited = state.replace(**edit(state))
    with pytest.raises(fz.StateError, match=f"train_step: (.|\n)*{message}"):
        step(edited, tiny.points())
    with pytest.raises(fz.StateError, match=f"replan: (.|\n)*{message}"):
        fz.replan(edited, MODEL, TX, PLAN, tiny.plan(zero=1, data=2), devices=DEVICES)
    assert int(step(state, tiny.points())[0].step) == 1  # nothing was lost


@pytest.mark.parametrize("field", ["opt_state", "grads"])
def test_an_evaluation_takes_a_state_whose_moments_lie_elsewhere(field, given):
    state, _ = given
    evaluate = fz.eval_step(MODEL, PLAN, devices=DEVICES)
    edited = state.replace(**{field: jax.device_get(state.opt_state)})
    for _ in range(2):  # which it knows then
        assert evaluate(edited, tiny.points())["loss"] == evaluate(state, tiny.points())["loss"]


OFF_THE_MESH = {
    "numpy": lambda state: state.replace(params=jax.device_get(state.params)),
    "one device": lambda state: state.replace(
        params=jax.tree.map(jnp.asarray, jax.device_get(state.params))
    ),
    "a number": lambda state: state.replace(step=7),
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("name", OFF_THE_MESH)
def test_what_no_restore_would_take_is_not_saved(name, given, tmp_path):
    """Padded, and on one device: a checkpoint that says so is refused when it is needed."""
    with pytest.raises(fz.StateError, match=r"save: (.|\n)*(params/gain: expected|step is a int)"):
        fz.save(tmp_path, OFF_THE_MESH[name](given[0]), PLAN)
    assert not any(tmp_path.iterdir())


def test_padded_leaves_that_were_put_in_whole_are_restored(given, tmp_path):
    state, _ = given
    whole = NamedSharding(state.step.sharding.mesh, PartitionSpec())
    fz.save(tmp_path, state.replace(params=jax.device_put(state.params, whole)), PLAN)
    tiny.same_bits(fz.restore(tmp_path, MODEL, TX, PLAN, devices=DEVICES), state)


def test_what_an_edit_of_all_elements_writes_in_the_filling_is_said_to_be_no_loss(given, tmp_path):
    state, _ = given
    edited = state.replace(params=jax.tree.map(lambda x: x + 0.01, state.params))
    fz.save(tmp_path, edited, PLAN, asynchronous=False)
    with pytest.warns(UserWarning, match=r"params/odd: .* left out: .*x \+ 0.01 is, .*nothing is"):
        found = fz.restore(tmp_path, MODEL, TX, PLAN, devices=DEVICES)
    for name, value in fz.logical(MODEL, found, PLAN).items():
        np.testing.assert_array_equal(value, fz.logical(MODEL, state, PLAN)[name] + 0.01)


def test_what_the_message_advises_works(given):
    state, step = given
    halved = jax.tree.map(
        lambda old: jax.device_put(np.asarray(old) / 2, old.sharding), state.params
    )
    again, _ = step(state.replace(params=halved), tiny.points())
    twice, _ = step(
        state.replace(params=jax.tree.map(lambda x: x / 2, state.params)), tiny.points()
    )
    tiny.same_bits(again.params, twice.params)


def test_layers_in_a_schedules_order_are_not_to_be_put_in_by_hand():
    """`device_put`, as it was advised, trained other layers: arrays do not say which they are."""
    chain = [
        fz.Stack("blocks", 4, lambda rng: {"w": jnp.eye(4)}, lambda p, x, ctx: x @ p["w"]),
        fz.Layer("last", None, lambda p, x, ctx: jnp.mean(x)),
    ]
    model = fz.Sequential(chain)
    plan = tiny.plan(pipe=2, data=1, microbatches=2, schedule="interleaved")
    state = fz.init(model, None, plan, devices=DEVICES)
    blocks = jax.device_get(state.params["blocks"])
    edited = state.replace(params={**state.params, "blocks": blocks})
    with pytest.raises(fz.StateError, match=r"'blocks' in the rows \[0, (.|\n)*fz\.replan") as told:
        fz.eval_step(model, plan, devices=DEVICES)(edited, np.ones((4, 4), np.float32))
    assert "device_put(new" not in str(told.value)


def test_a_state_that_was_pickled_is_told_the_way_back(given):
    """JAX's pickled arrays come back whole, on one device."""
    state, step = given
    alone = pickle.loads(pickle.dumps(state))
    with pytest.raises(fz.StateError, match=r"pickled: jax.device_put\(state, fz.layout"):
        step(alone, tiny.points())
    with pytest.raises(fz.StateError, match=r"replan: the state lies on 1 devices.*fz.layout"):
        fz.replan(alone, MODEL, TX, PLAN, PLAN, devices=DEVICES)
    back = jax.device_put(alone, fz.layout(MODEL, TX, PLAN, devices=DEVICES).shardings)
    tiny.same_bits(step(back, tiny.points())[0], step(state, tiny.points())[0])


@pytest.mark.parametrize("where", ["in pieces", "on its way"])
def test_a_parked_leaf_is_deeply_copied_and_not_pickled(where, tmp_path):
    plan = PLAN.replace(tiers={"opt_state": "host"} if where == "in pieces" else {})
    plan = plan.replace(stream_bytes=200)
    state, other = (fz.init(MODEL, TX, plan, devices=DEVICES, rng=rng) for rng in (3, 3))
    if where == "on its way":
        state = fz.offload(state, "opt_state", to="disk", path=tmp_path, non_blocking=True)
    with pytest.raises(fz.PlacementError, match=r"float32.*cannot be pickled.*fz.reload"):
        pickle.dumps(state.opt_state[0].mu["w"])
    again = fz.reload(copy.deepcopy(state))
    tiny.same_bits(again.opt_state, fz.reload(other).opt_state)


def test_a_copy_of_what_is_on_disk_says_that_it_was_consumed_with_the_other(tmp_path):
    plan = PLAN.replace(tiers={"opt_state": "disk"}, disk_path=str(tmp_path))
    state = fz.init(MODEL, TX, plan, devices=DEVICES)
    copied = copy.deepcopy(state)
    fz.train_step(MODEL, TX, plan, devices=DEVICES)(state, tiny.points())
    with pytest.raises(fz.StateConsumedError, match="a copy of what is on disk"):
        fz.reload(copied)


STACKED = fz.Sequential(
    [fz.Stack("blocks", 3, tiny.block_init, tiny.block)],
    loss=lambda x, batch: jnp.mean(x),
    init=({"blocks": {"w": np.ones((3, 2, 2), np.float32), "b": np.zeros((3, 2))}}, {}),
)
FILLED = {
    "data": (MODEL, PLAN, "odd", 1),
    "layers": (STACKED, tiny.plan(pipe=2, data=1, microbatches=2, partition=(1, 2)), "blocks/w", 0),
}


@pytest.mark.parametrize("name", FILLED)
def test_an_edit_that_moves_fillings_among_values_is_refused(name):
    """A layer was lost, and zeros were one."""
    model, plan, path, dim = FILLED[name]
    state = fz.init(model, None, plan, devices=DEVICES)
    for moved in (lambda x: jnp.flip(x, dim), lambda x: jnp.roll(2 * x, 1, dim)):
        edit = lambda x, moved=moved: moved(x) if x.ndim > dim else x  # noqa: E731
        with pytest.raises(fz.StateError, match=rf"replace: zeros .* params/{path} have moved"):
            state.replace(params=jax.tree.map(edit, state.params))
    # What an edit makes of the zeros where they are is nobody's concern.
    noise = jax.tree.map(lambda x: x + 1, state.params)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    first = jax.tree.map(lambda x: x.at[:1].set(0) if x.ndim else x, state.params)
    own = np.asarray(dict(state.rows).get("blocks", [0])) >= 0
    for params in (noise, zeros, first):
        kept = state.replace(params=params).params
        if own.all():
            assert kept is params
        else:  # rows that are no layers stay as they were
            tiny.same_bits(*(jax.tree.map(lambda x: np.asarray(x)[own], x) for x in (kept, params)))


def test_values_move_within_a_leaf_where_nothing_is_filled_up():
    model, plan, _, _ = FILLED["layers"]
    flat, here = plan.replace(pipe=1), DEVICES[:1]
    state = fz.init(model, None, plan, devices=DEVICES)
    one = fz.replan(state, model, None, plan, flat, devices=here)
    scale = jnp.arange(1.0, 4.0)[:, None, None]
    weights = {**one.params["blocks"], "w": (one.params["blocks"]["w"] * scale)[::-1]}
    turned = one.replace(params={"blocks": weights})
    back = fz.replan(turned, model, None, flat, plan, devices=DEVICES)
    found = fz.logical(model, back, plan)["blocks"]["w"]
    assert found[:, 0, 0].tolist() == [3, 2, 1]


@pytest.mark.parametrize(
    "options",
    [{"zero": 1, "data": 4}, {"zero": 3, "data": 8},
     {"zero": 1, "data": 4, "tiers": {"opt_state": "host"}, "update_on": "host"},
     {"pipe": 2, "data": 2, "microbatches": 2, "partition": (2, 2)}],
    ids=["a shard of each leaf", "stage 3", "on the host", "a pipeline"],
)  # fmt: skip
def test_what_an_edit_of_sums_writes_where_nothing_lies_is_not_counted(options):
    """Of leaves that are filled up; the norm clips all others."""
    chain = [fz.Layer("first", None, lambda p, batch, ctx: batch["x"]),
             fz.Stack("blocks", 3, tiny.block_init, tiny.block)]  # fmt: skip
    uneven = fz.Sequential(chain, loss=lambda x, batch: jnp.mean(x**2))
    model = uneven if "pipe" in options else MODEL
    found = []
    for plan in (fz.Plan(zero=0, data=1, clip_norm=0.1), tiny.plan(clip_norm=0.1, **options)):
        devices = jax.devices()[: plan.data * plan.pipe]
        about = (model, optax.adam(1e-2), plan)
        state, _ = fz.accumulate_step(*about, devices=devices)(
            fz.init(*about, devices=devices), tiny.points()
        )
        noise = 0.2 * float(state.grads.count)
        noisy = jax.tree.map(lambda x, noise=noise: x + noise, state.grads.sums)
        state = state.replace(grads=dataclasses.replace(state.grads, sums=noisy))
        state, metrics = fz.train_step(*about, devices=devices)(state, tiny.points())
        found.append((fz.logical(model, state, plan), metrics["grad_norm"]))
    tiny.close(*found, rtol=1e-4)  # another order of sums
