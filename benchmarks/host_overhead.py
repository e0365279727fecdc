"""What a step costs the host beside the compiled program: CPU seconds per call, of many leaves.

    python benchmarks/host_overhead.py --json benchmarks/results/host_overhead.json

A step of a model of many tiny leaves, next to the bare call of the same program (`step.pure` under
`jax.jit` with the state donated). Rounds of both take turns, so that what else runs on the machine
slows both; the medians of CPU time are compared, which waiting does not count in.
"""

from __future__ import annotations

import argparse
import statistics
import time

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

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


def measure() -> dict[str, float]:
    """Both medians, and of how many leaves."""
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
    medians = {f"{name}_s": statistics.median(times) for name, times in found.items()}
    return {"leaves": len(jax.tree.leaves(states["fzero"])), **medians}


def main() -> None:
    """Prints both, and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", help="write the figures there, and the table beside it")
    given = parser.parse_args()
    before, found = common.provenance(), measure()
    found["ratio"] = found["fzero_s"] / found["bare_s"]
    cells = (*(f"{1e3 * found[name]:.2f} ms" for name in ("fzero_s", "bare_s")),)
    grid = common.Grid(
        "CPU seconds of a call", ("leaves", "step", "bare jit", "ratio"),
        [(str(found["leaves"]), *cells, f"{found['ratio']:.2f}")],
    )  # fmt: skip
    Console().print(grid.rich())
    if given.json:
        common.save(given.json, {"before": before, **found, "after": common.provenance()}, grid)


if __name__ == "__main__":
    main()
