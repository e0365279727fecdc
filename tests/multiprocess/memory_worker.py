"""One process of two: memory that `fz.restore`, `fz.replan` and `tb.save` take for a while."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fzero as fz


LEAVES, LEAF_BYTES = 16, 8 * 2**20
MIB = 2**20


def model() -> fz.Model:
    def init(rng: Any) -> Any:
        keys = jax.random.split(rng, LEAVES)
        rows = LEAF_BYTES // 4 // 256
        return {f"w{n:02}": jax.random.normal(key, (rows, 256)) for n, key in enumerate(keys)}, {}

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        return sum(jnp.sum(w[:1]) for w in p.values()) * jnp.mean(batch["x"]), buffers, {}

    return fz.Model(init, loss)


def memory(name: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `peak_from_now`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_from_now() -> int:
    """What the process has now, which its peak starts again from."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def own_bytes(state: fz.TrainState) -> int:
    return sum(s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards)


def exports(folder: Path) -> dict[str, Any]:
    """A converted module of as many bytes in smaller leaves; what writing it takes.

    A device has the whole of a leaf for a while, and all devices of a CPU are this host's memory.
    """
    import torch

    import torch_bridge as tb

    torch.manual_seed(0)
    sizes = [(512, 1024), (1024, 512)] * (2 * LEAVES)
    module = torch.nn.Sequential(*(torch.nn.Linear(*size, bias=False) for size in sizes))
    converted = tb.convert(module, torch.zeros(1, 512), roll=False)
    state = fz.init(
        converted.model(lambda forward, b: forward(b["x"]).sum()), None, fz.Plan(zero=3)
    )
    assert {leaf.nbytes for leaf in jax.tree.leaves(state.params)} == {LEAF_BYTES // 4}
    found = {}
    for to in ("safetensors", "dcp"):
        for attempt in ("first", "second"):
            before = peak_from_now()
            tb.save(folder / f"{to}-{attempt}", converted, state, to=to, max_shard_size="20MB")
            found[f"{to}, {attempt}"] = round((memory("VmHWM") - before) / MIB, 1)
    return found


def main() -> None:
    folder, world = Path(sys.argv[1]), fz.join()
    sgd, plan, other = optax.sgd(0.1), fz.Plan(zero=3), fz.Plan(zero=3, data=2, replica=2)
    state = fz.init(model(), sgd, plan)
    fz.save(folder / "checkpoints", state, plan, asynchronous=False)
    del state
    # The first restore brings threads, caches and programs, which stay.
    found: dict[str, Any] = {}
    for attempt in ("first", "second"):
        before = peak_from_now()
        state = fz.restore(folder / "checkpoints", model(), sgd, plan)
        jax.block_until_ready(state.params)
        beside = memory("VmHWM") - before - own_bytes(state)
        found[f"restore, {attempt}"] = round(beside / MIB, 1)
        if attempt == "first":
            del state
    before = peak_from_now()
    again = fz.restore(folder / "checkpoints", model(), sgd, other)
    jax.block_until_ready(again.params)
    found["restore, other plan"] = round((memory("VmHWM") - before - own_bytes(again)) / MIB, 1)
    del again
    before = peak_from_now()
    moved = fz.replan(state, model(), sgd, plan, other)
    jax.block_until_ready(moved.params)
    found["replan"] = round((memory("VmHWM") - before - own_bytes(moved)) / MIB, 1)
    found |= exports(folder)
    found["own"], found["leaf"] = own_bytes(state) / MIB, LEAF_BYTES / MIB
    (folder / f"memory-{world.process_id}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
