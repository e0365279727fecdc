"""One process of several: trains a small model and writes what it has to a file.

`python one_process.py OUT PROCESS NUM_PROCESSES PORT CASE...`; all processes together have eight
devices.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The whole global batch goes to every process; each keeps its own rows.
CASES = {
    "zero3": {"zero": 3, "microbatches": 2, "clip_norm": 0.5},
    # Groups within a process, their replicas in two: only shards cross, in 16 bits. (Stage 0 in
    # float32, where whole gradients cross, is the pipeline `spanning`.)
    "replica2": {"zero": 2, "replica": 2, "precision": "bf16", "clip_norm": 0.5},
    # Weights cross once, in 8 bits. A single process has one host, so no secondary shard.
    "sparing": {"zero": 3, "gather_dtype": "int8", "secondary": "host", "clip_norm": 0.5},
    "flat_disk": {
        "zero": 2,
        "microbatches": 2,
        "clip_norm": 0.5,
        "precision": "bf16",
        "tiers": {"opt_state": "disk", "master": "host"},
    },
}
# Pipelines. The model's head reads the embedding's table.
CHECKPOINTED = {
    # A rank for each process.
    "zb_v": {"pipe": 2, "data": 4, "zero": 3, "microbatches": 4, "schedule": "zb_v",
             "clip_norm": 0.5},
    # Every rank in both processes.
    "spanning": {"pipe": 2, "data": 2, "replica": 2, "zero": 0, "microbatches": 2,
                 "schedule": "interleaved", "clip_norm": 0.5},
}  # fmt: skip
FURTHER = ("tensor", "context", "expert")
# Those above that `make test` runs.
USUAL = ("zero3", "zb_v")
# Further axes of pipelines, a rank for each of two processes; and in two of four, each with all of
# the axis.
AXES = {axis: {"pipe": 2, "data": 2, axis: 2, "zero": 3, "microbatches": 2, "clip_norm": 0.5}
        for axis in FURTHER}  # fmt: skip
# A further axis over all four processes, whose sums gloo adds in its own order.
WIDE_BY_FOUR = {
    f"{axis}_wide": {"data": 2, axis: 4, "zero": 3, "microbatches": 2, "clip_norm": 0.5}
    for axis in FURTHER
}
# Devices in another order than jax's.
ORDERS = {
    "spanning": [0, 4, 1, 5, 2, 6, 3, 7],
    **{name: [0, 2, 4, 6, 1, 3, 5, 7] for name in WIDE_BY_FOUR},
}
NUM_DEVICES = 8


def train(case: str, checkpoints: Path) -> dict[str, np.ndarray]:
    """Losses, gradient norms, and this process's shards of every leaf by device and position."""
    import paired
    from support import axes, tiny

    import fzero as fz
    from fzero.sharding.group import secondary_size
    from fzero.tree import named_leaves

    print(case, flush=True)  # shown where something hangs
    one = paired.PAIRED.get(case)
    own, accumulated = one and one.rows == "local", one and one.updates == "accumulate"
    wide = case in AXES or case in WIDE_BY_FOUR
    if one:
        plan, model, order = paired.plan(one), tiny.chain(paired.layers(one)), paired.order(one)
    else:
        known = {**CASES, **CHECKPOINTED, **AXES, **WIDE_BY_FOUR}
        plan, model = tiny.plan(**known[case]), axes.chain() if wide else tiny.chain()
        order = ORDERS.get(case, range(NUM_DEVICES))
    tx, rows_of = optax.adamw(1e-2), axes.tokens if wide else tiny.tokens
    devices = [jax.devices()[i] for i in order]
    if plan.secondary == "host":
        alone = jax.process_count() == 1
        assert secondary_size(plan, NUM_DEVICES, jax.devices()) == (0 if alone else 4)
    state = fz.init(model, tx, plan, rng=0, devices=devices)
    step, trace = fz.train_step(model, tx, plan, devices=devices), []
    layout = fz.layout(model, tx, plan, devices=devices)
    for seed in (0, 1, 2, 0):
        batch = rows_of(16, seed=seed)
        if own:
            batch = fz.local_batch(own_rows(batch), layout)
        if accumulated:
            add = fz.accumulate_step(model, tx, plan, devices=devices)
            state, _ = add(state, tiny.tokens(16, seed=7))
        state, metrics = step(state, batch)
        trace.append([np.asarray(metrics[name]) for name in ("loss", "grad_norm", "accuracy")])
    out = {"trace": np.array(trace)}
    then = one.then if one else "both" if case in CHECKPOINTED else "evaluate"
    if then != "predict":
        evaluate = fz.eval_step(model, plan, devices=devices)
        out["eval"] = np.asarray(evaluate(state, rows_of(16))["loss"])
    if own:  # the end of the data: five rows, and three
        last = tiny.tokens(8, seed=9)
        rows = fz.local_batch(own_rows(last, first=5), layout, mask="real")
        if then != "predict":
            metrics = evaluate(state, rows)
            # Padding stands elsewhere than in one process, so sums round otherwise.
            out |= {f"last {name}": np.asarray(metrics[name]) for name in ("loss", "count")}
        nothing = {name: x[:0] for name, x in last.items()}
        assert fz.local_batch(nothing, layout, mask="real") is None
    found: Any = {}
    if then != "evaluate":  # rows go from the last rank to all; a short batch is filled up
        predict = fz.predict_step(model, plan, devices=devices)
        found = {rows: predict(state, tiny.tokens(rows)) for rows in (16, 15)}
    if case == "zb_v" and jax.process_count() > 1:
        refused(model, tx, plan)
    if case in CHECKPOINTED:
        # Most leaves are at home on one rank: each process writes what it has, and finds it again.
        fz.save(checkpoints.with_name(case), state, plan, data_position=4)
        tiny.same_shards(
            fz.restore(checkpoints.with_name(case), model, tx, plan, devices=devices), state
        )
    if case == "zero3":
        fz.save(checkpoints, state, plan, data_position=4)
        fz.wait(checkpoints)
        restored = fz.restore(checkpoints, model, tx, plan)
        tiny.same_shards(restored, state)
        leaves_of_one_device(state, checkpoints.with_name("disk"))
    number = {device: number for number, device in enumerate(devices)}
    if plan.tiers:  # each process brings back what it has
        state = fz.reload(state)
    for name, tree in (
        ("params", state.params), ("opt_state", state.opt_state), ("outputs", found)
    ):  # fmt: skip
        for path, leaf in named_leaves(tree):
            for shard in leaf.addressable_shards:
                out[f"{name}/{path}@{number[shard.device]}"] = np.asarray(shard.data)
    return out


def own_rows(batch: dict[str, Any], first: int | None = None) -> dict[str, Any]:
    """What this process reads of a batch: an equal part, or all others after the `first` ones."""
    process, count = jax.process_index(), jax.process_count()
    size = len(batch["ids"])
    ends = [size * p // count for p in range(count + 1)]
    if first is not None and count > 1:
        ends = [0, first, *[size] * (count - 1)]
    return {name: x[ends[process] : ends[process + 1]] for name, x in batch.items()}


def leaves_of_one_device(state: Any, folder: Path) -> None:
    """To disk and back, also where this process holds nothing of a leaf."""
    from support import tiny

    import fzero as fz

    def on(device: jax.Device) -> jax.Array:
        value = np.arange(1000.0, dtype=np.float32)
        here = device.process_index == jax.process_index()
        return jax.make_array_from_single_device_arrays(
            value.shape, jax.sharding.SingleDeviceSharding(device),
            [jax.device_put(value, device)] if here else [], dtype=value.dtype,
        )  # fmt: skip

    state = state.replace(buffers={"first": on(jax.devices()[0]), "last": on(jax.devices()[-1])})
    parked = fz.offload(state, "buffers", to="disk", path=folder, donate=False)
    tiny.same_shards(fz.reload(parked).buffers, state.buffers)


def train_all(checkpoints: Path, cases: Sequence[str]) -> dict[str, np.ndarray]:
    """`train` of some cases, under `case:name`."""
    return {
        f"{case}:{name}": leaf for case in cases for name, leaf in train(case, checkpoints).items()
    }


def refused(model, tx, plan) -> None:
    """Where jax could not send, or the process would wait for ever, it is said at once."""
    import fzero as fz

    name = "jax_cross_host_transfer_socket_address"
    address = jax.config.read(name)
    for wrong in ("", "127.0.0.1:0"):
        jax.config.update(name, wrong)
        with pytest.raises(fz.PlanError, match=f"expected {name} to be this process's address"):
            fz.init(model, tx, plan)
    jax.config.update(name, address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", "4")
        with pytest.raises(fz.PlanError, match="Start processes with NPROC=10"):
            fz.init(model, tx, plan)


def main() -> None:
    """Joins the other processes, trains, writes."""
    out, process, num_processes, port, *cases = sys.argv[1:]
    faulthandler.dump_traceback_later(float(os.environ.get("TRACEBACK_AFTER_S", "3570")))
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // int(num_processes))
    import fzero as fz

    fz.join(f"127.0.0.1:{port}", int(num_processes), int(process), initialization_timeout=300)
    assert len(jax.devices()) == NUM_DEVICES
    np.savez(out, **train_all(Path(out).with_name("checkpoints"), cases))


if __name__ == "__main__":
    main()
