"""The example under Ray Train, really: the bits of `fzero launch`, and a lost worker's run goes on.

Takes Ray, which `make nightly-ray` installs into an environment of its own.
"""

from __future__ import annotations

import importlib.util
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

import fzero as fz


CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
RAY = importlib.util.find_spec("ray")
# Ray's own start, twice, on a machine that does other things, too.
LIMIT_S = 3600

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(RAY is None, reason="Ray is not installed: make nightly-ray has it"),
]


def environ(home: Path) -> dict[str, str]:
    return {
        **os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "HOME": str(home),
        "RAY_TRAIN_V2_ENABLED": "1", "RAY_TMPDIR": "/tmp",  # sockets' paths have to be short
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default 15: hardly a turn on a machine that is busy
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip


def under_ray(out: Path, num_steps: int) -> subprocess.Popen[bytes]:
    """Two workers of a device each."""
    out.mkdir()
    command = [sys.executable, CLUSTER / "ray_train.py", out, "2", str(num_steps)]
    with (out / "ray.log").open("wb") as log:
        return subprocess.Popen(command, env=environ(out), stdout=log, stderr=log)


def ended(out: Path, driver: subprocess.Popen[bytes]) -> str:
    """What was said until the end."""
    try:
        code = driver.wait(LIMIT_S)
    finally:
        driver.kill()
    said = (out / "ray.log").read_text(errors="replace")
    assert code == 0, said[-6000:]
    return said


def weights(out: Path, step: int) -> dict[str, np.ndarray]:
    """Of the newest checkpoint, which is of that step."""
    sys.path.insert(0, str(CLUSTER))
    try:
        import train
    finally:
        sys.path.remove(str(CLUSTER))
    there, plan = out / "checkpoints", fz.Plan(zero=3, data=2, clip_norm=1.0)
    assert fz.checkpoint(there).step == step
    model = fz.Model(train.init, train.loss)
    state = fz.restore(there, model, optax.adamw(1e-2), plan, devices=jax.devices()[:2])
    return {name: np.asarray(value) for name, value in fz.logical(model, state).items()}


def workers_of(pid: int) -> list[int]:
    """Ray's workers that train, of all that a driver started."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        title = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace")
        found += [int(child)] if "RayTrainWorker" in title else workers_of(int(child))
    return found


def test_two_workers_of_ray_have_the_bits_of_launch(tmp_path):
    ended(tmp_path / "ray", under_ray(tmp_path / "ray", 20))
    out = tmp_path / "launch"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "fzero.cli", "launch", "--processes", "2", "--",
         CLUSTER / "train.py", out],
        env=environ(out), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    expected = weights(out, 20)
    for name, value in weights(tmp_path / "ray", 20).items():
        assert value.tobytes() == expected[name].tobytes(), name


def test_ray_starts_all_workers_again_where_one_was_killed(tmp_path):
    """And they go on from the newest checkpoint: the bits of a run that nobody killed."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    ended(straight, under_ray(straight, 60))
    driver = under_ray(killed, 60)
    deadline = time.monotonic() + LIMIT_S
    try:
        while not any(p.name.isdigit() for p in (killed / "checkpoints").glob("*")):
            assert driver.poll() is None, (killed / "ray.log").read_text()[-6000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        victims = workers_of(driver.pid)
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
    except BaseException:
        driver.kill()
        raise
    said = ended(killed, driver)
    # It may end the other worker before that one has said which was lost.
    assert "Error count: 1" in said
    expected = weights(straight, 60)
    for name, value in weights(killed, 60).items():
        assert value.tobytes() == expected[name].tobytes(), name
