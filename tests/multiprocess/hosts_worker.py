"""One process of several, for test_hosts.py: `python hosts_worker.py FOLDER WHAT`.

Started by `fzero launch`, so that it finds its world in the environment.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fzero as fz
from fzero.processes import jit_on
from fzero.state import fingerprint


# What PyTorch reads beside safetensors and DCP, by the names that the test gives them.
FORMATS = {"model.pt": "pt", "model.ckpt": "lightning", "universal": "universal"}


def model(width: int = 4, power: int = 2) -> fz.Model:
    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        error = (batch["x"] @ p["w"] - batch["y"]) ** power
        mask = batch["mask"] if "mask" in batch else jnp.ones(error.shape[:1])
        return fz.Mean(jnp.sum(error * mask[:, None]), mask.sum()), buffers, {}

    return fz.Model(lambda rng: ({"w": jax.random.normal(rng, (width, 2))}, {}), loss)


def batch(rows: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    return {"x": x, "y": x[:, :2]}


def others_take_the_port() -> None:
    """Another program takes the port of transfers before jax does, which is at the first one."""
    host, _, port = jax.config.read("jax_cross_host_transfer_socket_address").rpartition(":")
    with socket.socket() as other:
        other.bind((host, int(port)))


def of_version(version: str, *args: Any) -> fz.TrainState:
    """`fz.init` where another version of fzero is installed."""
    with mock.patch("fzero.state.fingerprint.version", return_value=version):
        return fz.init(*args)


def of_bridge(folder: Path, *args: Any) -> fz.TrainState:
    """`fz.init` where another torch_bridge lies first on the path."""
    package = folder / "torch_bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"# of {folder.name}\n")
    fingerprint._source.cache_clear()
    sys.path.insert(0, str(folder))
    try:
        return fz.init(*args)
    finally:
        sys.path.remove(str(folder))
        fingerprint._source.cache_clear()


def with_own_derivative(factor: float) -> fz.Model:
    """The same loss, whose derivative is another function."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))

    def loss(p: Any, buffers: Any, batch: Any, rng: Any, train: bool) -> Any:
        error = same(batch["x"] @ p["w"]) - batch["y"]
        return fz.Mean(jnp.sum(error**2), float(len(error))), buffers, {}

    return fz.Model(
        model().init, loss, predict=lambda p, b, batch, rng: factor * (batch["x"] @ p["w"])
    )


def with_rate(rate: float, plan: fz.Plan) -> Any:
    """A step of an optimizer that keeps its rate, into which a number was written by hand."""
    tx = optax.inject_hyperparams(optax.adam)(1e-2)
    state = fz.init(model(), tx, plan)
    state.opt_state.hyperparams["learning_rate"] = rate
    return fz.train_step(model(), tx, plan)(state, batch())


def refusal(call: Any) -> str:
    """What a call says that refuses."""
    try:
        call()
    except (fz.FzeroError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


ASKED: list[str] = []  # what a handler of the program's own noted


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    if what == "agrees":
        signal.signal(signal.SIGTERM, lambda *_: ASKED.append("SIGTERM"))
    world = fz.join(limit_s=float(os.environ.get("LIMIT_S", "60")))
    found = globals()[what](folder, world)
    (folder / f"{what}-{world.process_id}.json").write_text(json.dumps(found))


def agrees(folder: Path, world: fz.World) -> dict[str, Any]:
    """Everything that processes compare; what each call that differs between them says."""
    me, tx, plan = world.process_id, optax.adam(1e-2), fz.Plan(zero=1)
    assert fz.join() is world
    os.kill(os.getpid(), signal.SIGTERM)
    said = {
        "asked": ASKED,
        "seed": refusal(lambda: fz.init(model(), tx, plan, rng=me)),
        "plan": refusal(lambda: fz.init(model(), tx, fz.Plan(zero=1, clip_norm=1.0 + me))),
        "model": refusal(lambda: fz.init(model(4 + me), tx, plan)),
    }  # fmt: skip
    order = jax.devices()[:: -1 if me else 1]
    said["devices"] = refusal(lambda: fz.init(model(), tx, plan, devices=order))
    said["port"] = refusal(others_take_the_port)
    state = fz.init(model(), tx, plan)
    said["order"] = refusal(lambda: fz.init(model(), tx, plan) if me else fz.check_same(state))
    said["rows as a batch"] = refusal(
        lambda: fz.train_step(model(), tx, plan)(state, batch(seed=me))
    )
    said["rate"] = refusal(
        lambda: fz.train_step(model(), optax.adam(1e-2 + me / 100), plan)(state, batch())
    )
    said["loss function"] = refusal(
        lambda: fz.train_step(model(power=2 + me), tx, plan)(state, batch())
    )
    said["shared"] = refusal(
        lambda: fz.train_step(model(), tx, plan)(
            state, {**batch(), "by": fz.Shared(np.float32(me))}
        )
    )
    said["rate in the state"] = refusal(lambda: with_rate(0.5 + me, plan))
    said["elsewhere"] = refusal(
        lambda: fz.replan(state, model(), tx, plan, fz.Plan(data=2), devices=jax.devices()[:2])
    )
    own = with_own_derivative(1.0 + me)
    said["derivative"] = refusal(lambda: fz.train_step(own, tx, plan)(state, batch()))
    said["outputs"] = refusal(lambda: fz.predict_step(own, plan)(state, {"x": batch()["x"]}))
    said["bridge"] = refusal(lambda: of_bridge(folder / f"path-{me}", model(), tx, plan))
    said["version"] = refusal(lambda: of_version("0.1" if me else "0.2", model(), tx, plan))
    layout, evaluate = fz.layout(model(), tx, plan), fz.eval_step(model(), plan)
    own = batch(3 - 2 * me, seed=me)  # three rows, and one
    said["uneven"] = refusal(lambda: fz.local_batch(own, layout))
    said["dtype"] = refusal(
        lambda: fz.local_batch({**own, "y": own["y"].astype(np.float16 if me else "f")}, layout)
    )
    said["mask"] = refusal(lambda: fz.local_batch(own, layout, mask="x" if me else "mask"))
    rows = fz.local_batch(own, layout, mask="mask")
    metrics = evaluate(state, rows)
    said["loss"] = float(metrics["loss"])
    said["count"] = float(metrics["count"])
    none = jax.tree.map(lambda x: x[:0], own)
    last = fz.local_batch(own if me else none, layout, mask="mask")
    said["last"] = float(evaluate(state, last)["count"])
    said["over"] = fz.local_batch(none, layout, mask="mask") is None
    said["in turn"] = in_turn(world)
    said["numbers"] = numbers(folder / "numbers", me == 1, state, plan, tx)
    said["same"] = refusal(lambda: fz.check_same(state))
    said["other"] = refusal(lambda: fz.check_same(changed(state, "x" if me else "")))
    said["finite"] = refusal(lambda: fz.check_finite(state))
    said["nan"] = refusal(lambda: fz.check_finite(changed(state, "nan" if me else "")))
    own = fz.local_batch({**own, "x": own["x"] * 10.0 ** (30 * me)}, layout, mask="mask")
    said["step"] = refusal(lambda: fz.train_step(model(), tx, plan).check_finite(state, own))
    return said


def numbers(folder: Path, stale: bool, state: fz.TrainState, plan: fz.Plan, tx: Any) -> list[int]:
    """Numbers of two checkpoints, and the step of the one that is restored.

    A stale process is shown neither, as by a network's file system that has not looked again.
    """
    listdir = os.listdir

    def stale_listdir(path: Any = ".") -> list[str]:
        found = listdir(path)
        hidden = Path(path) == folder
        return [name for name in found if not (hidden and name.isdigit())]

    stepped, _ = fz.train_step(model(), tx, plan, donate=False)(state, batch())
    with mock.patch.object(os, "listdir", stale_listdir if stale else listdir):
        found = [fz.save(folder, s, plan, asynchronous=False) for s in (state, stepped)]
        return [*found, int(fz.restore(folder, model(), tx, plan).step)]


def in_turn(world: fz.World) -> list[bool]:
    """Whether programs are over when they were called: of one device here, and of two."""
    found = []
    for each in (1, 2):
        devices = [d for d in jax.devices() if d.id % 2 < each]
        mesh = jax.make_mesh((2 * each,), ("data",), devices=devices)
        to = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        # Too long to be over by itself.
        run = jit_on(mesh, lambda x: jnp.sum(x @ x @ x @ x), out_shardings=None)
        x = jax.make_array_from_callback((600, 600), to, lambda i: np.ones((600, 600))[i])
        jax.block_until_ready(run(x))
        found.append(run(x).is_ready())
    return found


def changed(state: fz.TrainState, how: str) -> fz.TrainState:
    """A state whose parameter, kept whole on every device, is another on the last one here."""
    w = state.params["w"]
    shards = [np.array(shard.data) for shard in w.addressable_shards]
    if how:
        shards[-1][2, 1] = np.nan if how == "nan" else shards[-1][2, 1] + 1e-6
    devices = [shard.device for shard in w.addressable_shards]
    arrays = [jax.device_put(x, device) for x, device in zip(shards, devices, strict=True)]
    new = jax.make_array_from_single_device_arrays(w.shape, w.sharding, arrays)
    return state.replace(params={"w": new})


def exports(folder: Path, world: fz.World) -> dict[str, Any]:
    """A converted module, its weights on devices of both processes, written by `tb.save`."""
    import torch

    import torch_bridge as tb

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    converted = tb.convert(module, torch.zeros(2, 6))
    jax_model = converted.model(lambda forward, b: jnp.mean((forward(b["x"]) - 1) ** 2))
    tx, plan = optax.adam(1e-2), fz.Plan(zero=3)
    state = fz.init(jax_model, tx, plan)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(state.params))
    state, _ = fz.train_step(jax_model, tx, plan)(state, {"x": x})
    tb.save(folder / "model.safetensors", converted, state)
    tb.save(folder / "dcp", converted, state, to="dcp")
    for name, to in FORMATS.items():
        tb.save(folder / name, converted, state, to=to)
    adapted = tb.lora(converted, rank=2, targets="all-linear")
    tuned = adapted.model(lambda forward, b: jnp.mean((forward(b["x"]) - 1) ** 2))
    tb.save(folder / "peft", adapted, fz.init(tuned, tx, plan), to="peft")
    said = refusal(
        lambda: tb.save(folder / "dcp" / ".metadata" / "w.safetensors", converted, state)
    )
    said_other = refusal(
        lambda: tb.save(folder / ("1.pt" if world.process_id else "0.ckpt"), converted, state)
    )
    said_full = refusal(lambda: on_a_full_disk(folder / "full", converted, state, world))
    said_store = stored(folder, converted, state, world)
    again = tb.restore(folder / "dcp", converted, tx, plan)
    evaluate = fz.eval_step(jax_model, plan)
    losses = [float(evaluate(s, {"x": x})["loss"]) for s in (state, again)]
    return {
        "said": said, "said full": said_full,
        "said other": said_other, "said store": said_store,
        "losses": losses, "step": int(again.step),
        "wrote": [*files_written(folder / "hf", converted, state), *written_of_a_stack(folder)],
    }  # fmt: skip


def files_written(folder: Path, converted: Any, state: Any, plan: Any = None) -> list[str]:
    """Saves in files of 9 KB; those that this process wrote."""
    import torch_bridge as tb
    from torch_bridge.formats import safetensors_files

    with mock.patch.object(
        safetensors_files, "write_file", side_effect=safetensors_files.write_file
    ) as write:
        tb.save(folder, converted, state, plan, max_shard_size="9KB")
    assert sorted(path.name for path in folder.parent.glob(".*")) == []
    return [call.args[0].name for call in write.call_args_list]


def written_of_a_stack(folder: Path) -> list[str]:
    """Equal blocks, whose layers are one array in a pipeline over both processes."""
    import torch

    import torch_bridge as tb

    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(6)]
    converted = tb.convert(torch.nn.Sequential(*blocks), torch.zeros(2, 32))
    jax_model = converted.model(lambda forward, b: jnp.mean(forward(b["x"]) ** 2))
    plan = fz.Plan(pipe=2, zero=3, microbatches=2, min_shard_bytes=0)
    state = fz.init(jax_model, optax.sgd(1e-2), plan)
    assert any(leaf.ndim == 3 for leaf in jax.tree.leaves(state.params))
    return files_written(folder / "stack", converted, state, plan)


class Folder:
    """An object store, as fsspec has it, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def isdir(self, url: str) -> bool:
        return False

    def put_file(self, path: str, url: str) -> None:
        target = self.folder / url.partition("://")[2]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(path).read_bytes())


def stored(folder: Path, converted: Any, state: Any, world: fz.World) -> list[str]:
    """To URLs that differ; where process 1 cannot write; and what a save says after that."""
    import torch_bridge as tb
    from torch_bridge.formats import remote, safetensors_files

    me, write = world.process_id, safetensors_files.write_file

    def fails(path: Path, *args: Any) -> None:
        if me == 1:
            raise fz.CheckpointError(f"{path}: disk of 1")
        write(path, *args)

    def saved(where: Any) -> str:
        return refusal(lambda: tb.save(where, converted, state, max_shard_size="9KB"))

    with mock.patch.object(remote, "_store", return_value=Folder(folder / "store")):
        said = [saved(f"s3://bucket/run-{me}"), saved(f"s3://bucket/w.{'pt' if me else 'ckpt'}")]
        with mock.patch.object(safetensors_files, "write_file", fails):
            said.append(saved("s3://bucket/failed"))
    return [*said, saved(folder / "after")]


def on_a_full_disk(path: Path, converted: Any, state: Any, world: fz.World) -> None:
    """Saves where process 1 can write no more than a KiB."""
    import torch_bridge as tb

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.process_id == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        tb.save(path, converted, state, to="dcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def dies_exporting(folder: Path, world: fz.World) -> None:
    """A process is killed in its turn, in the middle of its file."""
    import torch

    import torch_bridge as tb
    from torch_bridge.formats import safetensors_files

    torch.manual_seed(0)
    converted = tb.convert(torch.nn.Linear(256, 64), torch.zeros(2, 256))
    jax_model = converted.model(lambda forward, b: jnp.mean(forward(b["x"])))
    state = fz.init(jax_model, None, fz.Plan(zero=3))

    def half(path: Path, *args: Any) -> None:
        if world.process_id == int(os.environ["VICTIM"]):
            path.write_bytes(b"half")
            time.sleep(2)  # the other one waits for it
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *args)

    write = safetensors_files.write_file
    with mock.patch.object(safetensors_files, "write_file", half):
        tb.save(folder / "hf", converted, state, max_shard_size="1KB")


def stores(folder: Path, world: fz.World) -> dict[str, Any]:
    """A state whose shards are on both processes, to an object store and back."""
    tx, plan, url = optax.adam(1e-2), fz.Plan(zero=3, min_shard_bytes=0), os.environ["STORE"]
    step = fz.train_step(model(), tx, plan)
    state, _ = step(fz.init(model(), tx, plan), batch())
    numbers = [fz.save(url, state, plan, keep=1) for _ in range(2)]
    again = fz.restore(url, model(), tx, plan)
    evaluate = fz.eval_step(model(), plan)
    losses = [float(evaluate(s, batch())["loss"]) for s in (state, again)]
    return {"numbers": numbers, "losses": losses, "whole": fz.checkpoint(url).number}


def writes(folder: Path, world: fz.World) -> None:
    """Saves until one process cannot write its part, while the other waits for it."""
    tx, plan, where = optax.adam(1e-2), fz.Plan(zero=3), folder / "checkpoints"
    state = fz.init(model(1 << 16), tx, plan)
    fz.save(where, state, plan, asynchronous=False)
    if world.process_id == int(os.environ["VICTIM"]):  # its shards are 256 KiB
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, resource.RLIM_INFINITY))
    for _ in range(2):
        fz.save(where, state, plan)


# Half a TiB, by whom.
ALLOCATES = {"numpy": lambda: np.ones(1 << 36), "jax": lambda: jnp.ones(1 << 37).sum()}


def allocate(who: str) -> None:
    """Asks for more memory than this process may have."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    ALLOCATES[who]()


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
            if how in ALLOCATES:
                allocate(how)
            time.sleep(2)  # several beats of this step
            os.kill(os.getpid(), getattr(signal, how))


if __name__ == "__main__":
    main()
