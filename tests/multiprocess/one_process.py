"""One process of several: trains a small model and writes what it has to a file.

`python one_process.py OUT PROCESS NUM_PROCESSES PORT`; all processes together have eight devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import optax


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The whole global batch goes to every process; each keeps its own rows.
CASES = {
    "zero0": {"zero": 0, "microbatches": 2, "clip_norm": 0.5},
    "zero3": {"zero": 3, "microbatches": 2, "clip_norm": 0.5},
    # Groups within a process, their replicas in two: only shards cross.
    "replica2": {"zero": 2, "replica": 2, "clip_norm": 0.5},
    # 16-bit weights and gradients cross.
    "bf16": {"zero": 3, "precision": "bf16", "clip_norm": 0.5},
    # Weights cross once, in 8 bits. A single process has one host, so no secondary shard.
    "sparing": {"zero": 3, "gather_dtype": "int8", "secondary": "host", "clip_norm": 0.5},
}
# A pipeline as one program. The two processes are its two ranks.
PIPELINES = {
    "spmd": {"pipe": 2, "data": 4, "pipe_backend": "spmd", **CASES["zero3"]},
}
NUM_DEVICES = 8


def train(case: str, checkpoints: Path) -> dict[str, np.ndarray]:
    """Losses, gradient norms, and this process's shards of every leaf by device and position."""
    from support import tiny

    import fzero as fz
    from fzero.blueprint import secondary_size
    from fzero.tree import named_leaves

    choice = {**CASES, **PIPELINES}[case]
    model, tx, plan = tiny.chain(), optax.adamw(1e-2), tiny.plan(**choice)
    if plan.secondary == "host":
        alone = jax.process_count() == 1
        assert secondary_size(plan, NUM_DEVICES, jax.devices()) == (0 if alone else 4)
    state = fz.init(model, tx, plan, rng=0)
    step, trace = fz.train_step(model, tx, plan), []
    for seed in (0, 1, 2, 0):
        state, metrics = step(state, tiny.tokens(16, seed=seed))
        trace.append([np.asarray(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    out = {"trace": np.array(trace)}
    if case == "zero3":
        out["eval"] = np.asarray(fz.eval_step(model, plan)(state, tiny.tokens(16))["loss"])
        fz.save(checkpoints, state, plan, data_position=4)
        fz.wait(checkpoints)
        restored = fz.restore(checkpoints, model, tx, plan)
        tiny.same_shards(restored, state)
    order = {device: number for number, device in enumerate(plan.mesh().devices.flat)}
    for name in ("params", "opt_state"):
        for path, leaf in named_leaves(getattr(state, name)):
            for shard in leaf.addressable_shards:
                out[f"{name}/{path}@{order[shard.device]}"] = np.asarray(shard.data)
    return out


def train_all(checkpoints: Path) -> dict[str, np.ndarray]:
    """`train` of every case, under `case:name`."""
    cases = [*CASES, *PIPELINES]
    return {
        f"{case}:{name}": leaf for case in cases for name, leaf in train(case, checkpoints).items()
    }


def main() -> None:
    """Joins the other processes, trains, writes."""
    out, process, num_processes, port = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // int(num_processes))
    jax.distributed.initialize(
        f"127.0.0.1:{port}", int(num_processes), int(process), initialization_timeout=60
    )
    assert len(jax.devices()) == NUM_DEVICES
    from support import quick

    with quick.compiles():
        np.savez(out, **train_all(Path(out).with_name("checkpoints")))


if __name__ == "__main__":
    main()
