"""A disk that fails in the middle of a streamed step: the state is whole, or the error has it."""

import dataclasses
import errno
import os
from unittest import mock

import jax
import optax
import pytest
from disk_cases import bytes_held
from support import tiny

import fzero as fz
from fzero.storage.tiers import Slabs, settled, slabs_of


MODEL, TX, BATCH = tiny.chain(4), optax.adam(1e-2), tiny.tokens(8)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("disk"))
    return tiny.plan(zero=3, data=2, tiers={"opt_state": "disk"}, disk_path=path, stream_bytes=600)


@pytest.fixture(scope="module")
def step(plan):
    return fz.train_step(MODEL, TX, plan)


@pytest.fixture(scope="module")
def expected(plan, step):
    """States after two and three steps on a disk that works, on the host."""
    state, seen = fz.init(MODEL, TX, plan), []
    for _ in range(3):
        state, _ = step(state, BATCH)
        seen.append(values(state))
    assert len(step.stream.visits) > 6
    return seen[1:]


def values(state):
    return tiny.host(fz.reload(state, donate=False))


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(found[path].tobytes() == wanted[path].tobytes() for path in found)


def failing(name, code, after):
    """Requests of one kind fail after some."""
    real, seen = getattr(os, name), []

    def call(*args):
        seen.append(0)
        if len(seen) > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return mock.patch.object(os, name, call)


@pytest.mark.parametrize("after", [0, 2, 7])
@pytest.mark.parametrize(("name", "code"), [("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)])
def test_what_the_disk_does_not_take_stays_in_host_memory(plan, step, expected, name, code, after):
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    with failing(name, code, after), pytest.raises(fz.PlacementError) as caught:
        step(state, BATCH)
    said, after = str(caught.value), caught.value.state
    assert said.startswith("train_step: the step was taken, but not all of its result is on disk:")
    assert "`opt_state/0/" in said
    assert os.strerror(code) in said
    assert plan.disk_path in said
    assert "go on with this error's .state" in said
    with pytest.raises(fz.StateConsumedError):
        step(state, BATCH)
    same(values(after), expected[0])
    for moved in (fz.offload(after, to="host", donate=False),
                  fz.offload(after, to="disk", path=plan.disk_path, donate=False)):  # fmt: skip
        same(values(moved), expected[0])
    # The disk works again: the next step writes everything there.
    after, _ = step(after, BATCH)
    fz.placement(after).require(opt_state="disk")
    same(values(after), expected[1])


def test_a_failure_is_over_with_its_step(plan, step, expected):
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    with failing("pwritev", errno.EIO, 0), pytest.raises(fz.PlacementError) as caught:
        step(state, BATCH)
    after, _ = step(caught.value.state, BATCH)  # the disk works again
    fz.placement(after).require(opt_state="disk")
    same(values(after), expected[1])


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("to", ["device", "host", "disk"])
def test_leaves_of_which_the_disk_has_some_pieces_are_moved_whole(plan, to, waits):
    """Such as a disk leaves behind that fails on the way: the first piece is on the host."""
    whole = fz.init(MODEL, TX, plan)
    host = fz.offload(whole, to="host", include="opt_state", donate=False)

    def mixed(there, here):
        if not isinstance(there, Slabs):
            return there
        return dataclasses.replace(there, slabs=(here.slabs[0], *there.slabs[1:]))

    state = whole.replace(opt_state=jax.tree.map(mixed, whole.opt_state, host.opt_state))
    assert any(len({*map(type, slabs_of(leaf))}) == 2 for leaf in jax.tree.leaves(state.opt_state))
    assert fz.placement(state).disk_bytes == fz.placement(whole).disk_bytes
    with pytest.raises(fz.PlacementError, match="disk"):
        fz.placement(state).require(opt_state="host")
    options = {"include": "opt_state", "donate": False, "non_blocking": not waits}
    if to == "device":
        moved = fz.reload(state, **options)
    else:
        moved = fz.offload(state, to=to, path=plan.disk_path if to == "disk" else None, **options)
    moved = jax.block_until_ready(moved)
    fz.placement(moved).require(opt_state=to)
    for leaf in jax.tree.leaves(settled(moved.opt_state)):
        assert len({*map(type, slabs_of(leaf))}) == 1
    same(values(moved), values(whole))


def test_a_disk_that_is_full_in_the_middle(plan, expected, tmp_path):
    """A first step needs room for two chunks more, later ones have it."""
    plan = plan.replace(disk_path=str(tmp_path))
    state, step = fz.init(MODEL, TX, plan), fz.train_step(MODEL, TX, plan)
    held = bytes_held(plan.disk_path)
    with failing("posix_fallocate", errno.ENOSPC, 0), pytest.raises(fz.PlacementError) as caught:
        step(state, BATCH)
    assert "The disk is full" in str(caught.value)
    after, _ = step(caught.value.state, BATCH)
    same(values(after), expected[0])
    assert bytes_held(plan.disk_path) <= 2 * held


def test_a_first_read_that_fails_takes_no_step(plan, step, expected):
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    with failing("preadv", errno.EIO, 0), pytest.raises(fz.PlacementError) as caught:
        step(state, BATCH)
    assert "The step was not taken, and the state is as it was." in str(caught.value)
    assert "`opt_state/0/" in str(caught.value)
    state, _ = step(state, BATCH)
    same(values(state), expected[0])


def test_a_later_read_that_fails(plan, step, expected):
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    keeps = fz.train_step(MODEL, TX, plan, donate=False)
    with failing("preadv", errno.EIO, 7), pytest.raises(fz.PlacementError) as caught:
        keeps(state, BATCH)
    assert "The step was not taken, and the state is as it was." in str(caught.value)
    same(values(keeps(state, BATCH)[0]), expected[0])
    with failing("preadv", errno.EIO, 7), pytest.raises(fz.PlacementError) as caught:
        step(state, BATCH)
    assert "The update had begun" in str(caught.value)
    assert "restore a checkpoint" in str(caught.value)
    assert "donate=False" in str(caught.value)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_new_optimizers_state_that_a_disk_does_not_take_is_an_error_of_the_disk(plan, after):
    """Some of it is there, some on the host."""
    state, new = fz.init(MODEL, None, plan.replace(tiers={})), optax.adamw(1e-2)
    with (
        failing("pwritev", errno.ENOSPC, after),
        pytest.raises(fz.PlacementError, match=r"offload to disk: cannot write .*No space"),
    ):
        fz.with_optimizer(state, MODEL, None, new, plan)
    fz.placement(fz.with_optimizer(state, MODEL, None, new, plan)).require(opt_state="disk")


def test_space_does_not_grow(plan, step):
    """What a step replaces is used for what it makes next."""
    state, _ = step(fz.init(MODEL, TX, plan), BATCH)
    state, _ = step(state, BATCH)
    held = bytes_held(plan.disk_path)
    for _ in range(3):
        state, _ = step(state, BATCH)
        assert bytes_held(plan.disk_path) <= held
