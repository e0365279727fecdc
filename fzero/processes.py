"""Arrays and programs on devices that may belong to other processes.

Over several processes every process dispatches everything, in one order. So all of them make the
same transfers in the same order, which `jax.device_put` between processes needs, and two that wait
for each other cannot be written down. What a process has no device of costs it nothing: its
programs are not compiled there, and their results are arrays without local shards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.axes import PIPE
from fzero.compat import auto_mesh
from fzero.errors import PlanError, some_of
from fzero.tree import PyTree


WHOLE = PartitionSpec()


def named_devices(devices: Sequence[Any]) -> str:
    """The first devices of some, with their processes, for messages."""
    return some_of([f"{one} of process {one.process_index}" for one in devices], 3)


def at_home(mesh: Mesh) -> bool:
    """Whether this process runs programs of a mesh (or may compile them: for described devices)."""
    if jax.process_count() == 1:
        return True
    devices = set(mesh.devices.flat)
    return not devices <= set(jax.devices()) or not devices.isdisjoint(jax.local_devices())


def require_transfers(devices: Sequence[Any]) -> None:
    """Refuses devices of several processes between which nothing could be sent.

    Raises:
        PlanError: CPU devices of several processes, and no address for transfers between them, or
            no thread.
    """
    owners = [device.process_index for device in devices]
    if len(set(owners)) == 1 or devices[0].platform != "cpu":
        return
    address = jax.config.read("jax_cross_host_transfer_socket_address")
    if not address or address.endswith(":0"):
        raise PlanError(
            f"plan: the ranks of this pipeline are on CPU devices of {len(set(owners))} processes,"
            " between which jax sends arrays through sockets; expected"
            " jax_cross_host_transfer_socket_address to be this process's address with a free port"
            f" of its own, got {address!r}. Say in every process, before the first use of a device:"
            " jax.config.update('jax_cross_host_transfer_socket_address', '<this host>:<port>')"
        )
    own, threads = owners.count(jax.process_index()), _threads()
    if threads <= own:
        raise PlanError(
            f"plan: the ranks of this pipeline are on CPU devices of {len(set(owners))} processes."
            f" This one has {own} devices, which may all wait for other processes, and jax runs"
            f" {threads} threads here, so none would be left to send what those wait for; expected"
            f" more than {own}. Start processes with NPROC={2 * own + 2} in the environment"
        )


def _threads() -> int:
    """Threads of XLA's CPU client."""
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() else len(os.sched_getaffinity(0))


def mesh_of(leaf: jax.Array) -> Mesh:
    """The devices of an array."""
    assert isinstance(leaf.sharding, NamedSharding)
    assert isinstance(leaf.sharding.mesh, Mesh)
    return leaf.sharding.mesh


def jit_on(
    mesh: Mesh, function: Callable[..., PyTree], out_shardings: PyTree = None, **options: Any
) -> Any:
    """`jax.jit` of a function on the devices of a mesh, or what stands for it in other processes.

    Args:
        mesh: the devices that it runs on.
        function: what to compile.
        out_shardings: a `NamedSharding` of each result, or of all results in a subtree. `None`
            stands for any, and for replicated results in processes that do not compute them.
        **options: of `jax.jit`.
    """
    if at_home(mesh):
        return in_turn(mesh.devices.flat, jax.jit(function, out_shardings=out_shardings, **options))
    return _Elsewhere(function, mesh, out_shardings)


def in_turn(devices: Iterable[Any], program: Any) -> Any:
    """A program that is over when its call returns, where it could meet another one.

    That is on CPU devices of several processes, one of them here. XLA runs such programs side by
    side if neither reads of the other, and gloo then gives one what was sent to the other, or ends
    the process. (Where a process has several of the devices, XLA runs one after the other; so do
    GPUs.) Programs of steps and states in which processes may wait for each other are made by this
    or `jit_on`; one thread calls them.

    Args:
        devices: what it runs on.
        program: a `jax.jit`.
    """
    owners = [device.process_index for device in devices if device.platform == "cpu"]
    one_each = len(set(owners)) > 1 and owners.count(jax.process_index()) == 1
    return _InTurn(program) if one_each else program


class _InTurn:
    """A program that is waited for; all else is the program's own."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def __call__(self, *args: PyTree) -> PyTree:
        return jax.block_until_ready(self.program(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)


class _Elsewhere:
    """A program of other processes: it gives arrays of the right shapes without local shards."""

    def __init__(self, function: Callable[..., PyTree], mesh: Mesh, out_shardings: PyTree) -> None:
        anywhere = NamedSharding(mesh, WHOLE)
        self.function = function
        self.out_shardings = jax.tree.map(
            lambda to: to or anywhere, out_shardings, is_leaf=lambda to: to is None
        )
        self._known: dict[Any, tuple[Any, list[Any]]] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(args)
        key = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._known:
            shapes = jax.eval_shape(self.function, *args)
            to = jax.tree.leaves(jax.tree.broadcast(self.out_shardings, shapes))
            flat, out = jax.tree.flatten(shapes)
            self._known[key] = out, list(zip(flat, to, strict=True))
        out, found = self._known[key]
        return jax.tree.unflatten(out, [joined(x.shape, to, (), x.dtype) for x, to in found])


def joined(
    shape: Sequence[int], sharding: NamedSharding, arrays: Sequence[jax.Array], dtype: Any
) -> jax.Array:
    """An array of arrays that already lie where its shards belong; no copy.

    Args:
        shape: of the whole.
        sharding: of the whole.
        arrays: arrays on some of its devices each.
        dtype: of the whole: a process without any of its devices has nobody to ask.
    """
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards, dtype=dtype)


def view(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A replicated array as seen by some of its devices, or a shard that they hold; no copy."""
    have = {shard.device: shard.data for shard in leaf.addressable_shards}
    local = [have[device] for device in sharding.mesh.devices.flat if device in have]
    # What a device holds, times into how many shards these devices divide it.
    shape = list(leaf.sharding.shard_shape(leaf.shape))
    for dim, axes in enumerate(sharding.spec):
        for axis in (axes,) if isinstance(axes, str) else (axes or ()):
            shape[dim] *= sharding.mesh.shape[axis]
    return joined(shape, sharding, local, leaf.dtype)


def from_host(value: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process has, on devices of any of them."""
    host = np.asarray(value)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index].copy(), dtype=host.dtype
    )


def send(tree: PyTree, to: NamedSharding) -> PyTree:
    """Arrays of one rank, laid out alike on the devices of another.

    Args:
        tree: arrays of one mesh.
        to: cuts them as they are cut: every shard goes from one device to one.
    """
    leaves = jax.tree.leaves(tree)
    if jax.process_count() == 1 or not leaves:
        return jax.device_put(tree, to)
    here = {device.process_index for device in mesh_of(leaves[0]).devices.flat}
    there = {device.process_index for device in to.mesh.devices.flat}
    if here.isdisjoint(there) or here | there == {jax.process_index()}:
        return jax.device_put(tree, to)
    # jax sends between different processes, or within this one.
    return jax.tree.map(lambda leaf: _send_shards(leaf, to), tree)


def _send_shards(leaf: jax.Array, to: NamedSharding) -> jax.Array:
    """`send` where some shards change the process and others do not."""
    have = {shard.device: shard.data for shard in leaf.addressable_shards}
    shape = leaf.sharding.shard_shape(leaf.shape)
    arrays: list[jax.Array] = []
    pairs = zip(mesh_of(leaf).devices.flat, to.mesh.devices.flat, strict=True)
    for giver, taker in pairs:
        if giver.process_index != taker.process_index:
            own = [have[giver]] if giver in have else []
            shard = joined(shape, _on_one(giver), own, leaf.dtype)
            arrays.append(jax.device_put(shard, _on_one(taker)))
        elif giver in have:
            arrays.append(jax.device_put(have[giver], _on_one(taker)))
    return joined(leaf.shape, to, arrays, leaf.dtype)


def _on_one(device: Any) -> NamedSharding:
    return NamedSharding(auto_mesh(np.array([device]), ("one",)), WHOLE)


def copied(value: jax.Array, mesh: Mesh) -> jax.Array:
    """A small value of one rank, or of several, whole on every device of others.

    One hop for each rank that does not hold it yet: between processes jax wants equally many
    devices on both sides.

    Args:
        value: on the devices of one or several ranks of a pipeline.
        mesh: of one or several ranks.
    """
    home = mesh_of(value)
    if not value.sharding.is_fully_replicated:
        value = _replicated(home)(value)
    have, ranks = value.sharding.device_set, _rank_meshes(home)
    first = view(value, NamedSharding(ranks[0], WHOLE))
    arrays: list[jax.Array] = []
    for rank in _rank_meshes(mesh):
        to = NamedSharding(rank, WHOLE)
        arrays.append(view(value, to) if to.device_set <= have else send(first, to))
    return joined(value.shape, NamedSharding(mesh, WHOLE), arrays, value.dtype)


def repeated(value: jax.Array, mesh: Mesh) -> jax.Array:
    """An array of one rank of a pipeline on the devices of every rank, cut as it is on its own."""
    arrays: list[jax.Array] = []
    for rank in _rank_meshes(mesh):
        to = NamedSharding(rank, value.sharding.spec)  # type: ignore[attr-defined]
        own = to.device_set == value.sharding.device_set
        arrays.append(value if own else send(value, to))
    return joined(value.shape, NamedSharding(mesh, to.spec), arrays, value.dtype)


def _rank_meshes(mesh: Mesh) -> list[Mesh]:
    """The meshes of the ranks in a mesh of one or of several, which has an axis more."""
    if PIPE not in mesh.axis_names:
        return [mesh]
    return [auto_mesh(devices, mesh.axis_names[1:]) for devices in mesh.devices]


def to_process(leaf: jax.Array, process: int) -> np.ndarray[Any, Any] | None:
    """An array of any processes, whole on the host of one; `None` in the others.

    Every process calls this for the same arrays in the same order. Each device of the array holds
    the whole for that long.

    Args:
        leaf: on any mesh.
        process: which one gets it.
    """
    mesh = mesh_of(leaf)
    if not leaf.sharding.is_fully_replicated:
        leaf = _replicated(mesh)(leaf)
    if process not in {device.process_index for device in mesh.devices.flat}:
        flat = auto_mesh(mesh.devices.reshape(-1), ("all",))
        nearest = sorted(jax.devices(), key=lambda device: device.process_index != process)
        there = auto_mesh(np.array(nearest[: flat.size]), ("all",))
        leaf = send(view(leaf, NamedSharding(flat, WHOLE)), NamedSharding(there, WHOLE))
    if jax.process_index() != process:
        jax.block_until_ready(leaf)
        return None
    return np.asarray(leaf.addressable_shards[0].data)


@functools.lru_cache(maxsize=64)
def _replicated(mesh: Mesh) -> Any:
    """A program that makes arrays of a mesh whole on every device of it."""
    return jit_on(mesh, lambda x: x, NamedSharding(mesh, WHOLE))
