"""One process of several, for test_hosts.py: `python hosts_worker.py FOLDER WHAT`.

Started by `fzero launch`, so that it finds its world in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


def model(width: int = 4) -> fz.Model:
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        error = (batch["x"] @ p["w"] - batch["y"]) ** 2
        mask = batch["mask"] if "mask" in batch else jnp.ones(error.shape[:1])
        return fz.Mean(jnp.sum(error * mask[:, None]), mask.sum()), buffers, {}

    return fz.Model(lambda rng: ({"w": jax.random.normal(rng, (width, 2))}, {}), loss)


def batch(rows: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x[:, :2]}


def refusal(call: Any) -> str:
    """What a call says that refuses."""
    try:
        call()
    except fz.FzeroError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    world = fz.join(limit_s=float(os.environ.get("LIMIT_S", "60")))
    found = globals()[what](folder, world)
    (folder / f"{what}-{world.process_id}.json").write_text(json.dumps(found))


def dies(folder: Path, world: fz.World) -> None:
    """Trains until a process goes at step 5, in the way the environment says."""
    tx, plan, how = optax.adam(1e-2), fz.Plan(zero=1, clip_norm=1.0), os.environ["HOW"]
    state, step = fz.init(model(), tx, plan), fz.train_step(model(), tx, plan)
    for number in range(1, 10_000):
        state, metrics = step(state, batch())
        jax.block_until_ready(metrics)
        if number == 3:
            fz.save(folder / "checkpoints", state, plan, asynchronous=False)
        if number == 5 and world.process_id == int(os.environ["VICTIM"]):
            if how == "raise":
                raise ValueError("row 7 of the data is no number")
            time.sleep(0.5)  # a beat of this step
            os.kill(os.getpid(), getattr(signal, how))


if __name__ == "__main__":
    main()
