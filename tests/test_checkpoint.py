"""Checkpoints: bit-identical under any plan, whole or not there at all."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from support import tiny

import fzero as fz
from fzero.offload.park import unpark


pytestmark = pytest.mark.quick

MODEL, TX, BATCH = tiny.chain(3), optax.adamw(1e-2), tiny.tokens(16)
PLANS = {
    "zero 0": tiny.plan(zero=0, data=8),
    "zero 3": tiny.plan(zero=3, data=8),
    "one device": tiny.plan(zero=3, data=1),
    "bf16": tiny.plan(zero=1, data=4, precision="bf16"),
    "pipeline": tiny.plan(zero=3, pipe=2, data=2, microbatches=2),
    "tiers": tiny.plan(zero=3, data=4, tiers={"opt_state": "host"}, stream_bytes=300),
}
KILLS = 200 if os.environ.get("FZERO_NIGHTLY") else 20
WAYS = [
    ("zero 3", "zero 0"),
    ("zero 0", "zero 3"),
    ("zero 3", "one device"),
    ("one device", "pipeline"),
    ("pipeline", "zero 3"),
    ("zero 3", "bf16"),
    ("bf16", "zero 0"),
    ("tiers", "zero 3"),
    ("zero 0", "tiers"),
    ("pipeline", "tiers"),
    ("tiers", "tiers"),
    ("zero 3", "zero 3"),
]


@pytest.fixture(scope="module")
def states():
    """A state of each plan after a step."""
    found = {}

    def get(name):
        if name not in found:
            step = fz.train_step(MODEL, TX, PLANS[name])
            found[name], _ = step(fz.init(MODEL, TX, PLANS[name], rng=3), BATCH)
        return found[name]

    return get


@pytest.mark.parametrize(("old", "new"), WAYS)
def test_the_same_bits_under_another_plan(old, new, states, tmp_path):
    before, plan = states(old), PLANS[new]
    fz.save(tmp_path, before, PLANS[old], data_position={"epoch": 1, "row": 64})
    after = fz.restore(tmp_path, MODEL, TX, plan)
    expected = fz.replan(before, MODEL, TX, PLANS[old], plan)
    assert jax.tree.structure(after) == jax.tree.structure(expected)
    tiny.same_bits(jax.tree.map(unpark, after), jax.tree.map(unpark, expected))
    shardings = [[x.sharding for x in jax.tree.leaves(s)] for s in (after, expected)]
    assert shardings[0] == shardings[1]
    about = fz.checkpoint(tmp_path)
    assert (about.number, about.step, about.plan) == (0, 1, PLANS[old])
    assert about.data_position == {"epoch": 1, "row": 64}


@pytest.mark.parametrize("name", ["zero 3", "pipeline", "tiers"])
def test_training_goes_on_as_if_nothing_had_been(name, tmp_path):
    plan = PLANS[name]
    step, add = fz.train_step(MODEL, TX, plan), fz.accumulate_step(MODEL, TX, plan)
    state, _ = step(fz.init(MODEL, TX, plan, rng=3), BATCH)
    state, _ = add(state, tiny.tokens(16, seed=1))  # in the middle of an accumulation
    fz.save(tmp_path, state, plan)
    state, straight = step(state, tiny.tokens(16, seed=2))
    again, resumed = step(fz.restore(tmp_path, MODEL, TX, plan), tiny.tokens(16, seed=2))
    assert {k: float(v) for k, v in straight.items()} == {k: float(v) for k, v in resumed.items()}
    tiny.same_bits(jax.tree.map(unpark, state), jax.tree.map(unpark, again))


def test_the_newest_are_kept_and_numbered(states, tmp_path):
    state = states("zero 3")
    numbers = [fz.save(tmp_path, state, PLANS["zero 3"], keep=2, data_position=i) for i in range(4)]
    assert numbers == [0, 1, 2, 3]
    assert fz.checkpoint(tmp_path).data_position == 3
    assert fz.checkpoint(tmp_path, 2).data_position == 2
    with pytest.raises(fz.CheckpointError, match=r"expected a checkpoint 0 .* found \[2, 3\]"):
        fz.restore(tmp_path, MODEL, TX, PLANS["zero 3"], number=0)


def test_parameters_alone(states, tmp_path):
    fz.save(tmp_path, states("zero 3"), PLANS["zero 3"])
    state = fz.restore(tmp_path, MODEL, None, PLANS["zero 0"])
    tiny.same_bits(fz.logical(MODEL, state), fz.logical(MODEL, states("zero 3")))
    assert np.isfinite(float(fz.eval_step(MODEL, PLANS["zero 0"])(state, BATCH)["loss"]))


def test_refusals(states, tmp_path):
    plan = PLANS["zero 3"]
    with pytest.raises(fz.CheckpointError, match="found none"):
        fz.restore(tmp_path, MODEL, TX, plan)
    fz.save(tmp_path, states("zero 3"), plan)
    with pytest.raises(
        fz.CheckpointError, match=r"opt_state/0/nu/blocks/b: in the checkpoint only"
    ):
        fz.restore(tmp_path, MODEL, optax.sgd(0.1), plan)
    with pytest.raises(
        fz.CheckpointError, match=r"blocks/w: expected \[4, 16, 16\], .* \[3, 16, 16\]"
    ):
        fz.restore(tmp_path, tiny.chain(4), TX, plan)
    parked = fz.offload(states("zero 3"), "opt_state", donate=False)
    with pytest.raises(fz.PlacementError, match="save: "):
        fz.save(tmp_path, parked, plan)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(fz.CheckpointError, match="file"):
        fz.save(blocked / "run", states("zero 3"), plan, asynchronous=False)
    assert fz.checkpoint(tmp_path).number == 0


def test_a_position_that_json_cannot_hold_is_refused_at_once(states, tmp_path):
    with pytest.raises(fz.CheckpointError, match=r"data_position: expected .* got \{'rows': \{1"):
        fz.save(tmp_path / "run", states("zero 3"), PLANS["zero 3"], data_position={"rows": {1}})
    assert not (tmp_path / "run").exists()


def test_skipped_steps_are_counted_on_in_another_precision(tmp_path):
    old = tiny.plan(zero=3, data=8, precision="fp16")
    new = old.replace(precision="bf16", skip_nonfinite=True)
    state = fz.init(MODEL, TX, old)
    scale = dataclasses.replace(state.loss_scale, skipped=state.loss_scale.skipped + 3)
    fz.save(tmp_path, state.replace(loss_scale=scale), old)
    after = fz.restore(tmp_path, MODEL, TX, new)
    assert (int(after.loss_scale.skipped), float(after.loss_scale.scale)) == (3, 1.0)


EXIT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
from tests.support import tiny
import fzero as fz
model, plan = tiny.chain(3), tiny.plan(zero=3, data=4)
fz.save(sys.argv[1], fz.init(model, None, plan), plan, data_position="last words")
"""


def python(code, path, **options):
    """A process with our paths."""
    root = Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True,
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, **options,
    )  # fmt: skip


def test_the_end_of_the_process_waits_for_the_writer(tmp_path):
    child = python(EXIT, tmp_path, stderr=subprocess.PIPE)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert fz.checkpoint(tmp_path).data_position == "last words"


# Starts a writer whenever it is told to: a fork of a process that has imported everything and
# started nothing. The writer goes on from the newest checkpoint until it is killed.
NURSERY = """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import optax
from tests.support import tiny
import fzero as fz

def write():
    model, tx, plan = tiny.chain(3), optax.adamw(1e-2), tiny.plan(zero=3, data=4)
    state = fz.restore(sys.argv[1], model, tx, plan)
    while True:
        state = state.replace(step=state.step + 1)
        fz.save(sys.argv[1], state, plan, data_position=int(state.step), keep=3)
        print(int(state.step), flush=True)

for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        write()
    print("writer", child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def said(child, word):
    """Lines of a process up to the first that begins with a word."""
    lines = [child.stdout.readline().split()]
    while lines[-1][0] != word:
        lines.append(child.stdout.readline().split())
    return lines


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(tmp_path):
    """A killed process leaves complete checkpoints only, and the next one goes on after them."""
    random = np.random.default_rng(0)
    model, plan = tiny.chain(3), tiny.plan(zero=3, data=4)
    first = fz.init(model, TX, plan, rng=3)
    expected, newest = tiny.host(first.params), fz.save(tmp_path, first, plan, data_position=0)
    fz.wait(tmp_path)
    nursery = python(NURSERY, tmp_path, stdin=subprocess.PIPE)
    reached = 0
    for _ in range(KILLS):
        nursery.stdin.write("another\n")
        nursery.stdin.flush()
        writer = int(said(nursery, "writer")[-1][1])
        begun = int(nursery.stdout.readline())  # the first is being written
        time.sleep(float(random.uniform(0, 0.3)))
        os.kill(writer, signal.SIGKILL)
        steps = [begun, *(int(line[0]) for line in said(nursery, "gone")[:-1])]
        about = fz.checkpoint(tmp_path)
        # `save` waits for the one before, so all but the last one begun are there.
        assert about.number >= newest
        assert max(steps) - 1 <= about.step <= max(steps) + 1
        assert about.step == about.data_position >= reached
        newest, reached = about.number, about.step
        state = fz.restore(tmp_path, model, TX, plan)
        assert int(state.step) == about.step
        found = tiny.host(state.params)
        assert all(expected[path].tobytes() == found[path].tobytes() for path in expected)
    nursery.stdin.close()
    assert nursery.wait(timeout=60) == 0
    assert newest >= KILLS / 4
