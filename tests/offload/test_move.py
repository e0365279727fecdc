"""Moving leaves between tiers: the same tree and bits, and only what was asked for."""

import functools
import gc
import os
import re
import threading
import time
from concurrent.futures import Future
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from disk_cases import bytes_held, patch_bytes
from support import tiny

import fzero as fz
from fzero.state import offload as moves
from fzero.tree import named_leaves


MODEL, TX, BATCH = tiny.chain(2), optax.adamw(1e-2), tiny.tokens(16)
CLASSES = ("params", "compute", "opt_state", "buffers", "grads")


@functools.cache
def first(plan):
    return fz.init(MODEL, TX, plan, rng=0)


def made(**options):
    """A plan and a state of its own."""
    plan = tiny.plan(**{"data": 4, **options})
    return plan, tiny.copied(first(plan))


@functools.cache
def train_step(plan):
    return fz.train_step(MODEL, TX, plan)


@functools.cache
def accumulate_step(plan):
    return fz.accumulate_step(MODEL, TX, plan)


@functools.cache
def eval_step(plan):
    return fz.eval_step(MODEL, plan)


def tiers(state):
    return {f"{leaf.state_class}/{leaf.path}": leaf.tier for leaf in fz.placement(state).leaves}


def in_tier(state, tier):
    return {path for path, where in tiers(state).items() if where == tier}


@pytest.fixture(params=["host", "disk"])
def to(request):
    return request.param


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_there_and_back(zero, precision, tmp_path):
    plan, state = made(zero=zero, precision=precision)
    accumulate = accumulate_step(plan)
    state, _ = accumulate(state, BATCH)
    before, structure = tiny.host(state), jax.tree.structure(state)
    shardings = {path: leaf.sharding for path, leaf in named_leaves(state)}
    total = fz.placement(state).bytes_per_device["total"]

    for to in ("host", "disk"):
        parked = fz.offload(state, to=to, path=tmp_path)
        assert jax.tree.structure(parked) == structure
        where = fz.placement(parked).require(**dict.fromkeys(CLASSES, to))
        assert where.bytes_per_device["total"] == 0
        held = where.host_bytes_per_device if to == "host" else where.disk_bytes_per_device
        assert held["total"] == total

        state = fz.reload(parked)
        fz.placement(state).require(**dict.fromkeys(CLASSES, "device"))
        assert jax.tree.structure(state) == structure
        assert {path: leaf.sharding for path, leaf in named_leaves(state)} == shardings
        assert bytes_held(tmp_path) == 0
        after = tiny.host(state)
        assert all(before[path].tobytes() == after[path].tobytes() for path in before)


def test_moving_what_is_there_is_free(to, tmp_path):
    _, state = made()
    for _ in range(2):
        parked = fz.offload(state, "opt_state", to=to, path=tmp_path)
        again = fz.offload(parked, "opt_state", to=to, path=tmp_path)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (parked, again)), strict=True))
        state = fz.reload(again)
        again = fz.reload(state)
        assert all(a is b for a, b in zip(*map(jax.tree.leaves, (state, again)), strict=True))


WORDS = [
    ("params", {"params", "compute"}),
    ("master", {"params"}),
    ("hp_params", {"params"}),
    ("lp_params", {"compute"}),
    ("optim_states", {"opt_state"}),
    (["lp_grads", "buffers"], {"grads"}),
    (("opt_state", "grads"), {"opt_state", "grads"}),
]


@pytest.mark.parametrize(("include", "expected"), WORDS, ids=[str(word) for word, _ in WORDS])
def test_words(include, expected):
    plan, state = made(zero=1, precision="bf16")
    state, _ = accumulate_step(plan)(state, BATCH)
    parked = fz.offload(state, include)
    assert {path.split("/")[0] for path in in_tier(parked, "host")} == expected
    assert {path.split("/")[0] for path in in_tier(parked, "device")} == (
        {"params", "compute", "opt_state", "grads"} - expected
    )


def test_without_a_copy_the_low_precision_parameters_are_the_parameters():
    _, state = made(zero=3)
    assert in_tier(fz.offload(state, "lp_params"), "host") == {
        f"params/{path}" for path, _ in named_leaves(state.params)
    }


def test_only_leaves_that_match():
    _, state = made()
    parked = fz.offload(state, where=r"/mu/.*table$|^params/blocks")
    assert in_tier(parked, "host") == {
        "opt_state/0/mu/embed/table", "params/blocks/w", "params/blocks/b"
    }  # fmt: skip
    back = fz.reload(parked, where="table")
    assert in_tier(back, "host") == {"params/blocks/w", "params/blocks/b"}


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1.0])
def test_the_largest_leaves_until_their_share_of_the_bytes(fraction):
    _, state = made(zero=3)
    sizes = {f"{x.state_class}/{x.path}": x.bytes_per_device for x in fz.placement(state).leaves
             if x.state_class == "opt_state"}  # fmt: skip
    parked = in_tier(fz.offload(state, "opt_state", fraction=fraction), "host")
    left = {path: size for path, size in sizes.items() if path not in parked}
    total = sum(sizes.values())
    moved = total - sum(left.values())
    assert moved >= fraction * total
    if parked:
        smallest = min(sizes[path] for path in parked)
        assert moved - smallest < fraction * total or fraction == 1
        assert all(size <= smallest for size in left.values())


def test_the_source_is_given_away_and_says_to_what():
    plan, state = made()
    parked = fz.offload(state, "opt_state")
    for touch in (fz.placement, fz.reload, lambda s: train_step(plan)(s, BATCH)):
        with pytest.raises(fz.StateConsumedError, match="consumed by offload"):
            touch(state)
    back = fz.reload(parked)
    with pytest.raises(fz.StateConsumedError, match="consumed by reload"):
        fz.placement(parked)
    fz.placement(back)


def test_or_kept(to, tmp_path):
    plan, state = made()
    before = tiny.host(state)
    parked = fz.offload(state, to=to, donate=False, path=tmp_path)
    back = fz.reload(parked, donate=False)
    step = fz.train_step(MODEL, TX, plan, donate=False)
    losses = [float(step(each, BATCH)[1]["loss"]) for each in (state, back, fz.reload(parked))]
    assert len(set(losses)) == 1
    assert all(before[path].tobytes() == value.tobytes() for path, value in tiny.host(back).items())


def test_without_waiting(to, tmp_path):
    plan, state = made()
    step = train_step(plan)
    before = tiny.host(state)
    for _ in range(3):
        state = fz.offload(state, to=to, non_blocking=True, path=tmp_path)
        state = fz.reload(state, non_blocking=True)
    assert all(before[p].tobytes() == v.tobytes() for p, v in tiny.host(fz.reload(state)).items())
    plain = made()[1]
    state, metrics = step(fz.reload(fz.offload(plain, to=to, path=tmp_path)), BATCH)
    _, expected = step(made()[1], BATCH)
    assert float(metrics["loss"]) == float(expected["loss"])


def test_the_first_use_waits(tmp_path):
    plan, state = made()
    step = train_step(plan)
    expected = float(step(made()[1], BATCH)[1]["loss"])
    for tier in ("host", "disk"):
        _, state = made()
        state = fz.offload(state, to=tier, non_blocking=True, path=tmp_path)
        state = fz.reload(state, non_blocking=True)
        assert float(step(state, BATCH)[1]["loss"]) == expected


def test_a_step_refuses_parked_leaves_that_it_needs(to, tmp_path):
    plan, state = made(zero=3)
    train, evaluate = train_step(plan), eval_step(plan)
    expected = float(evaluate(state, BATCH)["loss"])
    state = fz.offload(state, "opt_state", to=to, path=tmp_path)
    with pytest.raises(fz.PlacementError) as error:
        train(state, BATCH)
    text = str(error.value)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    assert "train_step" in text
    assert f"{size:,} bytes" in text
    assert re.search(r"opt_state/0/(mu|nu)/embed/table \(" + to, text)
    assert "fz.reload(state, ['opt_state'])" in text
    # Evaluation and accumulation need no optimizer state.
    assert float(evaluate(state, BATCH)["loss"]) == expected
    state, _ = accumulate_step(plan)(state, BATCH)
    fz.placement(state).require(opt_state=to)
    state = fz.offload(state, "params", to=to, path=tmp_path)
    for use in (lambda: evaluate(state, BATCH), lambda: fz.logical(MODEL, state)):
        with pytest.raises(fz.PlacementError, match="'params'"):
            use()
    state, metrics = train(fz.reload(state), BATCH)
    assert float(metrics["loss"]) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": "optimizer"}, "'optimizer' is no field of a state"),
        ({"include": 3}, "include: 3 is no field of a state"),
        ({"include": [["params"]]}, "include: ['params'] is no field of a state"),
        ({"to": "nvme"}, "to='nvme': expected 'host' or 'disk'"),
        ({"fraction": 1.5}, "fraction=1.5: expected a share from 0 to 1"),
        ({"where": "("}, "expected a regular expression"),
        ({"where": len}, "expected a regular expression"),
        ({"where": "parms"}, "where='parms' is found in no path of what include= names"),
    ],
)
def test_refusals(arguments, message):
    _, state = made()
    with pytest.raises(fz.PlacementError, match=re.escape(message)):
        fz.offload(state, **arguments)
    fz.placement(state)


def test_a_disk_that_fails_half_way_loses_nothing(tmp_path, monkeypatch):
    plan, state = made()
    file = tmp_path / "file"
    file.write_text("")
    before = tiny.host(state)
    with pytest.raises(fz.PlacementError, match=str(file)):
        fz.offload(state, to="disk", path=file / "folder")
    assert all(before[p].tobytes() == v.tobytes() for p, v in tiny.host(state).items())
    # In the background, the failure comes with the first use, and the values are still there.
    broken = fz.offload(state, to="disk", path=file / "folder", non_blocking=True)
    with pytest.raises(fz.PlacementError, match=str(file)):
        eval_step(plan)(broken, BATCH)
    back = fz.reload(broken)
    assert all(before[p].tobytes() == v.tobytes() for p, v in tiny.host(back).items())


def test_a_damaged_file_leaves_the_rest_usable(tmp_path):
    _, state = made()
    state = fz.offload(state, "opt_state", to="disk", path=tmp_path)
    (byte,) = patch_bytes(tmp_path, 3, b"?")
    assert byte != ord("?")
    with pytest.raises(fz.PlacementError, match=r"opt_state/0/(mu|nu)/") as error:
        fz.reload(state)
    fz.placement(error.value.state).require(params="device", opt_state="disk")
    fz.reload(state, "params")


def test_memory_too_small_for_the_copy_gives_the_state_in_between(monkeypatch):
    _, state = made()
    before = tiny.host(state)
    monkeypatch.setattr(moves, "BATCH_BYTES", 1)
    put, calls = jax.device_put, []

    def limited(values, shardings):
        calls.append(len(values))
        if len(calls) == 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")
        return put(values, shardings)

    monkeypatch.setattr(jax, "device_put", limited)
    with pytest.raises(fz.PlacementError, match="RESOURCE_EXHAUSTED") as error:
        fz.offload(state)
    monkeypatch.undo()
    assert len(in_tier(error.value.state, "host")) == 3
    back = tiny.host(fz.reload(error.value.state))
    assert all(before[path].tobytes() == value.tobytes() for path, value in back.items())


def test_no_optimizer_no_problem(to, tmp_path):
    plan = tiny.plan(data=4, zero=3)
    state = fz.init(MODEL, None, plan, rng=0)
    evaluate = eval_step(plan)
    expected = float(evaluate(state, BATCH)["loss"])
    state = fz.offload(state, to=to, path=tmp_path)
    assert fz.placement(state).bytes_per_device["total"] == 0
    assert float(evaluate(fz.reload(state), BATCH)["loss"]) == expected


def odd_model():
    """Frozen, scalar, zero-size and bfloat16 leaves."""

    def init(key):
        params = {
            "base": jax.random.normal(key, (16, 16)).astype(jnp.bfloat16),
            "lora": {"a": jnp.ones((16, 2)), "b": jnp.zeros((2, 16))},
            "gain": jnp.ones(()),
            # jax 0.11 refuses leaves without elements on several CPU devices.
            "none": jnp.zeros((0 if jax.__version_info__ < (0, 11) else 1, 4)),
        }
        return params, {"seen": jnp.zeros((), jnp.int32)}

    def loss(p, buffers, batch, rng, train):
        x = batch["x"] @ (p["base"].astype(jnp.float32) + p["lora"]["a"] @ p["lora"]["b"])
        out = jnp.mean((x * p["gain"]) ** 2) + jnp.sum(p["none"])
        return out, {**buffers, "seen": buffers["seen"] + 1}, {}

    return fz.Model(init, loss, frozen=frozenset(["base"]))


@pytest.mark.parametrize("zero", [0, 3])
def test_odd_leaves(zero, to, tmp_path):
    model, tx = odd_model(), optax.adam(1e-2)
    plan = tiny.plan(zero=zero, data=4)
    batch = {"x": tiny.points(8)["x"]}
    step = fz.train_step(model, tx, plan)
    plain = moved = None
    for park in (False, True):
        state = fz.init(model, tx, plan, rng=1)
        for _ in range(2):
            if park:
                state = fz.reload(fz.offload(state, to=to, path=tmp_path))
            state, _ = step(state, batch)
        plain, moved = state, plain or state
    tiny.same_bits(plain, moved)


@pytest.mark.parametrize("zero", [1, 3])
def test_pipelines(zero, to, tmp_path):
    plan = tiny.plan(zero=zero, pipe=2, data=2, microbatches=2)
    step, evaluate = train_step(plan), eval_step(plan)
    plain, moved = (tiny.copied(first(plan)) for _ in range(2))
    for _ in range(2):
        moved = fz.reload(fz.offload(moved, to=to, path=tmp_path))
        moved, metrics = step(moved, BATCH)
        plain, expected = step(plain, BATCH)
        assert float(metrics["loss"]) == float(expected["loss"])
        moved = fz.offload(moved, "opt_state", to=to, path=tmp_path)
        assert float(evaluate(moved, BATCH)["loss"]) == float(evaluate(plain, BATCH)["loss"])
        moved = fz.reload(moved)
    tiny.same_bits(moved, plain)


def test_phases(tmp_path):
    _, state = made(zero=3)
    before = tiny.host(state)
    phases = fz.Phases(idle={"params": "host", "opt_state": "disk"})
    state = fz.enter(state, phases.generate)
    fz.placement(state).require(params="device", opt_state="host")
    state = fz.enter(state, phases.idle, path=tmp_path)
    fz.placement(state).require(params="host", opt_state="disk")
    state = fz.enter(state, phases.train)
    fz.placement(state).require(params="device", opt_state="device")
    again = fz.enter(state, phases.train)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (state, again)), strict=True))
    assert all(before[p].tobytes() == v.tobytes() for p, v in tiny.host(again).items())
    with pytest.raises(fz.PlacementError, match="expected one of"):
        fz.Phases(train={"opt_state": "hbm"})
    with pytest.raises(fz.PlacementError, match="no field of a state"):
        fz.enter(again, {"weights": "host"})
    # It was taken for the device.
    with pytest.raises(fz.PlacementError, match=r"enter: phase\['opt_state'\]='ram': expected one"):
        fz.enter(again, {"opt_state": "ram"})
    with pytest.raises(fz.PlacementError, match="enter: phase: 'idle': expected the tier of each"):
        fz.enter(again, "idle")


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_phase_makes_room_first(to, non_blocking, tmp_path, monkeypatch):
    """What leaves is gone before anything comes, whether the caller waits or not."""
    _, state = made(zero=3)
    call_back = Future._invoke_callbacks  # whoever waits for a future may wake before
    monkeypatch.setattr(
        Future, "_invoke_callbacks", lambda own: (time.sleep(0.1), call_back(own))[1]
    )
    before, events = tiny.host(state), []
    state = fz.enter(state, {"params": to}, path=tmp_path)

    def observe(event, tier, paths):
        assert all(path.startswith("params" if tier == "device" else "opt_state") for path in paths)
        if tier == "device":  # nothing of what left is on the device any more
            assert sum(x.nbytes for x in on_device if not x.is_deleted()) == 0
        events.append((tier, event))

    on_device = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    state = fz.enter(state, {"opt_state": to}, path=tmp_path, non_blocking=non_blocking,
                     observer=observe)  # fmt: skip
    tiers = [tier for tier, _ in events]
    assert tiers == sorted(tiers, reverse=True)  # host and disk, then device
    assert set(tiers) == {to, "device"}
    after = tiny.host(fz.reload(state))
    assert all(before[path].tobytes() == value.tobytes() for path, value in after.items())


def test_a_phase_with_nothing_to_bring_in_returns_at_once(tmp_path):
    _, state = made()
    returned, pwritev = threading.Event(), os.pwritev

    def late(*args):
        assert returned.wait(timeout=600)
        return pwritev(*args)

    with mock.patch.object(os, "pwritev", late):
        state = fz.enter(state, dict.fromkeys(CLASSES, "disk"), path=tmp_path, non_blocking=True)
        returned.set()
        fz.placement(fz.reload(state)).require(params="device")


def test_a_phase_whose_disk_fails_has_the_whole_state(tmp_path):
    """Non-blocking, too: it is known before anything comes."""
    _, state = made()
    before = tiny.host(state)
    state = fz.offload(state, "opt_state", to="host")
    file = tmp_path / "file"
    file.write_text("")
    for non_blocking in (False, True):
        with pytest.raises(fz.PlacementError, match=str(file)) as caught:
            fz.enter(state, {"params": "disk"}, path=file / "new", non_blocking=non_blocking)
        state = caught.value.state
        fz.placement(state).require(params="device", opt_state="host")
    after = tiny.host(fz.reload(state))
    assert all(before[path].tobytes() == value.tobytes() for path, value in after.items())


def test_a_blocking_move_waits_for_copies_before_it_releases(to, tmp_path, monkeypatch):
    """On accelerators copies are under way when `device_put` returns."""
    events, ready = [], jax.block_until_ready

    def waits(x):
        events.append("ready")
        return ready(x)

    monkeypatch.setattr(jax, "block_until_ready", waits)
    _, state = made()

    def observe(event, *_):
        events.append(event)

    for there in (True, False):
        events.clear()
        if there:
            state = fz.offload(state, to=to, path=tmp_path, observer=observe)
        else:
            state = fz.reload(state, observer=observe)
        told = [event for event in events if event != "ready"]
        assert told == ["copy", "done", "release"]
        assert "ready" in events[: events.index("done")]


def test_fifty_cycles_leave_memory_flat(tmp_path):
    def big(key):
        return {f"w{i}": jax.random.normal(key, (512, 1024)) for i in range(4)}, {}

    model = fz.Model(big, lambda p, b, batch, rng, train: (jnp.sum(p["w0"]), b, {}))
    state = fz.init(model, optax.adam(1e-3), tiny.plan(data=8), rng=0)  # 24 MiB
    process, seen, arrays = psutil.Process(), [], []
    for cycle in range(50):
        to = "disk" if cycle % 10 == 9 else "host"
        state = fz.reload(fz.offload(state, to=to, path=tmp_path))
        seen.append(process.memory_info().rss)
        arrays.append(len(jax.live_arrays()))
        gc.collect()
    assert len(set(arrays[1:])) == 1
    # The allocator keeps what it was given; a leak would be 50 times 24 MiB.
    assert max(seen[25:]) - max(seen[:25]) < 24 * 2**20
    assert bytes_held(tmp_path) == 0


def test_returning_at_once_is_at_once(tmp_path):
    """Non-blocking moves to disk return before the disk is done: here it waits for us."""
    _, state = made()
    before, returned, pwritev = tiny.host(state), threading.Event(), os.pwritev

    def late(*args):
        assert returned.wait(timeout=600)
        return pwritev(*args)

    with mock.patch.object(os, "pwritev", late):
        parked = fz.offload(state, to="disk", path=tmp_path, non_blocking=True)
        assert fz.placement(parked).bytes_per_device["opt_state"] == 0
        returned.set()
        after = tiny.host(fz.reload(parked))
    assert all(before[path].tobytes() == value.tobytes() for path, value in after.items())


def test_a_step_refuses_what_the_disk_is_still_taking(tmp_path):
    plan, state = made()
    step, returned, pwritev = train_step(plan), threading.Event(), os.pwritev
    state, _ = step(state, BATCH)

    def late(*args):
        assert returned.wait(timeout=600)
        return pwritev(*args)

    with mock.patch.object(os, "pwritev", late):
        parked = fz.offload(state, to="disk", path=tmp_path, non_blocking=True)
        try:
            with pytest.raises(fz.StateConsumedError, match=r"train_step: .* by offload"):
                step(state, BATCH)
        finally:
            returned.set()
            fz.reload(parked)


@pytest.mark.parametrize("parked", ["plan", "hand"])
def test_masters_that_only_an_update_reads_may_be_parked(parked, to, tmp_path):
    """Beside frozen parameters too, which are read in the precision of the masters."""
    model, tx, batch = odd_model(), optax.adam(1e-2), {"x": tiny.points(8)["x"]}
    plan = tiny.plan(data=4, zero=1, precision="bf16", min_shard_bytes=0)
    plain = fz.init(model, tx, plan, rng=1)
    own_plan = plan
    if parked == "plan":
        own_plan = plan.replace(tiers={"master": to, "opt_state": to}, stream_bytes=64)
        state = fz.init(model, tx, own_plan, rng=1)
    else:
        state = fz.offload(tiny.copied(plain), "master", to=to, where="lora", path=tmp_path)
    before = fz.placement(state).bytes_per_device["params"]
    found = fz.eval_step(model, own_plan)(state, batch)["loss"]
    assert found == fz.eval_step(model, plan)(plain, batch)["loss"]
    state, _ = fz.accumulate_step(model, tx, own_plan)(state, batch)
    plain, _ = fz.accumulate_step(model, tx, plan)(plain, batch)
    assert fz.placement(state).bytes_per_device["params"] == before
    tiny.same_bits(fz.reload(state, donate=False), plain)
    if parked == "plan":
        state, _ = fz.train_step(model, tx, own_plan)(state, batch)
        plain, _ = fz.train_step(model, tx, plan)(plain, batch)
        near = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(near, *(jax.device_get(x.params) for x in (fz.reload(state), plain)))
