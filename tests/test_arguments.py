"""Every public function that takes a state leaves it as it is, unless it says that it consumes it.

One table: functions x where the state's leaves are. What is given is the same afterwards: the same
leaves, none of them deleted, every bit.
"""

import functools
import inspect

import jax
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.sharding.park import unpark


MODEL, TX, BATCH = tiny.chain(2), optax.adam(1e-2), tiny.tokens(4)
PLAIN = tiny.plan(zero=3, data=2, ema=0.9)


@functools.cache
def plans(folder):
    parked = {"stream_bytes": 300, "disk_path": folder}
    return {
        "plain": PLAIN,
        "host": PLAIN.replace(tiers={"opt_state": "host"}, **parked),
        "brought back": PLAIN.replace(tiers={"opt_state": "host"}, **parked),
        "disk": PLAIN.replace(tiers={"opt_state": "disk"}, **parked),
        "pipeline": PLAIN.replace(pipe=2, microbatches=2, **parked),
    }


@functools.cache
def made(kind, folder):
    """A plan, and one state for all functions: none of them may change it."""
    plan = plans(folder)[kind]
    state = fz.init(MODEL, TX, plan)
    return plan, fz.reload(state) if kind == "brought back" else state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("arguments"))


def replanned(state, plan, **changes):
    return fz.replan(state, MODEL, TX, plan, plan.replace(**changes))


def stepped(factory, state, plan):
    return factory(MODEL, TX, plan, donate=False)(state, BATCH)


def saved(state, plan, folder):
    fz.save(f"{folder}/saved", state, plan)
    fz.wait(f"{folder}/saved")


# By name, or name and case: what is called. Consuming functions are called so that they do not.
CASES = {
    "replan, the same": lambda s, p, f: replanned(s, p),
    "replan, another stage": lambda s, p, f: replanned(s, p, zero=1),
    "replan, to the host": lambda s, p, f: replanned(s, p, tiers={"opt_state": "host"}),
    "replan, to the disk": lambda s, p, f: replanned(s, p, tiers={"opt_state": "disk"}),
    "replan, to the device": lambda s, p, f: replanned(s, p, tiers={}),
    "offload, to the host": lambda s, p, f: fz.offload(s, to="host", donate=False),
    "offload, to the disk": lambda s, p, f: fz.offload(s, to="disk", path=f, donate=False),
    "reload": lambda s, p, f: fz.reload(s, donate=False),
    "enter, host": lambda s, p, f: fz.enter(s, fz.Phases().idle, donate=False),
    "enter, disk": lambda s, p, f: fz.enter(s, {"params": "disk"}, path=f, donate=False),
    "save": saved,
    "logical": lambda s, p, f: fz.logical(MODEL, s, p),
    "with_optimizer": lambda s, p, f: fz.with_optimizer(s, MODEL, TX, optax.sgd(0.1), p),
    "eval_params": lambda s, p, f: fz.eval_params(s, MODEL, TX, p, lambda opt, params: params),
    "averaged": lambda s, p, f: fz.averaged(s, MODEL, p),
    "check_same": lambda s, p, f: fz.check_same(s),
    "check_finite": lambda s, p, f: fz.check_finite(s),
    "placement": lambda s, p, f: str(fz.placement(s)),
    "train_step": lambda s, p, f: stepped(fz.train_step, s, p),
    "accumulate_step": lambda s, p, f: stepped(fz.accumulate_step, s, p),
    "eval_step": lambda s, p, f: fz.eval_step(MODEL, p)(s, BATCH),
    "predict_step": lambda s, p, f: fz.predict_step(MODEL, p)(s, BATCH),
}
CASES = {name: case for name, case in CASES.items() if hasattr(fz, name.split(",")[0])}


def test_the_table_is_complete():
    """Functions of fzero with an argument for a state, and makers of steps."""
    takes = {
        name
        for name, function in ((name, getattr(fz, name)) for name in dir(fz))
        if inspect.isfunction(function)
        and not name.startswith("_")
        and any(x.startswith("state") for x in (name, *inspect.signature(function).parameters))
    }
    takes |= {name for name in dir(fz) if name.endswith("_step")}
    assert takes == {name.split(",")[0] for name in CASES}, "add what is missing to CASES"


@pytest.mark.parametrize("kind", ["plain", "host", "brought back", "disk", "pipeline"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_given_stays(case, kind, folder):
    plan, state = made(kind, folder)
    leaves = jax.tree.leaves(state)
    before = tiny.host(jax.tree.map(unpark, state))
    result = CASES[case](state, plan, folder)
    jax.block_until_ready(result)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), leaves, strict=True))
    assert not any(leaf.is_deleted() for leaf in leaves)
    fz.placement(state)  # nor is it said to be consumed
    after = tiny.host(jax.tree.map(unpark, state))
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)
