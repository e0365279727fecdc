"""Two processes of four devices, or four of two, compute the same bits as one process of eight.

Real processes on loopback with gloo between them, exactly as `jax.distributed` is used on hosts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paired
import pytest
from one_process import AXES, CASES, CHECKPOINTED, ORDERS, USUAL, WIDE_BY_FOUR, train_all
from support import quick, tiny

import fzero as fz
from fzero.cli.launch import reserved_port
from fzero.processes import jit_on
from fzero.tree import named_leaves


WORKER = Path(__file__).with_name("one_process.py")
# Each process compiles a dozen programs, on a machine that runs other things too.
TIMEOUT_S = 3600


def run(
    folder: Path,
    num_processes: int,
    first_process: int = 0,
    cases: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[dict[str, np.ndarray]]:
    """What every process wrote. All of them are ended when one fails or time is up."""
    env = {**(environ or os.environ), "JAX_PLATFORMS": "cpu", "PYTHONFAULTHANDLER": "1"}
    # A cache that both processes write could hide that they compiled different programs.
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    children, outputs = [], []
    with reserved_port() as port:
        try:
            for process in range(first_process, first_process + num_processes):
                out = folder / f"{process}.npz"
                log = open(out.with_suffix(".log"), "w")  # noqa: SIM115 (open while the child runs)
                args = [WORKER, out, process, num_processes, port, *cases]
                command = [sys.executable, *map(str, args)]
                children.append((subprocess.Popen(command, env=env, stdout=log, stderr=log), log))
                outputs.append(out)
            wait(children, outputs)
        finally:
            for child, log in children:
                child.kill()
                child.wait()
                log.close()
    results = []
    for out in outputs:
        with np.load(out) as data:
            results.append({name: data[name] for name in data.files})
    return results


def wait(children, outputs) -> None:
    """Until all have ended well; fails with every process's own words otherwise."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        codes = [child.poll() for child, _ in children]
        if all(code == 0 for code in codes):
            return
        failed = any(code not in (None, 0) for code in codes)
        if failed or time.monotonic() > deadline:
            why = "a process failed" if failed else f"not done after {TIMEOUT_S} s"
            for code, out in zip(codes, outputs, strict=True):
                said = out.with_suffix(".log").read_text()[-6000:]
                why += f"\n--- process {out.stem} (exit {code}) ---\n{said}"
            pytest.fail(why, pytrace=False)
        time.sleep(0.05)


def joined(results: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Shards of all processes; metrics are every process's own copy and must be equal."""
    whole = dict(results[0])
    for one in results[1:]:
        for name, value in one.items():
            if "@" not in name:
                assert value.tobytes() == whole[name].tobytes(), name
            whole[name] = value
    return whole


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """What this one process has."""
    return train_all(tmp_path_factory.mktemp("one"), USUAL)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes have, and their checkpoints."""
    folder = tmp_path_factory.mktemp("two")
    return joined(run(folder, 2, cases=USUAL)), folder / "checkpoints"


def of_case(case: str, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v for k, v in found.items() if k.startswith(f"{case}:")}


def same_bits(case: str, one: dict[str, np.ndarray], several: dict[str, np.ndarray]) -> None:
    """Losses, norms, and every shard of parameters and optimizer state, on the same device."""
    one, several = of_case(case, one), of_case(case, several)
    assert one.keys() == several.keys()
    assert {int(name.split("@")[1]) for name in one if "@" in name} == set(range(8))
    trace = one[f"{case}:trace"]
    assert trace[3, 0] < trace[0, 0]  # the same batch again, three steps later
    # Clipping was at work, so that the norm went into every parameter.
    assert np.all(trace[:, 1] > (paired.CLIP_NORM if case in paired.PAIRED else 0.5)), trace
    for name, value in one.items():
        found = several[name]
        if ":last " in name:  # of rows that are padded elsewhere
            np.testing.assert_allclose(value, found, rtol=1e-6, err_msg=name)
            continue
        if found.dtype == np.dtype("V2"):  # bfloat16 in a file of numpy's
            found = found.view(jnp.bfloat16)
        assert value.dtype == found.dtype
        np.testing.assert_array_equal(value, found, err_msg=name)
        assert value.tobytes() == found.tobytes(), name


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("case", USUAL)
def test_two_processes_give_the_bits_of_one(one, two, case):
    """Also where stages hand on to another process."""
    same_bits(case, one, two[0])


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("processes", [2, 4])
def test_every_two_choices_of_a_pipeline_meet_over_processes(tmp_path, processes):
    """Schedules, stages of ZeRO, places, tiers, precisions, own rows, accumulation, what follows.

    And further axes. Of four processes, most have no device of most stages: they run none of their
    programs. One start for all, as starts are what costs.
    """
    bits_of_one(tmp_path, processes, [*paired.of(processes), *AXES], os.environ)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.as_users
@pytest.mark.parametrize(
    ("processes", "cases"), [(2, [*CASES, *CHECKPOINTED]), (4, paired.of(4)[:3])]
)
def test_processes_give_the_bits_of_one_as_users_compile(tmp_path, processes, cases):
    """Quick programs add otherwise: three other schedules and places, flat plans, checkpoints."""
    alone = bits_of_one(tmp_path, processes, cases, quick.environment_of_users())
    for case in CHECKPOINTED.keys() & set(cases):
        restored_by_one(case, alone, tmp_path / "checkpoints")


def bits_of_one(folder, processes, cases, environ) -> dict[str, np.ndarray]:
    """What one process has, which is what several have."""
    several = joined(run(folder, processes, cases=cases, environ=environ))
    (folder / "one").mkdir()
    alone = train_all(folder / "one" / "checkpoints", cases)
    for case in cases:
        same_bits(case, alone, several)
    return alone


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.as_users
def test_further_axes_over_four_processes_agree_to_rounding(tmp_path):
    """Sums over such an axis are XLA's own, and gloo adds in the order of its rings."""
    users = quick.environment_of_users()
    several = joined(run(tmp_path, 4, cases=[*WIDE_BY_FOUR], environ=users))
    alone = train_all(tmp_path / "one", [*WIDE_BY_FOUR])
    assert alone.keys() == several.keys()
    for name, value in alone.items():
        # 1.5e-6 of the largest was seen, in second moments; Adam's division lets parameters whose
        # gradients are nearly nothing differ by more than a rounding.
        far = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(value, several[name], rtol=0, atol=far, err_msg=name)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_write_one_checkpoint(one, two):
    """Each wrote its own shards (and found them again); one process restores the whole."""
    _, checkpoints = two
    model, tx, plan = tiny.chain(), optax.adamw(1e-2), tiny.plan(**CASES["zero3"])
    about = fz.checkpoint(checkpoints)
    assert (about.step, about.data_position, about.plan) == (4, 4, plan)
    state = fz.restore(checkpoints, model, tx, plan)
    order = {device: number for number, device in enumerate(plan.mesh().devices.flat)}
    for name in ("params", "opt_state"):
        for path, leaf in named_leaves(getattr(state, name)):
            for shard in leaf.addressable_shards:
                expected = one[f"zero3:{name}/{path}@{order[shard.device]}"]
                assert np.asarray(shard.data).tobytes() == expected.tobytes(), path


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_pipeline_over_processes_writes_what_one_process_restores(one, two):
    restored_by_one("zb_v", one, two[1])


def restored_by_one(case, one, checkpoints) -> None:
    """Leaves at home on one rank, under the same plan and without ranks."""
    checkpoints = checkpoints.with_name(case)
    model, tx, plan = tiny.chain(), optax.adamw(1e-2), tiny.plan(**CHECKPOINTED[case])
    devices = [jax.devices()[i] for i in ORDERS.get(case, range(8))]
    state = fz.restore(checkpoints, model, tx, plan, devices=devices)
    for name in ("params", "opt_state"):
        for path, leaf in named_leaves(getattr(state, name)):
            for shard in leaf.addressable_shards:
                expected = one[f"{case}:{name}/{path}@{devices.index(shard.device)}"]
                assert np.asarray(shard.data).tobytes() == expected.tobytes(), path
    other = fz.restore(checkpoints, model, tx, tiny.plan(zero=1, data=2))
    tiny.same_bits(
        fz.logical(model, other), fz.logical(model, state, tiny.plan(**CHECKPOINTED[case]))
    )


@pytest.mark.multiprocess
def test_what_others_compute_has_the_dtype_of_each_call(monkeypatch):
    monkeypatch.setattr("fzero.processes.at_home", lambda mesh: False)
    monkeypatch.setattr(
        "fzero.processes.joined",
        lambda shape, to, arrays, dtype: jax.ShapeDtypeStruct(shape, dtype),
    )
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    twice = jit_on(mesh, lambda x: 2 * x)
    for dtype in (np.float32, np.int32):
        assert twice(np.zeros(3, dtype)) == jax.ShapeDtypeStruct((3,), dtype)


def test_a_failing_process_is_reported_with_its_own_words(tmp_path):
    """Nothing hangs, and what the process said is shown."""
    # The only process of one says that it is number 7.
    said = r"a process failed(.|\n)*HostsError: join: .*got process 7 of 1"
    with pytest.raises(pytest.fail.Exception, match=said):
        run(tmp_path, 1, first_process=7)
