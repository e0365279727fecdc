"""What a step costs the host beside the compiled program: CPU seconds per call, of many leaves.

    python benchmarks/host_overhead.py

A step of a model of many tiny leaves, next to the bare call of the same program (`step.pure` under
`jax.jit` with the state donated). Rounds of both take turns, so that what else runs on the machine
slows both; the medians of CPU time are compared, which waiting does not count in.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz


LEAVES = 300  # of parameters; with Adam's moments and counts 903 leaves of a state
ROUNDS, CALLS = 30, 10


def init(key: jax.Array) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Parameters that cost nothing to compute with."""
    return {f"w{i:03}": jnp.ones((4,)) for i in range(LEAVES)}, {}


def loss(params, buffers, batch, rng, train):  # type: ignore[no-untyped-def]
    """A sum over all."""
    total = sum(jnp.sum(leaf) for leaf in params.values())
    return fz.Mean(total * jnp.sum(batch["x"]), jnp.float32(batch["x"].size)), buffers, {}


def seconds(step, state, batch):  # type: ignore[no-untyped-def]
    """CPU seconds a call, and the state after some."""
    started = time.process_time()
    for _ in range(CALLS):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    return (time.process_time() - started) / CALLS, state


def main() -> None:
    """Prints both, and their ratio."""
    model, tx, plan = fz.Model(init, loss), optax.adam(1e-3), fz.Plan(data=1)
    step = fz.train_step(model, tx, plan)
    bare = jax.jit(step.pure, donate_argnums=0)
    batch = {"x": jax.device_put(np.ones((4, 4), np.float32))}
    states = {"fzero": fz.init(model, tx, plan), "bare": fz.init(model, tx, plan)}
    steps = {"fzero": step, "bare": bare}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:  # compiles
        _, states[name] = seconds(steps[name], states[name], batch)
    for _ in range(ROUNDS):
        for name in steps:
            spent, states[name] = seconds(steps[name], states[name], batch)
            found[name].append(spent)
    median = {name: statistics.median(times) for name, times in found.items()}
    leaves = len(jax.tree.leaves(states["fzero"]))
    sys.stdout.write(
        f"{leaves} leaves: step {1e3 * median['fzero']:.2f} ms, bare jit"
        f" {1e3 * median['bare']:.2f} ms, ratio {median['fzero'] / median['bare']:.2f}\n"
    )


if __name__ == "__main__":
    main()
