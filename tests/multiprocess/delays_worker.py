"""One process of several that all dawdle: `python delays_worker.py FOLDER STEPS SEED`.

A pipeline whose processes each sleep at random actions, each at others, while it trains with rows
that each process reads for itself, evaluates now and then and saves.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import xxhash


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Longer than an action of this model takes by far, so that every order of arrival comes up.
LONGEST_S = 0.02
SHARE = 0.1


def main(folder: Path, num_steps: int, seed: int) -> None:
    """Trains; without a seed nobody sleeps. Writes every loss and norm, and a hash of the end."""
    from support import tiny

    import fzero as fz

    world = fz.join()
    dice = random.Random(f"{seed} {world.process_id}")

    def dawdle(action, slots):
        if seed and dice.random() < SHARE:
            time.sleep(dice.uniform(0, LONGEST_S))

    plan = tiny.plan(pipe=4, data=1, zero=1, microbatches=4, schedule="1f1b", clip_norm=0.5)
    model, tx = tiny.chain(4), optax.adamw(1e-2)
    state, step, trace = fz.init(model, tx, plan), fz.train_step(model, tx, plan), []
    evaluate, layout = fz.eval_step(model, plan), fz.layout(model, tx, plan)
    step.executor.observer = dawdle
    for number in range(num_steps):
        own = 8 // world.num_processes
        part = slice(world.process_id * own, (world.process_id + 1) * own)
        rows = {name: x[part] for name, x in tiny.tokens(8, seed=number).items()}
        state, metrics = step(state, fz.local_batch(rows, layout))
        trace.append([float(metrics[name]).hex() for name in ("loss", "grad_norm")])
        if number % 10 == 9:
            trace.append(float(evaluate(state, tiny.tokens(8, seed=number))["loss"]).hex())
            fz.save(folder / f"checkpoints-{seed}", state, plan, keep=1)
    fz.wait(folder / f"checkpoints-{seed}")
    digest = xxhash.xxh3_64(repr(trace).encode())
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        for shard in leaf.addressable_shards:
            digest.update(np.ascontiguousarray(np.asarray(shard.data)).tobytes())
    (folder / f"end-{seed}-{world.process_id}").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
