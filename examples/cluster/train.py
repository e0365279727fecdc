"""A training script for any number of processes: `fzero launch --processes 2 -- train.py OUT`.

Also under srun, torchrun and Kubernetes (the other files here). Each process reads its own rows,
all save together, and any number of processes goes on from what they saved.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


def loss(params, buffers, batch, rng, train):
    """Squared error of the rows that are real."""
    error = jnp.sum((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2, axis=1)
    return fz.Mean(jnp.sum(error * batch["real"]), batch["real"].sum()), buffers, {}


def init(rng):
    """Two weights."""
    return {"w": jax.random.normal(rng, (16, 64)) / 4, "v": jnp.zeros((64, 4))}, {}


def rows_of(process: int, step: int) -> dict[str, np.ndarray]:
    """This process's rows of a step; a real one would read its own files here."""
    x = np.random.default_rng([step, process]).normal(size=(8, 16)).astype(np.float32)
    return {"x": x, "y": x[:, :4] * 2}


def main(out: Path, num_steps: int = 20) -> None:
    """Trains, or goes on."""
    world = fz.join()  # before the first use of a device
    model, tx, plan = fz.Model(init, loss), optax.adamw(1e-2), fz.Plan(zero=3, clip_norm=1.0)
    layout, step = fz.layout(model, tx, plan), fz.train_step(model, tx, plan)
    there = (out / "checkpoints").is_dir()
    state = fz.restore(out / "checkpoints", model, tx, plan) if there else fz.init(model, tx, plan)
    for number in range(int(state.step), num_steps):
        rows = rows_of(world.process_id, number)
        state, metrics = step(state, fz.local_batch(rows, layout, mask="real"))
        if (number + 1) % 10 == 0:
            fz.check_same(state)
            fz.save(out / "checkpoints", state, plan, keep=2)
            if world.process_id == 0:
                print(f"step {number + 1}: loss {float(metrics['loss']):.6f}", flush=True)
    fz.wait(out / "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
