"""Tiers: where a leaf lives. A property of the leaf itself, never a flag beside it.

- `device`: a `jax.Array` in device memory.
- `host`: a `jax.Array` of the same sharding in pinned host memory (memory kind `pinned_host`), or
  `Slabs` of it, which visit the device one by one.
- `disk`: a handle of bytes there (`fzero.storage.disk.DiskArray`), or `Slabs` of such.

Handles are no pytree nodes: to `jax.tree` they are leaves, so that a state has the same tree
structure wherever its leaves are. They have the shape, dtype and (device) sharding of the array.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fzero.compat import is_traced_on_host
from fzero.errors import PlacementError, some_of
from fzero.storage.disk import DiskArray
from fzero.storage.handle import Handle
from fzero.tree import PyTree, leaf_bytes


DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)

HOST_KIND = "pinned_host"


@dataclass(frozen=True, eq=False)
class Slabs(Handle):
    """A leaf kept as several arrays, cut along a dim that no mesh axis splits.

    Args:
        shape: shape of the whole leaf.
        dtype: its dtype.
        sharding: its sharding on the device.
        dim: the dim that is cut.
        slabs: in order: arrays in host memory, or on disk.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Any
    dim: int
    slabs: tuple[jax.Array | DiskArray, ...] = field(repr=False)

    def is_deleted(self) -> bool:
        """Whether a slab's memory was given away."""
        return any(slab.is_deleted() for slab in self.slabs)

    def delete(self) -> None:
        """Releases all slabs."""
        for slab in self.slabs:
            slab.delete()

    def __deepcopy__(self, memo: Any) -> Slabs:
        return dataclasses.replace(self, slabs=copy.deepcopy(self.slabs, memo))


class Transfer:
    """Leaves that travel together, in the background.

    Args:
        future: gives their slabs.
        arrange: makes leaves of them; called once.
    """

    def __init__(self, future: Future[list[Any]], arrange: Callable[[list[Any]], list[Leaf]]):
        self.future = future
        self._arrange = arrange
        self._lock = threading.Lock()
        self._leaves: list[Leaf] | None = None

    def settled(self) -> list[Leaf]:
        """The leaves, after waiting for them."""
        slabs = self.future.result()
        with self._lock:
            if self._leaves is None:
                self._leaves = self._arrange(slabs)
            return self._leaves


@dataclass(frozen=True, eq=False)
class Arriving(Handle):
    """A leaf on its way to or from the disk; the first use waits for it.

    Args:
        source: where it comes from; kept until it has arrived, so that a failure loses nothing.
        to: the tier it is going to.
        transfer: what it travels with.
        index: which leaf of that it is.
    """

    source: Any
    to: str
    transfer: Transfer
    index: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of the leaf."""
        return tuple(self.source.shape)

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """Its dtype."""
        return np.dtype(self.source.dtype)

    @property
    def sharding(self) -> Any:
        """Its sharding on the device."""
        return on_device(self.source.sharding)

    def is_deleted(self) -> bool:
        """Whether it was given away after it had arrived."""
        future = self.transfer.future
        return future.done() and not future.exception() and self.settled().is_deleted()

    def delete(self) -> None:
        """Waits for it, and releases it."""
        self.settled().delete()

    def settled(self) -> Any:
        """The leaf, once it is where it goes.

        Raises:
            PlacementError: it could not be moved; `fz.reload` brings back where it came from.
        """
        return self.transfer.settled()[self.index]

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.settled(), memo)


Leaf = Any  # jax.Array | DiskArray | Slabs | Arriving


# States have many leaves and few shardings.
@functools.lru_cache(maxsize=1024)
def host_sharding(sharding: Any) -> Any:
    """The same sharding in pinned host memory."""
    return sharding.with_memory_kind(HOST_KIND)


@functools.lru_cache(maxsize=1024)
def on_device(sharding: Any) -> Any:
    """The same sharding in device memory."""
    return sharding.with_memory_kind(DEVICE) if _in_host_memory(sharding) else sharding


def _in_host_memory(sharding: Any) -> bool:
    return getattr(sharding, "memory_kind", None) == HOST_KIND


def tier_of(leaf: Leaf) -> str:
    """The tier of a leaf, traced or not, or of its shape (`jax.ShapeDtypeStruct`, sharded)."""
    if isinstance(leaf, DiskArray):
        return DISK
    if isinstance(leaf, Slabs):
        # After a disk failed some may be in memory; the leaf still needs the disk.
        return DISK if any(isinstance(slab, DiskArray) for slab in leaf.slabs) else HOST
    if isinstance(leaf, Arriving):
        return leaf.to
    if isinstance(leaf, jax.core.Tracer):
        return HOST if is_traced_on_host(leaf) else DEVICE
    return HOST if _in_host_memory(getattr(leaf, "sharding", None)) else DEVICE


def settled(tree: PyTree) -> PyTree:
    """A leaf or a tree, after waiting for leaves that are on their way."""
    if not any(isinstance(leaf, Arriving) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: x.settled() if isinstance(x, Arriving) else x, tree)


def is_handle(leaf: Any) -> bool:
    """Whether a leaf is a handle, which jax cannot compute with."""
    return isinstance(leaf, Handle)


def require_on_device(leaves: Iterable[tuple[str, Leaf]], operation: str) -> None:
    """Raises `PlacementError` if one of the leaves (by path) is not in device memory."""
    parked = [(path, leaf) for path, leaf in leaves if tier_of(leaf) != DEVICE]
    if not parked:
        return
    shown = [f"{path} ({tier_of(leaf)}, {leaf_bytes(leaf):,} bytes)" for path, leaf in parked]
    size = sum(leaf_bytes(leaf) for _, leaf in parked)
    fields = sorted({path.split("/")[0] for path, _ in parked})
    raise PlacementError(
        f"{operation}: expected every leaf on the device, but {len(parked)} are parked"
        f" ({size:,} bytes): {some_of(shown, 6)}. Bring them back with"
        f" state = fz.reload(state, {fields})"
    )


def slabs_of(leaf: Leaf) -> tuple[Any, ...]:
    """The arrays, in memory or on disk, that a leaf consists of."""
    return leaf.slabs if isinstance(leaf, Slabs) else (leaf,)


def lies_in(leaf: Leaf, tier: str) -> bool:
    """Whether all of a leaf is in a tier: after a disk failed, of some only a part is."""
    return all(tier_of(slab) == tier for slab in slabs_of(leaf))


def made_of_slabs(leaves: Sequence[Leaf], slabs: Sequence[Any], tier: str) -> list[Leaf]:
    """Leaves like `leaves`, made of slabs (of all of them, in order) in another tier."""
    rest = iter(slabs)
    out: list[Leaf] = []
    for leaf in leaves:
        own = tuple(itertools.islice(rest, len(slabs_of(leaf))))
        if not isinstance(leaf, Slabs):
            out.append(own[0])
        elif tier == DEVICE:
            out.append(whole_leaf(leaf, own))
        else:
            out.append(dataclasses.replace(leaf, slabs=own))
    return out


def whole_leaf(leaf: Slabs, slabs: Sequence[jax.Array]) -> jax.Array:
    """The whole leaf from slabs on the device."""
    return _concatenate(leaf.dim, leaf.sharding)(slabs)


@functools.cache
def _concatenate(dim: int, sharding: Any) -> Callable[..., jax.Array]:
    return jax.jit(partial(jnp.concatenate, axis=dim), out_shardings=sharding)


def largest(sizes: Mapping[str, int], share: float) -> list[str]:
    """Names by size, the largest first, until they make up a share of all.

    Example:
        >>> largest({"a": 10, "b": 60, "c": 30}, 0.5), largest({"a": 10, "b": 60}, 0)
        (['b'], [])
    """
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    if share == 1:
        return order
    taken: list[str] = []
    room = share * sum(sizes.values())
    for name in order:
        if room <= 0:
            break
        taken.append(name)
        room -= sizes[name]
    return taken


def cut_of(shape: tuple[int, ...], count: int, split: Iterable[int] = ()) -> tuple[int, int] | None:
    """How to cut a leaf into at least `count` equal slabs.

    Args:
        shape: its shape.
        count: the number of slabs wanted.
        split: dims that are split over devices, along which a slab would not be local.

    Returns:
        The dim and the number of slabs: the fewest that are enough, or the most there can be;
        `None` for a leaf that cannot be cut.

    Example:
        >>> cut_of((12, 5), 3), cut_of((7, 6), 3, split=[0]), cut_of((2, 2), 3)
        ((0, 3), (1, 3), (0, 2))
    """
    found = []
    for dim, rows in enumerate(shape):
        if rows > 1 and dim not in split:
            divisors = (n for n in range(min(count, rows), rows + 1) if rows % n == 0)
            found.append((dim, next(divisors)))
    # Enough slabs if possible, then few of them, then along the outermost dim.
    return min(found, key=lambda cut: (max(count - cut[1], 0), cut[1]), default=None)


def slab_shape(shape: tuple[int, ...], cut: tuple[int, int]) -> tuple[int, ...]:
    """Shape of one slab of a leaf."""
    dim, count = cut
    return (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
