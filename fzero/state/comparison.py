"""Whether devices that should hold the same do, and whether all values are finite."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fzero.compat import key_bits
from fzero.errors import DivergenceError, NonFiniteError
from fzero.hosts.activity import doing
from fzero.hosts.agree import exchange
from fzero.processes import jit_on, mesh_of, named_devices
from fzero.state.require import require_alive
from fzero.state.train_state import TrainState, fields_of
from fzero.storage.tiers import DEVICE, tier_of
from fzero.tree import PyTree, named_leaves


# Knuth's multiplier: neighbouring positions get numbers far apart.
_GOLDEN = 2654435761
# What is known of a shard: its hash, and its first row with a value that is not finite (from 1).
Mark = tuple[int, int]


def check_same(state: TrainState) -> None:
    """Compares what several devices hold of each leaf: replicas, and whole leaves on every device.

    Hashes are taken on the devices; only they travel, from each process to all. Every process calls
    this at the same point; call it every few hundred steps.

    Args:
        state: the state. Leaves that are parked are left out.

    Raises:
        DivergenceError: in every process alike: names the first leaf that differs, and where.
        StateConsumedError: the state was given to a step.

    Example:
        >>> import jax.numpy as jnp, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2))}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> fz.check_same(fz.init(model, None, fz.Plan(data=1)))
    """
    require_alive(state, "check_same")
    with doing("check_same"):
        for path, leaf, marks in _marked(state, "check_same"):
            holders: dict[Any, dict[int, list[Any]]] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                hashes = holders.setdefault(str(index), {})
                hashes.setdefault(marks[device.id][0], []).append(device)
            for found in holders.values():
                if len(found) > 1:
                    who = "; ".join(f"{h:08x} on {named_devices(ds)}" for h, ds in found.items())
                    raise DivergenceError(
                        f"check_same: {path} {leaf.dtype}{list(leaf.shape)} is not the same on"
                        f" devices that should hold the same: {who}. A checkpoint from before the"
                        " last check_same that passed is sound; look for a faulty device, or for a"
                        " process that computed something else"
                    )


def check_finite(state: TrainState) -> None:
    """Looks for values that are not finite in the floating-point leaves of a state.

    Args:
        state: the state. Leaves that are parked are left out. Every process calls this.

    Raises:
        NonFiniteError: in every process alike: names the first leaf that has any, its first row
            (the layer, where it is a stack's) and the devices.
        StateConsumedError: the state was given to a step.

    Example:
        >>> import jax.numpy as jnp, fzero as fz
        >>> model = fz.Model(lambda rng: ({"w": jnp.ones((8, 2)) / 0}, {}),
        ...                  lambda p, b, batch, rng, train: (jnp.mean(batch["x"] @ p["w"]), b, {}))
        >>> try:
        ...     fz.check_finite(fz.init(model, None, fz.Plan(data=1)))
        ... except fz.NonFiniteError as error:
        ...     print(str(error).split(";")[0])
        check_finite: params/w float32[8, 2] has values that are not finite, first in row 0
    """
    require_alive(state, "check_finite")
    with doing("check_finite"):
        for path, leaf, marks in _marked(state, "check_finite"):
            indices = leaf.sharding.devices_indices_map(leaf.shape)
            rows = {
                device: (index[0].start or 0) + marks[device.id][1] - 1 if index else 0
                for device, index in indices.items()
                if marks[device.id][1]
            }
            if rows:
                first = min(rows.values())
                who = named_devices([device for device, row in rows.items() if row == first])
                raise NonFiniteError(
                    f"check_finite: {path} {leaf.dtype}{list(leaf.shape)} has values that are not"
                    f" finite, first in row {first}; on {who}"
                )


def _marked(state: TrainState, point: str) -> list[tuple[str, Any, dict[int, Mark]]]:
    """Every leaf with what is known of its shard on each device, of all processes."""
    leaves = [
        (path, key_bits(leaf))
        for path, leaf in named_leaves(fields_of(state))
        if isinstance(leaf, jax.Array) and tier_of(leaf) == DEVICE and leaf.size
    ]
    by_mesh: dict[Mesh, list[int]] = {}
    for number, (_, leaf) in enumerate(leaves):
        by_mesh.setdefault(mesh_of(leaf), []).append(number)
    own: dict[str, list[Mark]] = {}
    for mesh, numbers in by_mesh.items():
        arrays = [leaves[number][1] for number in numbers]
        specs = tuple(getattr(leaf.sharding, "spec") for leaf in arrays)  # noqa: B009 (mypy)
        for shard in _program(mesh, specs)(arrays).addressable_shards:
            for number, mark in zip(numbers, np.asarray(shard.data)[0].tolist(), strict=True):
                own.setdefault(str(number), []).append((shard.device.id, *mark))
    everyone = exchange(point, own)
    return [
        (path, leaf, {d: (h, row) for one in everyone for d, h, row in one.get(str(number), ())})
        for number, (path, leaf) in enumerate(leaves)
    ]


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, specs: Sequence[PartitionSpec]) -> Any:
    """Marks of the shards of some leaves of a mesh, a row for each device."""
    axes = PartitionSpec(tuple(mesh.axis_names))

    def marks(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([_mark(leaf) for leaf in leaves])[None]

    run = jax.shard_map(marks, mesh=mesh, in_specs=(list(specs),), out_specs=axes, check_vma=False)
    return jit_on(mesh, run, NamedSharding(mesh, axes))


def _mark(shard: jax.Array) -> jax.Array:
    bits = _bits(shard).reshape(-1)
    positions = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(_GOLDEN)
    bad = jnp.zeros((1, 1), bool)
    if jnp.issubdtype(shard.dtype, jnp.inexact):
        bad = ~jnp.isfinite(shard).reshape(shard.shape[0] if shard.ndim else 1, -1)
    rows = jnp.any(bad, axis=1)
    first = jnp.where(jnp.any(rows), jnp.argmax(rows) + 1, 0).astype(jnp.uint32)
    return jnp.stack([jnp.sum(_mixed(bits + positions), dtype=jnp.uint32), first])


def _mixed(x: jax.Array) -> jax.Array:
    """Numbers each bit of which depends on all bits of those given.

    Without it two signs that are turned over would not be seen: they are the highest bit of a sum.

    Source: the last steps of MurmurHash3.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * jnp.uint32(factor)
    return x ^ x >> 16


def _bits(x: jax.Array) -> PyTree:
    """The bits of an array as uint32."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or x.dtype.itemsize < 1:
        return x.astype(jnp.uint32)
    width = min(x.dtype.itemsize, 4)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
